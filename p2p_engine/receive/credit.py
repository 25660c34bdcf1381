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

import heapq
from collections import Counter
from collections.abc import Callable

import numpy as np

from p2p_engine.config import EngineConfig
from p2p_engine.control.timers import Timers
from p2p_engine.memory.arena import (
    MIN_BLOCK_BYTES,
    RESERVED_PART,
    SHARE,
    LandingArena,
    Space,
    round_up,
)
from p2p_engine.receive.ledger import LandingId

RETRY_AFTER_SECONDS = 0.02  # for each chunk of the same sender that waits: it asks at one pace
MAX_WAITING = 4096  # chunks of one sender that are remembered
SCARCE_PART = 2  # one of so many must be free, else the reserve is taken
_FIRST_ROWS = 16


class Claims:
    """The chunks that were denied, by sender, each until its own deadline: a table with one row for
    each sender that waits. The chunk that waits longest claims its bytes for its sender. What all
    of them claim is found in one look, however many wait."""

    def __init__(self) -> None:
        self._chunks: dict[int, dict[int, int]] = {}  # their bytes, the oldest first
        self._deadlines: Timers[LandingId] = Timers()
        self._rows: dict[int, int] = {}
        self._free: list[int] = []
        self._end = 0  # of the rows that were ever used
        self._held = np.zeros(_FIRST_ROWS, np.int64)
        self._claimed = np.zeros(_FIRST_ROWS, np.int64)

    def __len__(self) -> int:
        """How many chunks are remembered."""
        return len(self._deadlines)

    def __contains__(self, landing_id: LandingId) -> bool:
        """Whether a chunk is remembered."""
        return landing_id[1] in self._chunks.get(landing_id[0], ())

    def num_of(self, epoch: int) -> int:
        """How many chunks of a sender are remembered."""
        return len(self._chunks.get(epoch, ()))

    def put(self, landing_id: LandingId, nbytes: int, until: float, held: int) -> None:
        """Remember a chunk, until then, of a sender that holds so many bytes."""
        epoch, seq = landing_id
        if epoch not in self._rows:
            self._rows[epoch] = self._take_row()
            self._chunks[epoch] = {}
        self._chunks[epoch][seq] = nbytes  # it keeps its place
        self._deadlines.set(landing_id, until)
        self._held[self._rows[epoch]] = held
        self._note_oldest(epoch)

    def discard(self, landing_id: LandingId) -> None:
        """Forget a chunk; idempotent."""
        epoch, seq = landing_id
        if self._chunks.get(epoch, {}).pop(seq, None) is not None:
            self._deadlines.cancel(landing_id)
            self._note_oldest(epoch)

    def forget(self, epoch: int) -> None:
        """Forget all chunks of a sender; idempotent."""
        for seq in self._chunks.get(epoch, {}):
            self._deadlines.cancel((epoch, seq))
        if epoch in self._rows:
            self._chunks[epoch].clear()
            self._note_oldest(epoch)

    def set_held(self, epoch: int, held: int) -> None:
        """Say how many bytes a sender holds now."""
        row = self._rows.get(epoch)
        if row is not None:
            self._held[row] = held

    def of_those_below(self, held: int) -> int:
        """Bytes that the senders claim which hold less than so many."""
        return int(self._claimed[: self._end][self._held[: self._end] < held].sum())

    def forget_old(self, now: float) -> None:
        """Forget the chunks that were not offered again by their deadlines."""
        for landing_id in self._deadlines.take_due(now):
            self.discard(landing_id)

    def _note_oldest(self, epoch: int) -> None:
        row, chunks = self._rows[epoch], self._chunks[epoch]
        if chunks:
            self._claimed[row] = next(iter(chunks.values()))
        else:
            self._claimed[row] = 0
            heapq.heappush(self._free, self._rows.pop(epoch))
            del self._chunks[epoch]

    def _take_row(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        if self._end == len(self._held):
            more = len(self._held)
            self._held, self._claimed = (
                np.pad(column, (0, more)) for column in (self._held, self._claimed)
            )
        self._end += 1
        return self._end - 1


class Reserve:
    """Landing memory that only chunks get which somebody waits for.

    A landed chunk stays until its request has a slot, however long that queues, and a spill until
    its peer pulls it. If these could fill the arena, the request at the head of the queue would
    find no room, and nothing would move. So RESERVED_PART of the arena, in one piece, is kept free
    of them: taken as soon as the arena is half full, lent to what is waited for, and taken again
    before anything else is granted. An arena that is too small for a reserve has none.
    """

    def __init__(self, arena: LandingArena) -> None:
        self._arena = arena
        self._total = sum(arena.budgets.values())
        # Senders cut chunks to such a part, and each has a word behind it.
        nbytes = round_up(self._total // RESERVED_PART) + MIN_BLOCK_BYTES
        self._nbytes = nbytes if nbytes * SCARCE_PART <= max(arena.budgets.values()) else 0
        self._space: Space | None = None

    @property
    def nbytes(self) -> int:
        """What is set aside now."""
        return self._space.nbytes if self._space is not None else 0

    @property
    def place(self) -> str | None:
        """Where that is; None: nothing is."""
        return self._space.place if self._space is not None else None

    def can_spare(self, nbytes: int) -> bool:
        """Whether a chunk that nobody waits for may have so many bytes of the rest."""
        is_scarce = (self._arena.free_bytes - nbytes) * SCARCE_PART < self._total
        if is_scarce and self._nbytes and self._space is None:
            self._space = self._arena.reserve(self._nbytes)
            return self._space is not None
        return True

    def reserve(self, nbytes: int) -> Space | None:
        """Reserve memory for a chunk that somebody waits for; None when there is none."""
        space = self._arena.reserve(nbytes)
        if space is None and self._space is not None:
            self._give_back()
            space = self._arena.reserve(nbytes)
        return space

    def relax(self) -> None:
        """Set nothing aside while memory is plenty."""
        if self._space is not None:
            free_bytes = self._arena.free_bytes + self._space.nbytes
            if free_bytes * SCARCE_PART > self._total:
                self._give_back()

    def _give_back(self) -> None:
        if self._space is not None:
            self._arena.release(self._space)
            self._space = None


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
