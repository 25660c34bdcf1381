"""CompletionWords: where senders publish that a landing is whole.

The words lie side by side in the arena. One look of a few microseconds sees all that were
published, however many are awaited.
"""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from mempool import Arena, read_word, write_word

T = TypeVar("T")
WORD_BYTES = 8
_NEVER = -1  # no completion word is negative


class CompletionWords(Generic[T]):
    """A table of completion words in an arena, each lent to one owner. The engine's lock guards
    it; senders write to it whenever they like."""

    def __init__(self, arena: Arena, offset: int, num: int) -> None:
        """Use the `num` words from `offset` on."""
        self._address, self._offset = arena.address + offset, offset
        self._words: npt.NDArray[np.int64] = np.frombuffer(
            arena.view(offset, num * WORD_BYTES), np.int64
        )
        self._awaited = np.full(num, _NEVER, np.int64)
        self._owners: dict[int, tuple[T, int]] = {}
        self._free: list[int] = []
        self._end = 0  # of the slots that were ever used

    def take(self, owner: T, value: int) -> int | None:
        """Lend a word, reset, that will be `value` when it is published; None: all are lent."""
        if not self._free and self._end >= len(self._awaited):
            return None
        slot = heapq.heappop(self._free) if self._free else self._end
        self._end = max(self._end, slot + 1)  # the lowest ones, so that there is little to look at
        write_word(self._address + slot * WORD_BYTES, 0)
        self._owners[slot], self._awaited[slot] = (owner, value), value
        return slot

    def give_back(self, slot: int) -> None:
        """Take a word back: its sender writes no more."""
        del self._owners[slot]
        self._awaited[slot] = _NEVER
        heapq.heappush(self._free, slot)

    def offset(self, slot: int) -> int:
        """Where in the arena a word lies."""
        return self._offset + slot * WORD_BYTES

    def is_published(self, slot: int) -> bool:
        """Whether a word has been published; what it stands for can be read then (an acquire)."""
        return read_word(self._address + slot * WORD_BYTES) == self._owners[slot][1]

    def take_published(self) -> list[T]:
        """Return the owners of the words that were published; each is told once."""
        end = self._end
        found = np.flatnonzero(self._words[:end] == self._awaited[:end]).tolist()
        published = [slot for slot in found if self.is_published(slot)]
        for slot in published:
            self._awaited[slot] = _NEVER
        return [self._owners[slot][0] for slot in published]

    def close(self) -> None:
        """Let go of the arena; nothing is published any more."""
        self._end = 0
        self._words = np.zeros(0, np.int64)
