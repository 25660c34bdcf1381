"""Host to host: 256 MiB in scattered blocks into another process's memory, peers side by side.

The timed part, for each contender:
  shm, tcp   engine.send() of a chunk whose bytes are ready, until COMMIT: they lie in the
             receiver's arena, as after a one-sided WRITE
  nixl       transfer() until DONE of a WRITE whose descriptors are prepared
  nixl tcp   the same with UCX_TLS=tcp, as between two hosts without RDMA
  raw socket memory that lies in one piece through one plain TCP socket, until its last byte is
             in the receiver's memory: what one stream can reach
  limit      torch.index_select of the same blocks into shared memory, one core, one process
  copy_now   our own native copy of the same blocks into the same shared memory
Every round writes new words into every block, and every round of a transfer is verified byte for
byte by the receiver. "cold" is the first transfer of two engines that have just started.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from benchmarks.harness import Row, alternate, arguments, progress, ratio, record, spread
from benchmarks.memory import HostCache, address_of, ordinary_memory, random_memory, scattered
from benchmarks.nixl_peer import NixlInitiator, NixlTarget, installed
from benchmarks.processes import Remote
from benchmarks.raw_socket import RawReceiver, RawSender
from mempool import Arena, copy_now
from p2p_engine import EngineConfig, P2pNcclEngine, TransferKey
from p2p_engine.memory.paged import PagedSink, PagedSource
from p2p_engine.peers.link import PeerAddress
from tests.processes import ChildError

TRANSPORTS = ("shm", "tcp")
UCX_TRANSPORTS = {"nixl": None, "nixl tcp": "tcp"}  # by contender; None: what UCX chooses
SECONDS = 60.0
KIB, MIB = 1 << 10, 1 << 20


def make_engine(transport: str) -> P2pNcclEngine:
    """An engine with the default budgets, one transport."""
    return P2pNcclEngine(EngineConfig(transports=(transport,)))


@contextlib.contextmanager
def awake(remotes: Sequence[Remote]) -> Iterator[None]:
    """Let NIXL's processes run for now. They poll also while nothing moves, so they are stopped
    while others are measured."""
    for remote in remotes:
        os.kill(remote.pid, signal.SIGCONT)
    try:
        yield
    finally:
        for remote in remotes:
            os.kill(remote.pid, signal.SIGSTOP)


class TransferReceiver:
    """The receiving process: an engine for each transport."""

    def __init__(self, total_bytes: int, seed: int, transports: Sequence[str] = TRANSPORTS) -> None:
        torch.set_num_threads(1)
        self._memory = ordinary_memory(total_bytes)
        self._source = random_memory(2 * total_bytes, seed)
        self._engines = {name: make_engine(name) for name in transports}

    def address(self, transport: str) -> str:
        """Where to dial."""
        return self._engines[transport].zmq_address

    def restart(self, transport: str) -> str:
        """Make a new engine with a new arena; returns where to dial."""
        self._engines[transport].close()
        self._engines[transport] = make_engine(transport)
        return self.address(transport)

    def verify(self, transport: str, number: int, block_bytes: int, seed: int) -> bool:
        """Take what has landed out of the arena and compare it with what was sent."""
        mine, its = (HostCache(item, 1, block_bytes) for item in (self._memory, self._source))
        num_blocks = mine.paged.num_blocks
        block_ids = scattered(num_blocks, its.paged.num_blocks, seed)
        its.stamp(block_ids, number)
        order = np.arange(num_blocks)
        engine = self._engines[transport]
        engine.receive(round_key(number), PagedSink(mine.paged, order, 0, 0)).wait(SECONDS)
        return mine.holds(order, its, block_ids) and engine.stats()["live_bytes"] == 0

    def close(self) -> None:
        """Close the engines."""
        for engine in self._engines.values():
            engine.close()


def round_key(number: int) -> TransferKey:
    """The key of one round."""
    return TransferKey(f"round-{number}")


class TransferBench:
    """The sending process, which is also where the limits are measured."""

    def __init__(self, total_bytes: int, seed: int, transports: Sequence[str] = TRANSPORTS) -> None:
        torch.set_num_threads(1)
        self.total_bytes, self.seed = total_bytes, seed
        self.numbers = itertools.count(1)
        self.memory = random_memory(2 * total_bytes, seed)
        self.receiver = Remote(TransferReceiver, total_bytes, seed, transports)
        self.engines = {name: make_engine(name) for name in transports}
        self.shared = Arena(total_bytes)
        self.raw_receiver = Remote(RawReceiver, total_bytes)
        self.raw_sender = RawSender(self.raw_receiver.ask("port"), total_bytes)
        found = {name: self._start_nixl(name) for name in UCX_TRANSPORTS}
        self.nixl_pairs = {name: pair for name, pair in found.items() if pair}

    def _start_nixl(self, name: str) -> list[Remote]:
        if not installed():
            progress(f"without {name}: it is not installed")
            return []
        started = []
        chosen = UCX_TRANSPORTS[name]
        environment = {key: value for key, value in os.environ.items() if key != "UCX_TLS"}
        if chosen is not None:
            environment["UCX_TLS"] = chosen
        most = self.total_bytes, self.seed
        try:
            started.append(Remote(NixlTarget, *most, environment=environment))
            endpoint = started[0].ask("endpoint")
            started.append(Remote(NixlInitiator, *most, *endpoint, environment=environment))
        except ChildError as error:
            progress(f"without {name}: {error}")
            for remote in started:
                remote.close()
            return []
        with awake(started):
            return started

    def use(self, block_bytes: int) -> None:
        """Cut the memory into blocks of this size and choose half of them."""
        self.cache = HostCache(self.memory, 1, block_bytes)
        out_of = self.cache.paged.num_blocks
        self.block_bytes, self.block_ids = block_bytes, scattered(out_of // 2, out_of, self.seed)
        for pair in self.nixl_pairs.values():
            with awake(pair):
                pair[1].ask("prepare", block_bytes, self.seed)

    def send(self, transport: str, address: str) -> float:
        """One round of ours; returns the seconds from send to COMMIT."""
        number = next(self.numbers)
        self.cache.stamp(self.block_ids, number)
        source = PagedSource(self.cache.paged, self.block_ids, 0, 0)
        engine, peer = self.engines[transport], PeerAddress(address)
        start = time.perf_counter()
        engine.send(round_key(number), peer, source).wait(SECONDS)
        seconds = time.perf_counter() - start
        place = (transport, number, self.block_bytes, self.seed)
        self._check(transport, self.receiver.ask("verify", *place))
        return seconds

    def nixl(self, name: str) -> float:
        """One round of NIXL's; returns the seconds of one WRITE."""
        number = next(self.numbers)
        target, initiator = self.nixl_pairs[name]
        with awake(self.nixl_pairs[name]):
            seconds: float = initiator.ask("write", number)
            self._check(name, target.ask("verify", self.block_bytes, self.seed, number))
        return seconds

    def raw(self) -> float:
        """One round of a plain socket; returns the seconds until its last byte has arrived."""
        total = self.raw_sender.stamp(next(self.numbers))
        seconds = self.raw_sender.send()
        self._check("raw socket", self.raw_receiver.ask("verify", total))
        return seconds

    def limit(self) -> float:
        """Gather the blocks with torch into shared memory."""
        target = torch.frombuffer(self.shared, dtype=torch.uint8)
        source, rows = torch.from_numpy(self.cache.pages[0]), torch.from_numpy(self.block_ids)
        out = target.view(len(rows), -1)
        start = time.perf_counter()
        if len(rows) > 1:
            torch.index_select(source, 0, rows, out=out)
        else:
            out.copy_(source[rows[0] :][:1])
        return time.perf_counter() - start

    def native_limit(self) -> float:
        """Gather the blocks with our native copy into shared memory."""
        offsets = np.arange(len(self.block_ids)) * self.block_bytes
        lengths = np.full(len(offsets), self.block_bytes)
        sources = address_of(self.memory) + self.block_ids * self.block_bytes
        start = time.perf_counter()
        copy_now(sources, self.shared.address + offsets, lengths)
        return time.perf_counter() - start

    def cold(self, transport: str, settle: float) -> float:
        """The first transfer of two new engines, `settle` seconds after their start."""
        address = self.receiver.ask("restart", transport)
        self.engines[transport].close()
        self.engines[transport] = make_engine(transport)
        time.sleep(settle)
        return self.send(transport, address)

    def close(self) -> None:
        """End the processes and engines."""
        for engine in self.engines.values():
            engine.close()
        self.raw_sender.close()
        nixl = [remote for pair in self.nixl_pairs.values() for remote in reversed(pair)]
        for remote in nixl:
            os.kill(remote.pid, signal.SIGCONT)
        for remote in [self.receiver, self.raw_receiver, *nixl]:
            remote.close()

    def _check(self, name: str, verified: bool) -> None:
        if not verified:
            raise RuntimeError(f"{name}: the bytes that arrived are not those that were sent")


