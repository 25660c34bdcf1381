"""What crosses the wire, and the names in it. Pure; the proxy shares it."""
