"""Releases: frees KV that a prefill instance has sent and no decode request will use."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from proxy.errors import ProxyError
from proxy.fleet.instances import Role
from proxy.http.client import Limits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.fleet.instances import Instance
    from proxy.fleet.upstream import Upstream
    from proxy.http.memory import Keep, Parts
    from proxy.observe.metrics import Metrics

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 10.0


class Releases:
    """Asks decode to load the KV and generate one token, and discards the answer.

    Every engine understands such a request, and it is the cheapest one that frees memory on both
    instances at once. If decode cannot be reached, its memory is freed when the lease ends.
    """

    def __init__(self, upstream: Upstream, metrics: Metrics) -> None:
        self._upstream = upstream
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(
        self, decode: Instance, path: str, body: Parts, headers: Mapping[str, str], keep: Keep
    ) -> None:
        """Start a release in the background, which frees `keep` at its end; does not block."""
        task = asyncio.ensure_future(self._release(decode, path, body, headers))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: keep.free())

    async def close(self) -> None:
        """Cancel all releases in progress; idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _release(
        self, decode: Instance, path: str, body: Parts, headers: Mapping[str, str]
    ) -> None:
        limits = Limits(TIMEOUT_SECONDS, total=TIMEOUT_SECONDS)
        try:
            response = await self._upstream.post(decode, Role.DECODE, path, body, headers, limits)
        except ProxyError as error:
            logger.warning("KV not released instance=%s: %s", decode.identity.name, error)
            self._metrics.releases.labels("failed").inc()
            return
        response.close()
        self._metrics.releases.labels("done" if response.status == 200 else "refused").inc()
