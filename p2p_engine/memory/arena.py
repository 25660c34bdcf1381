"""LandingArena: the memory where bytes land that cannot go to their final place yet.

It has two budgets: the buffer is used first, the tensor memory pool when that is full.
Invariant: live_bytes[place] is the sum of the sizes of the place's live spaces, at every moment.
"""

from __future__ import annotations

import heapq
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from mempool import Arena, Buddy, read_word, write_word

T = TypeVar("T")
MIN_BLOCK_BYTES = 4096
HEADER_BYTES = MIN_BLOCK_BYTES  # at offset 0 lies the nonce; no landing is granted there
MAX_WORDS = 1 << 16  # concurrent landings that senders write by themselves
PROOF_BYTES = 4 << 20  # behind all landings: where senders prove that their writes arrive
PREFAULT_BYTES = 256 << 20  # at least so many are touched beyond the highest use so far
BUFFER, POOL = "buffer", "pool"
SHARE = 8  # a sender may have so many times the bytes that it leaves free
RESERVED_PART = 8  # one of so many is kept for chunks that a receive waits for
WINDOW = 4  # chunks of one shipment that are not written yet, at a time
SHARE_OF_LANDING = 2 * WINDOW  # all of its open chunks fit into its receiver's largest landing
WORD_BYTES = 8
_NEVER = -1  # no completion word is negative


class CompletionWords(Generic[T]):
    """Words in the arena by which senders publish that a landing is whole. Each word is lent to one
    owner. The words are contiguous, so one look of a few microseconds finds all published ones. The
    engine's lock guards the table; senders may write to the words at any time."""

    def __init__(self, arena: Arena, offset: int, num: int) -> None:
        """Use `num` words from `offset` on."""
        self._address, self._offset = arena.address + offset, offset
        self._words: npt.NDArray[np.int64] = np.frombuffer(
            arena.view(offset, num * WORD_BYTES), np.int64
        )
        self._awaited = np.full(num, _NEVER, np.int64)
        self.num_awaited = 0  # lent and not published, as far as was seen
        self._owners: dict[int, tuple[T, int]] = {}
        self._free: list[int] = []
        self._end = 0  # of the slots used so far

    def take(self, owner: T, value: int) -> int | None:
        """Reset a word and lend it; `value` will publish it. None: all words are lent."""
        if not self._free and self._end >= len(self._awaited):
            return None
        slot = heapq.heappop(self._free) if self._free else self._end
        self._end = max(self._end, slot + 1)  # the lowest free slot keeps the scanned range short
        write_word(self._address + slot * WORD_BYTES, 0)
        self._owners[slot], self._awaited[slot] = (owner, value), value
        self.num_awaited += 1
        return slot

    def give_back(self, slot: int) -> None:
        """Take a word back. Its sender must not write any more."""
        del self._owners[slot]
        self._await_no_more(slot)
        heapq.heappush(self._free, slot)

    def offset(self, slot: int) -> int:
        """Return the offset of a word in the arena."""
        return self._offset + slot * WORD_BYTES

    def publish(self, offset: int, value: int) -> None:
        """Publish the word at an offset for its sender; nothing if another value is awaited, or
        none any more."""
        slot, rest = divmod(offset - self._offset, WORD_BYTES)
        if rest == 0 and slot in self._owners and self._owners[slot][1] == value:
            write_word(self._address + slot * WORD_BYTES, value)

    def is_published(self, slot: int) -> bool:
        """Whether a word has been published; an acquire, so that the landed bytes can be read
        next."""
        return read_word(self._address + slot * WORD_BYTES) == self._owners[slot][1]

    def take_published(self) -> list[T]:
        """Return the owners of newly published words, each once."""
        end = self._end
        found = np.flatnonzero(self._words[:end] == self._awaited[:end]).tolist()
        published = [slot for slot in found if self.is_published(slot)]
        for slot in published:
            self._await_no_more(slot)
        return [self._owners[slot][0] for slot in published]

    def _await_no_more(self, slot: int) -> None:
        self.num_awaited -= bool(self._awaited[slot] != _NEVER)
        self._awaited[slot] = _NEVER

    def close(self) -> None:
        """Release the view of the arena; no word is published any more."""
        self._end = 0
        self._words = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Space:
    """A reserved piece of the arena, in whole blocks. Exactly one owner frees it."""

    handle: int
    offset: int
    nbytes: int
    place: str


