"""One-sided writes between hosts through NIXL and UCX."""