def contenders(bench: TransferBench) -> dict[str, Callable[[], float]]:
    """Return the contenders, in the order of a round."""
    runs: dict[str, Callable[[], float]] = {"limit": bench.limit, "copy_now": bench.native_limit}
    for name in bench.engines:
        address = bench.receiver.ask("address", name)
        shown = f"our {name}" if name in UCX_TRANSPORTS else name
        runs[shown] = lambda n=name, a=address: bench.send(n, a)  # type: ignore[misc]
    runs["raw socket"] = bench.raw
    for name in bench.nixl_pairs:
        runs[name] = lambda n=name: bench.nixl(n)  # type: ignore[misc]
    return runs


def rows_of(bench: TransferBench, case: str, seconds: dict[str, list[float]]) -> list[Row]:
    """One row for each contender: GB/s, and its share of the limit, round by round."""
    rows = []
    for name, samples in seconds.items():
        rates = [bench.total_bytes / value / 1e9 for value in samples]
        row = {"case": case, "contender": name, **spread(rates, "gb_per_s_", 2)}
        row["of_limit"] = ratio(seconds["limit"], samples)
        row["of_copy_now"] = ratio(seconds["copy_now"], samples)
        for peer in ("raw socket", *UCX_TRANSPORTS):
            if peer in seconds:
                row[f"over_{peer.replace(' ', '_')}"] = ratio(seconds[peer], samples)
        rows.append(row)
    return rows


