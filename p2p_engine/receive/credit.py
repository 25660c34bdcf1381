"""Credit: limits how much landing memory each sender may have, and orders the senders when it is
full.

A sender may have SHARE times the bytes that it leaves free (dynamic thresholds, Choudhury and Hahne
1998): one alone gets 8/9 of the memory, n senders get 8/(8n+1) each, and some is left for the next
one. A denied chunk is remembered until it is offered again; in the meantime, a sender that holds
more does not get those bytes. A sender that holds nothing gets whatever is free.

This applies to chunks whose requests still queue here. A chunk that a receive waits for goes first:
it needs no share, and after one was denied, no other kind of chunk is granted. Among such chunks,
the sender that holds less goes first. The engine's lock guards everything here.
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

RETRY_AFTER_SECONDS = 0.02  # times the waiting chunks of the sender: its rate stays the same
MAX_WAITING = 4096  # remembered chunks of one sender
SCARCE_PART = 2  # if less than one part of so many is free, the reserve is taken
_FIRST_ROWS = 16


class Claims:
    """The denied chunks by sender, each until its own deadline.

    It is a table with one row for each waiting sender. The sender's oldest chunk claims its bytes
    for it. The sum of the claims is one vector operation, however many senders wait.
    """

    def __init__(self) -> None:
        self._chunks: dict[int, dict[int, int]] = {}  # bytes, the oldest chunk first
        self._deadlines: Timers[LandingId] = Timers()
        self._rows: dict[int, int] = {}
        self._free: list[int] = []
        self._end = 0  # of the rows in use
        self._held = np.zeros(_FIRST_ROWS, np.int64)
        self._claimed = np.zeros(_FIRST_ROWS, np.int64)

    def __len__(self) -> int:
        """Return how many chunks are remembered."""
        return len(self._deadlines)

    def __contains__(self, landing_id: LandingId) -> bool:
        """Whether a chunk is remembered."""
        return landing_id[1] in self._chunks.get(landing_id[0], ())

    def num_of(self, epoch: int) -> int:
        """Return how many chunks of a sender are remembered."""
        return len(self._chunks.get(epoch, ()))

    def put(self, landing_id: LandingId, nbytes: int, until: float, held: int) -> None:
        """Remember a chunk until a time; its sender holds `held` bytes now."""
        epoch, seq = landing_id
        if epoch not in self._rows:
            self._rows[epoch] = self._take_row()
            self._chunks[epoch] = {}
        self._chunks[epoch][seq] = nbytes  # a chunk that is denied again keeps its turn
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
        """Set how many bytes a sender holds now."""
        row = self._rows.get(epoch)
        if row is not None:
            self._held[row] = held

    def of_those_below(self, held: int) -> int:
        """Return the bytes claimed by senders that hold less than `held`."""
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
    """Landing memory that is reserved for chunks that a receive waits for.

    A landed chunk stays until its request has a slot, and a spill stays until its peer pulls it. If
    these could fill the arena, the request at the head of the queue would find no room, and nothing
    would move. So RESERVED_PART of the arena, in one piece, is kept from them. It is taken when the
    arena is half full, lent to chunks that a receive waits for, and taken again before any other
    chunk is granted. An arena that is too small has no reserve.
    """

    def __init__(self, arena: LandingArena) -> None:
        self._arena = arena
        self._total = sum(arena.budgets.values())
        # Senders cut chunks to at most this part of the arena; each chunk has a word behind it.
        nbytes = round_up(self._total // RESERVED_PART) + MIN_BLOCK_BYTES
        self._nbytes = nbytes if nbytes * SCARCE_PART <= max(arena.budgets.values()) else 0
        self._space: Space | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes that are set aside now."""
        return self._space.nbytes if self._space is not None else 0

    @property
    def place(self) -> str | None:
        """Return where the reserve lies; None if nothing is set aside."""
        return self._space.place if self._space is not None else None

    def can_spare(self, nbytes: int) -> bool:
        """Whether a chunk without a receive may have so many bytes; sets the reserve aside
        first."""
        is_scarce = (self._arena.free_bytes - nbytes) * SCARCE_PART < self._total
        if is_scarce and self._nbytes and self._space is None:
            self._space = self._arena.reserve(self._nbytes)
            return self._space is not None
        return True

    def reserve(self, nbytes: int) -> Space | None:
        """Reserve memory for a chunk that a receive waits for; None if there is none."""
        space = self._arena.reserve(nbytes)
        if space is None and self._space is not None:
            self._give_back()
            space = self._arena.reserve(nbytes)
        return space

    def relax(self) -> None:
        """Give the reserve back while memory is plentiful."""
        if self._space is not None:
            free_bytes = self._arena.free_bytes + self._space.nbytes
            if free_bytes * SCARCE_PART > self._total:
                self._give_back()

    def _give_back(self) -> None:
        if self._space is not None:
            self._arena.release(self._space)
            self._space = None


class Credit:
    """The held bytes and the denied chunks of all senders of one engine."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._held: Counter[int] = Counter()
        self._waiting = Claims()
        self._awaited = Claims()  # the subset that a receive waits for: these go first

    def refusal(
        self, landing_id: LandingId, nbytes: int, free: int, *, is_awaited: bool = False
    ) -> str:
        """Return why a sender may not have so many of the free bytes now, or ""."""
        self._forget_old()
        held = self._held[landing_id[0]]
        if nbytes > free:
            return "buffer and pool are full"
        if not is_awaited and self.is_awaited():
            return "chunks that a receive waits for go first"
        if not is_awaited and held and held + nbytes > SHARE * (free - nbytes):
            return "this sender has its share of buffer and pool"
        if held and nbytes > free - self._claimed(held, awaited=is_awaited):
            return "senders that hold less are waiting for buffer and pool"
        return ""

    def is_awaited(self) -> bool:
        """Whether a chunk was denied that a receive waits for. Until it is granted, no other is."""
        self._forget_old()
        return len(self._awaited) > 0

    def is_waited_for(self) -> bool:
        """Whether a chunk was denied, and is to be offered again."""
        self._forget_old()
        return len(self._waiting) > 0

    def take(self, landing_id: LandingId, nbytes: int) -> None:
        """Note that a chunk's bytes were granted."""
        self.discard(landing_id)
        self._hold(landing_id[0], nbytes)

    def give_back(self, landing_id: LandingId, nbytes: int) -> None:
        """Note that a chunk's bytes are free again."""
        self._hold(landing_id[0], -nbytes)

    def wait(self, landing_id: LandingId, nbytes: int, *, is_awaited: bool = False) -> float:
        """Remember a denied chunk; returns the seconds after which its sender is to offer it
        again."""
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
        """Forget a denied chunk that will not be offered again; idempotent."""
        self._waiting.discard(landing_id)
        self._awaited.discard(landing_id)

    def forget(self, epoch: int) -> None:
        """Forget the waiting chunks of a sender that is gone."""
        self._waiting.forget(epoch)
        self._awaited.forget(epoch)

    def _claimed(self, held: int, *, awaited: bool) -> int:
        """Return the bytes claimed by senders that hold less; each claims its oldest chunk."""
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
