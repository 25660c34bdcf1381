"""Threads, timers and ZMQ sockets. Nothing here knows what a transfer is."""
