"""Parts of ours, real and small, put together for a test."""
