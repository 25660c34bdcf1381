"""Packing: the kernel's own source, compiled for the host, and the torch fallback, both against
numpy; which way is chosen for which regions."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from p2p_engine.errors import TransportError
from p2p_engine.gpu.cuda import Cuda
from p2p_engine.gpu.pack import ENGINE_BYTES, Pack, copy_rows, tabulate
from p2p_engine.gpu.pack_kernel import KERNEL, TILE_BYTES
from p2p_engine.memory.layout import Int64s
from tests.doubles.gpu import GpuDouble
from tests.support import SeededRandom, eventually

# A grid of threads, one after the other: the kernel's threads do not depend on each other.
HOST = """
#include <initializer_list>
struct index_t { int x; };
static thread_local index_t blockIdx, threadIdx, blockDim, gridDim;
#define __device__ static
#define __global__
%s
extern "C" void run(const long long* tiles, long long num_tiles, int blocks, int threads) {
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
            copy_tiles(tiles, num_tiles);
}
"""
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("kernel")
    (folder / "kernel.cpp").write_text(HOST % KERNEL)
    flags = ["-std=c++14", "-O1", "-fPIC", "-shared", "-fsanitize=undefined", "-fno-sanitize=vptr"]
    library = str(folder / "kernel.so")
    command = ["cc", "-x", "c++", *flags, str(folder / "kernel.cpp"), "-o", library]
    subprocess.run(command, check=True)
    return ctypes.CDLL(library)


def run(kernel: ctypes.CDLL, tiles: int, num_tiles: int) -> None:
    kernel.run(ctypes.c_void_p(tiles), ctypes.c_longlong(num_tiles), 7, 32)


def random_regions(rng: SeededRandom, alignment: int) -> tuple[np.ndarray, np.ndarray, Int64s]:
    """Memory, and regions of it as rows of (from, to, length); targets do not overlap."""
    count = rng.randrange(1, 40)
    lengths = rng.numpy.integers(1, 3 * TILE_BYTES // alignment, count) * alignment
    gaps = rng.numpy.integers(0, 64 // alignment + 1, count) * alignment
    targets = np.cumsum(lengths + gaps) - lengths
    memory = rng.numpy.integers(0, 256, int(targets[-1] + lengths[-1]), np.uint8)
    starts = [rng.randrange(0, len(memory) - int(n) + 1, alignment) for n in lengths]
    return memory, np.zeros_like(memory), np.stack((starts, targets, lengths))


def copied(memory: np.ndarray, like: np.ndarray, regions: Int64s) -> np.ndarray:
    expected = np.zeros_like(like)
    for start, target, nbytes in regions.T.tolist():
        expected[target : target + nbytes] = memory[start : start + nbytes]
    return expected


@pytest.mark.parametrize("alignment", [1, 2, 4, 8, 16])
def test_the_kernel_copies_any_regions(
    kernel: ctypes.CDLL, rng: SeededRandom, alignment: int
) -> None:
    for _ in range(5):
        memory, target, regions = random_regions(rng, alignment)
        starts, targets, lengths = regions
        table = tabulate(memory.ctypes.data + starts, target.ctypes.data + targets, lengths)
        assert table[2].sum() == lengths.sum()
        assert table[2].max() <= TILE_BYTES
        run(kernel, table.ctypes.data, table.shape[1])
        assert (target == copied(memory, target, regions)).all()


@pytest.mark.parametrize("alignment", [1, 2, 16, 512])
def test_the_torch_fallback_copies_any_regions(rng: SeededRandom, alignment: int) -> None:
    memory, target, regions = random_regions(rng, alignment)
    starts, targets, lengths = regions

    def view(address: int, nbytes: int) -> torch.Tensor:
        for array in (memory, target):
            offset = address - array.ctypes.data
            if 0 <= offset < len(array):
                return torch.from_numpy(array[offset : offset + nbytes])
        raise AssertionError("outside of both")

    copy_rows(memory.ctypes.data + starts, target.ctypes.data + targets, lengths, view)
    assert (target == copied(memory, target, regions)).all()


@dataclass
class PackDouble:
    """The double with a pack on it, and how often its kernel was launched."""

    cuda: Cuda
    pack: Pack
    stream: int
    launches: list[int]

    def copy(self, memory: np.ndarray, target: np.ndarray, regions: Int64s) -> None:
        starts, targets, lengths = regions
        release = self.pack.enqueue(
            memory.ctypes.data + starts, target.ctypes.data + targets, lengths, self.stream
        )
        self.cuda.synchronize(self.stream)
        release()


@pytest.fixture
def double(request: pytest.FixtureRequest, kernel: ctypes.CDLL) -> Iterator[PackDouble]:
    """Its kernel is the real one's source, or there is none."""
    library = GpuDouble()
    cuda, num_streams = Cuda(library.path), library["live_streams"]
    cuda.use(0)
    launches, kept, has_kernel = [], [], getattr(request, "param", True)

    def launch(tiles: int, num_tiles: int, stream: int) -> None:
        call = HOST_FUNCTION(lambda _: run(kernel, tiles, num_tiles))
        kept.append(call)
        launches.append(num_tiles)
        cuda.library.cudaLaunchHostFunc(ctypes.c_void_p(stream), call, None)

    made = PackDouble(
        cuda, Pack(cuda, 0, launch if has_kernel else None), cuda.create_stream(), launches
    )
    yield made
    made.pack.close()
    cuda.destroy_stream(made.stream)
    eventually(lambda: library["live_streams"] == num_streams)


