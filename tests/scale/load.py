"""An even load on a proxy before stand-ins, and what became of each request."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from p2p_engine.simulate.answers import completion, events

PATH = "/v1/completions"
PROMPT_BYTES = 2048
MAX_TOKENS = 8
# More at once says that answers no longer come, and memory is not endless.
MAX_IN_FLIGHT = 4000


@dataclass
class Outcomes:
    """Counts of requests. A failure is `early` when the client had been told nothing yet."""

    num_ok: int = 0
    late: Counter[str] = field(default_factory=Counter)
    early: Counter[str] = field(default_factory=Counter)
    # Of each failure: seconds since the start of the load, and in words.
    failures: list[tuple[float, str]] = field(default_factory=list)
    # Of each stream: when it was asked for, since the start, and how long its first token took.
    first_tokens: list[tuple[float, float]] = field(default_factory=list)

    @property
    def num_requests(self) -> int:
        """All that have ended."""
        return self.num_ok + self.late.total() + self.early.total()


class StreamLoad:
    """Asks `rate` times a second; half of the answers are streams. Every byte is compared.

    The rate may be changed while it runs.
    """

    def __init__(self, url: str, model: str, rate: float, rng: random.Random) -> None:
        self._url = url
        self._model = model
        self.rate = rate
        self._rng = rng
        self.outcomes = Outcomes()

    async def run(self, until: asyncio.Event) -> None:
        """Ask until told to stop, then wait for the last answers."""
        loop = asyncio.get_running_loop()
        self._began = loop.time()
        running: set[asyncio.Task[None]] = set()
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self._client:
            number, due = 0, self._began
            while not until.is_set():
                number += 1
                assert len(running) < MAX_IN_FLIGHT, f"{len(running)} requests have no answer"
                task = asyncio.ensure_future(self._ask(number))
                running.add(task)
                task.add_done_callback(running.discard)
                due += self.pause()
                await asyncio.sleep(max(0.0, due - loop.time()))
            await asyncio.gather(*running)

    def pause(self) -> float:
        """Return the seconds from one request to the next."""
        return 1 / self.rate

    async def _ask(self, number: int) -> None:
        asked: dict[str, Any] = {
            "model": self._model,
            "prompt": f"{number} {self._rng.random()} ".ljust(PROMPT_BYTES, "x"),
            "max_tokens": MAX_TOKENS,
            "stream": number % 2 == 0,
        }
        received = bytearray()
        why = ""
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            async with self._client.post(self._url + PATH, json=asked) as response:
                with suppress(aiohttp.ClientPayloadError):  # what came before it is judged below
                    async for piece in response.content.iter_any():
                        if asked["stream"] and response.status == 200 and not received:
                            took = clock() - began
                            self.outcomes.first_tokens.append((began - self._began, took))
                        received += piece
                why = "" if response.status == 200 else f"{response.status} {received[:200]!r}"
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            why = type(error).__name__
        self._judge(asked, bytes(received), why)

    def _judge(self, asked: dict[str, Any], received: bytes, why: str) -> None:
        outcomes = self.outcomes
        if not why and _is_whole(asked, received):
            outcomes.num_ok += 1
            return
        is_late = not why and received != b""
        what = why or ("cut" if b'"error":' in received else f"wrong {received[-200:]!r}")
        (outcomes.late if is_late else outcomes.early)[what] += 1
        since = asyncio.get_running_loop().time() - self._began
        outcomes.failures.append((round(since, 2), f"{'late' if is_late else 'early'}: {what}"))


def _is_whole(asked: dict[str, Any], received: bytes) -> bool:
    if asked["stream"]:
        return received == b"".join(events(asked))
    with suppress(ValueError):
        return bool(json.loads(received)["choices"] == completion(asked)["choices"])
    return False
