"""RareWarnings: log lines that strangers can cause, so many as a person can read."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

RARE_SECONDS = 10.0


class RareWarnings:
    """At most one warning in ten seconds; the next one says how many were left out."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._silent_until = 0.0
        self._num_left_out = 0

    def warn(self, text: str, *values: object) -> None:
        """Log it, or count it."""
        now = self._clock()
        if now < self._silent_until:
            self._num_left_out += 1
            return
        self._silent_until = now + RARE_SECONDS
        more = f" (and {self._num_left_out} such lines before)" if self._num_left_out else ""
        self._num_left_out = 0
        self._logger.warning("%s%s", text % values, more)
