"""Pack: copies lists of regions on a GPU: gather, scatter, or both.

Few large regions, and regions in host memory, use the copy engines: one command each, and no
multiprocessor. Many small regions on the device use one launch of a kernel, which is compiled when
the device starts. Without cupy, torch's index operations take its place; they need an index as long
as the list.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mempool import Arena, Buddy
from p2p_engine.errors import P2pError, TransportError
from p2p_engine.gpu.cuda import Cuda
from p2p_engine.gpu.pack_kernel import TILE_BYTES, Launch, compile_kernel
from p2p_engine.memory.layout import Int64s

ENGINE_BYTES = 256 << 10  # for a larger mean size, the copy engine is as fast: 2 us each
TABLES_BYTES = 8 << 20

Release = Callable[[], None]


class Way(enum.Enum):
    """The direction of a copy; each has a copy engine of its own."""

    ON_DEVICE = enum.auto()
    TO_HOST = enum.auto()
    FROM_HOST = enum.auto()


class Pack:
    """The ways in which one device copies many regions. For the device's thread."""

    def __init__(self, cuda: Cuda, device: int, launch: Launch | None = None) -> None:
        """Compile the kernel if cupy is installed, unless a `launch` is given.

        Raises:
            TransportError: the device has no memory for the lists.
        """
        self._cuda = cuda
        self._device = device
        launch = launch or compile_kernel(device)
        self._tiles = Tiles(cuda, launch) if launch is not None else None
        self._has_torch = torch.cuda.is_available()

    def way(self, sources: Int64s, destinations: Int64s) -> Way:
        """Return the direction of a copy; one region in host memory decides."""
        if self._is_host(sources):
            return Way.FROM_HOST
        return Way.TO_HOST if self._is_host(destinations) else Way.ON_DEVICE

    def enqueue(
        self, sources: Int64s, destinations: Int64s, lengths: Int64s, stream: int
    ) -> Release:
        """Enqueue copies between device, host and peer memory; returns a function to call when they
        are done.

        Raises:
            TransportError: the device refuses.
        """
        try:
            return self._enqueue(sources, destinations, lengths, stream)
        except P2pError:
            raise
        except Exception as error:  # from cupy or torch
            raise TransportError(f"pack: {error}") from error

    def close(self) -> None:
        """Free the lists. All copies must have ended."""
        if self._tiles is not None:
            self._tiles.close()

    def _enqueue(
        self, sources: Int64s, destinations: Int64s, lengths: Int64s, stream: int
    ) -> Release:
        kept = lengths > 0
        if not kept.all():
            sources, destinations, lengths = sources[kept], destinations[kept], lengths[kept]
        is_small = len(lengths) > 1 and lengths.mean() < ENGINE_BYTES
        if not is_small or self.way(sources, destinations) is not Way.ON_DEVICE:
            return self._by_engine(sources, destinations, lengths, stream)
        if self._tiles is not None:
            release = self._tiles.copy(tabulate(sources, destinations, lengths), stream)
            if release is not None:
                return release
            return self._by_engine(sources, destinations, lengths, stream)  # too many at once
        if self._has_torch:
            return self._by_torch(sources, destinations, lengths, stream)
        return self._by_engine(sources, destinations, lengths, stream)

    def _is_host(self, addresses: Int64s) -> bool:
        """Whether an address is in host memory, which a kernel may not be able to reach."""
        return any(
            bool(((addresses >= start) & (addresses < start + nbytes)).any())
            for start, nbytes in self._cuda.host_ranges.items()
        )

    def _by_engine(
        self, sources: Int64s, destinations: Int64s, lengths: Int64s, stream: int
    ) -> Release:
        for source, destination, nbytes in zip(
            sources.tolist(), destinations.tolist(), lengths.tolist(), strict=True
        ):
            self._cuda.copy(destination, source, nbytes, stream)
        return _nothing

    def _by_torch(
        self, sources: Int64s, destinations: Int64s, lengths: Int64s, stream: int
    ) -> Release:
        device = f"cuda:{self._device}"
        cuda: Any = torch.cuda
        with cuda.stream(cuda.ExternalStream(stream, device=device)):
            kept = copy_rows(sources, destinations, lengths, lambda a, n: _on_device(a, n, device))
        return lambda: kept.clear()


class Tiles:
    """Copies by the kernel. Owns registered host memory and equally much device memory, for the
    tables of tiles in use."""

    def __init__(self, cuda: Cuda, launch: Launch) -> None:
        self._cuda = cuda
        self._launch = launch
        self._host = Arena(TABLES_BYTES)
        self._buddy = Buddy(TABLES_BYTES, 4096)
        cuda.register(self._host.address, TABLES_BYTES)
        self._device_address = cuda.allocate(TABLES_BYTES)

    def copy(self, table: Int64s, stream: int) -> Release | None:
        """Enqueue the copies of a table. Returns None if there is no room for the table."""
        try:
            handle = self._buddy.alloc(table.nbytes)
        except MemoryError:
            return None
        offset = self._buddy.offset(handle)
        self._host.view(offset, table.nbytes)[:] = table.tobytes()
        address = self._device_address + offset
        try:
            self._cuda.copy(address, self._host.address + offset, table.nbytes, stream)
            self._launch(address, table.shape[1], stream)
        except BaseException:
            self._buddy.free(handle)  # later writes to it follow in the same stream
            raise
        return lambda: self._buddy.free(handle)

    def close(self) -> None:
        """Free both memories."""
        self._cuda.free(self._device_address)
        self._cuda.unregister(self._host.address)
        self._host.close()


def cut_at(
    addresses: Int64s, others: Int64s, lengths: Int64s, start: int, size: int
) -> tuple[Int64s, Int64s, Int64s]:
    """Cut regions so that none crosses a multiple of `size` from `start` on in `addresses`; returns
    the three lists anew."""
    offsets = (addresses - start) % size
    counts = np.maximum(1, -(-(offsets + lengths) // size))
    if counts.max(initial=1) == 1:
        return addresses, others, lengths
    which = np.repeat(np.arange(len(counts)), counts)
    numbers = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.maximum(0, numbers * size - offsets[which])
    ends = np.minimum(lengths[which], (numbers + 1) * size - offsets[which])
    return addresses[which] + begins, others[which] + begins, ends - begins


def tabulate(sources: Int64s, destinations: Int64s, lengths: Int64s) -> Int64s:
    """Cut regions into tiles for the kernel: (source, destination, length) as int64[3, tiles]."""
    counts = -(-lengths // TILE_BYTES)
    ends = np.cumsum(counts)
    starts = (np.arange(ends[-1]) - np.repeat(ends - counts, counts)) * TILE_BYTES
    rests = np.repeat(lengths, counts) - starts
    return np.stack((
        np.repeat(sources, counts) + starts, np.repeat(destinations, counts) + starts,
        np.minimum(rests, TILE_BYTES),
    ))  # fmt: skip


def copy_rows(
    sources: Int64s,
    destinations: Int64s,
    lengths: Int64s,
    view: Callable[[int, int], torch.Tensor],
) -> list[torch.Tensor]:
    """Copy regions by torch's index operations; returns objects that must outlive the copies.

    Memory is viewed as rows of the largest size that divides every distance and length.
    `view(address, nbytes)` returns the memory there as a tensor of bytes.
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


def _on_device(address: int, nbytes: int, device: str) -> torch.Tensor:
    """Return device memory as a tensor of bytes, without a copy."""

    class Memory:
        __cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip

    return torch.as_tensor(Memory(), device=device)


def _nothing() -> None:
    """Do nothing: there is nothing to release."""
