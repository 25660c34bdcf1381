"""One request's way through its legs."""
