"""Credit: how much of the landing memory each sender may have, and who is next when it is full.

A sender may have SHARE times what it leaves free (dynamic thresholds, Choudhury and Hahne 1998):
one alone 8/9 of the memory, n of them 8/(8n+1) each, and some is left for who comes next. What was
denied is remembered until it is offered again: a sender that has more does not get it in the
meantime. A sender with nothing gets whatever there is.

That is said of chunks whose requests queue here. A chunk that is awaited goes before them: it needs
no share, and while one was denied, nothing is granted that is not. Among the awaited ones, a sender
that has less goes first. The engine's lock guards everything here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from p2p_engine.config import EngineConfig
from p2p_engine.landing import LandingId

SHARE = 8
RETRY_AFTER_SECONDS = 0.02  # for each chunk of the same sender that waits: it asks at one pace
MAX_WAITING = 4096  # chunks of one sender that are remembered


@dataclass
class Waiting:
    """A chunk that was denied."""

    nbytes: int
    forgotten_at: float


class Credit:
    """The senders of one engine."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._held: Counter[int] = Counter()
        self._waiting: dict[int, dict[int, Waiting]] = {}
        self._awaited: dict[LandingId, float] = {}  # those of them that go first

    def refusal(
        self, landing_id: LandingId, nbytes: int, free: int, *, is_awaited: bool = False
    ) -> str:
        """Why a sender may not have so many of the free bytes now, or ""."""
        held = self._held[landing_id[0]]
        if nbytes > free:
            return "buffer and pool are full"
        if not is_awaited and self._has_awaited():
            return "what somebody waits for goes first"
        if not is_awaited and held and held + nbytes > SHARE * (free - nbytes):
            return "this sender has its share of buffer and pool"
        if held and nbytes > free - self._claimed(landing_id[0], held, awaited=is_awaited):
            return "senders that have less are waiting for buffer and pool"
        return ""

    def take(self, landing_id: LandingId, nbytes: int) -> None:
        """The bytes were granted."""
        epoch, seq = landing_id
        self._awaited.pop(landing_id, None)
        self._held[epoch] += nbytes
        waiting = self._waiting.get(epoch, {})
        waiting.pop(seq, None)
        if not waiting:
            self._waiting.pop(epoch, None)

    def give_back(self, landing_id: LandingId, nbytes: int) -> None:
        """The bytes are free again."""
        epoch = landing_id[0]
        self._held[epoch] -= nbytes
        if not self._held[epoch]:
            del self._held[epoch]

    def wait(self, landing_id: LandingId, nbytes: int, *, is_awaited: bool = False) -> float:
        """Remember a chunk that was denied; returns the seconds after which to offer it again."""
        epoch, seq = landing_id
        waiting = self._waiting.setdefault(epoch, {})
        rivals = len(self._awaited) if is_awaited else len(waiting)
        pause = RETRY_AFTER_SECONDS * min(rivals + 1, MAX_WAITING)
        until = self._clock() + pause + self._config.retry_seconds
        if seq in waiting or len(waiting) < MAX_WAITING:
            waiting[seq] = Waiting(nbytes, until)
            if is_awaited:
                self._awaited[landing_id] = until
        return min(pause, self._config.retry_seconds)

    def forget(self, epoch: int) -> None:
        """A sender is gone: it waits for nothing."""
        self._waiting.pop(epoch, None)
        for landing_id in [name for name in self._awaited if name[0] == epoch]:
            del self._awaited[landing_id]

    def _has_awaited(self) -> bool:
        now = self._clock()
        while self._awaited:
            landing_id, until = next(iter(self._awaited.items()))
            if until > now:
                return True
            del self._awaited[landing_id]
        return False

    def _claimed(self, asking: int, held: int, *, awaited: bool) -> int:
        """What is kept for senders that have less: of each, the chunk that waits longest."""
        oldest = self._oldest_awaited if awaited else self._oldest
        return sum(
            oldest(epoch)
            for epoch in list(self._waiting)
            if epoch != asking and self._held[epoch] < held
        )

    def _oldest(self, epoch: int) -> int:
        now, waiting = self._clock(), self._waiting[epoch]
        while waiting:
            seq = next(iter(waiting))
            if waiting[seq].forgotten_at > now:
                return waiting[seq].nbytes
            del waiting[seq]
        del self._waiting[epoch]
        return 0

    def _oldest_awaited(self, epoch: int) -> int:
        now, waiting = self._clock(), self._waiting[epoch]
        for (other, seq), until in self._awaited.items():
            if other == epoch and until > now and seq in waiting:
                return waiting[seq].nbytes
        return 0
