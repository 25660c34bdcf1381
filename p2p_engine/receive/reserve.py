"""Reserve: landing memory that only chunks get which somebody waits for.

What nobody waits for yet stays until its request has a slot, however long it queues, and a spill
until its peer pulls it. If these could fill the arena, the request at the head of the queue would
find no room, and nothing would move. So RESERVED_PART of the arena, in one piece, is kept free of
it: taken as soon as the arena is half full, lent to what is waited for, and taken again before
anything else is granted. The engine's lock guards everything here.
"""

from __future__ import annotations

from p2p_engine.memory.arena import MIN_BLOCK_BYTES, LandingArena, Space, round_up

RESERVED_PART = 8  # one of so many
SCARCE_PART = 2  # one of so many must be free, else the reserve is taken


class Reserve:
    """The reserve of one arena; one that is too small for it has none."""

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
