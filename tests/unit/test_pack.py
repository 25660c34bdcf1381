"""Packing on the double of a GPU, whose kernel is the real one's source: what is copied, by which
way, in how many commands, and how many of them at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from p2p_engine.errors import P2pError, TransportError
from p2p_engine.gpu import cuts, pack
from p2p_engine.gpu.cuda import Cuda
from p2p_engine.gpu.device import Device
from p2p_engine.gpu.pack import COMMANDS, ENGINE_BYTES, FEW, Pack, Way
from p2p_engine.gpu.pack_kernel import TABLES_BYTES, TILE_BYTES, Table
from p2p_engine.memory.layout import Int64s
from tests.doubles.gpu import GpuDouble
from tests.doubles.slow_kernel import SlowKernel
from tests.support import SeededRandom, all_given_back, eventually

DOUBLE = GpuDouble()
KIB = 1 << 10
BEHIND = 100_000  # a region of any alignment at a distance that no other one has


def random_regions(rng: SeededRandom, alignment: int) -> tuple[np.ndarray, np.ndarray, Int64s]:
    """Memory, room for it, and regions as rows of (from, to, length); targets do not overlap."""
    count = rng.randrange(FEW + 1, 40)
    lengths = rng.numpy.integers(1, 3 * TILE_BYTES // alignment, count) * alignment
    gaps = rng.numpy.integers(0, 64 // alignment + 1, count) * alignment
    targets = np.cumsum(lengths + gaps) - lengths
    memory = rng.numpy.integers(0, 256, int(targets[-1] + lengths[-1]), np.uint8)
    starts = [rng.randrange(0, len(memory) - int(n) + 1, alignment) for n in lengths]
    return memory, np.zeros_like(memory), np.stack((starts, targets, lengths))


def scattered(rng: SeededRandom, count: int, nbytes: int) -> tuple[np.ndarray, np.ndarray, Int64s]:
    """Memory of which so many pieces, in random order, go to one piece of the room."""
    memory = rng.numpy.integers(0, 256, 2 * count * nbytes, np.uint8)
    starts = rng.numpy.permutation(2 * count)[:count] * nbytes
    places = np.arange(count) * nbytes
    return (
        memory,
        np.zeros(count * nbytes, np.uint8),
        np.stack((starts, places, np.full(count, nbytes))),
    )


def copied(memory: np.ndarray, like: np.ndarray, regions: Int64s) -> np.ndarray:
    expected = np.zeros_like(like)
    for start, target, nbytes in regions.T.tolist():
        expected[target : target + nbytes] = memory[start : start + nbytes]
    return expected


@dataclass
class PackDouble:
    """The double with a pack on it; it counts commands, and looks at what the kernel gets."""

    cuda: Cuda
    stream: int
    pack: Pack = field(init=False)
    num_copies: int = 0
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.pack = Pack(self.cuda, 0)
        copy = self.cuda.copy
        self.tables = list[Table]()
        if self.pack.kernel is not None:
            self.write = self.pack.kernel.write
            self.pack.kernel.write = self.look  # type: ignore[method-assign]

        def count(destination: int, source: int, nbytes: int, stream: int) -> None:
            self.num_copies += 1
            copy(destination, source, nbytes, stream)

        self.cuda.copy = count  # type: ignore[method-assign]

    def look(self, sources: Int64s, destinations: Int64s, lengths: Int64s) -> Table | None:
        assert not self.pack._is_host(sources)
        assert not self.pack._is_host(destinations)
        table = self.write(sources, destinations, lengths)
        self.tables += [table] if table is not None else []
        return table

    def copy(self, memory: np.ndarray, target: np.ndarray, regions: Int64s) -> Way:
        starts, targets, lengths = regions
        sources, destinations = memory.ctypes.data + starts, target.ctypes.data + targets
        way = self.pack.way(sources, destinations)
        order = self.pack.order(sources, destinations, lengths, way, self.stream)
        self.num_steps += 1
        while not order.advance():
            self.num_steps += 1
        self.cuda.synchronize(self.stream)
        order.release()
        return way


@pytest.fixture
def double(request: pytest.FixtureRequest) -> Iterator[PackDouble]:
    with all_given_back(DOUBLE):
        cuda = Cuda()
        cuda.use(0)
        with DOUBLE.fault(compiler_fails=getattr(request, "param", 0)):
            made = PackDouble(cuda, cuda.create_stream())
        DOUBLE["kernels"] = 0
        yield made
        made.pack.close()
        cuda.destroy_stream(made.stream)


with_and_without = pytest.mark.parametrize(
    "double", [0, 1], indirect=True, ids=["kernel", "without"]
)


@with_and_without
@pytest.mark.parametrize("alignment", [1, 2, 4, 8, 16])
def test_any_regions_of_a_device(double: PackDouble, rng: SeededRandom, alignment: int) -> None:
    for _ in range(5):
        memory, target, regions = random_regions(rng, alignment)
        regions = np.concatenate((regions, [[0], [0], [0]]), axis=1)  # nothing is a region too
        assert double.copy(memory, target, regions) is Way.ON_DEVICE
        assert (target == copied(memory, target, regions)).all()
    assert DOUBLE["kernels"] == (5 if double.pack.kernel else 0)


@with_and_without
@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("side", ["source", "destination", "both"])
def test_any_regions_of_host_memory(
    double: PackDouble,
    rng: SeededRandom,
    side: str,
    alignment: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Page-locked or not: an address of what is not would end the context of the whole process."""
    monkeypatch.setattr(cuts, "STAGE_BYTES", 3 * TILE_BYTES + 7)
    for _ in range(5):
        memory, target, regions = random_regions(rng, alignment)
        hosts = {"source": [memory], "destination": [target], "both": [memory, target]}[side]
        for host in hosts:
            double.cuda.note_host(host.ctypes.data, host.nbytes)
        way = double.copy(memory, target, regions)
        assert way is (Way.TO_HOST if side == "destination" else Way.FROM_HOST)
        assert (target == copied(memory, target, regions)).all()
        for host in hosts:
            double.cuda.forget_host(host.ctypes.data)


