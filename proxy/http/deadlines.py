"""Deadlines: many limits of time that are seldom reached, on one timer of the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from proxy.http.stall import ABSENCE_SECONDS

# How late a limit may be noticed. A timer of its own for each would cost more than what it limits.
TICK_SECONDS = 0.05


class Deadline:
    """One limit; `cancel` it when what it limits is over."""

    __slots__ = ("_call", "_deadlines", "_due", "_seconds")

    def __init__(
        self, deadlines: Deadlines, now: float, seconds: float, call: Callable[[], None]
    ) -> None:
        self._deadlines = deadlines
        self._seconds = seconds
        self._due = now + seconds
        self._call = call

    def cancel(self) -> None:
        """Forget it; idempotent."""
        self._deadlines.pending.pop(self, None)

    def excuse(self, absence: float, now: float) -> None:
        """Put it off by an absence that ends now, but not beyond its own length."""
        self._due = min(self._due + absence, now + self._seconds)

    def check(self, now: float) -> None:
        """Act if it is time."""
        if now >= self._due:
            self.cancel()
            self._call()


class Deadlines:
    """All limits of one event loop. The timer runs only while there are any.

    While this process stands still, time does not count: what has come meanwhile is read first. Of
    absences in a row only the first is excused.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.pending: dict[Deadline, None] = {}
        self._clock = clock
        self._ticked_at = 0.0
        self._was_here = True  # at the last tick
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_ticking = False

    def add(self, seconds: float, call: Callable[[], None]) -> Deadline:
        """Call this after so many seconds, or up to TICK_SECONDS later, unless it is cancelled."""
        loop = self._loop = self._loop or asyncio.get_running_loop()
        now = self._clock()
        deadline = Deadline(self, now, seconds, call)
        self.pending[deadline] = None
        if not self._is_ticking:
            self._is_ticking, self._ticked_at = True, now
            loop.call_later(TICK_SECONDS, self._tick)
        return deadline

    def _tick(self) -> None:
        assert self._loop is not None
        now = self._clock()
        absence, self._ticked_at = now - self._ticked_at, now
        is_here = absence <= ABSENCE_SECONDS
        for deadline in list(self.pending):
            if self._was_here and not is_here:
                deadline.excuse(absence, now)
            deadline.check(now)
        self._was_here = is_here
        self._is_ticking = bool(self.pending)
        if self._is_ticking:
            self._loop.call_later(TICK_SECONDS, self._tick)
