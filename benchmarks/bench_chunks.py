"""The cut: 512 MiB of KV from one paged cache into another process's, in chunks of several sizes.

Timed is from `send` of KV that is ready, while the receiver waits for it, until all of it lies
in the receiver's cache. `whole` is one chunk: gather, flight and scatter then follow one another
over shm. `by layers` is 16 MiB as well, but cut by layers first and by blocks within a layer, as a
shipment for each layer. Every round writes new words into every page, and the receiver compares all
bytes. `messages` are those of the sender in one round; the receiver sends as many. `cpu_ms_per_gib`
is the processor time of both processes, which other work on the machine changes little.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.harness import Row, alternate, arguments, progress, ratio, record, spread
from benchmarks.memory import HostCache, Int64s, ordinary_memory, random_memory, scattered
from benchmarks.processes import Remote
from p2p_engine import EngineConfig, P2pNcclEngine, TransferKey
from p2p_engine.memory.paged import PagedCache, PagedSink, PagedSource
from p2p_engine.peers.link import PeerAddress
from p2p_engine.transfer import Transfer

TRANSPORTS = ("shm", "tcp")
NUM_LAYERS = 16
SECONDS = 60.0
MIB = 1 << 20
SIZES = {"1 MiB": MIB, "4 MiB": 4 * MIB, "16 MiB": 16 * MIB, "64 MiB": 64 * MIB, "whole": 1 << 40}
BY_LAYERS = "16 MiB by layers"


def keys_of(number: int, *, by_layers: bool) -> list[TransferKey]:
    """The keys of one round."""
    layers = range(NUM_LAYERS) if by_layers else [""]
    return [TransferKey(f"round-{number}", str(layer)) for layer in layers]


def caches_of(cache: PagedCache, *, by_layers: bool) -> list[PagedCache]:
    """The cache, or each of its layers for itself."""
    if not by_layers:
        return [cache]
    return [
        PagedCache(
            cache.layer_addresses[layer : layer + 1],
            cache.block_strides[layer : layer + 1],
            cache.page_bytes[layer : layer + 1],
            cache.num_blocks,
        )
        for layer in range(NUM_LAYERS)
    ]


class ChunksReceiver:
    """The receiving process: an engine for each transport."""

    def __init__(self, total_bytes: int, page_bytes: int, seed: int) -> None:
        torch.set_num_threads(1)
        self._cache = HostCache(ordinary_memory(total_bytes), NUM_LAYERS, page_bytes)
        self._its = HostCache(random_memory(total_bytes, seed), NUM_LAYERS, page_bytes)
        self._order = np.arange(self._cache.paged.num_blocks)
        self._sent: Int64s = scattered(len(self._order), len(self._order), seed)
        self._engines = {name: make_engine(name) for name in TRANSPORTS}
        self._transfers: list[Transfer] = []
        self._cpu = 0.0

    def address(self, transport: str) -> str:
        """Where to dial."""
        return self._engines[transport].zmq_address

    def start(self, transport: str, number: int, by_layers: bool) -> None:
        """Wait for a round."""
        self._cpu = time.process_time()
        caches = caches_of(self._cache.paged, by_layers=by_layers)
        self._transfers = [
            self._engines[transport].receive(key, PagedSink(cache, self._order, 0, 0))
            for key, cache in zip(keys_of(number, by_layers=by_layers), caches, strict=True)
        ]

    def finish(self) -> tuple[float, float]:
        """When all of it was there, on the clock that all processes of this host share, and the
        seconds of processor time that it took here."""
        for transfer in self._transfers:
            transfer.wait(SECONDS)
        return time.monotonic(), time.process_time() - self._cpu

    def verify(self, number: int) -> bool:
        """Compare what came with what was sent."""
        self._its.stamp(self._sent, number)
        return self._cache.holds(self._order, self._its, self._sent)

    def close(self) -> None:
        """Close the engines."""
        for engine in self._engines.values():
            engine.close()


def make_engine(transport: str, chunk_bytes: int = SIZES["16 MiB"]) -> P2pNcclEngine:
    """An engine with the default budgets, one transport."""
    return P2pNcclEngine(EngineConfig(transports=(transport,), chunk_bytes=chunk_bytes))


class ChunksBench:
    """The sending process."""

    def __init__(self, total_bytes: int, page_bytes: int, seed: int) -> None:
        torch.set_num_threads(1)
        self.total_bytes = total_bytes
        self._cache = HostCache(random_memory(total_bytes, seed), NUM_LAYERS, page_bytes)
        num_blocks = self._cache.paged.num_blocks
        self._ids = scattered(num_blocks, num_blocks, seed)
        self._receiver = Remote(ChunksReceiver, total_bytes, page_bytes, seed)
        self._numbers = itertools.count(1)
        self.messages: dict[str, int] = {}
        self.cpu: dict[str, list[float]] = {}

    def contenders(self, transport: str) -> dict[str, Callable[[], float]]:
        """Each cut with an engine of its own."""
        peer = PeerAddress(self._receiver.ask("address", transport))
        self._engines = {name: make_engine(transport, size) for name, size in SIZES.items()}
        self._engines[BY_LAYERS] = make_engine(transport)
        self.cpu.clear()
        return {name: lambda n=name: self.send(transport, peer, n) for name in self._engines}  # type: ignore[misc]

    def send(self, transport: str, peer: PeerAddress, name: str) -> float:
        """One round; returns its seconds."""
        engine, number, by_layers = self._engines[name], next(self._numbers), name == BY_LAYERS
        self._cache.stamp(self._ids, number)
        self._receiver.ask("start", transport, number, by_layers)
        caches = caches_of(self._cache.paged, by_layers=by_layers)
        before = engine.stats()["messages_sent"]
        start, cpu = time.monotonic(), time.process_time()
        for key, cache in zip(keys_of(number, by_layers=by_layers), caches, strict=True):
            engine.send(key, peer, PagedSource(cache, self._ids, 0, 0))
        end, its_cpu = self._receiver.ask("finish")
        seconds: float = end - start
        self.cpu.setdefault(name, []).append(its_cpu + time.process_time() - cpu)
        self.messages[name] = engine.stats()["messages_sent"] - before
        if not self._receiver.ask("verify", number):
            raise RuntimeError(f"{name}: the bytes that arrived are not those that were sent")
        return seconds

    def close_engines(self) -> None:
        """Close this transport's."""
        for engine in self._engines.values():
            engine.close()

    def close(self) -> None:
        """End the other process."""
        self._receiver.close()