@pytest.mark.parametrize("side", ["source", "destination"])
def test_4096_regions_cross_the_bus_in_few_commands(
    double: PackDouble, rng: SeededRandom, side: str
) -> None:
    """One by one they would take 16 ms of the thread."""
    memory, target, regions = scattered(rng, 4096, 8 * KIB)
    if side == "source":
        memory, target = target, memory
        memory[:] = rng.numpy.integers(0, 256, len(memory), np.uint8)
        target[:] = 0
        regions = regions[[1, 0, 2]]
    host = memory if side == "source" else target
    double.cuda.note_host(host.ctypes.data, host.nbytes)
    double.copy(memory, target, regions)
    assert (target == copied(memory, target, regions)).all()
    num_slabs = 4096 * 8 * KIB // cuts.STAGE_BYTES
    assert (DOUBLE["kernels"], double.num_copies) == (num_slabs, num_slabs + 1)  # with the table
    assert double.num_steps == num_slabs


def test_regions_that_are_scattered_in_host_memory_too_are_copied_one_by_one(
    double: PackDouble, rng: SeededRandom
) -> None:
    memory, target, regions = scattered(rng, 256, KIB)
    target = np.zeros_like(memory)
    regions[1] = regions[0]
    double.cuda.note_host(target.ctypes.data, target.nbytes)
    double.copy(memory, target, regions)
    assert (target == copied(memory, target, regions)).all()
    assert DOUBLE["kernels"] == 0


@pytest.mark.parametrize("double", [1], indirect=True)
def test_a_step_has_few_commands(double: PackDouble, rng: SeededRandom) -> None:
    memory, target, regions = scattered(rng, 3 * COMMANDS, KIB)
    double.copy(memory, target, regions)
    assert (target == copied(memory, target, regions)).all()
    assert (double.num_steps, double.num_copies) == (3, 3 * COMMANDS)


