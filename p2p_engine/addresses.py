"""Addresses: "host:port" as peers know each other by it."""

from __future__ import annotations

import socket


def split_address(address: str) -> tuple[str, int]:
    """Split "host:port", where an IPv6 host stands in brackets.

    Raises:
        ValueError: it is not of that form.
    """
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) <= 65535:
        raise ValueError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def family_of(host: str) -> socket.AddressFamily:
    """Return the family of a numeric address; of a name, IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def join_address(host: str, port: int) -> str:
    """Join a host and a port; brackets go around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
