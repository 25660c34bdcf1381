"""The cost of a checksum for every chunk: the same transfers with and without it, side by side.

Two processes move 256 MiB in scattered blocks, with engine.receive() before engine.send(). The time
runs from the send until the verified bytes are in the receiver's final memory. The ratio is taken
round by round: seconds with checksums over seconds without.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.harness import Row, alternate, arguments, progress, ratio, record, spread
from benchmarks.memory import HostCache, ordinary_memory, random_memory, scattered
from benchmarks.processes import Remote
from p2p_engine import EngineConfig, P2pNcclEngine, TransferKey
from p2p_engine.memory.paged import PagedSink, PagedSource
from p2p_engine.peers.link import PeerAddress
from p2p_engine.transfer import Transfer

CONTENDERS = [(name, checked) for name in ("shm", "tcp") for checked in (False, True)]
SECONDS = 60.0
MIB = 1 << 20


def make_engines() -> dict[tuple[str, bool], P2pNcclEngine]:
    """One engine for each contender."""
    return {
        (name, checked): P2pNcclEngine(EngineConfig(transports=(name,), checksum=checked))
        for name, checked in CONTENDERS
    }


def round_key(number: int) -> TransferKey:
    """The key of one round."""
    return TransferKey(f"round-{number}")


class ChecksumReceiver:
    """The receiving process."""

    def __init__(self, total_bytes: int) -> None:
        torch.set_num_threads(1)
        self._memory = ordinary_memory(total_bytes)
        self._engines = make_engines()
        self._transfer: Transfer | None = None

    def address(self, contender: tuple[str, bool]) -> str:
        """Where to dial."""
        return self._engines[contender].zmq_address

    def begin(self, contender: tuple[str, bool], number: int, block_bytes: int) -> None:
        """Wait for a round's bytes."""
        cache = HostCache(self._memory, 1, block_bytes).paged
        sink = PagedSink(cache, np.arange(cache.num_blocks), 0, 0)
        self._transfer = self._engines[contender].receive(round_key(number), sink)

    def finish(self) -> float:
        """Wait until they are in place; returns when that was, on the machine's one clock."""
        assert self._transfer is not None
        self._transfer.wait(SECONDS)
        return time.monotonic()

    def close(self) -> None:
        """Close the engines."""
        for engine in self._engines.values():
            engine.close()


class ChecksumBench:
    """The sending process."""

    def __init__(self, total_bytes: int, seed: int) -> None:
        torch.set_num_threads(1)
        self._memory = random_memory(2 * total_bytes, seed)
        self._seed = seed
        self._numbers = itertools.count(1)
        self._receiver = Remote(ChecksumReceiver, total_bytes)
        self._engines = make_engines()

    def send(self, contender: tuple[str, bool], block_bytes: int) -> float:
        """One round; returns the seconds."""
        number, cache = next(self._numbers), HostCache(self._memory, 1, block_bytes).paged
        block_ids = scattered(cache.num_blocks // 2, cache.num_blocks, self._seed)
        peer = PeerAddress(self._receiver.ask("address", contender))
        self._receiver.ask("begin", contender, number, block_bytes)
        self._receiver.tell("finish")
        start = time.monotonic()
        self._engines[contender].send(
            round_key(number), peer, PagedSource(cache, block_ids, 0, 0)
        ).wait(SECONDS)
        ended: float = self._receiver.answer()
        return ended - start

    def close(self) -> None:
        """End everything."""
        for engine in self._engines.values():
            engine.close()
        self._receiver.close()


def rows_of(
    bench: ChecksumBench, block_bytes: int, total_bytes: int, repetitions: int
) -> list[Row]:
    """One row for each transport."""
    runs: dict[tuple[str, bool], Callable[[], float]] = {
        contender: lambda c=contender: bench.send(c, block_bytes)  # type: ignore[misc]
        for contender in CONTENDERS
    }
    seconds = alternate(runs, repetitions)
    rows = []
    for name in ("shm", "tcp"):
        plain, checked = seconds[name, False], seconds[name, True]
        rates = [total_bytes / value / 1e9 for value in plain]
        row = {"block_kib": block_bytes >> 10, "transport": name}
        row |= spread(rates, "without_gb_per_s_", 2)
        rows.append({**row, "seconds_with_over_without": ratio(checked, plain)})
    return rows


def main() -> None:
    """Measure, print, record."""
    parser = arguments("checksum", "the cost of checksums", repetitions=15)
    parser.add_argument("--total-mib", type=int, default=256)
    options = parser.parse_args()
    total_bytes = options.total_mib * MIB
    bench, rows = ChecksumBench(total_bytes, options.seed), []
    try:
        for block_bytes in (16 << 10, 64 << 10, MIB):
            progress(f"blocks of {block_bytes >> 10} KiB")
            rows += rows_of(bench, block_bytes, total_bytes, options.repetitions)
    finally:
        bench.close()
    record(rows, options)


if __name__ == "__main__":
    main()
