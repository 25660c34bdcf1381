"""Deadlines: many limits of time that are seldom reached, on one timer of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

# How late a limit may be noticed. A timer of its own for each would cost more than what it limits.
TICK_SECONDS = 0.05


class Deadline:
    """One limit; `cancel` it when what it limits is over."""

    __slots__ = ("_call", "_deadlines", "_due")

    def __init__(self, deadlines: Deadlines, due: float, call: Callable[[], None]) -> None:
        self._deadlines = deadlines
        self._due = due
        self._call = call

    def cancel(self) -> None:
        """Forget it; idempotent."""
        self._deadlines.pending.pop(self, None)

    def check(self, now: float) -> None:
        """Act if it is time."""
        if now >= self._due:
            self.cancel()
            self._call()


class Deadlines:
    """All limits of one event loop. The timer runs only while there are any."""

    def __init__(self) -> None:
        self.pending: dict[Deadline, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_ticking = False

    def add(self, seconds: float, call: Callable[[], None]) -> Deadline:
        """Call this after so many seconds, or up to TICK_SECONDS later, unless it is cancelled."""
        loop = self._loop = self._loop or asyncio.get_running_loop()
        deadline = Deadline(self, loop.time() + seconds, call)
        self.pending[deadline] = None
        if not self._is_ticking:
            self._is_ticking = True
            loop.call_later(TICK_SECONDS, self._tick)
        return deadline

    def _tick(self) -> None:
        assert self._loop is not None
        now = self._loop.time()
        for deadline in list(self.pending):
            deadline.check(now)
        self._is_ticking = bool(self.pending)
        if self._is_ticking:
            self._loop.call_later(TICK_SECONDS, self._tick)
