"""The proxy's status page in a real browser."""