class LandingArena:
    """Anonymous shared memory that peers on this host may write into. Not thread-safe: the engine's
    lock guards it."""

    def __init__(
        self,
        buffer_bytes: int,
        pool_bytes: int,
        *,
        page_lock: bool = False,
        has_buffer: bool = True,
        has_proof: bool = False,
    ) -> None:
        """Map the arena; its pages are touched in the background, ahead of use. Without
        `has_buffer`, the buffer is elsewhere (on a GPU), and only its completion words are here.
        With `has_proof`, there is memory for proofs, which is touched now.

        Raises:
            OSError: the memory cannot be mapped.
        """
        self.budgets = {BUFFER: round_up(buffer_bytes), POOL: round_up(pool_bytes)}
        self.live_bytes = {BUFFER: 0, POOL: 0}
        landing_bytes = sum(self.budgets.values())
        num_words = min(landing_bytes // MIN_BLOCK_BYTES + 1, MAX_WORDS)
        capacity = landing_bytes if has_buffer else self.budgets[POOL]
        capacity += HEADER_BYTES + round_up(num_words * WORD_BYTES)
        self.proof_offset = capacity  # no landing lies there
        proof_bytes = PROOF_BYTES if has_proof else 0
        self.arena = Arena(capacity + proof_bytes, page_lock=page_lock)
        self.arena.view(self.proof_offset, proof_bytes)[:] = bytes(proof_bytes)
        self._buddy = Buddy(capacity, MIN_BLOCK_BYTES)
        self._prefaulted_bytes = 0
        self._live: dict[int, Space] = {}
        nonce_block = self._buddy.alloc(8)
        self.nonce_offset = self._buddy.offset(nonce_block)
        self.nonce = secrets.randbits(63) | 1
        write_word(self.arena.address + self.nonce_offset, self.nonce)
        table = self._buddy.offset(self._buddy.alloc(num_words * WORD_BYTES))
        self.words: CompletionWords[Any] = CompletionWords(self.arena, table, num_words)
        self._prefault()

    def reserve(self, nbytes: int, places: Iterable[str] = (BUFFER, POOL)) -> Space | None:
        """Reserve nbytes in the first of these places that has room; None if none has.

        The size is rounded up to a multiple of MIN_BLOCK_BYTES, and accounted as such.
        """
        nbytes = round_up(nbytes)
        for place in places:
            if self.live_bytes[place] + nbytes <= self.budgets[place]:
                space = self.reserve_in(place, nbytes)
                if space is not None:
                    return space
        return None

    def reserve_in(self, place: str, nbytes: int) -> Space | None:
        """Reserve nbytes of the arena, accounted to a place; None if its free pieces are too
        small."""
        try:
            handle = self._buddy.alloc(nbytes)
        except MemoryError:
            return None
        space = Space(handle, self._buddy.offset(handle), nbytes, place)
        self._live[handle] = space
        self.live_bytes[place] += nbytes
        self._prefault()
        return space

    @property
    def free_bytes(self) -> int:
        """Return the bytes of both budgets that are not reserved."""
        return sum(self.budgets.values()) - sum(self.live_bytes.values())

    @property
    def largest_bytes(self) -> int:
        """Return the most bytes that could ever be reserved at once."""
        return max(self.budgets.values())

    def fits(self, nbytes: int) -> bool:
        """Whether so many bytes could ever be reserved."""
        return round_up(nbytes) <= self.largest_bytes

    def release(self, space: Space) -> None:
        """Free a space.

        Raises:
            ValueError: it is not live.
        """
        self._buddy.free(space.handle)
        del self._live[space.handle]
        self.live_bytes[space.place] -= space.nbytes

    def is_touched(self, space: Space) -> bool:
        """Whether another process may write to a space: this one has touched its pages, so that
        they are charged to it, and none to the writer."""
        return space.offset + space.nbytes <= self.arena.touched_bytes

    def address(self, space: Space) -> int:
        """Return the address of a space in this process."""
        return self.arena.address + space.offset

    def check(self) -> None:
        """Check the invariants.

        Raises:
            RuntimeError: names the one that is broken.
        """
        self._buddy.check()
        self.check_nonce()
        for place in self.budgets:
            live = sum(space.nbytes for space in self._live.values() if space.place == place)
            if live != self.live_bytes[place]:
                raise RuntimeError(
                    f"{place}: accounted {self.live_bytes[place]}, live {live} bytes"
                )

    def check_nonce(self) -> None:
        """Check the nonce. Without it, no new sender accepts this memory as ours.

        Raises:
            RuntimeError: it was overwritten.
        """
        if read_word(self.arena.address + self.nonce_offset) != self.nonce:
            raise RuntimeError("the arena's nonce was overwritten")

    def close(self) -> None:
        """Unmap the arena; idempotent."""
        self.words.close()
        self.arena.close()

    def _prefault(self) -> None:
        wanted = self._buddy.stats()["high_water_bytes"] + PREFAULT_BYTES
        if wanted > self._prefaulted_bytes:
            self._prefaulted_bytes = min(self.arena.nbytes, wanted + PREFAULT_BYTES)
            self.arena.prefault(self._prefaulted_bytes)


def round_up(nbytes: int) -> int:
    """Return nbytes rounded up to a multiple of the smallest block."""
    return -(-nbytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