@pytest.mark.parametrize("double", [True, False], indirect=True, ids=["kernel", "engine"])
@pytest.mark.parametrize("alignment", [1, 16])
def test_many_small_regions_go_by_the_kernel_where_there_is_one(
    double: PackDouble, rng: SeededRandom, alignment: int, request: pytest.FixtureRequest
) -> None:
    memory, target, regions = random_regions(rng, alignment)
    regions = np.concatenate((regions, [[0], [0], [0]]), axis=1)  # nothing is a region too
    is_by_kernel = "kernel" in request.node.callspec.id and np.count_nonzero(regions[2]) > 1
    double.copy(memory, target, regions)
    assert (target == copied(memory, target, regions)).all()
    assert bool(double.launches) == is_by_kernel


@pytest.mark.parametrize("side", ["source", "destination"])
def test_no_kernel_reads_or_writes_host_memory(
    double: PackDouble, rng: SeededRandom, side: str
) -> None:
    """Registered or not: what is not would end the context of the whole process."""
    memory, target, regions = random_regions(rng, 16)
    host = memory if side == "source" else target
    double.cuda.note_host(host.ctypes.data, host.nbytes)
    double.copy(memory, target, regions)
    assert (target == copied(memory, target, regions)).all()
    assert not double.launches


def test_large_regions_go_by_the_copy_engine(double: PackDouble) -> None:
    memory, target = np.full(4 * ENGINE_BYTES, 7, np.uint8), np.zeros(4 * ENGINE_BYTES, np.uint8)
    starts = np.array([0, 2 * ENGINE_BYTES])
    double.copy(memory, target, np.stack((starts, starts, np.full(2, ENGINE_BYTES))))
    assert target.sum() == 2 * 7 * ENGINE_BYTES
    assert not double.launches


def test_what_a_kernel_refuses_is_an_error_of_the_transport(double: PackDouble) -> None:
    def refuse(tiles: int, num_tiles: int, stream: int) -> None:
        raise RuntimeError("CUDA_ERROR_NOT_FOUND")

    pack, memory = Pack(double.cuda, 0, refuse), np.zeros(100, np.uint8)
    at = memory.ctypes.data + np.array([0, 50])
    for _ in range(2):  # and its table is given back
        with pytest.raises(TransportError, match="CUDA_ERROR_NOT_FOUND"):
            pack.enqueue(at, at, np.full(2, 10), double.stream)
    double.cuda.synchronize(double.stream)
    pack.close()