def measure(bench: ChunksBench, repetitions: int) -> list[Row]:
    """Every cut over every transport, all of a transport's in turn."""
    rows = []
    for transport in TRANSPORTS:
        progress(transport)
        seconds = alternate(bench.contenders(transport), repetitions)
        bench.close_engines()
        for name, samples in seconds.items():
            rates = [bench.total_bytes / value / 1e9 for value in samples]
            row = {"transport": transport, "chunks": name, **spread(rates, "gb_per_s_", 2)}
            row["over_whole"] = ratio(seconds["whole"], samples)
            row["messages"] = bench.messages[name]
            gib = bench.total_bytes / 2**30
            row["cpu_ms_per_gib"] = round(1000 * statistics.median(bench.cpu[name]) / gib)
            rows.append(row)
    return rows


def main() -> None:
    """Measure, print, record."""
    parser = arguments("chunks", "one prompt's KV, cut in several ways", repetitions=9)
    parser.add_argument("--total-mib", type=int, default=512)
    parser.add_argument("--page-kib", type=int, default=64)
    options = parser.parse_args()
    bench = ChunksBench(options.total_mib * MIB, options.page_kib << 10, options.seed)
    try:
        record(measure(bench, options.repetitions), options)
    finally:
        bench.close()


if __name__ == "__main__":
    main()
