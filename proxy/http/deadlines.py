"""Deadlines: many timeouts that seldom expire, on one timer of the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from operator import attrgetter

from proxy.http.stall import ABSENCE_SECONDS

# A timeout may fire this late. One loop timer for each request would cost more than the request.
TICK_SECONDS = 0.05
# Timeouts that expire before other work has its turn: the end of what they end takes time, too.
AT_ONCE = 4


class Deadline:
    """One timeout; `cancel` it when the operation is over."""

    __slots__ = ("_line", "call", "due")

    def __init__(self, line: dict[Deadline, None], due: float, call: Callable[[], object]) -> None:
        self._line = line
        self.due = due
        self.call = call
        line[self] = None

    def cancel(self) -> None:
        """Remove the timeout; idempotent."""
        self._line.pop(self, None)


class Deadlines:
    """All timeouts of one event loop. The timer runs only while there are any.

    Time during which the process did not run does not count, because input may have arrived and
    must be read first. Of several such absences in a row, only the first is excused.

    Timeouts of one length stand in one line, the first to expire in front; there are few lengths.
    So a tick looks at those that expire, however many there are.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lines: dict[float, dict[Deadline, None]] = {}  # by length
        self._clock = clock
        self._ticked_at = 0.0
        self._was_here = True  # at the last tick
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_ticking = False

    def add(self, seconds: float, call: Callable[[], object]) -> Deadline:
        """Call `call` after `seconds`, up to TICK_SECONDS late, unless it is cancelled."""
        loop = self._loop = self._loop or asyncio.get_running_loop()
        now = self._clock()
        deadline = Deadline(self._lines.setdefault(seconds, {}), now + seconds, call)
        if not self._is_ticking:
            self._is_ticking, self._ticked_at = True, now
            loop.call_later(TICK_SECONDS, self._tick)
        return deadline

    @property
    def pending(self) -> list[Deadline]:
        """All that are neither over nor cancelled."""
        return [deadline for line in self._lines.values() for deadline in line]

    def _tick(self) -> None:
        assert self._loop is not None
        now = self._clock()
        absence, self._ticked_at = now - self._ticked_at, now
        is_here, num_expired = absence <= ABSENCE_SECONDS, 0
        if self._was_here and not is_here:
            self._excuse(absence, now)
        self._was_here = is_here
        try:
            while num_expired < AT_ONCE and (deadline := self._expired(now)) is not None:
                num_expired += 1
                deadline.cancel()
                deadline.call()
        finally:
            self._lines = {seconds: line for seconds, line in self._lines.items() if line}
            self._is_ticking = bool(self._lines)
            if self._is_ticking:
                self._loop.call_later(TICK_SECONDS if num_expired < AT_ONCE else 0, self._tick)

    def _excuse(self, absence: float, now: float) -> None:
        """Extend each timeout by an absence that ends now, up to its full length from now."""
        for seconds, line in self._lines.items():
            for deadline in line:
                deadline.due = min(deadline.due + absence, now + seconds)

    def _expired(self, now: float) -> Deadline | None:
        """Return the timeout that has been over for the longest."""
        first = (next(iter(line)) for line in self._lines.values() if line)
        earliest = min(first, key=attrgetter("due"), default=None)
        return earliest if earliest is not None and now >= earliest.due else None
