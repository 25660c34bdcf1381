"""Turns: who has work to do waits for others, a round of the event loop for each, or nearly so."""

from __future__ import annotations

import asyncio
from collections import deque

# Where others may not wait for long rounds, either: so many have their turn in each second.
LEAST_PER_SECOND = 500
MOST_AT_ONCE = 32


class Rounds:
    """Tells how many may have their turn in a round of the event loop: one, and more if the round
    before took long. So they take a part of the time, however long others make the rounds."""

    def __init__(self) -> None:
        self._began = 0.0

    def begin(self) -> None:
        """Note that a round begins, and that nobody waited before it."""
        self._began = asyncio.get_running_loop().time()

    def num_turns(self) -> int:
        """Return how many may have their turn in the round that begins now."""
        before = self._began
        self.begin()
        return 1 + min(MOST_AT_ONCE, int((self._began - before) * LEAST_PER_SECOND))


class Turns:
    """Lets one task work in each round of the event loop, or more if that is too seldom. Origins
    take turns; tasks of one origin are in order.

    Who moves much then delays others by one piece, however many do so at once.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._rounds = Rounds()
        self._is_running = False

    async def take(self, origin: str = "") -> None:
        """Wait for one's turn."""
        loop = asyncio.get_running_loop()
        mine = loop.create_future()
        self._waiting.setdefault(origin, deque()).append(mine)
        if not self._is_running:
            self._is_running = True
            self._rounds.begin()
            loop.call_soon(self._give)
        await mine

    def _give(self) -> None:
        for _ in range(self._rounds.num_turns()):
            if (following := self._next()) is not None:
                following.set_result(None)
        self._is_running = bool(self._waiting)
        if self._is_running:
            asyncio.get_running_loop().call_soon(self._give)

    def _next(self) -> asyncio.Future[None] | None:
        while self._waiting:
            origin = next(iter(self._waiting))
            line = self._waiting.pop(origin)
            following = line.popleft()
            if line:
                self._waiting[origin] = line  # behind the others
            if not following.done():  # it may have been cancelled
                return following
        return None
