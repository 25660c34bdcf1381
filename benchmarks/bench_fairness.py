"""Eight senders of unequal speed share one receiver that is slower than all of them together.

Sender n keeps 2**n chunks of 1 MiB offered at a time. Landing memory has room for 32 chunks, and
landed chunks are taken out in order at a steady rate. Rounds with credit alternate with rounds
without it, in which memory goes to every sender that asks. Jain's index of the served bytes is 1 if
all have the same share and 1/8 if one has everything.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.harness import Row, arguments, progress, record
from p2p_engine import EngineConfig, P2pNcclEngine, TransferKey
from p2p_engine.config import GIB
from p2p_engine.memory.layout import TensorSink, TensorSource
from p2p_engine.peers.link import PeerAddress
from p2p_engine.receive import store
from p2p_engine.receive.credit import RETRY_AFTER_SECONDS, Credit
from p2p_engine.receive.ledger import LandingId
from p2p_engine.transfer import Transfer

MIB = 1 << 20
NUM_SENDERS = 8
ROOM_CHUNKS = 32


class FirstCome(Credit):
    """Grants every offer that fits, without credit: a sender that asks more often gets more."""

    def refusal(
        self, landing_id: LandingId, nbytes: int, free: int, *, is_awaited: bool = False
    ) -> str:
        """Refuse only what does not fit."""
        return "buffer and pool are full" if nbytes > free else ""

    def wait(self, landing_id: LandingId, nbytes: int, *, is_awaited: bool = False) -> float:
        """Let each chunk be offered again at the same pace, however many there are."""
        return RETRY_AFTER_SECONDS


class FairnessBench:
    """One receiver, eight senders with a thread each, one consumer."""

    def __init__(self, seconds: float, chunks_per_second: int) -> None:
        self._seconds, self._rate = seconds, chunks_per_second
        room = ROOM_CHUNKS * (MIB + 64)
        self._receiver = P2pNcclEngine(
            EngineConfig(transports=("shm",), kv_buffer_size=room, mem_pool_size_gb=0)
        )
        small = EngineConfig(transports=("shm",), kv_buffer_size=0, mem_pool_size_gb=16 / GIB)
        self._senders = [P2pNcclEngine(small, receives=False) for _ in range(NUM_SENDERS)]
        self._landed: queue.Queue[tuple[int, TransferKey]] = queue.Queue()
        self._tensor = torch.zeros(MIB, dtype=torch.uint8)

    def run(self) -> Counter[int]:
        """Let all send for a while; returns the bytes that were served, by sender."""
        served, stop = Counter[int](), threading.Event()
        threads = [
            threading.Thread(target=self._send, args=(number, stop))
            for number in range(NUM_SENDERS)
        ]
        for thread in threads:
            thread.start()
        end = time.monotonic() + self._seconds
        while time.monotonic() < end:
            number, key = self._landed.get(timeout=10)
            self._receiver.receive(key, TensorSink()).wait(10)
            served[number] += MIB
            time.sleep(1 / self._rate)
        stop.set()
        for thread in threads:
            thread.join()
        while not self._landed.empty():
            self._landed.get()
        self._receiver.drop_landed()
        return served

    def _send(self, number: int, stop: threading.Event) -> None:
        names = self._names(number)
        out: dict[Transfer, TransferKey] = {}
        while not stop.is_set():
            while len(out) < 2**number:
                key = next(names)
                out[self._offer(number, key)] = key
            for transfer in [item for item in out if item.done]:
                key = out.pop(transfer)
                if transfer.error is None:
                    self._landed.put((number, key))
            time.sleep(0.002)
        for transfer in out:
            transfer.cancel("the round is over")

    def _offer(self, number: int, key: TransferKey) -> Transfer:
        peer = PeerAddress(self._receiver.zmq_address)
        return self._senders[number].send(key, peer, TensorSource(self._tensor))

    def _names(self, number: int) -> Iterator[TransferKey]:
        start = time.monotonic_ns()
        count = 0
        while True:
            yield TransferKey(f"{number}-{start}-{count}")
            count += 1

    def close(self) -> None:
        """Close all engines."""
        for engine in [*self._senders, self._receiver]:
            engine.close()


def row_of(case: str, rounds: list[Counter[int]]) -> Row:
    """Jain's index, and the least and the most that a sender had, over all rounds."""
    shares = np.array([[served[number] for number in range(NUM_SENDERS)] for served in rounds])
    index = shares.sum(1) ** 2 / (NUM_SENDERS * (shares.astype(float) ** 2).sum(1))
    total = shares.sum(0)
    return {
        "case": case,
        "jain_index_median": round(float(np.median(index)), 3),
        "least_over_fair_share": round(float(total.min() / total.mean()), 3),
        "most_over_fair_share": round(float(total.max() / total.mean()), 3),
        "served_mib": int(total.sum() // MIB),
    }


def main() -> None:
    """Measure, print, record."""
    parser = arguments("fairness", "eight senders of unequal speed", repetitions=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--chunks-per-second", type=int, default=200)
    options = parser.parse_args()
    rounds: dict[str, list[Counter[int]]] = {}
    for _ in range(options.repetitions):
        for case, rule in (("credit", Credit), ("first come", FirstCome)):
            progress(case)
            vars(store)["Credit"] = rule
            bench = FairnessBench(options.seconds, options.chunks_per_second)
            try:
                rounds.setdefault(case, []).append(bench.run())
            finally:
                bench.close()
    record([row_of(case, served) for case, served in rounds.items()], options)


if __name__ == "__main__":
    main()
