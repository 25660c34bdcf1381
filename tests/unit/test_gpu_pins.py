"""Page-locking in slices: which are needed, when a copy may start, what an end leaves."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from mempool import Arena
from p2p_engine.gpu import pins
from p2p_engine.gpu.cuda import Cuda
from p2p_engine.gpu.cuts import cut_at
from p2p_engine.gpu.pins import HostPins
from tests.doubles.gpu import GpuDouble
from tests.support import SeededRandom, eventually

MIB = 1 << 20
DOUBLE = GpuDouble()
pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def memory() -> Iterator[Arena]:
    made = Arena(5 * MIB + 4096)
    yield made
    made.close()


@pytest.fixture
def pinned(memory: Arena, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostPins]:
    """HostPins with `memory` as a range of six slices."""
    monkeypatch.setattr(pins, "SLICE_BYTES", MIB)
    cuda = Cuda()
    cuda.use(0)
    made = HostPins(cuda, 0)
    made.add(memory.address, memory.nbytes)
    yield made
    made.remove(memory.address)
    assert made.close(10)
    assert not DOUBLE["registered_bytes"]


def at(memory: Arena, *regions: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return addresses and lengths of regions, given by offset and bytes."""
    offsets, lengths = np.array(regions, np.int64).reshape(-1, 2).T
    return memory.address + offsets, lengths


def test_only_what_is_used_is_page_locked(pinned: HostPins, memory: Arena) -> None:
    regions = at(memory, (100, 50), (2 * MIB - 1, 2), (5 * MIB, 4096))
    (moment,) = pinned.pending(*regions)
    eventually(moment.is_complete)
    assert pinned.nbytes() == {"pinned": 3 * MIB + 4096, "refused": 0}
    assert pinned.pending(*regions) == []
    assert pinned.boundary(regions[0]) == (memory.address, MIB)


def test_other_memory_waits_for_nothing(pinned: HostPins, memory: Arena) -> None:
    other = np.zeros(100, np.uint8)
    outside = np.array([other.ctypes.data, memory.address + memory.nbytes, memory.address - 1])
    assert pinned.pending(outside, np.full(3, 1)) == []
    assert pinned.boundary(outside) is None
    assert pinned.pending(*at(memory)) == []


def test_what_is_refused_is_not_waited_for(pinned: HostPins, memory: Arena) -> None:
    with DOUBLE.fault(register_total_bytes=2 * MIB):
        (moment,) = pinned.pending(*at(memory, (0, 4 * MIB)))
        eventually(moment.is_complete)
    assert pinned.nbytes() == {"pinned": 2 * MIB, "refused": 2 * MIB}


def test_cuda_is_not_asked_again_and_again(
    pinned: HostPins, memory: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    """Each question may hold up everybody."""
    with DOUBLE.fault(register_limit_bytes=1):
        (moment,) = pinned.pending(*at(memory, (0, memory.nbytes)))
        eventually(moment.is_complete)
    assert pinned.nbytes() == {"pinned": 0, "refused": memory.nbytes}
    assert caplog.text.count("stay pageable") == pins.MAX_REFUSALS
    assert caplog.text.count("not asked again") == 1


def test_a_range_stays_while_a_slice_of_it_is_being_page_locked(
    pinned: HostPins, memory: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins, "REMOVE_SECONDS", 0.05)
    with DOUBLE.fault(register_hangs=1):
        (moment,) = pinned.pending(*at(memory, (0, 1)))
        eventually(lambda: pinned._busy is not None)
        assert not pinned.remove(memory.address)
        assert moment.is_complete()  # its copy has ended, or never begins
    eventually(lambda: pinned._busy is None)
    assert pinned.remove(memory.address)


def test_calls_of_others_are_held_up_for_one_slice_at_a_time(
    pinned: HostPins, memory: Arena
) -> None:
    cuda = Cuda()
    cuda.use(0)
    DOUBLE["longest_lock_milliseconds"] = 0
    with DOUBLE.fault(register_microseconds=30_000):
        (moment,) = pinned.pending(*at(memory, (0, 5 * MIB)))
        num_calls = 0
        while not moment.is_complete():
            cuda.memory()
            num_calls += 1
    assert DOUBLE["longest_lock_milliseconds"] == 30
    assert num_calls > 5


def test_regions_are_cut_where_slices_meet(rng: SeededRandom) -> None:
    for _ in range(200):
        size, start = rng.randrange(1, 50), rng.randrange(1000)
        count = rng.randrange(1, 20)
        addresses = start + rng.numpy.integers(0, 300, count)
        others, lengths = rng.numpy.integers(0, 300, count), rng.numpy.integers(0, 200, count)
        cut = cut_at(addresses, others, lengths, start, size)
        firsts, lasts = (
            (cut[0] - start) // size,
            (cut[0] + np.maximum(cut[2], 1) - 1 - start) // size,
        )
        assert (firsts == lasts).all()
        assert bytes_of(*cut) == bytes_of(addresses, others, lengths)


def bytes_of(
    addresses: np.ndarray, others: np.ndarray, lengths: np.ndarray
) -> list[tuple[int, int]]:
    """Return each byte's two places, in order."""
    regions = zip(addresses.tolist(), others.tolist(), lengths.tolist(), strict=True)
    return [(a + i, b + i) for a, b, n in regions for i in range(n)]
