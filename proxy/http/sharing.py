"""What many readers ask for is made seldom."""

from __future__ import annotations

import time
from collections.abc import Callable

# Of one core's time, the most that making one kind of content takes if readers are many.
MAX_SHARE = 0.02
# Time that may be used at once after a while without readers.
BURST_SECONDS = 0.1


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
