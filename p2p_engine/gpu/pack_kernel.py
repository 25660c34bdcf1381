"""The kernel that copies many small regions. cupy compiles it at run time and launches it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

TILE_BYTES = (
    16 << 10
)  # one block of threads copies a tile: each thread makes four accesses of 16 bytes
NUM_THREADS = 256
MAX_BLOCKS = 1056  # eight per multiprocessor of an H100: small tiles are bound by latency

# Accesses are as wide as the mutual alignment of source and destination allows, at most 16 bytes.
# The ends are copied byte by byte. A thread issues four loads before its first store.
KERNEL = r"""
struct alignas(16) wide_t { unsigned a, b, c, d; };

template <typename T>
__device__ void copy_as(char* to, const char* from, long long n) {
    const long long step = blockDim.x;
    const long long mask = sizeof(T) - 1;
    long long head = (-(unsigned long long)from) & mask;
    head = head < n ? head : n;
    const long long body = (n - head) / (long long)sizeof(T);
    const long long done = head + body * (long long)sizeof(T);
    for (long long i = threadIdx.x; i < head; i += step) to[i] = from[i];
    const T* source = (const T*)(from + head);
    T* target = (T*)(to + head);
    long long i = threadIdx.x;
    for (; i + 3 * step < body; i += 4 * step) {
        const T a = source[i], b = source[i + step];
        const T c = source[i + 2 * step], d = source[i + 3 * step];
        target[i] = a;
        target[i + step] = b;
        target[i + 2 * step] = c;
        target[i + 3 * step] = d;
    }
    for (; i < body; i += step) target[i] = source[i];
    for (long long j = done + threadIdx.x; j < n; j += step) to[j] = from[j];
}

extern "C" __global__ void copy_tiles(const long long* tiles, long long num_tiles) {
    for (long long tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
        const char* from = (const char*)tiles[tile];
        char* to = (char*)tiles[num_tiles + tile];
        const long long n = tiles[2 * num_tiles + tile];
        const unsigned long long apart = (unsigned long long)from ^ (unsigned long long)to;
        if (apart % 16 == 0) copy_as<wide_t>(to, from, n);
        else if (apart % 8 == 0) copy_as<unsigned long long>(to, from, n);
        else if (apart % 4 == 0) copy_as<unsigned>(to, from, n);
        else if (apart % 2 == 0) copy_as<unsigned short>(to, from, n);
        else copy_as<char>(to, from, n);
    }
}
"""

Launch = Callable[[int, int, int], None]  # address of the tiles on the device, their number, stream


def compile_kernel(device: int) -> Launch | None:
    """Return a function that launches the kernel; None without cupy, or without a GPU that it can
    use.

    The kernel is launched once here, to load it: loading may wait for all work on the device.
    """
    try:
        import cupy  # optional

        if cupy.cuda.runtime.getDeviceCount() <= device:
            return None
        with cupy.cuda.Device(device):
            kernel = cupy.RawKernel(KERNEL, "copy_tiles")
            kernel.compile()
            stream = cupy.cuda.Stream(non_blocking=True)
            _launch(cupy, kernel, device, 0, 0, stream.ptr)
            stream.synchronize()
    except ImportError:
        logger.info("cupy is not installed: small regions are packed by torch's index operations")
        return None
    except Exception as error:  # noqa: BLE001  # cupy has many, none of them is fatal here
        logger.warning("no pack kernel: %s; small regions are packed by torch", str(error))
        return None
    return lambda tiles, num_tiles, stream: _launch(cupy, kernel, device, tiles, num_tiles, stream)


def _launch(cupy: Any, kernel: Any, device: int, tiles: int, num_tiles: int, stream: int) -> None:
    blocks = min(max(num_tiles, 1), MAX_BLOCKS)
    with cupy.cuda.Device(device), _current_stream(cupy, stream):
        kernel((blocks,), (NUM_THREADS,), (np.uint64(tiles), np.int64(num_tiles)))


def _current_stream(cupy: Any, stream: int) -> Any:
    """Return a context in which cupy launches into a stream of ours."""
    if hasattr(cupy.cuda.Stream, "from_external"):  # since 14, which deprecates the other one
        return cupy.cuda.Stream.from_external(_Handle(stream))
    return cupy.cuda.ExternalStream(stream)


class _Handle:
    """A stream in the form in which libraries exchange it."""

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the protocol's version and the handle."""
        return 0, self._stream
