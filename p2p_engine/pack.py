"""Pack: copies lists of regions on a GPU, in either direction: gather, scatter, or both.

Few large regions, and what lies in host memory, go by the copy engines, one command each, without a
multiprocessor. Many small ones on the device go by one launch of a kernel, compiled when the device
is started; without cupy by torch's index operations, which need an index as long as the list.
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mempool import Arena, Buddy
from p2p_engine.cuda import Cuda
from p2p_engine.layout import Int64s

logger = logging.getLogger(__name__)

ENGINE_BYTES = 256 << 10  # regions of this mean size are as fast by the copy engine: 2 us each
TILE_BYTES = 16 << 10  # what one block of threads copies at a time
NUM_THREADS = 256
MAX_BLOCKS = 264  # two on each multiprocessor of an H100
LISTS_BYTES = 8 << 20  # for the lists of regions that are being worked on

# A tile belongs to the region before whose successor it starts. Accesses are as wide as source and
# destination are aligned to each other, 16 bytes at best; the ends are copied byte by byte.
KERNEL = r"""
struct alignas(16) wide_t { unsigned a, b, c, d; };

template <typename T>
__device__ void copy_as(char* to, const char* from, long long n, int thread, int num_threads) {
    const long long mask = sizeof(T) - 1;
    long long head = (-(unsigned long long)from) & mask;
    head = head < n ? head : n;
    const long long body = (n - head) / (long long)sizeof(T);
    const long long done = head + body * (long long)sizeof(T);
    for (long long i = thread; i < head; i += num_threads) to[i] = from[i];
    const T* source = (const T*)(from + head);
    T* target = (T*)(to + head);
    for (long long i = thread; i < body; i += num_threads) target[i] = source[i];
    for (long long i = done + thread; i < n; i += num_threads) to[i] = from[i];
}

extern "C" __global__ void copy_regions(const long long* lists, long long num_regions,
                                        long long num_tiles, long long tile_bytes) {
    const long long* sources = lists;
    const long long* destinations = lists + num_regions;
    const long long* lengths = lists + 2 * num_regions;
    const long long* first_tiles = lists + 3 * num_regions;
    for (long long tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
        long long low = 0, high = num_regions - 1;
        while (low < high) {
            const long long middle = (low + high + 1) / 2;
            if (first_tiles[middle] <= tile) low = middle; else high = middle - 1;
        }
        const long long start = (tile - first_tiles[low]) * tile_bytes;
        const long long rest = lengths[low] - start;
        const long long n = rest < tile_bytes ? rest : tile_bytes;
        const char* from = (const char*)(sources[low] + start);
        char* to = (char*)(destinations[low] + start);
        const unsigned long long apart = (unsigned long long)from ^ (unsigned long long)to;
        if (apart % 16 == 0) copy_as<wide_t>(to, from, n, threadIdx.x, blockDim.x);
        else if (apart % 8 == 0) copy_as<unsigned long long>(to, from, n, threadIdx.x, blockDim.x);
        else if (apart % 4 == 0) copy_as<unsigned>(to, from, n, threadIdx.x, blockDim.x);
        else if (apart % 2 == 0) copy_as<unsigned short>(to, from, n, threadIdx.x, blockDim.x);
        else copy_as<char>(to, from, n, threadIdx.x, blockDim.x);
    }
}
"""

Release = Callable[[], None]


class Way(enum.Enum):
    """Between which memories a copy goes; each way has a copy engine of its own."""

    ON_DEVICE = enum.auto()
    TO_HOST = enum.auto()
    FROM_HOST = enum.auto()


class Pack:
    """The ways in which one device copies many regions. For the device's thread."""

    def __init__(self, cuda: Cuda, device: int) -> None:
        """Compile the kernel, if there is cupy.

        Raises:
            TransportError: the device has no memory for the lists.
        """
        self._cuda = cuda
        self._device = device
        self._kernel = _compile(device)
        self._has_torch = torch.cuda.is_available()
        self._lists: Lists | None = Lists(cuda) if self._kernel is not None else None

    def way(self, sources: Int64s, destinations: Int64s) -> Way:
        """Return which way a copy goes: one region in host memory decides."""
        if self._is_host(sources):
            return Way.FROM_HOST
        return Way.TO_HOST if self._is_host(destinations) else Way.ON_DEVICE

    def enqueue(
        self, sources: Int64s, destinations: Int64s, lengths: Int64s, stream: int
    ) -> Release:
        """Enqueue copies between device, registered and peers' memory; returns what is to be called
        when they are done.

        Raises:
            TransportError: the device refuses.
        """
        kept = lengths > 0
        if not kept.all():
            sources, destinations, lengths = sources[kept], destinations[kept], lengths[kept]
        is_small = len(lengths) > 1 and lengths.mean() < ENGINE_BYTES
        if not is_small or self.way(sources, destinations) is not Way.ON_DEVICE:
            return self._by_engine(sources, destinations, lengths, stream)
        if self._lists is not None:
            return self._by_kernel(self._lists, sources, destinations, lengths, stream)
        if self._has_torch:
            return self._by_torch(sources, destinations, lengths, stream)
        return self._by_engine(sources, destinations, lengths, stream)

    def close(self) -> None:
        """Give everything back; what it copies has ended."""
        if self._lists is not None:
            self._lists.close()

    def _is_host(self, addresses: Int64s) -> bool:
        """Whether one of them is in registered host memory."""
        return any(
            bool(((addresses >= start) & (addresses < start + nbytes)).any())
            for start, nbytes in self._cuda.registered.items()
        )

    def _by_engine(
        self, sources: Int64s, destinations: Int64s, lengths: Int64s, stream: int
    ) -> Release:
        for source, destination, nbytes in zip(
            sources.tolist(), destinations.tolist(), lengths.tolist(), strict=True
        ):
            self._cuda.copy(destination, source, nbytes, stream)
        return _nothing

    def _by_kernel(
        self, lists: Lists, sources: Int64s, destinations: Int64s, lengths: Int64s, stream: int
    ) -> Release:
        table, num_tiles = tabulate(sources, destinations, lengths)
        placed = lists.place(table, stream)
        if placed is None:  # more lists at once than there is room for
            return self._by_engine(sources, destinations, lengths, stream)
        address, release = placed
        import cupy  # optional

        with cupy.cuda.Device(self._device), cupy.cuda.ExternalStream(stream):
            self._kernel(
                (min(num_tiles, MAX_BLOCKS),),
                (NUM_THREADS,),
                (np.uint64(address), np.int64(len(lengths)), np.int64(num_tiles),
                 np.int64(TILE_BYTES)),
            )  # fmt: skip
        return release

    def _by_torch(
        self, sources: Int64s, destinations: Int64s, lengths: Int64s, stream: int
    ) -> Release:
        device = f"cuda:{self._device}"
        cuda: Any = torch.cuda
        with cuda.stream(cuda.ExternalStream(stream, device=device)):
            kept = copy_rows(sources, destinations, lengths, lambda a, n: _on_device(a, n, device))
        return lambda: kept.clear()


