"""Packing: the kernel's own source, compiled for the host, and the torch fallback, both against
numpy; which way is chosen for which regions."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from p2p_engine.cuda import Cuda
from p2p_engine.layout import Int64s
from p2p_engine.pack import ENGINE_BYTES, KERNEL, TILE_BYTES, Pack, copy_rows, tabulate
from tests.gpu_double import GpuDouble
from tests.support import SeededRandom

# A grid of threads, one after the other: the kernel's threads do not depend on each other.
HOST = """
#include <initializer_list>
struct index_t { int x; };
static index_t blockIdx, threadIdx, blockDim, gridDim;
#define __device__ static
#define __global__
%s
extern "C" void run(const long long* lists, long long n, long long tiles, long long tile_bytes,
                    int blocks, int threads) {
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
            copy_regions(lists, n, tiles, tile_bytes);
}
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("kernel")
    (folder / "kernel.cpp").write_text(HOST % KERNEL)
    flags = ["-std=c++14", "-O1", "-fPIC", "-shared", "-fsanitize=undefined", "-fno-sanitize=vptr"]
    library = str(folder / "kernel.so")
    command = ["cc", "-x", "c++", *flags, str(folder / "kernel.cpp"), "-o", library]
    subprocess.run(command, check=True)
    return ctypes.CDLL(library)


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
        table, num_tiles = tabulate(
            memory.ctypes.data + starts, target.ctypes.data + targets, lengths
        )
        table = np.ascontiguousarray(table)
        kernel.run(
            ctypes.c_void_p(table.ctypes.data), ctypes.c_longlong(len(lengths)),
            ctypes.c_longlong(num_tiles), ctypes.c_longlong(TILE_BYTES), 7, 32,
        )  # fmt: skip
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


def test_without_a_gpu_every_region_goes_by_the_copy_engine(rng: SeededRandom) -> None:
    double = GpuDouble()
    cuda = Cuda(double.path)
    cuda.use(0)
    pack, stream = Pack(cuda, 0), cuda.create_stream()
    memory, target, regions = random_regions(rng, 1)
    starts, targets, lengths = regions
    assert lengths.mean() < ENGINE_BYTES
    release = pack.enqueue(
        memory.ctypes.data + starts, target.ctypes.data + targets, lengths, stream
    )
    cuda.synchronize(stream)
    release()
    assert (target == copied(memory, target, regions)).all()
    pack.close()
    cuda.destroy_stream(stream)
