"""Messages, addresses and ids as they go over the network. Pure code; the proxy shares it."""
