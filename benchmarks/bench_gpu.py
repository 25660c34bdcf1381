"""The rates of a GPU engine's parts beside the machine's own limits, on one GPU.

push     CUDA IPC, process to process            the time beyond a device-to-device copy's
pack     scattered regions into one and back     beside a device-to-device copy of the same size
pool     device memory to the pinned pool, back  beside torch's pinned copy; also under transfers
commands what one call of CUDA's takes of the thread that makes it
groups   device memory of a group of two ranks   beside 4 + 6c MiB, in two processes

Rates are GB/s of bytes moved (each is read once and written once). `--part` runs one alone.

A push has no rate beside that of a copy: on one GPU, a copy of 256 MiB takes an eighth of a
millisecond, and no push is that short. What a push adds is the same for every size, and counts on
every link.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Row, alternate, arguments, progress, record, spread
from mempool import Arena
from p2p_engine.gpu.cuda import Cuda
from p2p_engine.gpu.device import Device, DeviceJob
from p2p_engine.gpu.pack_kernel import TABLES_BYTES, PackKernel
from p2p_engine.memory.layout import Int64s
from tests.gpu import checks
from tests.gpu.machine import Machine
from tests.gpu.peer import Processes
from tests.processes import together

MIB = 1 << 20
Contenders = Mapping[str, Callable[[], float]]
REGION_BYTES = 32 << 10
BATCH = 10  # copies for which the device is waited for once


PARTS = ("pack", "push", "pool", "commands", "groups")


class GpuBench:
    """One device and how large its measurements are."""

    def __init__(
        self, processes: Processes, *, total: int, repetitions: int, seed: int = 1
    ) -> None:
        """`total` bytes are moved at a time."""
        self.processes = processes
        self.total = total
        self.repetitions = repetitions
        self._seed = seed
        self._cuda, _ = processes.machine.load()
        self._device = Device(self._cuda, 0)
        self._stream = self._cuda.create_stream()

    def close(self) -> None:
        """Give everything back."""
        self._cuda.destroy_stream(self._stream)
        if not self._device.close(10):
            raise RuntimeError("the device's thread did not end")

    def pack(self) -> list[Row]:
        """Regions of a cache, in random order, into one piece and back: the kernel alone, and all
        from the order to its end. That includes the table of the regions, and as many orders at
        once as there is room for tables."""
        rows, kernel = [], PackKernel(self._cuda, 0)
        cache, slab = self._cuda.allocate(2 * self.total), self._cuda.allocate(2 * self.total)
        for nbytes in (4096, 65536, MIB, 4 * MIB):
            if nbytes > self.total // 4:
                continue
            order = np.random.default_rng(self._seed).permutation(2 * self.total // nbytes)
            starts = cache + order[: self.total // nbytes] * nbytes
            lengths = np.full(len(starts), nbytes)
            flat = slab + np.arange(len(starts)) * nbytes
            for name, sides in (("pack", (starts, flat)), ("unpack", (flat, starts))):
                contenders: dict[str, Callable[[], float]] = {
                    "limit": partial(self._copies, slab + self.total, slab),
                    "whole": partial(
                        self._by_device, sides[0], sides[1], lengths, at_once=_tables(len(lengths))
                    ),
                }
                contenders["kernel"] = partial(self._launches, kernel, sides[0], sides[1], lengths)
                if nbytes > 4096:
                    contenders["engine"] = partial(self._one_by_one, sides[0], sides[1], nbytes)
                rows.append(self._row(f"{name} {nbytes} B", contenders))
        kernel.close()
        self._cuda.free(cache)
        self._cuda.free(slab)
        return rows

    def pool(self) -> list[Row]:
        """Device memory and registered host memory, beside torch's pinned copy; then the same while
        two processes exchange."""
        arena, memory = Arena(self.total), self._cuda.allocate(self.total)
        self._cuda.register(arena.address, self.total)
        with _pinned(self._cuda, self.total) as pinned:
            pairs = {
                "store": ((memory, arena.address), (memory, pinned)),
                "load": ((arena.address, memory), (pinned, memory)),
            }
            contenders = {
                name: {
                    "limit": partial(self._copies, limit[1], limit[0]),
                    "whole": partial(self._by_device, *np.array([[*ours, self.total]]).T),
                }
                for name, (ours, limit) in pairs.items()
            }
            places = np.arange(self.total // REGION_BYTES) * REGION_BYTES
            mixed, sizes = (
                np.random.default_rng(self._seed).permutation(places),
                np.full(len(places), REGION_BYTES),
            )
            contenders["store"]["scattered"] = partial(
                self._by_device, memory + mixed, arena.address + places, sizes
            )
            contenders["load"]["scattered"] = partial(
                self._by_device, arena.address + places, memory + mixed, sizes
            )
            rows = [self._row(f"pool {name}", each) for name, each in contenders.items()]
            with self._exchange() as is_over:
                for name, each in contenders.items():
                    row = self._row(f"pool {name}, under transfers", each)
                    rows.append({**row, "ended_before": is_over()})
        self._cuda.unregister(arena.address)
        self._cuda.free(memory)
        arena.close()
        return rows

    def push(self) -> list[Row]:
        """Pieces from a process to another one, by our transport, one at a time: its own account of
        the time in which each was written, less the time of a copy of that size."""
        rows = []
        one, two = self.processes.two()
        settings = self.processes.machine.settings(
            "cuda_ipc", kv_buffer_size=8 * self.total, mem_pool_size_gb=0.5
        )
        _, theirs = together([one, two], "start", [(settings, self.total)] * 2)
        source, target = self._cuda.allocate(self.total), self._cuda.allocate(self.total)
        for nbytes in (self.total // 64, self.total // 4, self.total):
            before = one.ask("stats")
            for number in range(4 * self.repetitions):
                names = [f"push {nbytes} {number}"]
                two.tell("begin", names, nbytes, one.ask("address"), "receive")
                one.ask("begin", names, nbytes, theirs, "send")
                two.answer()
                ended = together([one, two], "outcomes", [(60.0,)] * 2)
                if any(side["errors"] for side in ended):
                    raise RuntimeError(f"push: {ended}")
            after = one.ask("stats")
            seconds = after["writing_seconds"] - before["writing_seconds"]
            moved = (after["sent_bytes"] - before["sent_bytes"]) / max(seconds, 1e-9) / 1e9
            limit = [self._copies(target, source, nbytes) for _ in range(self.repetitions)]
            added = seconds / (4 * self.repetitions) - nbytes / (float(np.median(limit)) * 1e9)
            rows.append({
                "what": f"push {nbytes / MIB:g} MiB", "ours_median": round(moved, 3),
                **spread(limit, "limit_"), "added_ms": round(1e3 * added, 4),
            })  # fmt: skip
        self._cuda.free(source)
        self._cuda.free(target)
        return rows

    def commands(self) -> list[Row]:
        """Microseconds of this thread for a call, without waiting for what it orders."""
        memory, event = self._cuda.allocate(2 * REGION_BYTES), self._cuda.create_event()
        kernel = PackKernel(self._cuda, 0)
        places = np.arange(4096, dtype=np.int64)
        table = kernel.write(places, places, places)
        if table is None:
            raise RuntimeError("no room for the table")
        calls: dict[str, Callable[[], object]] = {
            "copy": lambda: self._cuda.copy(memory, memory + REGION_BYTES, 4096, self._stream),
            "launch": lambda: kernel.launch(table, 0, 0, self._stream),
            "record": lambda: self._cuda.record(event, self._stream),
            "query": lambda: self._cuda.is_complete(event),
            "table of 4096 regions": lambda: kernel.free(
                kernel.write(places, places, places) or table
            ),
        }
        rows = []
        for name, call in calls.items():
            samples = []
            for _ in range(self.repetitions):
                self._cuda.synchronize(self._stream)
                start = time.perf_counter()
                for _ in range(100):
                    call()
                samples.append((time.perf_counter() - start) / 100 * 1e6)
            rows.append({"what": f"command: {name}", **spread(samples, "us_")})
        self._cuda.synchronize(self._stream)
        kernel.close()
        self._cuda.free(memory)
        self._cuda.destroy_event(event)
        return rows

    def groups(self) -> list[Row]:
        """Communicators between two processes."""
        return [
            {"what": f"group of {channels}", **checks.group_memory(self.processes, channels)}
            for channels in (1, 2, 4, 8, 16)
        ]

    def _row(self, name: str, contenders: Contenders) -> Row:
        """Measure side by side; ratios are to the limit, round by round, at the median."""
        rates = alternate(contenders, self.repetitions)
        row: Row = {"what": name, **spread(rates["limit"], "limit_")}
        for kind in rates.keys() - {"limit"}:
            ratios = np.array(rates[kind]) / np.array(rates["limit"])
            row |= {**spread(rates[kind], f"{kind}_"), f"{kind}_ratio": round(np.median(ratios), 3)}
        return row

    def _copies(self, destination: int, source: int, nbytes: int = 0) -> float:
        """GB/s of the driver's own copies, one behind the other."""
        size = nbytes or self.total
        return self._timed(size, lambda: self._cuda.copy(destination, source, size, self._stream))

    def _launches(
        self, kernel: PackKernel, sources: Int64s, destinations: Int64s, lengths: Int64s
    ) -> float:
        """GB/s of the kernel on a table that is there already."""
        table = kernel.write(sources, destinations, lengths)
        if table is None:
            raise RuntimeError("no room for the table")
        kernel.upload(table, self._stream)
        rate = self._timed(
            int(lengths.sum()), lambda: kernel.launch(table, 0, len(lengths), self._stream)
        )
        kernel.free(table)
        return rate

    def _one_by_one(self, sources: Int64s, destinations: Int64s, nbytes: int) -> float:
        """GB/s of a command of the copy engine for each region."""
        pairs = list(zip(destinations.tolist(), sources.tolist(), strict=True))

        def enqueue() -> None:
            for destination, source in pairs:
                self._cuda.copy(destination, source, nbytes, self._stream)

        return self._timed(nbytes * len(pairs), enqueue)

    def _timed(self, nbytes: int, enqueue: Callable[[], None]) -> float:
        enqueue()
        self._cuda.synchronize(self._stream)
        start = time.perf_counter()
        for _ in range(BATCH):
            enqueue()
        self._cuda.synchronize(self._stream)
        return BATCH * nbytes / (time.perf_counter() - start) / 1e9

    def _by_device(
        self, sources: Int64s, destinations: Int64s, lengths: Int64s, at_once: int = BATCH
    ) -> float:
        """GB/s from the order to the end, by the device's thread, several orders at a time."""
        jobs: collections.deque[DeviceJob] = collections.deque()
        start = time.perf_counter()
        for number in range(BATCH + at_once):
            if number < BATCH:
                jobs.append(self._device.copy(sources, destinations, lengths))
            if number >= at_once - 1 and jobs:
                job = jobs.popleft()
                if not job.wait(60) or job.state != "done":
                    raise RuntimeError(f"copy: {job.state} {job.error}")
        return BATCH * int(lengths.sum()) / (time.perf_counter() - start) / 1e9

    @contextlib.contextmanager
    def _exchange(self) -> Iterator[Callable[[], bool]]:
        """Two processes that move pieces both ways by cuda_ipc; yields whether they have ended."""
        plan = {
            "name": "load", "send_type": "PUT_ASYNC", "count": 5 * self.repetitions,
            "timeout": 60.0, "max_bytes": self.total // 4,
            "budget_bytes": 5 * self.repetitions * self.total,
        }  # fmt: skip
        peers = self.processes.two()
        settings = self.processes.machine.settings(
            "cuda_ipc", kv_buffer_size=4 * self.total, mem_pool_size_gb=0.5
        )
        addresses = together(peers, "start", [(settings, plan["max_bytes"])] * 2)
        for side, peer in enumerate(peers):
            peer.tell("exchange", plan, side, addresses[1 - side])
        yield lambda: any(peer.has_answered() for peer in peers)
        for peer in peers:
            peer.answer()


