"""StallWatch: detects that this process did not run, because it was stopped or got no CPU.

The proxy could not receive meanwhile, so the silence of others is not their fault.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

# A long callback may cause shorter pauses, and no sensible deadline is that short.
ABSENCE_SECONDS = 1.0
LOOK_SECONDS = 0.25


class StallWatch:
    """Compares the clock at regular intervals and reports a pause of the process to `excuse`.

    The check is a timer callback of the loop: by then the loop has read what arrived, and no task
    has acted on it. Of several pauses in a row, only the first is excused: the loop ran between
    them, so a peer that was silent then may be gone.
    """

    def __init__(self, clock: Callable[[], float], excuse: Callable[[float], None]) -> None:
        self._clock = clock
        self._excuse = excuse
        self._looked_at = 0.0
        self._was_here = True  # at the last look
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start; call it inside the event loop."""
        self._looked_at = self._clock()
        self._again()

    def close(self) -> None:
        """Stop; idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    def _again(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        now = self._clock()
        absence, self._looked_at = now - self._looked_at, now
        if absence > ABSENCE_SECONDS and self._was_here:
            logger.warning("process paused seconds=%.1f: instances get that much longer", absence)
            self._excuse(absence)
        self._was_here = absence <= ABSENCE_SECONDS
        self._again()
