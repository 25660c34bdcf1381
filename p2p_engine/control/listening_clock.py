"""ListeningClock: a clock of the time in which this process could have heard its peers.

A process that was stopped, got no core, or whose interpreter was held, heard nobody: that is not
its peers' silence. So this clock stands still in such an absence. It never counts more than was
missed, and a process that is absent again and again still notices who is dead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

NUM_STEPS = 4  # looks that the silence of a peer takes at least, however long each absence is


class ListeningClock:
    """Seconds that were listened to. Look at it often: what lies between two looks may be absence.

    An interval of up to a step counts whole; a longer one is an absence. The first absence counts
    nothing, because the sockets are read only after it. Until `patience_seconds` have been counted
    since then, each further one counts one step. So at most five looks are needed to notice a
    silence of `patience_seconds`, and where looks are less than a step apart, no more time than it
    takes. Not for more than one thread at a time.
    """

    def __init__(self, patience_seconds: float, clock: Callable[[], float]) -> None:
        """`patience_seconds` is the longest silence of a peer."""
        self._patience = patience_seconds
        self._step = patience_seconds / NUM_STEPS
        self._clock = clock
        self._looked_at = self._seconds = clock()
        self._excused_at = self._seconds - patience_seconds  # on this clock

    def __call__(self) -> float:
        """Look: return the seconds, which begin with those of `clock`."""
        now = self._clock()
        interval, self._looked_at = now - self._looked_at, now
        if interval <= self._step:
            self._seconds += interval
        elif self._seconds - self._excused_at >= self._patience:
            self._excused_at = self._seconds
            logger.info("this process did not run for %.1f s: nobody is late by that", interval)
        else:
            self._seconds += self._step
        return self._seconds
