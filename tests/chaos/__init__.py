"""The fault campaign: real processes, a fault at every step of the protocol, and its promises."""