def measure(bench: TransferBench, block_sizes: Sequence[int], repetitions: int) -> list[Row]:
    """Every block size, then the first bytes after start."""
    rows = []
    for block_bytes in block_sizes:
        progress(f"blocks of {block_bytes >> 10} KiB")
        bench.use(block_bytes)
        rows += rows_of(
            bench, f"{block_bytes >> 10} KiB", alternate(contenders(bench), repetitions)
        )
    for label, settle in (("cold, at once", 0.0), ("cold, after 2 s", 2.0)):
        progress(label)
        bench.use(64 * KIB)
        runs: dict[str, Callable[[], float]] = {
            "limit": bench.limit,
            "copy_now": bench.native_limit,
            "shm": lambda s=settle: bench.cold("shm", s),  # type: ignore[misc]
            "tcp": lambda s=settle: bench.cold("tcp", s),  # type: ignore[misc]
        }
        rows += rows_of(bench, label, alternate(runs, repetitions))
    return rows


def main() -> None:
    """Measure, print, record."""
    parser = arguments("transfer", "host-to-host transfer rate", repetitions=9)
    parser.add_argument("--total-mib", type=int, default=256)
    options = parser.parse_args()
    total_bytes = options.total_mib * MIB
    bench = TransferBench(total_bytes, options.seed)
    try:
        sizes = [16 * KIB, 64 * KIB, MIB, total_bytes]
        record(measure(bench, sizes, options.repetitions), options)
    finally:
        bench.close()


if __name__ == "__main__":
    main()
