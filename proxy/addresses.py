"""Parse the addresses of instances, and check them before they are dialled."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from urllib.parse import urlsplit

from p2p_engine.errors import ConfigError
from p2p_engine.wire.request_ids import ProxyId, parse_proxy_id

# Where clouds tell a machine its secrets; link-local ones are refused with their network.
_METADATA = {
    ipaddress.ip_address(text)
    for text in (
        "169.254.169.254", "169.254.170.2", "169.254.170.23", "fd00:ec2::254", "fd00:ec2::23",
        "fd20:ce::254", "100.100.100.200", "168.63.129.16", "192.0.0.192",
    )
}  # fmt: skip
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_address(text: str) -> bool:
    """Tell whether `text` is a `host:port` that a request id can carry and give back unchanged."""
    proxy_id = ProxyId(text, text, "0" * 32)
    return parse_proxy_id(str(proxy_id)) == proxy_id


def plain_address(text: str) -> str:
    """Return an address as `host:port` if it is one behind `http://`, or one of IPv6 without
    brackets, else as it is."""
    bare = text.removeprefix("http://").removesuffix("/")
    host, _, port = bare.rpartition(":")
    try:
        return f"[{ipaddress.IPv6Address(host)}]:{port}"
    except ValueError:
        return bare if is_address(bare) else text


def is_url(text: str) -> bool:
    """Tell whether `text` is a URL of HTTP with a host."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


class AllowList:
    """The host names and networks, separated by commas, from which instances may register.

    An empty list permits every address, except those that no instance has: link-local, multicast
    and unspecified ones, metadata services of clouds, and the proxy's own ports. The first kind is
    permitted if a network of its kind is listed, a metadata service if it is listed itself.

    A name that is not listed is permitted if it resolves to an address in a listed network. That
    is checked when it is dialled, on the very address that is dialled.
    """

    def __init__(self, text: str, own: Sequence[tuple[str, int]] = ()) -> None:
        """`own` has the hosts and ports on which the proxy itself listens."""
        entries = [entry.strip() for entry in text.split(",") if entry.strip()]
        networks = {entry: _network(entry) for entry in entries}
        self._networks = [network for network in networks.values() if network is not None]
        self._names = {name.lower() for name, network in networks.items() if network is None}
        self._own = own

    def refusal(self, address: str, *, is_dialled: bool = True) -> str:
        """Return why an instance may not use this `host:port`, or "".

        A name that is not listed can only be checked if the proxy dials it.
        """
        host, _, port = address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        ip = _ip(host)
        if ip is not None:
            return self._refusal_of(ip, int(port))
        is_open = not self._names and not self._networks
        if is_open or host.lower() in self._names or (self._networks and is_dialled):
            return ""
        return f"{address} is not among the allowed addresses"

    def refusal_to_dial(self, host: str, resolved: str, port: int) -> str:
        """Return why this address, to which a host name resolves, may not be dialled, or ""."""
        ip = _ip(resolved)
        if ip is None:
            return f"{resolved} is no address"
        return self._refusal_of(ip, port, is_listed=host.lower() in self._names)

    def _refusal_of(
        self, ip: IPv4Address | IPv6Address, port: int, *, is_listed: bool = False
    ) -> str:
        if any(port == own_port and _is_own(ip, host) for host, own_port in self._own):
            return f"{ip} port {port} is the proxy's own"
        networks = [network for network in self._networks if ip in network]
        if ip in _METADATA:
            if any(network.num_addresses == 1 for network in networks):
                return ""
            return f"{ip} is a metadata service"
        if ip.is_link_local or ip.is_multicast or ip.is_unspecified:
            if any(_is_of_its_kind(network) for network in networks):
                return ""
            return (
                f"{ip} is no address of an instance; list its network in allowed_addresses if it is"
            )
        if is_listed or networks or not (self._names or self._networks):
            return ""
        return f"{ip} is not among the allowed addresses"


def parse_static(text: str) -> list[tuple[str, str]]:
    """Return the HTTP and KV addresses in `HTTP[@KV],...`; a missing KV address is "".

    Raises:
        ConfigError: a part is not `host:port`; the message names it.
    """
    pairs = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        http_address, separator, zmq_address = entry.partition("@")
        for address in (http_address, zmq_address) if separator else (http_address,):
            if not is_address(address):
                raise ConfigError(f"{address!r} in {entry!r} is not host:port")
        pairs.append((http_address, zmq_address))
    return pairs


def _network(text: str) -> IPv4Network | IPv6Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def _is_of_its_kind(network: IPv4Network | IPv6Network) -> bool:
    return network.num_addresses == 1 or network.is_link_local


def _ip(text: str) -> IPv4Address | IPv6Address | None:
    """Return an address; one of IPv4 also where it is written inside one of IPv6."""
    try:
        ip = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(ip, IPv6Address):
        if ip.ipv4_mapped is not None:
            return ip.ipv4_mapped
        if ip in _NAT64:
            return IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip


def _is_own(ip: IPv4Address | IPv6Address, host: str) -> bool:
    """Tell whether a listener on `host` of this machine would be reached at an address."""
    listener = _ip(host.removeprefix("[").removesuffix("]"))
    if listener is not None and not listener.is_unspecified:
        return ip == listener
    if ip.is_loopback or ip.is_unspecified:
        return True
    family = socket.AF_INET6 if ip.version == 6 else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((str(ip), 0))  # only an address of this machine can be bound
        return True
    return False
