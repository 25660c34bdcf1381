"""Parse the addresses of instances and check them against the allowed networks; pure."""

from __future__ import annotations

import ipaddress
from ipaddress import IPv4Network, IPv6Network

from p2p_engine.errors import ConfigError
from p2p_engine.wire.request_ids import ProxyId, parse_proxy_id


def is_address(text: str) -> bool:
    """Tell whether `text` is a `host:port` that a request id can carry and give back unchanged."""
    return parse_proxy_id(str(ProxyId(text, text, "0" * 32))) is not None


class AllowList:
    """The host names and networks, separated by commas, from which instances may register.

    An empty list permits every address. Names are compared as text and never resolved: otherwise,
    whoever controls the name server could send requests elsewhere.
    """

    def __init__(self, text: str) -> None:
        entries = [entry.strip() for entry in text.split(",") if entry.strip()]
        networks = {entry: _network(entry) for entry in entries}
        self._networks = [network for network in networks.values() if network is not None]
        self._names = {name.lower() for name, network in networks.items() if network is None}

    def permits(self, address: str) -> bool:
        """Tell whether an instance may use this `host:port`."""
        if not self._names and not self._networks:
            return True
        host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
        try:
            ip = ipaddress.ip_address(host)
        except ValueError:
            return host.lower() in self._names
        return any(ip in network for network in self._networks)


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
