"""Transports: each moves the bytes of a granted transfer between memories; none knows requests."""
