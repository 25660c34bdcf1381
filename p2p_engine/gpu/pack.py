"""Pack: copies lists of regions on a GPU: gather, scatter, or both.

Few regions, and large ones, go by the copy engines: one command each, and no multiprocessor. Many
small regions on the device take one launch of a kernel. Many small regions on the way to or from
host memory are packed into a slab on the device, or unpacked from it, and cross the bus in large
pieces: no kernel gets an address in host memory. Without the kernel, each region is a command.

A command takes 2 to 4 us of the thread that gives it, so an order is given in several steps.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterator

from p2p_engine.errors import P2pError, TransportError
from p2p_engine.gpu.cuda import Cuda
from p2p_engine.gpu.cuts import SlabLoad, level, stage
from p2p_engine.gpu.pack_kernel import TILE_BYTES, PackKernel, Table
from p2p_engine.memory.layout import Int64s

logger = logging.getLogger(__name__)

FEW = 4  # regions, whose commands take no longer than the kernel's table
COMMANDS = 64  # in one step: a quarter of a millisecond


class Way(enum.Enum):
    """The direction of a copy; each has a copy engine of its own."""

    ON_DEVICE = enum.auto()
    TO_HOST = enum.auto()
    FROM_HOST = enum.auto()


# From this mean size on, a command for each region keeps up with the memory, or with the bus.
ENGINE_BYTES = {Way.ON_DEVICE: 4 << 20, Way.TO_HOST: 256 << 10, Way.FROM_HOST: 256 << 10}


class PackOrder:
    """The copies of one list of regions."""

    def __init__(self, steps: Iterator[None], release: Callable[[], None]) -> None:
        self._steps = steps
        self.release = release  # call it when the copies have ended

    def advance(self) -> bool:
        """Enqueue some more copies; returns whether all are enqueued.

        Raises:
            TransportError: the device refuses. What is enqueued still runs.
        """
        return next(self._steps, self) is self


class Pack:
    """The ways in which one device copies many regions. For the device's thread."""

    def __init__(self, cuda: Cuda, device: int) -> None:
        """Make the kernel ready, unless something is missing for it."""
        self._cuda = cuda
        self.kernel: PackKernel | None = None
        try:
            self.kernel = PackKernel(cuda, device)
        except P2pError as error:
            logger.warning("no pack kernel, each region is a copy of its own: %s", str(error))

    def way(self, sources: Int64s, destinations: Int64s) -> Way:
        """Return the direction of a copy; one region in host memory decides."""
        if self._is_host(sources):
            return Way.FROM_HOST
        return Way.TO_HOST if self._is_host(destinations) else Way.ON_DEVICE

    def order(
        self,
        sources: Int64s,
        destinations: Int64s,
        lengths: Int64s,
        way: Way,
        stream: int,
        slices: tuple[int, int] | None = None,
    ) -> PackOrder:
        """Plan copies between device, host and peer memory. `slices` are the start and the size of
        those in which the host memory is page-locked; no region crosses them."""
        kept = lengths > 0
        if not kept.all():
            sources, destinations, lengths = sources[kept], destinations[kept], lengths[kept]
        if len(lengths) > FEW and lengths.mean() < ENGINE_BYTES[way] and self.kernel is not None:
            regions = level(sources, destinations, lengths, TILE_BYTES)
            order = self._by_kernel(self.kernel, *regions, way, stream, slices)
            if order is not None:
                return order
        return PackOrder(self._one_by_one(sources, destinations, lengths, stream), _nothing)

    def checksum(
        self, rows: tuple[Int64s, Int64s, Int64s], stream: int, sums: list[int], *, is_start: bool
    ) -> PackOrder:
        """Plan a launch of `checksum.batches`; at its release, its sum is added to the list. It
        needs the kernel, and waits for room for its table."""
        held: list[Table] = []

        def release() -> None:
            if self.kernel is not None and held:
                sums.append(self.kernel.sum_of(held[0]))
                self.kernel.free(held.pop())

        return PackOrder(self._add(rows, held, stream, is_start=is_start), release)

    def close(self) -> None:
        """Free what the kernel has. All copies must have ended."""
        if self.kernel is not None:
            self.kernel.close()

    def _is_host(self, addresses: Int64s) -> bool:
        """Whether an address is in host memory, which a kernel may not be able to reach."""
        if not len(addresses):
            return False
        low, high = int(addresses.min()), int(addresses.max())
        return any(
            bool(((addresses >= start) & (addresses < start + nbytes)).any())
            for start, nbytes in self._cuda.host_ranges.items()
            if start <= high and low < start + nbytes  # with many peers, few of theirs
        )

    def _by_kernel(
        self,
        kernel: PackKernel,
        sources: Int64s,
        destinations: Int64s,
        lengths: Int64s,
        way: Way,
        stream: int,
        slices: tuple[int, int] | None,
    ) -> PackOrder | None:
        """Return None if the kernel would save few commands, if it cannot reach the memory, or if
        there is no room for the table."""
        loads = [SlabLoad(0, len(lengths), [])]
        if way is Way.TO_HOST:
            slab = kernel.slab_to_host
            sources, destinations, lengths, loads = stage(
                sources, destinations, lengths, slab, slices
            )
        elif way is Way.FROM_HOST:
            slab = kernel.slab_from_host
            destinations, sources, lengths, loads = stage(
                destinations, sources, lengths, slab, slices
            )
            if self._is_host(destinations):
                return None
        if 2 * sum(len(load.copies) for load in loads) > len(lengths):
            return None
        table = kernel.write(sources, destinations, lengths)
        if table is None:
            return None
        steps = self._load_by_load(kernel, table, loads, way, stream)
        return PackOrder(steps, lambda: kernel.free(table))

    def _load_by_load(
        self, kernel: PackKernel, table: Table, loads: list[SlabLoad], way: Way, stream: int
    ) -> Iterator[None]:
        """A slab belongs to one step at a time, whose commands follow each other in the stream."""
        kernel.upload(table, stream)
        for number, load in enumerate(loads):
            if number:
                yield
            if way is Way.TO_HOST:
                kernel.launch(table, load.first, load.num, stream)
            for host, place, nbytes in load.copies:
                ends = (host, place) if way is Way.TO_HOST else (place, host)
                self._cuda.copy(*ends, nbytes, stream)
            if way is not Way.TO_HOST:
                kernel.launch(table, load.first, load.num, stream)

    def _add(
        self,
        rows: tuple[Int64s, Int64s, Int64s],
        held: list[Table],
        stream: int,
        *,
        is_start: bool,
    ) -> Iterator[None]:
        kernel = self.kernel
        if kernel is None:
            raise TransportError("no kernel computes checksums here")
        while (table := kernel.write_sum(*rows)) is None:
            yield
        held.append(table)
        kernel.upload(table, stream)
        kernel.add_checksums(table, stream, is_start=is_start)

    def _one_by_one(
        self, sources: Int64s, destinations: Int64s, lengths: Int64s, stream: int
    ) -> Iterator[None]:
        copies = zip(sources.tolist(), destinations.tolist(), lengths.tolist(), strict=True)
        for number, (source, destination, nbytes) in enumerate(copies):
            if number and number % COMMANDS == 0:
                yield
            self._cuda.copy(destination, source, nbytes, stream)


def _nothing() -> None:
    """Do nothing: there is nothing to release."""
