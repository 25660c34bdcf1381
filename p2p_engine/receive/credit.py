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

from p2p_engine.config import EngineConfig
from p2p_engine.receive.claims import Claims
from p2p_engine.receive.landing import LandingId

SHARE = 8
RETRY_AFTER_SECONDS = 0.02  # for each chunk of the same sender that waits: it asks at one pace
MAX_WAITING = 4096  # chunks of one sender that are remembered


class Credit:
    """The senders of one engine."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._held: Counter[int] = Counter()
        self._waiting = Claims()
        self._awaited = Claims()  # those of them that go first

    def refusal(
        self, landing_id: LandingId, nbytes: int, free: int, *, is_awaited: bool = False
    ) -> str:
        """Why a sender may not have so many of the free bytes now, or ""."""
        self._forget_old()
        held = self._held[landing_id[0]]
        if nbytes > free:
            return "buffer and pool are full"
        if not is_awaited and self.is_awaited():
            return "what somebody waits for goes first"
        if not is_awaited and held and held + nbytes > SHARE * (free - nbytes):
            return "this sender has its share of buffer and pool"
        if held and nbytes > free - self._claimed(held, awaited=is_awaited):
            return "senders that have less are waiting for buffer and pool"
        return ""

    def is_awaited(self) -> bool:
        """Whether a chunk was denied that somebody waits for: nothing else is granted meanwhile."""
        self._forget_old()
        return len(self._awaited) > 0

    def take(self, landing_id: LandingId, nbytes: int) -> None:
        """The bytes were granted."""
        self.discard(landing_id)
        self._hold(landing_id[0], nbytes)

    def give_back(self, landing_id: LandingId, nbytes: int) -> None:
        """The bytes are free again."""
        self._hold(landing_id[0], -nbytes)

    def wait(self, landing_id: LandingId, nbytes: int, *, is_awaited: bool = False) -> float:
        """Remember a chunk that was denied; returns the seconds after which to offer it again."""
        self._forget_old()
        epoch = landing_id[0]
        num_waiting = self._waiting.num_of(epoch)
        rivals = len(self._awaited) if is_awaited else num_waiting
        pause = min(RETRY_AFTER_SECONDS * (rivals + 1), self._config.retry_seconds)
        until = self._clock() + pause + self._config.retry_seconds
        if not is_awaited:
            self._awaited.discard(landing_id)
        if landing_id in self._waiting or num_waiting < MAX_WAITING:
            for claims in (self._waiting, self._awaited) if is_awaited else (self._waiting,):
                claims.put(landing_id, nbytes, until, self._held[epoch])
        return pause

    def discard(self, landing_id: LandingId) -> None:
        """A chunk that was denied will not be offered again; idempotent."""
        self._waiting.discard(landing_id)
        self._awaited.discard(landing_id)

    def forget(self, epoch: int) -> None:
        """A sender is gone: it waits for nothing."""
        self._waiting.forget(epoch)
        self._awaited.forget(epoch)

    def _claimed(self, held: int, *, awaited: bool) -> int:
        """What is kept for senders that have less: of each, the chunk that waits longest."""
        claims = self._awaited if awaited else self._waiting
        return claims.of_those_below(held)

    def _forget_old(self) -> None:
        now = self._clock()
        self._waiting.forget_old(now)
        self._awaited.forget_old(now)

    def _hold(self, epoch: int, nbytes: int) -> None:
        self._held[epoch] += nbytes
        held = self._held[epoch]
        if not held:
            del self._held[epoch]
        self._waiting.set_held(epoch, held)
        self._awaited.set_held(epoch, held)
