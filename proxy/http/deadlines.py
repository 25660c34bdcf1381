"""Deadlines: many timeouts that seldom expire, on one timer of the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from proxy.http.stall import ABSENCE_SECONDS

# A timeout may fire this late. One loop timer for each request would cost more than the request.
TICK_SECONDS = 0.05
# Timeouts that expire before other work has its turn: the end of what they end takes time, too.
AT_ONCE = 4


class Deadline:
    """One timeout; `cancel` it when the operation is over."""

    __slots__ = ("_call", "_deadlines", "_due", "_seconds")

    def __init__(
        self, deadlines: Deadlines, now: float, seconds: float, call: Callable[[], object]
    ) -> None:
        self._deadlines = deadlines
        self._seconds = seconds
        self._due = now + seconds
        self._call = call

    def cancel(self) -> None:
        """Remove the timeout; idempotent."""
        self._deadlines.pending.pop(self, None)

    def excuse(self, absence: float, now: float) -> None:
        """Extend the timeout by an absence that ends now, up to its full length from now."""
        self._due = min(self._due + absence, now + self._seconds)

    def check(self, now: float) -> bool:
        """Call the callback if the timeout has expired; return whether it has."""
        if now < self._due:
            return False
        self.cancel()
        self._call()
        return True


class Deadlines:
    """All timeouts of one event loop. The timer runs only while there are any.

    Time during which the process did not run does not count, because input may have arrived and
    must be read first. Of several such absences in a row, only the first is excused.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.pending: dict[Deadline, None] = {}
        self._clock = clock
        self._ticked_at = 0.0
        self._was_here = True  # at the last tick
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_ticking = False

    def add(self, seconds: float, call: Callable[[], object]) -> Deadline:
        """Call `call` after `seconds`, up to TICK_SECONDS late, unless it is cancelled."""
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
        is_here, num_expired = absence <= ABSENCE_SECONDS, 0
        for deadline in list(self.pending):
            if self._was_here and not is_here:
                deadline.excuse(absence, now)
            if num_expired < AT_ONCE:
                num_expired += deadline.check(now)
        self._was_here = is_here
        self._is_ticking = bool(self.pending)
        if self._is_ticking:
            self._loop.call_later(TICK_SECONDS if num_expired < AT_ONCE else 0, self._tick)
