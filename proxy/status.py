"""Status: the proxy's instances and requests, as JSON, as server-sent events and as a page."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections import Counter
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import msgspec

from proxy.errors import ProxyError
from proxy.fleet.instances import Instance, Role

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from proxy.fleet.discovery import Discovery
    from proxy.fleet.registry import Registry
    from proxy.fleet.weights import FleetWeights
    from proxy.observe.request_log import RequestLog
    from proxy.routing.admission import Admission

INTERVAL_SECONDS = 1.0
MAX_VIEWERS = 512
MAX_PAIRS = 50
# The page connects to the proxy only, and never runs text from an instance or client as code.
# No other site can put it into a frame, where a click could be another one than its user sees.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{}'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Status:
    """Reads everything on demand; keeps nothing."""

    def __init__(
        self,
        registry: Registry,
        discovery: Discovery,
        admission: Admission,
        log: RequestLog,
        weights: FleetWeights,
        clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._discovery = discovery
        self._admission = admission
        self._log = log
        self._weights = weights
        self._clock = clock
        self._num_viewers = 0
        # The page, which then reads `events`, and its headers.
        self.page = files("proxy").joinpath("status.html").read_bytes()
        script = self.page.partition(b"<script>")[2].partition(b"</script>")[0]
        digest = b64encode(sha256(script).digest()).decode()
        self.headers = [
            (b"content-type", b"text/html; charset=utf-8"),
            (b"content-security-policy", _POLICY.format(digest).encode()),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"cache-control", b"no-cache"),
        ]

    def snapshot(self) -> dict[str, Any]:
        """Return the instances and the number of requests in flight and queued."""
        now = self._clock()
        self._registry.sweep(now)
        return {
            "registration_address": self._discovery.address,
            "authenticated": self._discovery.is_authenticated,
            "warning": self._discovery.exposure,
            "requests_in_flight": len(self._log.open),
            "requests_queued": self._admission.num_queued,
            "weights": self._weights.describe(),
            "instances": [_describe(i, now) for i in self._registry.instances()],
        }

    def event(self) -> bytes:
        """Return a snapshot and the latest requests as a server-sent event."""
        return b"data: %b\n\n" % msgspec.json.encode(self._picture())

    def events(self, event: Callable[[], bytes]) -> AsyncGenerator[bytes, None]:
        """Return a stream with an `event` every second, until the viewer leaves.

        Raises:
            ProxyError: there are too many viewers.
        """
        if self._num_viewers >= MAX_VIEWERS:
            raise ProxyError(429, "too_many_viewers", f"at most {MAX_VIEWERS} viewers at a time")
        return self._pictures(event)

    async def _pictures(self, event: Callable[[], bytes]) -> AsyncGenerator[bytes, None]:
        self._num_viewers += 1
        try:
            while True:
                yield event()
                await asyncio.sleep(INTERVAL_SECONDS)
        finally:
            self._num_viewers -= 1

    def _picture(self) -> dict[str, Any]:
        return {
            **self.snapshot(),
            "seconds": self._clock(),
            "pairs": self._pairs(),
            "recent": [record.describe() for record in reversed(self._log.recent)],
        }

    def _pairs(self) -> list[dict[str, Any]]:
        """Return the busiest pairs: requests in flight, and KV transferred since the instances
        joined.

        KV is computed from the prompts' lengths; tokens that decode had cached did not move but
        count.
        """
        requests = Counter((j.prefill, j.decode) for j in self._log.open if j.decode is not None)
        moved: dict[tuple[str | None, str], int] = {
            (prefill, instance.identity.name): nbytes
            for instance in self._registry.instances()
            for prefill, nbytes in instance.kv_bytes_from.items()
            if self._registry.find(prefill) is not None
        }
        busiest = sorted({*requests, *moved}, key=lambda pair: (requests[pair], moved.get(pair, 0)))
        return [
            {
                "prefill": pair[0],
                "decode": pair[1],
                "requests": requests[pair],
                "kv_bytes": moved.get(pair, 0),
            }
            for pair in busiest[: -MAX_PAIRS - 1 : -1]
        ]


def _describe(instance: Instance, now: float) -> dict[str, Any]:
    identity, beat = instance.identity, instance.last_beat
    return {
        "name": identity.name,
        "http_address": identity.http_address,
        "zmq_address": identity.zmq_address,
        "roles": instance.labels(now),
        "state": instance.state(now),
        "heartbeat_age_seconds": None if beat is None else round(now - beat, 3),
        "in_flight": {role.label: instance.in_flight[role] for role in Role},
        "tokens_in_flight": instance.load,
        "events_sent": instance.num_events,
        "breaker": {role.label: instance.breakers[role].state(now) for role in Role},
        "protocol": identity.protocol,
        "epoch": identity.epoch,
        "model": identity.model,
        "tp_size": identity.tp_size,
        "send_type": identity.send_type,
        "weights": instance.weights,
        "held": instance.held,
        "warning": instance.warning,
        "accept_differences": instance.accept_differences,
    }
