"""StallWatch: notices that this process stood still, because it was stopped or got no core.

It heard nobody meanwhile: that is not the others' silence.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

# Less may come from a long callback, and ends no deadline that anybody would set.
ABSENCE_SECONDS = 1.0
LOOK_SECONDS = 0.25


class StallWatch:
    """Looks at the clock again and again, and tells `excuse` for how long nobody looked.

    In a callback of the loop's timer: what had come meanwhile has been read by then, and no task
    has acted on it yet. Of absences in a row only the first is excused: after it there was a look,
    and who was silent then may be gone.
    """

    def __init__(self, clock: Callable[[], float], excuse: Callable[[float], None]) -> None:
        self._clock = clock
        self._excuse = excuse
        self._looked_at = 0.0
        self._was_here = True  # at the last look
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to look; in the event loop."""
        self._looked_at = self._clock()
        self._again()

    def close(self) -> None:
        """Look no more; idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    def _again(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        now = self._clock()
        absence, self._looked_at = now - self._looked_at, now
        if absence > ABSENCE_SECONDS and self._was_here:
            logger.warning("this process stood still seconds=%.1f: nobody is late by that", absence)
            self._excuse(absence)
        self._was_here = absence <= ABSENCE_SECONDS
        self._again()
