"""What counts as one client where clients take turns: an address, or an IPv6 network of 64 bits."""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from typing import Any


@lru_cache(4096)
def origin_of(host: str) -> tuple[str, bool]:
    """Return the name of a host's origin, and whether it is this machine; "" for what is no
    address."""
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return "", False
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is None:
            return str(ipaddress.ip_network((ip, 64), strict=False)), ip.is_loopback
        ip = ip.ipv4_mapped
    return str(ip), ip.is_loopback


def address_of_client(scope: Any) -> str:
    """Return the address of a request's client, as the socket has it: headers can say anything."""
    host, _ = scope.get("client") or ("", 0)
    return str(host)
