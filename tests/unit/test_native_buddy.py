"""The binding of the buddy allocator; its behaviour is tested in tests/c/test_buddy.c."""

from __future__ import annotations

import pytest

from mempool import Buddy

NOT_HANDLES = [0, 1, 2**32, 2**63, 2**64 - 1, 2**64, -1]


def test_a_handle_knows_its_place_and_size() -> None:
    buddy = Buddy(1 << 20, 512)
    first = buddy.alloc(1000)
    second = buddy.alloc(1)
    assert (buddy.offset(first), buddy.nbytes(first)) == (0, 1024)
    assert (buddy.offset(second), buddy.nbytes(second)) == (1024, 512)


def test_an_empty_request_is_legal() -> None:
    buddy = Buddy(1024, 512)
    handle = buddy.alloc(0)
    assert buddy.nbytes(handle) == 512
    buddy.free(handle)


def test_a_full_allocator_raises_memory_error() -> None:
    buddy = Buddy(1024, 512)
    buddy.alloc(1024)
    with pytest.raises(MemoryError):
        buddy.alloc(1)


@pytest.mark.parametrize("nbytes", [-1, 2**64])
def test_sizes_outside_of_uint64_are_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match="not in"):
        Buddy(1024, 512).alloc(nbytes)


@pytest.mark.parametrize("method", ["free", "offset", "nbytes"])
@pytest.mark.parametrize("number", NOT_HANDLES)
def test_any_other_number_is_refused_and_harms_nothing(method: str, number: int) -> None:
    buddy = Buddy(1024, 512)
    handle = buddy.alloc(1)
    with pytest.raises(ValueError, match="not"):
        getattr(buddy, method)(number)
    buddy.check()
    buddy.free(handle)


@pytest.mark.parametrize("method", ["free", "offset", "nbytes"])
def test_a_freed_handle_is_stale_for_good(method: str) -> None:
    buddy = Buddy(1024, 512)
    handle = buddy.alloc(1)
    buddy.free(handle)
    successor = buddy.alloc(1)
    with pytest.raises(ValueError, match="not a live handle"):
        getattr(buddy, method)(handle)
    assert buddy.offset(successor) == 0


def test_allocators_do_not_accept_each_others_handles() -> None:
    left, right = Buddy(1024, 512), Buddy(1024, 512)
    handle = left.alloc(1)
    right.alloc(1)
    with pytest.raises(ValueError, match="not a live handle"):
        right.free(handle)
    left.free(handle)


def test_stats_add_up() -> None:
    buddy = Buddy((1 << 20) + 100, 512)
    handles = [buddy.alloc(n) for n in (0, 1, 512, 513)]
    buddy.free(handles[1])
    assert buddy.stats() == {
        "capacity_bytes": 1 << 20,
        "free_bytes": (1 << 20) - 2048,
        "used_bytes": 2048,
        "requested_bytes": 1025,
        "num_blocks": 3,
        "largest_free_bytes": (1 << 20) - 2560,
        "high_water_bytes": 2560,
    }
    buddy.check()


@pytest.mark.parametrize(
    ("capacity", "min_block"), [(0, 512), (511, 512), (1024, 0), (1024, 500), (1024, 4), (-1, 512)]
)
def test_sizes_that_make_no_sense_are_refused(capacity: int, min_block: int) -> None:
    with pytest.raises(ValueError, match=r"must be|not in"):
        Buddy(capacity, min_block)


def test_wrong_types_are_refused() -> None:
    with pytest.raises(TypeError):
        Buddy(1024, 512).alloc("1")  # type: ignore[arg-type]
