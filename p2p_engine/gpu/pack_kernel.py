"""The kernels that copy regions and compute checksums: their memory, and code of the first one."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np

from mempool import Arena, Buddy
from p2p_engine.gpu.checksum import CHECKSUM_KERNEL, CONSTANTS_BYTES, PART_BYTES, tables
from p2p_engine.gpu.cuda import Cuda
from p2p_engine.gpu.cuts import STAGE_BYTES
from p2p_engine.gpu.kernels import Kernels
from p2p_engine.memory.layout import Int64s

# One block of threads copies a tile: each thread makes four accesses of 16 bytes.
TILE_BYTES = 16 << 10
NUM_THREADS = 256
MAX_BLOCKS = 1056  # eight per multiprocessor of an H100: small tiles are bound by latency
TABLES_BYTES = 8 << 20
ROW_BYTES = 24
DEVICE_BYTES = TABLES_BYTES + 2 * STAGE_BYTES + CONSTANTS_BYTES

# `regions` is (source, destination, length) as int64[num_regions, 3]; each is cut into tiles_each
# tiles, of which the last ones may be empty. Accesses are as wide as the mutual alignment of source
# and destination allows, at most 16 bytes. The ends are copied byte by byte. A thread issues four
# loads before its first store.
KERNEL = (
    r"""
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

extern "C" __global__ void copy_regions(const long long* regions, long long num_regions,
                                        long long tiles_each) {
    const long long num_tiles = num_regions * tiles_each;
    for (long long tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
        const long long* region = regions + tile / tiles_each * 3;
        const long long start = tile % tiles_each * TILE_BYTES;
        const long long rest = region[2] - start;
        if (rest <= 0) continue;
        const long long n = rest < TILE_BYTES ? rest : TILE_BYTES;
        const char* from = (const char*)region[0] + start;
        char* to = (char*)region[1] + start;
        const unsigned long long apart = (unsigned long long)from ^ (unsigned long long)to;
        if (apart % 16 == 0) copy_as<wide_t>(to, from, n);
        else if (apart % 8 == 0) copy_as<unsigned long long>(to, from, n);
        else if (apart % 4 == 0) copy_as<unsigned>(to, from, n);
        else if (apart % 2 == 0) copy_as<unsigned short>(to, from, n);
        else copy_as<char>(to, from, n);
    }
}
""".replace("TILE_BYTES", str(TILE_BYTES))
    + CHECKSUM_KERNEL
)


@dataclass(frozen=True)
class Table:
    """A list of regions for the kernel, in both memories from `offset` on."""

    handle: int
    offset: int
    nbytes: int
    tiles_each: int  # or parts, for a checksum


class PackKernel:
    """The kernels on one device. Owns registered host memory and equally much device memory, for
    the tables in use, and a slab on the device for each direction of the bus."""

    def __init__(self, cuda: Cuda, device: int) -> None:
        """Compile the kernels, and load them: later, that might wait for other kernels.

        Raises:
            ConfigError: there is no compiler.
            TransportError: the device refuses, or has no memory for the slabs.
        """
        self._cuda = cuda
        with contextlib.ExitStack() as undo:
            self._kernels = Kernels(cuda, device, KERNEL)
            undo.callback(self._kernels.close)
            self._host = Arena(TABLES_BYTES)
            undo.callback(self._host.close)
            cuda.register(self._host.address, TABLES_BYTES)
            undo.callback(cuda.unregister, self._host.address)
            self._device_address = cuda.allocate(DEVICE_BYTES)
            undo.callback(cuda.free, self._device_address)
            self._buddy = Buddy(TABLES_BYTES, 4096)
            self.slab_to_host = self._device_address + TABLES_BYTES
            self.slab_from_host = self.slab_to_host + STAGE_BYTES
            self._constants = self.slab_from_host + STAGE_BYTES
            self._load()
            self._undo = undo.pop_all()

    def write(self, sources: Int64s, destinations: Int64s, lengths: Int64s) -> Table | None:
        """Write a table into host memory. Returns None if there is no room for it."""
        rows = np.stack((sources, destinations, lengths), axis=1)
        return self._keep(rows.tobytes(), -(-int(lengths.max()) // TILE_BYTES))

    def write_sum(self, addresses: Int64s, behind: Int64s, lengths: Int64s) -> Table | None:
        """Write a table for `add_checksums`, behind a row that is the sum. Returns None if there is
        no room for it."""
        rows = np.stack((addresses, behind, lengths), axis=1)
        return self._keep(bytes(ROW_BYTES) + rows.tobytes(), -(-int(lengths.max()) // PART_BYTES))

    def upload(self, table: Table, stream: int) -> None:
        """Enqueue the table's copy to the device."""
        address = self._device_address + table.offset
        self._cuda.copy(address, self._host.address + table.offset, table.nbytes, stream)

    def launch(self, table: Table, first: int, num: int, stream: int) -> None:
        """Enqueue the copies of rows [first, first + num) of a table."""
        rows = self._device_address + table.offset + ROW_BYTES * first
        blocks = min(max(num * table.tiles_each, 1), MAX_BLOCKS)
        arguments = rows, num, table.tiles_each
        self._kernels.launch("copy_regions", blocks, NUM_THREADS, stream, *arguments)

    def add_checksums(self, table: Table, stream: int, *, is_start: bool) -> None:
        """Enqueue the sum of a table's checksums, and its copy to the host. `is_start`: the first
        row is the start of the stream."""
        place, num = self._device_address + table.offset, table.nbytes // ROW_BYTES - 1
        blocks = min(max(-(-num * table.tiles_each // NUM_THREADS), 1), MAX_BLOCKS)
        self._kernels.launch(
            "add_checksums", blocks, NUM_THREADS, stream,
            place + ROW_BYTES, num, table.tiles_each, self._constants, place, int(is_start),
        )  # fmt: skip
        self._cuda.copy(self._host.address + table.offset, place, 8, stream)

    def sum_of(self, table: Table) -> int:
        """Return the sum that has come to the host."""
        return int.from_bytes(self._host.view(table.offset, 8)[:4], "little")

    def free(self, table: Table) -> None:
        """Free a table whose copies have ended."""
        self._buddy.free(table.handle)

    def close(self) -> None:
        """Free all memory, and unload the kernel; idempotent."""
        self._undo.close()

    def _keep(self, content: bytes, tiles_each: int) -> Table | None:
        try:
            handle = self._buddy.alloc(len(content))
        except MemoryError:
            return None
        offset = self._buddy.offset(handle)
        self._host.view(offset, len(content))[:] = content
        return Table(handle, offset, len(content), tiles_each)

    def _load(self) -> None:
        stream = self._cuda.create_stream()
        try:
            self._host.view(0, CONSTANTS_BYTES)[:] = tables()
            self._cuda.copy(self._constants, self._host.address, CONSTANTS_BYTES, stream)
            self._cuda.synchronize(stream)
            self.launch(Table(0, 0, 0, 1), 0, 0, stream)
            self.add_checksums(Table(0, 0, ROW_BYTES, 1), stream, is_start=False)
            self._cuda.synchronize(stream)
        finally:
            self._cuda.destroy_stream(stream)
