"""Addresses: "host:port" as peers know each other by it."""

from __future__ import annotations

import ipaddress
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


def is_any_address(host: str) -> bool:
    """Tell whether a server may listen there but nobody can dial it: `0.0.0.0`, `::`, a group's."""
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return host in ("*", "0")  # as getaddrinfo and ZMQ say it
    return address.is_unspecified or address.is_multicast


def route_from(host: str) -> str:
    """Return the address of this machine from which packets to a host leave; none is sent.

    Blocks while a name is resolved.

    Raises:
        OSError: the name has no address, or there is no way to it.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def join_address(host: str, port: int) -> str:
    """Join a host and a port; brackets go around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
