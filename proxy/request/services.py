"""Services: the parts of the proxy that attempts use; the application owns them."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from proxy.config import ProxyConfig
from proxy.fleet.instances import Instance
from proxy.fleet.last_turns import LastTurns
from proxy.fleet.registry import Registry
from proxy.fleet.upstream import Upstream
from proxy.http.deadlines import Deadlines
from proxy.observe.traces import Traces
from proxy.request.release import Releases


@dataclass(frozen=True, slots=True)
class Services:
    """The shared parts; a proxy has one of each."""

    config: ProxyConfig
    registry: Registry
    upstream: Upstream
    releases: Releases
    deadlines: Deadlines
    traces: Traces
    look: Callable[[Instance], Awaitable[None]]  # of `Readiness`
    last_turns: LastTurns = field(default_factory=LastTurns)
    # What this proxy calls itself in the header `Via`, by which it knows its own requests.
    name: str = field(default_factory=lambda: f"p2p-proxy-{os.urandom(8).hex()}")
