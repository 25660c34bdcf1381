"""Checksums by a GPU's kernel, on the double of one: the mover's, for any regions."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import numpy as np
import pytest

from mempool import Mover
from p2p_engine.errors import TransportError
from p2p_engine.gpu import checksum
from p2p_engine.gpu.cuda import Cuda
from p2p_engine.gpu.device import Device
from p2p_engine.gpu.pack_kernel import TABLES_BYTES
from p2p_engine.memory.jobs import Job
from p2p_engine.memory.layout import Int64s
from tests.doubles.gpu import GpuDouble
from tests.support import SeededRandom, eventually

DOUBLE = GpuDouble()
pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def mover() -> Iterator[Mover]:
    with contextlib.ExitStack() as stack:
        made = Mover()
        stack.callback(made.close)
        yield made


@pytest.fixture
def device(mover: Mover) -> Iterator[Device]:
    made = Device(Cuda(), 0)
    made.check_host = mover.check
    yield made
    assert made.close(5)


def of(job: Job) -> int | None:
    assert job.wait(10)
    assert job.error is None
    return job.checksum


def random_parts(rng: SeededRandom, memory: np.ndarray, count: int) -> tuple[Int64s, Int64s]:
    lengths = rng.numpy.integers(0, len(memory) // count, count)
    starts = rng.numpy.integers(0, len(memory) - lengths + 1)
    return memory.ctypes.data + starts, lengths


@pytest.mark.parametrize("count", [1, 2, 40, 700])
@pytest.mark.parametrize("max_rows", [7, 1 << 15])
def test_it_is_the_movers(
    device: Device,
    mover: Mover,
    rng: SeededRandom,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    max_rows: int,
) -> None:
    """Regions of any alignment, small and large ones, in one launch and in many."""
    monkeypatch.setattr(checksum, "MAX_ROWS", max_rows)
    memory = rng.numpy.integers(0, 256, 1 << 20, np.uint8)
    for _ in range(3):
        addresses, lengths = random_parts(rng, memory, count)
        launched = DOUBLE["kernels"]
        assert of(device.check(addresses, lengths)) == of(mover.check(addresses, lengths))
        assert DOUBLE["kernels"] > launched


def test_it_is_castagnolis(device: Device) -> None:
    """The check value of the catalogue."""
    text = ctypes.create_string_buffer(b"123456789", 9)
    address = np.array([ctypes.addressof(text)], np.int64)
    assert of(device.check(address, np.array([9], np.int64))) == 0xE3069283


def test_one_bit_anywhere_changes_it(device: Device, rng: SeededRandom) -> None:
    memory = rng.numpy.integers(0, 256, 50_000, np.uint8)
    regions = np.array([memory.ctypes.data], np.int64), np.array([memory.nbytes], np.int64)
    right = of(device.check(*regions))
    for _ in range(20):
        place, bit = rng.randrange(memory.nbytes), 1 << rng.randrange(8)
        memory[place] ^= bit
        assert of(device.check(*regions)) != right
        memory[place] ^= bit
    assert of(device.check(*regions)) == right


def test_host_memory_is_the_movers_work(device: Device, mover: Mover, rng: SeededRandom) -> None:
    """No kernel gets an address in host memory."""
    memory = rng.numpy.integers(0, 256, 100_000, np.uint8)
    device.cuda.note_host(memory.ctypes.data, memory.nbytes)
    addresses, lengths = random_parts(rng, memory, 9)
    launched = DOUBLE["kernels"]
    assert of(device.check(addresses, lengths)) == of(mover.check(addresses, lengths))
    assert DOUBLE["kernels"] == launched


def test_it_waits_for_room_for_its_table(device: Device, mover: Mover, rng: SeededRandom) -> None:
    memory = rng.numpy.integers(0, 256, 100_000, np.uint8)
    addresses, lengths = random_parts(rng, memory, 9)
    kernel = device._pack.kernel
    assert kernel is not None
    taken = []
    with contextlib.suppress(MemoryError):
        while True:
            taken.append(kernel._buddy.alloc(TABLES_BYTES >> 8))
    with contextlib.suppress(MemoryError):
        while True:
            taken.append(kernel._buddy.alloc(4096))
    job = device.check(addresses, lengths)
    device.run(lambda: None, 5.0)
    assert not job.done
    for handle in taken:
        device.run(lambda handle=handle: kernel._buddy.free(handle), 5.0)  # type: ignore[misc]
    assert of(job) == of(mover.check(addresses, lengths))


def test_without_the_kernel_it_is_an_error(mover: Mover) -> None:
    with DOUBLE.fault(compiler_fails=1):
        device = Device(Cuda(), 0)
    assert not device.can_check
    memory = np.zeros(100, np.uint8)
    job = device.check(np.array([memory.ctypes.data]), np.array([100]))
    assert job.wait(10)
    assert (job.state, job.checksum) == ("failed", None)
    assert "no kernel" in (job.error or "")
    assert device.close(5)
    with pytest.raises(TransportError, match="has ended"):
        device.run(lambda: None, 1.0)
    eventually(lambda: not device.alive)
