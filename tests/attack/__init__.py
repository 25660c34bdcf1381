"""Attacks on a real proxy, played one after the other and counted: `make attack`."""
