"""The proxy's command, with a watch on its event loop.

Each second, it logs the most of a core's time that passed between two looks of the loop, 1 ms
apart. That is how long others waited for the proxy's own work, whatever else runs on the machine.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time

from proxy import app, main
from proxy.http.door import DoorServer

LOOK_SECONDS = 0.001
SAY_SECONDS = 1.0
logger = logging.getLogger(__name__)


class LoopWatch:
    """Looks at the clock of the loop's thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._looked_at = time.thread_time()
        self._said_at = self._loop.time()
        self._longest = 0.0
        self._look()

    def _look(self) -> None:
        now = time.thread_time()
        self._longest = max(self._longest, now - self._looked_at)
        if self._loop.time() >= self._said_at + SAY_SECONDS:
            logger.info("turn_ms=%.1f", self._longest * 1000)
            self._said_at, self._longest = self._loop.time(), 0.0
        self._looked_at = time.thread_time()
        self._loop.call_later(LOOK_SECONDS, self._look)


class WatchedServer(DoorServer):
    """The proxy's server, watched."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and watch."""
        await super().startup(sockets)
        LoopWatch()


if __name__ == "__main__":
    app.DoorServer = WatchedServer  # type: ignore[attr-defined]
    sys.exit(main.main())
