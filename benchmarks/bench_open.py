"""The cost of an engine's operations with few and with many open transfers; none may grow.

Each row is one operation of one side, with the given number of others of each kind open there:
granted and not ready, held, awaited from any peer, awaited from a named peer, wanted (GET) and not
held. Its cost is CPU time of the thread that does it. `ratio` compares that cost with the one at
the fewest open transfers.

The figures do not contain the messages that each unanswered transfer repeats after retry_seconds,
nor the cost to open the transfers.
"""

from __future__ import annotations

import gc
import os
import time
from array import array
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness import Row, arguments, progress, record, spread
from mempool import Arena, Mover
from p2p_engine import EngineConfig, P2pNcclEngine, TransferKey
from p2p_engine.memory.layout import TensorSink, TensorSource
from p2p_engine.peers.link import PeerAddress

COUNTS = [10, 1_000, 10_000]
PAYLOAD = torch.arange(512)
PATIENCE_SECONDS = 120.0
ROUNDS = 20  # of one sample


def cost(call: Callable[[int], Any], repetitions: int) -> list[float]:
    """Microseconds of CPU of one call, in each of so many samples."""
    samples = []
    gc.collect()
    gc.disable()  # its pauses grow with the objects of the whole process, not with the call
    try:
        for sample in range(repetitions):
            start = time.thread_time()
            for number in range(ROUNDS):
                call(sample * ROUNDS + number)
            samples.append((time.thread_time() - start) / ROUNDS * 1e6)
    finally:
        gc.enable()
    return samples


class OpenPair:
    """A sender and a receiver with `count` transfers of each kind open between them."""

    def __init__(self, count: int) -> None:
        config = EngineConfig(
            host="127.0.0.1", kv_buffer_size=2**27, mem_pool_size_gb=0.001, transports=("shm",),
            transfer_timeout_seconds=3600, lease_seconds=3600, retry_seconds=1800,
            peer_timeout_seconds=1800,
        )  # fmt: skip
        self.count = count
        self.sender = P2pNcclEngine(config)
        self.receiver = P2pNcclEngine(config)
        self.there = PeerAddress(self.receiver.zmq_address)
        self.here = PeerAddress(self.sender.zmq_address)
        self.source = TensorSource(PAYLOAD)
        self._open()

    def _open(self) -> None:
        for number in range(self.count):
            self.sender.send(key("granted", number), self.there, self.source, ready=False)
            self.sender.hold(key("held", number), self.source)
            self.receiver.receive(key("waited", number), TensorSink())
            self.receiver.receive(key("awaited", number), TensorSink(), peer=self.here)
            self.receiver.receive(key("wanted", number), TensorSink(), peer=self.here, pull=True)
            if number % 64 == 0:  # so that neither side's queue of messages is full
                granted = number - 256
                self._wait(lambda: self._num_granted() >= granted)  # noqa: B023
        self._wait(lambda: self._num_granted() >= self.count)

    def _num_granted(self) -> int:
        return int(self.receiver.stats()["open_transfers"]) - self._num_received()

    def _num_received(self) -> int:
        return len(self.receiver._parts.store._ledger.receives)

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.receiver.stats()}")
            time.sleep(0.01)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()

    def operations(self) -> dict[str, Callable[[int], Any]]:
        """The measured operations; each leaves the number of open transfers unchanged."""
        sender, receiver = self.sender, self.receiver

        def receive(number: int) -> None:
            receiver.receive(key("new", number), TensorSink()).cancel()

        def send(number: int) -> None:
            sender.send(key("new", number), self.there, self.source, ready=False).cancel()

        def receive_awaited(number: int) -> None:
            receiver.receive(key("new", number), TensorSink(), peer=self.here).cancel()

        def hold(number: int) -> None:
            sender.hold(key("new hold", number), self.source).cancel()

        def tick(engine: P2pNcclEngine) -> Callable[[int], None]:
            return lambda _: engine._parts.dispatch.on_tick(time.monotonic())

        return {
            "receive and cancel": receive,
            "receive of a peer and cancel": receive_awaited,
            "poll": lambda _: receiver.poll(),
            "tick of the receiver": tick(receiver),
            "send and cancel": send,
            "hold and cancel": hold,
            "tick of the sender": tick(sender),
        }


def key(kind: str, number: int) -> TransferKey:
    return TransferKey(f"{kind}-{number}")


SLICE_BYTES = 65536
NUM_SLICES = 100_000  # of all lanes together
_CPU_CLOCK = 6  # of one thread: CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED, see pthread_getcpuclockid


def threads() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}


def slice_cost(num_lanes: int) -> float:
    """Return microseconds of the mover's CPU for one slice, with `num_lanes` lanes that take turns.

    All lanes have the same number of slices, so that they all wait until nearly the end. The copied
    bytes lie in cache: a copy is the smallest part of a busy mover's costs.
    """
    known = threads()
    mover, arena = Mover(slice_bytes=SLICE_BYTES), Arena(1 << 20)
    (thread,) = threads() - known
    clock = ~thread << 3 | _CPU_CLOCK
    try:
        num = NUM_SLICES // num_lanes
        sources, lengths = array("q", [arena.address] * num), array("q", [SLICE_BYTES] * num)
        targets = array("q", [arena.address + (1 << 19)] * num)
        start = time.clock_gettime(clock)
        jobs = [
            mover.copy(sources, targets, lengths, lane=lane) for lane in range(1, num_lanes + 1)
        ]
        for job in jobs:
            job.wait(PATIENCE_SECONDS)
        return (time.clock_gettime(clock) - start) / (num * num_lanes) * 1e6
    finally:
        mover.close(PATIENCE_SECONDS)
        arena.close()


def measure(count: int, repetitions: int) -> dict[str, list[float]]:
    """All operations with so many open."""
    pair = OpenPair(count)
    try:
        costs = {name: cost(call, repetitions) for name, call in pair.operations().items()}
    finally:
        pair.close()
    costs["one slice of the mover"] = [slice_cost(count) for _ in range(repetitions)]
    return costs


def main() -> None:
    """Measure, print, record."""
    parser = arguments("open", __doc__ or "", repetitions=9)
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS, help="transfers open")
    options = parser.parse_args()
    found: dict[int, dict[str, list[float]]] = {}
    for count in options.counts:
        progress(f"{count} open of each kind")
        found[count] = measure(count, options.repetitions)
    rows: list[Row] = []
    for name, fewest in found[options.counts[0]].items():
        for count in options.counts:
            row: Row = {"operation": name, "open": count}
            row |= spread(found[count][name], "us_", digits=1)
            row["ratio"] = round(row["us_median"] / max(0.1, spread(fewest)["median"]), 2)
            rows.append(row)
    record(rows, options)


if __name__ == "__main__":
    main()
