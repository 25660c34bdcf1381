"""Watchdog: sees the waits that should have ended and have not. It ends none; it says so."""

from __future__ import annotations

import logging
from collections.abc import Iterable

logger = logging.getLogger(__name__)

OVERDUE_SECONDS = 2.0  # a wait may outlive its deadline by so much: a copy stops at its next slice


class Watchdog:
    """The overdue waits of one engine. The engine's lock guards it."""

    def __init__(self) -> None:
        self.num_reported = 0  # since the start
        self._first_seen: dict[str, float] = {}
        self._reported: set[str] = set()

    def look(self, now: float, overdue: Iterable[str]) -> None:
        """Take the names of what is past its deadline; log what stays so, once each. `now` counts
        the seconds in which this engine ran."""
        self._first_seen = {name: self._first_seen.get(name, now) for name in overdue}
        stuck = {name for name, since in self._first_seen.items() if now - since >= OVERDUE_SECONDS}
        for name in stuck - self._reported:
            self.num_reported += 1
            logger.error("a wait has outlived its deadline: %s", name)
        for name in self._reported - stuck:
            logger.warning("an overdue wait has ended: %s", name)
        self._reported = stuck

    @property
    def overdue(self) -> list[str]:
        """What is reported now."""
        return sorted(self._reported)
