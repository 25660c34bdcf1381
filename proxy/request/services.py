"""Services: what all attempts work with; the application owns them."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.config import ProxyConfig
from proxy.fleet.registry import Registry
from proxy.fleet.upstream import Upstream
from proxy.http.deadlines import Deadlines
from proxy.request.release import Releases


@dataclass(frozen=True, slots=True)
class Services:
    """One of each in a proxy."""

    config: ProxyConfig
    registry: Registry
    upstream: Upstream
    releases: Releases
    deadlines: Deadlines
