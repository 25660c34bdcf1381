"""`tcp` between distant hosts whose kernel has the old limit of socket buffers (212,992 bytes).

The timed part, for each contender:
  raw socket    memory through one plain socket whose buffers the kernel tunes, until its last byte
                is in the receiver's memory
  tcp           engine.send_tensor() until COMMIT: the bytes lie in the receiver's arena
  fixed buffer  the same with buffers of a size that was set, which the kernel has cut
Both hosts are network namespaces, and a relay delays each packet between them. What arrived is
verified, and the time of this is not counted.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.capped_host import (
    ENGINES,
    OLD_LIMIT_BYTES,
    SECONDS,
    CappedHost,
    cap_socket_buffers,
    make_engine,
    stamp,
)
from benchmarks.delayed_link import DelayedLink
from benchmarks.harness import Row, alternate, arguments, progress, ratio, record, spread
from benchmarks.memory import random_memory
from benchmarks.processes import Remote, enter_own_network
from benchmarks.raw_socket import RawSender
from p2p_engine import TransferKey

TUNING = ("tcp_rmem", "tcp_wmem")  # least, first and most bytes of a tuned buffer
PROBES = 9


class NearHost:
    """The sending process, with a receiving host at this distance."""

    def __init__(self, number: int, round_trip_ms: float, total_bytes: int, seed: int) -> None:
        # A subnet for each distance: the kernel remembers what it learned of an address.
        near, far = f"10.79.{number}.1", f"10.79.{number}.2"
        self.numbers = itertools.count(1)
        self.memory = random_memory(total_bytes, seed)
        self.receiver = Remote(CappedHost, total_bytes, seed, through=["unshare", "--net"])
        self.link = Remote(DelayedLink, near, far, self.receiver.pid, round_trip_ms / 1e3)
        self.addresses, port = self.receiver.ask("open", far)
        self.engines = {name: make_engine(name, near) for name in ENGINES}
        self.raw_sender = RawSender(port, total_bytes, far)
        self.measured_ms = measure_round_trip_ms(far, port)

    def send(self, name: str) -> float:
        """One round of ours; returns the seconds from the order to COMMIT."""
        number = next(self.numbers)
        stamp(self.memory, number)
        tensor, key = torch.from_numpy(self.memory), TransferKey(str(number))
        start = time.perf_counter()
        self.engines[name].send_tensor(key, tensor, self.addresses[name]).wait(SECONDS)
        seconds = time.perf_counter() - start
        check(name, self.receiver.ask("take", name, number))
        return seconds

    def raw(self) -> float:
        """One round of a plain socket; returns the seconds until its last byte has arrived."""
        total = self.raw_sender.stamp(next(self.numbers))
        seconds = self.raw_sender.send()
        check("raw socket", self.receiver.ask("verify", total))
        return seconds

    def close(self) -> None:
        """End the engines and the processes; the relay first, which holds the receiver's device."""
        for engine in self.engines.values():
            engine.close()
        self.raw_sender.close()
        self.link.close()
        self.receiver.close()


def measure_round_trip_ms(host: str, port: int) -> float:
    """Return the median time of a TCP handshake."""
    samples = []
    for _ in range(PROBES):
        start = time.perf_counter()
        socket.create_connection((host, port), timeout=SECONDS).close()
        samples.append(1e3 * (time.perf_counter() - start))
    return round(statistics.median(samples), 2)


def check(name: str, is_verified: bool) -> None:
    """Refuse a round whose bytes are wrong."""
    if not is_verified:
        raise RuntimeError(f"{name}: the bytes that arrived are not those that were sent")


def measure(options: Namespace, number: int, round_trip_ms: float) -> list[Row]:
    """One row for each contender: GB/s, and its share of the plain socket's, round by round."""
    total_bytes = options.total_mib << 20
    progress(f"a round trip of {round_trip_ms:g} ms")
    with contextlib.closing(NearHost(number, round_trip_ms, total_bytes, options.seed)) as host:
        runs: dict[str, Callable[[], float]] = {"raw socket": host.raw}
        for name in ENGINES:
            runs[name] = lambda n=name: host.send(n)  # type: ignore[misc]
        seconds = alternate(runs, options.repetitions)
    return [
        {
            "round_trip_ms": round_trip_ms,
            "measured_ms": host.measured_ms,
            "contender": name,
            **spread([total_bytes / value / 1e9 for value in samples], "gb_per_s_"),
            "of_raw": ratio(seconds["raw socket"], samples),
        }
        for name, samples in seconds.items()
    ]


def main() -> None:
    """Run the benchmark, in a network namespace of its own."""
    parser = arguments("windows", __doc__ or "", repetitions=9)
    parser.add_argument("--total-mib", type=int, default=128, help="of a transfer (%(default)s)")
    parser.add_argument("--round-trips-ms", type=float, nargs="+", default=[0.1, 0.5, 2.0, 10.0])
    options = parser.parse_args()
    enter_own_network("benchmarks.bench_windows")
    cap_socket_buffers()
    torch.set_num_threads(1)
    places = enumerate(options.round_trips_ms)
    rows = [row for place in places for row in measure(options, *place)]
    tuning = {name: Path(f"/proc/sys/net/ipv4/{name}").read_text().split() for name in TUNING}
    record(rows, options, {"limit_bytes": OLD_LIMIT_BYTES, **tuning})


if __name__ == "__main__":
    main()
