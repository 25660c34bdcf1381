"""Claims: the chunks that were denied, by sender. Of each sender, the one that waits longest claims
its bytes. What all of them claim is found in one look, however many wait."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from p2p_engine.landing import LandingId

_FIRST_ROWS = 16
_NEVER = np.inf  # when a row without a sender ends


@dataclass
class Denied:
    """A chunk that was denied, until it is offered again or forgotten."""

    nbytes: int
    forgotten_at: float


class Claims:
    """A table with one row for each sender that waits. The engine's lock guards it."""

    def __init__(self) -> None:
        self._chunks: dict[int, dict[int, Denied]] = {}  # the oldest first
        self._rows: dict[int, int] = {}
        self._free: list[int] = []
        self._num_chunks = self._end = 0  # of the rows that were ever used
        self._held = np.zeros(_FIRST_ROWS, np.int64)
        self._claimed = np.zeros(_FIRST_ROWS, np.int64)
        self._until = np.full(_FIRST_ROWS, _NEVER)

    def __len__(self) -> int:
        """How many chunks are remembered."""
        return self._num_chunks

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
        self._num_chunks += seq not in self._chunks[epoch]
        self._chunks[epoch][seq] = Denied(nbytes, until)  # it keeps its place
        self._held[self._rows[epoch]] = held
        self._note_oldest(epoch)

    def discard(self, landing_id: LandingId) -> None:
        """Forget a chunk; idempotent."""
        epoch, seq = landing_id
        if self._chunks.get(epoch, {}).pop(seq, None) is not None:
            self._num_chunks -= 1
            self._note_oldest(epoch)

    def forget(self, epoch: int) -> None:
        """Forget all chunks of a sender; idempotent."""
        if epoch in self._rows:
            self._num_chunks -= len(self._chunks[epoch])
            self._chunks[epoch].clear()
            self._note_oldest(epoch)

    def set_held(self, epoch: int, held: int) -> None:
        """Say how many bytes a sender holds now."""
        row = self._rows.get(epoch)
        if row is not None:
            self._held[row] = held

    def of_those_below(self, held: int, now: float) -> int:
        """Bytes that the senders claim which hold less than so many."""
        self._forget_old(now)
        return int(self._claimed[: self._end][self._held[: self._end] < held].sum())

    def has_any(self, now: float) -> bool:
        """Whether any chunk waits."""
        self._forget_old(now)
        return bool(self._rows)

    def _forget_old(self, now: float) -> None:
        if not self._rows or self._until[: self._end].min() > now:
            return
        for epoch in [name for name, row in self._rows.items() if self._until[row] <= now]:
            chunks = self._chunks[epoch]
            while chunks and chunks[next(iter(chunks))].forgotten_at <= now:
                del chunks[next(iter(chunks))]
                self._num_chunks -= 1
            self._note_oldest(epoch)

    def _note_oldest(self, epoch: int) -> None:
        row, chunks = self._rows[epoch], self._chunks[epoch]
        if chunks:
            oldest = chunks[next(iter(chunks))]
            self._claimed[row], self._until[row] = oldest.nbytes, oldest.forgotten_at
        else:
            self._claimed[row], self._until[row] = 0, _NEVER
            heapq.heappush(self._free, self._rows.pop(epoch))
            del self._chunks[epoch]

    def _take_row(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        if self._end == len(self._until):
            more = len(self._until)
            self._held, self._claimed = (
                np.pad(column, (0, more)) for column in (self._held, self._claimed)
            )
            self._until = np.pad(self._until, (0, more), constant_values=_NEVER)
        self._end += 1
        return self._end - 1
