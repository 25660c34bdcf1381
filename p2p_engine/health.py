"""Health of an engine: its counters, and its overdue waits. The engine's lock guards both."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from p2p_engine.errors import P2pError

logger = logging.getLogger(__name__)

MAX_OBSERVED = 4096  # between two looks of the caller
OVERDUE_SECONDS = 2.0  # after its deadline: a copy stops only at its next slice


@dataclass
class BusyTime:
    """The seconds in which at least one of several uses was in progress, each counted once however
    many overlap; up to the last beginning or end of a use."""

    seconds: float = 0.0
    _num_uses: int = 0
    _since: float = 0.0

    def begin(self, now: float) -> None:
        """Note the beginning of a use."""
        self._advance(now)
        self._num_uses += 1

    def end(self, now: float) -> None:
        """Note the end of one."""
        self._advance(now)
        self._num_uses -= 1

    def _advance(self, now: float) -> None:
        if self._num_uses:
            self.seconds += now - self._since
        self._since = now


@dataclass
class Counters:
    """The counters of an engine, since it was made."""

    sent_bytes: int = 0
    spilled_bytes: int = 0  # of held sources
    writing: BusyTime = field(default_factory=BusyTime)
    denied: int = 0
    expired: int = 0
    corrupted: int = 0  # chunks that arrived with a wrong checksum
    wrong_messages: int = 0
    callback_errors: int = 0
    landed_bytes_by_place: Counter[str] = field(
        default_factory=lambda: Counter({"blocks": 0, "buffer": 0, "pool": 0})
    )
    outcomes: Counter[str] = field(default_factory=Counter)
    # For the caller's histograms: what was measured, in which mode over which transport, and the
    # value. If nobody looks, the oldest are forgotten.
    observed: deque[tuple[str, str, float]] = field(
        default_factory=lambda: deque(maxlen=MAX_OBSERVED)
    )

    def count(self, direction: str, error: P2pError | None) -> None:
        """Count the end of a transfer under "sent ok", "received TransferTimeout" and so on."""
        self.outcomes[f"{direction} {'ok' if error is None else type(error).__name__}"] += 1


class Watchdog:
    """Finds waits that have outlived their deadlines. It logs them, and ends none."""

    def __init__(self) -> None:
        self.num_reported = 0  # since the start
        self._first_seen: dict[str, float] = {}
        self._reported: set[str] = set()

    def look(self, now: float, overdue: Iterable[str]) -> None:
        """Take the names of overdue waits, and log each that persists, once. `now` counts the
        seconds in which this engine ran."""
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
        """Return the waits that are reported now."""
        return sorted(self._reported)