@pytest.mark.parametrize("way", [Way.ON_DEVICE, Way.TO_HOST])
@pytest.mark.parametrize("is_small", [True, False])
def test_large_regions_go_by_the_copy_engine(
    double: PackDouble, way: Way, is_small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the device, a copy of 256 KiB takes less time than the command for it."""
    monkeypatch.setitem(ENGINE_BYTES, Way.ON_DEVICE, ENGINE_BYTES[Way.ON_DEVICE] >> 4)
    nbytes = ENGINE_BYTES[way] - is_small
    memory, target = np.full(10 * nbytes, 7, np.uint8), np.zeros(5 * nbytes, np.uint8)
    places = np.arange(5) * nbytes
    if way is Way.TO_HOST:
        double.cuda.note_host(target.ctypes.data, target.nbytes)
    double.copy(memory, target, np.stack((2 * places, places, np.full(5, nbytes))))
    assert target.sum() == 7 * target.nbytes
    assert bool(DOUBLE["kernels"]) is is_small
    assert pack.ENGINE_BYTES[Way.TO_HOST] == 256 * KIB


def test_one_large_region_among_small_ones_makes_no_table_larger(
    double: PackDouble, rng: SeededRandom
) -> None:
    memory = rng.numpy.integers(0, 256, 3 << 20, np.uint8)
    target = np.zeros_like(memory)
    lengths = np.array([*[8] * 100, 2 << 20])
    starts = np.cumsum(lengths) - lengths
    regions = np.stack((starts, starts + 5, lengths))
    double.copy(memory, target, regions)
    assert (target == copied(memory, target, regions)).all()
    (table,) = double.tables
    num_rows = table.nbytes // 24
    assert num_rows <= 2 * len(lengths)
    assert num_rows * table.tiles_each <= 4 * int(-(-lengths // TILE_BYTES).sum())


def test_without_room_for_a_table_regions_are_copied_one_by_one(
    double: PackDouble, rng: SeededRandom
) -> None:
    kernel = double.pack.kernel
    assert kernel is not None
    everything = kernel._buddy.alloc(TABLES_BYTES)
    memory, target, regions = random_regions(rng, 8)
    double.copy(memory, target, regions)
    assert (target == copied(memory, target, regions)).all()
    assert not DOUBLE["kernels"]
    kernel._buddy.free(everything)


@pytest.mark.parametrize(
    "faults", [{"malloc_fails": 1}, {"register_limit_bytes": 1}, {"kernel_fails": 1}]
)
def test_what_the_kernel_lacks_is_given_back(
    faults: dict[str, int], rng: SeededRandom, caplog: pytest.LogCaptureFixture
) -> None:
    with all_given_back(DOUBLE):
        cuda = Cuda()
        cuda.use(0)
        with DOUBLE.fault(**faults):
            made = Pack(cuda, 0)
        assert made.kernel is None
        assert "no pack kernel, each region is a copy of its own" in caplog.text
    made.close()


def test_a_table_is_given_back_when_nothing_reads_it_any_more() -> None:
    """Also that of an order which the device refuses: its copy to the device is in the stream."""
    device, errors = Device(Cuda(), 0), list[P2pError]()
    try:
        kernel = device._pack.kernel
        assert kernel is not None
        memory = np.zeros(10 * KIB, np.uint8)
        at = memory.ctypes.data + np.arange(FEW + 1) * KIB
        regions = at, at + 5 * KIB, np.full(FEW + 1, KIB)
        stream = device._streams[Way.ON_DEVICE]
        before = device.run(lambda: SlowKernel(device.cuda, stream), 5.0)
        with DOUBLE.fault(kernel_fails=719):
            device.post(lambda: device.pack(regions, lambda: None, errors.append))
            assert device.run(kernel._buddy.stats, 5.0)["num_blocks"]
        assert not errors  # what had begun before it still runs
        before.end()
        eventually(lambda: len(errors) == 1)
        assert isinstance(errors[0], TransportError)
        assert "719" in str(errors[0])
        eventually(lambda: not device.run(kernel._buddy.stats, 5.0)["num_blocks"])
    finally:
        assert device.close(10)


def test_the_first_order_waits_for_no_kernel_of_others(
    double: PackDouble, rng: SeededRandom
) -> None:
    """To load a kernel may need an idle device, and another one may wait for our peer."""
    device, other = Device(Cuda(), 0), SlowKernel(double.cuda, double.stream)
    try:
        DOUBLE["kernels"] = 0
        memory, target, regions = scattered(rng, 100, KIB)
        job = device.copy(
            memory.ctypes.data + regions[0], target.ctypes.data + regions[1], regions[2]
        )
        assert job.wait(10)
        assert DOUBLE["kernels"] == 1
        assert (target == copied(memory, target, regions)).all()
    finally:
        other.end()
        assert device.close(10)


def test_others_have_their_turn_while_many_regions_are_ordered(
    rng: SeededRandom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the kernel: 4,096 commands in one turn would keep them waiting for 16 ms."""
    with DOUBLE.fault(compiler_fails=1):
        device = Device(Cuda(), 0)
    longest, num_copies, copy = 0, 0, device.cuda.copy

    def count(*arguments: int) -> None:
        nonlocal num_copies
        num_copies += 1
        copy(*arguments)

    def turn() -> None:
        nonlocal longest, num_copies
        longest, num_copies = max(longest, num_copies), 0
        if not is_over:
            device.post(turn)

    monkeypatch.setattr(device.cuda, "copy", count)
    try:
        is_over = False
        memory, target, regions = scattered(rng, 4096, 64)
        device.post(turn)
        job = device.copy(
            memory.ctypes.data + regions[0], target.ctypes.data + regions[1], regions[2]
        )
        assert job.wait(20)
        is_over = True
        assert job.state == "done"
        assert (target == copied(memory, target, regions)).all()
        assert 0 < longest <= COMMANDS
    finally:
        is_over = True
        assert device.close(10)


def test_no_copy_crosses_two_slices_of_host_memory(rng: SeededRandom) -> None:
    """CUDA takes none of them; a slab of small regions may lie at the border of two."""
    for _ in range(100):
        size, count = rng.randrange(100, 5000), rng.randrange(1, 60)
        lengths = rng.numpy.integers(1, 50, count)
        host = 10_000 + np.cumsum(lengths) - lengths + rng.randrange(size)
        near = rng.numpy.permutation(count) * BEHIND
        near, host, lengths = _cut(near, host, lengths, size)
        sides = cuts.stage(near, host, lengths, 7, (10_000, size))
        assert _moved(*sides) == _bytes(near, host, lengths)
        for load in sides[3]:
            assert len(load.copies) <= cuts.PIECES
            for first, _, nbytes in load.copies:
                assert (first - 10_000) // size == (first + nbytes - 1 - 10_000) // size


def test_loads_are_no_larger_than_a_slab(
    rng: SeededRandom, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuts, "STAGE_BYTES", 1000)
    monkeypatch.setattr(cuts, "PIECES", 3)
    for _ in range(100):
        count = rng.randrange(1, 60)
        lengths = rng.numpy.integers(1, 3000, count)
        gaps = rng.numpy.integers(0, 2, count) * 10
        host = np.cumsum(lengths + gaps) - lengths
        near = rng.numpy.permutation(count) * BEHIND
        sides = cuts.stage(near, host, lengths, 7)
        assert _moved(*sides) == _bytes(near, host, lengths)
        for load in sides[3]:
            assert len(load.copies) <= 3
            assert all(7 <= place <= place + n <= 1007 for _, place, n in load.copies)


def _cut(near: Int64s, host: Int64s, lengths: Int64s, size: int) -> tuple[Int64s, Int64s, Int64s]:
    host, near, lengths = cuts.cut_at(host, near, lengths, 10_000, size)
    return near, host, lengths


def _bytes(near: Int64s, host: Int64s, lengths: Int64s) -> list[tuple[int, int]]:
    """Each byte's two places, in order."""
    rows = zip(near.tolist(), host.tolist(), lengths.tolist(), strict=True)
    return [(a + i, b + i) for a, b, n in rows for i in range(n)]


def _moved(
    near: Int64s, places: Int64s, lengths: Int64s, loads: list[cuts.SlabLoad]
) -> list[tuple[int, int]]:
    """The same of what goes through the slab, load by load."""
    moved = []
    for load in loads:
        rows = slice(load.first, load.first + load.num)
        held = {b: a for a, b in _bytes(near[rows], places[rows], lengths[rows])}
        moved += [(held[p + i], h + i) for h, p, n in load.copies for i in range(n)]
    return moved
