"""Metrics and request records of the proxy."""
