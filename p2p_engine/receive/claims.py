"""Claims: the chunks that were denied, by sender, each until its own deadline. Of each sender, the
one that waits longest claims its bytes. What all of them claim is found in one look, however many
wait."""

from __future__ import annotations

import heapq

import numpy as np

from p2p_engine.control.timers import Timers
from p2p_engine.receive.landing import LandingId

_FIRST_ROWS = 16


class Claims:
    """A table with one row for each sender that waits. The engine's lock guards it."""

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
