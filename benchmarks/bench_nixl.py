"""Our transport nixl beside plain NIXL, both over UCX's TCP, as between hosts without RDMA.

The cases and contenders are those of bench_transfer.py: 256 MiB in scattered blocks; "our nixl" is
to be held against "nixl tcp", which may use the same of UCX. Then both
processes rest, and the processor time of everything in them is read: once with an idle pair of
engines that have moved bytes, once with a pair of NIXL's own agents as its Python class makes them.
"""

from __future__ import annotations

import os
import time

from benchmarks.bench_transfer import MIB, TransferBench, contenders, rows_of
from benchmarks.harness import Row, alternate, arguments, progress, record
from benchmarks.nixl_peer import installed
from benchmarks.processes import Remote

UCX_TLS = "tcp"
REST_SECONDS = 10.0


class RestingEngine:
    """An engine in a process of its own that has sent a tensor to another one."""

    def __init__(self) -> None:
        import torch

        from benchmarks.bench_transfer import make_engine
        from p2p_engine import TransferKey

        torch.set_num_threads(1)
        self._engine = make_engine("nixl")
        self._key = TransferKey("before")
        self._tensor = torch.ones(MIB)

    def address(self) -> str:
        """Where to dial."""
        return self._engine.zmq_address

    def send(self, peer: str) -> None:
        """Send a tensor."""
        self._engine.send_tensor(self._key, self._tensor, peer).wait(60)

    def receive(self, peer: str) -> None:
        """Take it."""
        self._engine.recv_tensor(self._key, peer, timeout=60)

    def seconds(self) -> float:
        """Return the processor time of this process so far."""
        return time.process_time()

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()


class RestingAgent:
    """An agent of NIXL, as nixl_peer.py makes it for a benchmark."""

    def __init__(self) -> None:
        from benchmarks.nixl_peer import NixlTarget

        self._target = NixlTarget(MIB, 1)

    def seconds(self) -> float:
        """Return the processor time of this process so far."""
        return time.process_time()

    def close(self) -> None:
        """The process's end leaves nothing behind."""


def share_of_a_core(remote: Remote) -> float:
    """Return what a process uses while nothing moves, in percent of a core."""
    before, start = remote.ask("seconds"), time.perf_counter()
    time.sleep(REST_SECONDS)
    used: float = remote.ask("seconds") - before
    return round(100 * used / (time.perf_counter() - start), 2)


def measure_rest() -> list[Row]:
    """The processor time of processes in which nothing moves."""
    sender, receiver, agent = Remote(RestingEngine), Remote(RestingEngine), Remote(RestingAgent)
    try:
        sender.ask("send", receiver.ask("address"))
        receiver.ask("receive", sender.ask("address"))
        resting = {"nixl, sender": sender, "nixl, receiver": receiver, "plain nixl, target": agent}
        return [
            {"case": "rest", "contender": name, "percent_of_a_core": share_of_a_core(remote)}
            for name, remote in resting.items()
        ]
    finally:
        for remote in (sender, receiver, agent):
            remote.close()


def main() -> None:
    """Measure, print, record."""
    parser = arguments("nixl", "our transport nixl beside plain NIXL", repetitions=9)
    parser.add_argument("--total-mib", type=int, default=256)
    options = parser.parse_args()
    if not installed():
        raise SystemExit("NIXL is not installed: pip install 'p2p-kv-engine[bench]'")
    os.environ["UCX_TLS"] = UCX_TLS  # of our own processes, which inherit it
    os.environ["UCX_MEM_MMAP_HOOK_MODE"] = "none"
    bench = TransferBench(options.total_mib * MIB, options.seed, ("tcp", "nixl"))
    rows: list[Row] = []
    try:
        for block_bytes in (64 << 10, MIB, 16 * MIB, options.total_mib * MIB):
            progress(f"blocks of {block_bytes >> 10} KiB")
            bench.use(block_bytes)
            seconds = alternate(contenders(bench), options.repetitions)
            rows += rows_of(bench, f"{block_bytes >> 10} KiB", seconds)
    finally:
        bench.close()
    record(rows + measure_rest(), options)


if __name__ == "__main__":
    main()
