"""The path of one request through its legs."""
