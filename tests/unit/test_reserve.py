"""The reserve of landing memory: nobody else gets it, and nothing of it is seen at rest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from p2p_engine.memory.arena import BUFFER, MIN_BLOCK_BYTES, RESERVED_PART, LandingArena, Space
from p2p_engine.receive.credit import Reserve
from tests.support import SeededRandom

BLOCKS = 64
RESERVED = BLOCKS // RESERVED_PART + 1


@pytest.fixture
def arena() -> Iterator[LandingArena]:
    made = LandingArena(BLOCKS * MIN_BLOCK_BYTES, 0)
    yield made
    made.close()


def fill(arena: LandingArena, reserve: Reserve, num_blocks: int = 1) -> list[Space]:
    """Take for what nobody waits for as much as there is."""
    spaces = []
    while reserve.can_spare(num_blocks * MIN_BLOCK_BYTES):
        space = arena.reserve(num_blocks * MIN_BLOCK_BYTES)
        if space is None:
            break
        spaces.append(space)
    return spaces


def test_what_is_awaited_finds_room_in_one_piece_when_all_else_is_taken(
    arena: LandingArena,
) -> None:
    reserve = Reserve(arena)
    assert len(fill(arena, reserve)) == BLOCKS - RESERVED
    assert arena.reserve(MIN_BLOCK_BYTES) is None
    space = reserve.reserve(RESERVED * MIN_BLOCK_BYTES)
    assert space is not None
    assert not fill(arena, reserve)  # the reserve is lent
    arena.release(space)
    reserve.relax()
    assert not fill(arena, reserve)
    assert reserve.reserve(RESERVED * MIN_BLOCK_BYTES) is not None


def test_pieces_that_lie_anywhere_do_not_cut_the_reserve(
    arena: LandingArena, rng: SeededRandom
) -> None:
    reserve, spaces = Reserve(arena), list[Space]()
    for _ in range(2000):
        if spaces and rng.random() < 0.45:
            arena.release(spaces.pop(rng.randrange(len(spaces))))
            reserve.relax()
        else:
            size = rng.randrange(1, 6) * MIN_BLOCK_BYTES
            if reserve.can_spare(size) and (space := arena.reserve(size)) is not None:
                spaces.append(space)
        if reserve.nbytes:
            space = reserve.reserve(RESERVED * MIN_BLOCK_BYTES)
            assert space is not None
            arena.release(space)
        arena.check()


def test_nothing_is_set_aside_while_memory_is_plenty(arena: LandingArena) -> None:
    reserve = Reserve(arena)
    assert reserve.can_spare(BLOCKS // 4 * MIN_BLOCK_BYTES)
    assert reserve.nbytes == 0
    for space in fill(arena, reserve):
        assert (reserve.nbytes > 0) == (reserve.place == BUFFER)
        arena.release(space)
    reserve.relax()
    assert reserve.nbytes == arena.live_bytes[BUFFER] == 0


def test_an_arena_of_a_few_blocks_has_none() -> None:
    arena = LandingArena(MIN_BLOCK_BYTES, MIN_BLOCK_BYTES)
    assert len(fill(arena, Reserve(arena))) == 2
    arena.close()
