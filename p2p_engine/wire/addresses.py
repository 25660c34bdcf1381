"""Addresses of the form "host:port", by which peers know each other."""

from __future__ import annotations

import ipaddress
import socket


def split_address(address: str) -> tuple[str, int]:
    """Split "host:port"; an IPv6 host stands in brackets.

    Raises:
        ValueError: the text is not of that form.
    """
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) <= 65535:
        raise ValueError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def family_of(host: str) -> socket.AddressFamily:
    """Return the address family of a numeric address; for a name, IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def is_any_address(host: str) -> bool:
    """Whether a server may listen on a host that nobody can dial: `0.0.0.0`, `::`, multicast."""
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return host in ("*", "0")  # in the notation of getaddrinfo and ZMQ
    return address.is_unspecified or address.is_multicast


def route_from(host: str) -> str:
    """Return this machine's address on the route to a host. No packet is sent.

    Blocks while a name is resolved.

    Raises:
        OSError: the name has no address, or there is no route to it.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def join_address(host: str, port: int) -> str:
    """Join a host and a port; puts brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
