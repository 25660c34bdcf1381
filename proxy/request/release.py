"""Releases: lets go of KV that a prefill has sent and that no decode took."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from proxy.errors import LegFailed
from proxy.fleet.instances import Role
from proxy.http.client import Limits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.fleet.instances import Instance
    from proxy.fleet.upstream import Upstream
    from proxy.observe.metrics import Metrics

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 10.0


class Releases:
    """Asks decode to take the KV and generate one token for nobody: the one thing that every
    engine understands, and the cheapest that frees the memory of both instances at once.

    A decode instance that cannot be reached holds nothing, or lets go when its lease ends.
    """

    def __init__(self, upstream: Upstream, metrics: Metrics) -> None:
        self._upstream = upstream
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, decode: Instance, path: str, body: bytes, headers: Mapping[str, str]) -> None:
        """Release in the background; nobody waits for it."""
        task = asyncio.ensure_future(self._release(decode, path, body, headers))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End all that run; idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _release(
        self, decode: Instance, path: str, body: bytes, headers: Mapping[str, str]
    ) -> None:
        limits = Limits(TIMEOUT_SECONDS, total=TIMEOUT_SECONDS)
        try:
            response = await self._upstream.post(decode, Role.DECODE, path, body, headers, limits)
        except LegFailed as error:
            logger.warning("KV not released instance=%s: %s", decode.identity.name, error)
            self._metrics.releases.labels("failed").inc()
            return
        response.close()
        self._metrics.releases.labels("done" if response.status == 200 else "refused").inc()
