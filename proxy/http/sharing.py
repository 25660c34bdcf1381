"""What many readers ask for: made seldom, and served a few at a time."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

# Of one core's time, the most that making one kind of content takes if readers are many.
MAX_SHARE = 0.02
# Time that may be used at once after a while without readers.
BURST_SECONDS = 0.1
TICK_SECONDS = 0.01


class Shared:
    """Content for many readers. While they are few, each gets it fresh. If making it would take
    more than `MAX_SHARE` of the time, they get what was made last."""

    def __init__(
        self, make: Callable[[], bytes], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._make = make
        self._clock = clock
        self._content: bytes | None = None
        self._credit_seconds = BURST_SECONDS
        self._looked_at = clock()

    def get(self) -> bytes:
        """Return the content."""
        began = self._clock()
        earned = (began - self._looked_at) * MAX_SHARE
        self._credit_seconds = min(self._credit_seconds + earned, BURST_SECONDS)
        self._looked_at = began
        if self._content is None or self._credit_seconds > 0:
            self._content = self._make()
            self._credit_seconds -= self._clock() - began
        return self._content


class Pace:
    """Lets a few begin in each tick; the others wait, in order.

    Clients who ask for much at once then wait for each other, and completions wait for none of
    them.
    """

    def __init__(self, num_per_tick: int) -> None:
        self._num_per_tick = num_per_tick
        self._num_left = num_per_tick
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_ticking = False

    async def turn(self) -> None:
        """Wait for one's turn."""
        loop = asyncio.get_running_loop()
        if not self._is_ticking:
            self._is_ticking = True
            loop.call_later(TICK_SECONDS, self._tick)
        if self._num_left:
            self._num_left -= 1
            return
        mine = loop.create_future()
        self._waiting.append(mine)
        await mine

    def _tick(self) -> None:
        self._num_left = self._num_per_tick
        while self._waiting and self._num_left:
            following = self._waiting.popleft()
            if not following.done():  # it may have been cancelled
                following.set_result(None)
                self._num_left -= 1
        self._is_ticking = self._num_left < self._num_per_tick
        if self._is_ticking:
            asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)