class Lists:
    """Registered host memory, and device memory of the same size, for lists of regions."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._host = Arena(LISTS_BYTES)
        self._buddy = Buddy(LISTS_BYTES, 4096)
        cuda.register(self._host.address, LISTS_BYTES)
        self._device_address = cuda.allocate(LISTS_BYTES)

    def place(self, table: Int64s, stream: int) -> tuple[int, Release] | None:
        """Copy a table to the device, in the stream; returns its address there, and what is to be
        called when it is not needed any more. None: there is no room."""
        try:
            handle = self._buddy.alloc(table.nbytes)
        except MemoryError:
            return None
        offset = self._buddy.offset(handle)
        self._host.view(offset, table.nbytes)[:] = table.tobytes()
        address = self._device_address + offset
        self._cuda.copy(address, self._host.address + offset, table.nbytes, stream)
        return address, lambda: self._buddy.free(handle)

    def close(self) -> None:
        """Give both back."""
        self._cuda.free(self._device_address)
        self._cuda.unregister(self._host.address)
        self._host.close()


def tabulate(sources: Int64s, destinations: Int64s, lengths: Int64s) -> tuple[Int64s, int]:
    """Return what the kernel reads, int64[4, regions], and the number of tiles."""
    num_tiles = -(-lengths // TILE_BYTES)
    ends = np.cumsum(num_tiles)
    return np.stack((sources, destinations, lengths, ends - num_tiles)), int(ends[-1])


def copy_rows(
    sources: Int64s,
    destinations: Int64s,
    lengths: Int64s,
    view: Callable[[int, int], torch.Tensor],
) -> list[torch.Tensor]:
    """Copy regions by torch's index operations; returns what must outlive them.

    All memory is taken as rows of the largest size that divides every distance and length.
    `view(address, nbytes)` makes a tensor of bytes of what lies there.
    """
    source_base, destination_base = int(sources.min()), int(destinations.min())
    distances = np.concatenate((sources - source_base, destinations - destination_base, lengths))
    row = int(np.gcd.reduce(distances))
    ends = np.cumsum(lengths // row)
    steps = np.arange(ends[-1]) - np.repeat(ends - lengths // row, lengths // row)

    def rows(base: int, addresses: Int64s) -> tuple[torch.Tensor, torch.Tensor]:
        whole = int((addresses + lengths).max()) - base
        memory = view(base, math.ceil(whole / row) * row).view(-1, row)
        index = np.repeat((addresses - base) // row, lengths // row) + steps
        return memory, torch.from_numpy(index).to(memory.device, non_blocking=True)

    source, from_rows = rows(source_base, sources)
    destination, to_rows = rows(destination_base, destinations)
    gathered = source.index_select(0, from_rows)
    destination.index_copy_(0, to_rows, gathered)
    return [from_rows, to_rows, gathered]


def _compile(device: int) -> Any:
    """Return the kernel; None without cupy, or without a GPU that it can use."""
    try:
        import cupy  # optional

        if cupy.cuda.runtime.getDeviceCount() <= device:
            return None
        with cupy.cuda.Device(device):
            kernel = cupy.RawKernel(KERNEL, "copy_regions", options=("--std=c++14",))
            kernel.compile()
            return kernel
    except ImportError:
        logger.info("cupy is not installed: small regions are packed by torch's index operations")
    except Exception as error:  # noqa: BLE001  # cupy has many, none of them is fatal here
        logger.warning("no pack kernel: %s; small regions are packed by torch", error)
    return None


def _on_device(address: int, nbytes: int, device: str) -> torch.Tensor:
    """Return device memory as a tensor of bytes, without a copy."""

    class Memory:
        __cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip

    return torch.as_tensor(Memory(), device=device)


def _nothing() -> None:
    """Nothing is to be given back."""
