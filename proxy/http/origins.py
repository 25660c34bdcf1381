"""What counts as one client where clients take turns: an address, or an IPv6 network of 64 bits."""

from __future__ import annotations

import ipaddress
from functools import lru_cache


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