def _tables(num_regions: int) -> int:
    """How many orders of so many small regions the device has room for; beyond that, each region
    would be a copy of its own."""
    table_bytes = 3 * 8 * num_regions
    return max(1, min(BATCH, TABLES_BYTES // (1 << (table_bytes - 1).bit_length())))


@contextlib.contextmanager
def _pinned(cuda: Cuda, nbytes: int) -> Iterator[int]:
    """Torch's pinned memory, where torch has a GPU; else host memory that is registered."""
    gpu: Any = torch.cuda
    if gpu.is_available():
        tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        yield tensor.data_ptr()
        return
    arena = Arena(nbytes)
    cuda.register(arena.address, nbytes)
    yield arena.address
    cuda.unregister(arena.address)
    arena.close()


def parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    made = arguments("gpu", __doc__ or "", repetitions=10)
    made.add_argument("--part", choices=PARTS)
    return made


def main() -> None:
    """Run the parts and keep the figures."""
    options, machine = parser().parse_args(), Machine()
    gpu: Any = torch.cuda
    if not gpu.is_available():
        raise SystemExit("no GPU: nothing is measured")
    gpu.init()
    rows: list[Row] = []
    with Processes(machine) as processes:
        bench = GpuBench(
            processes, total=256 * MIB, repetitions=options.repetitions, seed=options.seed
        )
        for name in (options.part,) if options.part else PARTS:
            progress(name)
            rows += getattr(bench, name)()
        bench.close()
    record(rows, options, machine.describe())


if __name__ == "__main__":
    main()
