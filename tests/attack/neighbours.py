"""Neighbours: clients who ask for little, at an even rate, beside an attack."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import aiohttp

from tests.rigs.proxies import ASKED, COMPLETIONS, LoopThread

# Every so-manieth request comes over a connection of its own.
NEWCOMERS = 4
MODEL = "healthy"
ADDRESS = "127.0.0.2"  # where they are: strangers are elsewhere


class Neighbours:
    """The commands: `start` and `stop`, again and again."""

    def __init__(self, url: str, rate: float) -> None:
        self._url = url
        self._rate = rate
        self._loop = LoopThread()
        self._running: asyncio.Task[None] | None = None
        self._seconds: list[float] = []
        self._failures: Counter[str] = Counter()

    def start(self) -> None:
        """Begin to ask."""

        async def begin() -> None:
            self._seconds, self._failures = [], Counter()
            self._running = asyncio.ensure_future(self._ask_evenly())

        self._loop.run(begin())

    def stop(self) -> dict[str, Any]:
        """Stop asking; wait for the last answers, and return what came of all."""

        async def end() -> None:
            assert self._running is not None
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

        self._loop.run(end())
        ordered = sorted(self._seconds)
        return {
            "num_ok": len(ordered),
            "failures": dict(self._failures),
            "p50_ms": _quantile(ordered, 0.5),
            "p99_ms": _quantile(ordered, 0.99),
        }

    def close(self) -> None:
        """End."""
        self._loop.close()

    async def _ask_evenly(self) -> None:
        loop = asyncio.get_running_loop()
        timeout = aiohttp.ClientTimeout(total=20)
        kept, fresh = (
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0, force_close=is_closed, local_addr=(ADDRESS, 0), ssl=False
                ),
                timeout=timeout,
            )
            for is_closed in (False, True)
        )
        asking: set[asyncio.Task[None]] = set()
        began, number = loop.time(), 0
        async with kept, fresh:
            try:
                while True:
                    client = fresh if number % NEWCOMERS == 0 else kept
                    task = asyncio.ensure_future(self._ask(client))
                    asking.add(task)
                    task.add_done_callback(asking.discard)
                    number += 1
                    await asyncio.sleep(max(0.0, began + number / self._rate - loop.time()))
            finally:
                await asyncio.gather(*asking)

    async def _ask(self, client: aiohttp.ClientSession) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            asked = {**ASKED, "model": MODEL}
            async with client.post(self._url + COMPLETIONS, json=asked) as answer:
                await answer.read()
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            self._failures[type(error).__name__] += 1
            return
        if answer.status == 200:
            self._seconds.append(loop.time() - began)
        else:
            self._failures[str(answer.status)] += 1


def _quantile(ordered: list[float], share: float) -> float:
    """Return a quantile in milliseconds; 0 of nothing."""
    return round(ordered[int(share * (len(ordered) - 1))] * 1000, 1) if ordered else 0.0
