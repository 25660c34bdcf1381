"""What an engine costs with few and with many transfers open: nothing may grow with what is open.

Each row is one operation of one side, with so many other transfers open there; its cost is CPU time
of the thread that does it. `ratio` is what it costs beside the same with the fewest open.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness import Row, arguments, progress, record, spread
from mempool import Arena, Mover
from p2p_engine import EngineConfig, P2pNcclEngine, TransferKey
from p2p_engine.layout import TensorSink, TensorSource
from p2p_engine.peers import PeerAddress

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


class Pair:
    """A sender and a receiver with `count` transfers of each kind open between them."""

    def __init__(self, count: int) -> None:
        config = EngineConfig(
            host="127.0.0.1", kv_buffer_size=2**27, mem_pool_size_gb=0.001, transports=("shm",),
            transfer_timeout_seconds=600, lease_seconds=600,
        )  # fmt: skip
        self.count = count
        self.sender = P2pNcclEngine(config)
        self.receiver = P2pNcclEngine(config)
        self.there = PeerAddress(self.receiver.zmq_address)
        self.source = TensorSource(PAYLOAD)
        self._open()

    def _open(self) -> None:
        """Granted landings that nobody claims; holds; receives that wait."""
        for number in range(self.count):
            self.sender.send(key("granted", number), self.there, self.source, ready=False)
            self.sender.hold(key("held", number), self.source)
            self.receiver.receive(key("waited", number), TensorSink())
            if number % 64 == 0:
                self.receiver.poll()
        self._wait(lambda: self.receiver.stats()["open_transfers"] >= 2 * self.count)

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
        """What is measured; each leaves as much open as it found."""
        sender, receiver = self.sender, self.receiver

        def receive(number: int) -> None:
            receiver.receive(key("new", number), TensorSink()).cancel()

        def send(number: int) -> None:
            sender.send(key("new", number), self.there, self.source, ready=False).cancel()

        def hold(number: int) -> None:
            sender.hold(key("new hold", number), self.source).cancel()

        def tick(engine: P2pNcclEngine) -> Callable[[int], None]:
            return lambda _: engine._on_tick(time.monotonic())

        return {
            "receive and cancel": receive,
            "poll": lambda _: receiver.poll(),
            "tick of the receiver": tick(receiver),
            "send and cancel": send,
            "hold and cancel": hold,
            "tick of the sender": tick(sender),
        }


def key(kind: str, number: int) -> TransferKey:
    return TransferKey(f"{kind}-{number}")


class Queue:
    """A mover with `count` copies queued, each in a lane of its own; what a slice costs."""

    SLICE_BYTES = 65536

    def __init__(self, count: int) -> None:
        self._arena = Arena(1 << 26)
        self._mover = Mover(slice_bytes=self.SLICE_BYTES)
        base, half = self._arena.address, 1 << 25
        long = array("q", [half])
        self._first = self._mover.copy(
            array("q", [base] * 64), array("q", [base + half] * 64), long * 64, lane=1 << 40
        )
        lengths = array("q", [self.SLICE_BYTES])
        source, target = array("q", [base]), array("q", [base + half])
        self._jobs = [
            self._mover.copy(source, target, lengths, lane=number + 1) for number in range(count)
        ]

    def cost(self) -> float:
        """Microseconds for one slice, after the long copy was told to stop."""
        self._first.cancel()
        self._first.wait(PATIENCE_SECONDS)
        left = sum(not job.done for job in self._jobs)
        start = time.perf_counter()
        self._jobs[-1].wait(PATIENCE_SECONDS)
        seconds = time.perf_counter() - start
        self._mover.close()
        self._arena.close()
        return seconds / max(1, left) * 1e6


def measure(count: int, repetitions: int) -> dict[str, list[float]]:
    """All operations with so many open."""
    pair = Pair(count)
    try:
        costs = {name: cost(call, repetitions) for name, call in pair.operations().items()}
    finally:
        pair.close()
    costs["one slice of the mover"] = [Queue(count).cost() for _ in range(repetitions)]
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
