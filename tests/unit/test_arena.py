"""LandingArena: two budgets of one arena, accounted to the byte."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest

from mempool import read_word
from p2p_engine.memory.arena import (
    HEADER_BYTES,
    PREFAULT_BYTES,
    PROOF_BYTES,
    LandingArena,
    Space,
    round_up,
)
from tests.support import SeededRandom, eventually

KIB = 1024


@pytest.fixture
def arena() -> Iterator[LandingArena]:
    made = LandingArena(64 * KIB, 32 * KIB)
    yield made
    made.close()


def test_buffer_comes_first_then_the_pool_then_nothing(arena: LandingArena) -> None:
    places = [getattr(arena.reserve(30 * KIB), "place", None) for _ in range(4)]
    assert places == ["buffer", "buffer", "pool", None]
    assert arena.live_bytes == {"buffer": 64 * KIB, "pool": 32 * KIB}
    arena.check()


def test_what_is_accounted_is_what_a_space_takes(arena: LandingArena) -> None:
    """A landing of 16 bytes takes a whole block; so the budgets are full when the memory is."""
    spaces = [arena.reserve(16) for _ in range(96 // 4 + 1)]
    assert spaces[-1] is None
    assert arena.free_bytes == 0
    assert arena.live_bytes == {"buffer": 64 * KIB, "pool": 32 * KIB}


@pytest.mark.parametrize(("buffer", "pool"), [(64, 32), (1, 100), (100, 1), (100, 100), (7, 0)])
def test_whatever_fits_can_be_reserved_in_an_empty_arena(buffer: int, pool: int) -> None:
    made = LandingArena(buffer * KIB, pool * KIB)
    largest = max(buffer, pool) * KIB
    assert made.fits(largest)
    assert not made.fits(round_up(largest) + 1)
    space = made.reserve(largest)
    assert space is not None
    made.release(space)
    made.close()


def test_released_once_only(arena: LandingArena) -> None:
    space = arena.reserve(100)
    assert space is not None
    arena.release(space)
    with pytest.raises(ValueError, match="handle"):
        arena.release(space)
    assert sum(arena.live_bytes.values()) == 0
    arena.check()


def test_random_use_stays_exact_and_apart(arena: LandingArena, rng: SeededRandom) -> None:
    live: list[Space] = []
    for _ in range(2000):
        if live and rng.random() < 0.5:
            arena.release(live.pop(rng.randrange(len(live))))
        else:
            space = arena.reserve(rng.choice([0, 1, 100, 5000, 20_000]))
            live += [space] if space is not None else []
        spans = sorted((space.offset, space.offset + space.nbytes) for space in live)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert sum(arena.live_bytes.values()) == sum(space.nbytes for space in live)
    arena.check()


def test_a_space_is_for_other_processes_once_its_pages_are_touched_here() -> None:
    """The space is far beyond what has been touched when it is reserved."""
    made = LandingArena(2 * PREFAULT_BYTES, 0)
    space = made.reserve(2 * PREFAULT_BYTES)
    assert space is not None
    assert not made.is_touched(space)
    eventually(lambda: made.is_touched(space), timeout=60.0)
    assert made.arena.touched_bytes >= space.offset + space.nbytes
    made.close()


def test_memory_for_proofs_is_touched_at_once_and_never_handed_out() -> None:
    """It is far beyond what is touched in the background."""
    made = LandingArena(3 * PREFAULT_BYTES, 0, has_proof=True)
    start = made.proof_offset
    assert os.lseek(made.arena.fileno(), start, os.SEEK_DATA) == start
    assert os.lseek(made.arena.fileno(), start, os.SEEK_HOLE) >= start + PROOF_BYTES
    made.close()
    made = LandingArena(64 * KIB, 0, has_proof=True)
    proof = made.arena.view(made.proof_offset, PROOF_BYTES)
    while (space := made.reserve(4 * KIB)) is not None:
        made.arena.view(space.offset, space.nbytes)[:] = b"\xff" * space.nbytes
    assert bytes(proof) == bytes(PROOF_BYTES)
    proof.release()
    made.close()


def test_nonce_is_never_handed_out(arena: LandingArena) -> None:
    while (space := arena.reserve(4 * KIB)) is not None:
        arena.arena.view(space.offset, space.nbytes)[:] = bytes(space.nbytes)
    assert read_word(arena.arena.address + arena.nonce_offset) == arena.nonce


def test_every_space_may_have_a_completion_word_of_its_own(arena: LandingArena) -> None:
    """And none of them lies in a space."""
    spaces, slots = [], []
    while (space := arena.reserve(4 * KIB)) is not None:
        spaces.append(space)
        slots.append(arena.words.take(space, 7))
    ends = {space.offset + space.nbytes for space in spaces}
    words = [arena.words.offset(slot) for slot in slots if slot is not None]
    assert len(words) == len(spaces)
    assert all(HEADER_BYTES <= word < min(ends) - 4 * KIB for word in words)


def test_checker_finds_a_wrong_account(arena: LandingArena) -> None:
    arena.live_bytes["pool"] += 1
    with pytest.raises(RuntimeError, match="pool"):
        arena.check()
