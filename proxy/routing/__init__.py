"""Which pair of instances a request goes to."""
