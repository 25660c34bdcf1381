"""Turns: who has work to do waits for others, and each round of the event loop does a little."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from typing import TypeAlias

# By the clock that costs least: that of a thread's own time is a system call of 2 us.
TURN_SECONDS = 0.0005
# Where others may not wait for long rounds, either: so many have their turn in each second.
LEAST_PER_SECOND = 500
MOST_AT_ONCE = 8

Work: TypeAlias = Callable[[], object]


class Turns:
    """Gives so many turns in each round of the event loop, and more if the round before took long.
    So all work together takes a part of the time, however much there is and however long others
    make the rounds.

    Origins take turns. Of one origin, who comes is before those who wait: in a crowd that asks for
    more than there is, all would otherwise wait for the longest. Who goes on is behind them.
    """

    def __init__(self, num_turns: int = 1, *, least: float = 1, seconds: float = 0) -> None:
        """A turn counts as many as the time that it took, and as `least` at
        least: what a turn wakes may take its time later. A round takes `seconds` at least."""
        self._num_turns = num_turns
        self._least = least
        self._seconds = seconds
        self._num_left: float = num_turns  # in this round
        self._began = 0.0
        self._is_running = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lines: dict[str, OrderedDict[Hashable, Work]] = {}

    async def take(self, origin: str = "") -> None:
        """Wait for one's turn, behind all others of that origin."""
        if not self._lines and self._num_left > 0:
            self._num_left -= self._least  # its work begins when its turn is over
            self._run()
            return
        mine = asyncio.get_running_loop().create_future()
        self.ask(origin, mine, partial(_wake, mine), goes_on=True)
        try:
            await mine
        finally:
            self.leave(origin, mine)

    def do_now(self, work: Work) -> bool:
        """Do work at once if there is time left in this round; return whether there was."""
        if self._num_left <= 0:
            return False
        self._do(work)
        self._run()
        return True

    def ask(self, origin: str, who: Hashable, work: Work, *, goes_on: bool = False) -> None:
        """Ask for a turn to do work in; `goes_on`: behind all others."""
        line = self._lines.setdefault(origin, OrderedDict())
        line[who] = work
        line.move_to_end(who, last=not goes_on)
        self._run()

    def leave(self, origin: str, who: Hashable) -> None:
        """Wait no longer; idempotent."""
        line = self._lines.get(origin)
        if line is not None and line.pop(who, None) is not None and not line:
            del self._lines[origin]

    def _do(self, work: Work) -> None:
        began = time.perf_counter()
        try:
            work()
        finally:
            took = time.perf_counter() - began
            self._num_left -= max(self._least, took / TURN_SECONDS)

    def _run(self) -> None:
        if not self._is_running:
            self._is_running = True
            loop = self._loop = self._loop or asyncio.get_running_loop()
            self._began = loop.time()
            self._give_soon(loop)

    def _give_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._seconds:
            loop.call_later(self._seconds, self._give)
        else:
            loop.call_soon(self._give)

    def _give(self) -> None:
        assert self._loop is not None
        loop, before = self._loop, self._began
        self._began = loop.time()
        # Where a round has room for several anyway, more would make the next round as long.
        share = LEAST_PER_SECOND if self._least >= 1 else 0
        more = int((self._began - before - self._seconds) * share)
        self._num_left = self._num_turns + min(MOST_AT_ONCE, max(0, more))
        try:
            while self._lines and self._num_left > 0:
                self._do(self._next())
        finally:
            self._is_running = bool(self._lines) or self._num_left < self._num_turns
            if self._is_running:
                self._give_soon(loop)

    def _next(self) -> Work:
        origin = next(iter(self._lines))
        line = self._lines.pop(origin)
        _, work = line.popitem()
        if line:
            self._lines[origin] = line  # behind the others
        return work


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():  # it may have been cancelled, and not have left yet
        waiter.set_result(None)
