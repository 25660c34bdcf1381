"""The cost of the fleet's key: a control round trip and whole transfers, with and without it."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Row, alternate, arguments, progress, ratio, record, spread
from benchmarks.processes import Remote
from p2p_engine import EngineConfig, P2pNcclEngine, TransferKey
from p2p_engine.control.fleet_key import read_key_file, write_key_file
from p2p_engine.control.plane import ControlPlane, PlaneListener
from p2p_engine.control.sockets import Route
from p2p_engine.peers.directory import Directory, RankAddress
from p2p_engine.wire.messages import Lookup, encode

SECONDS = 60.0
ROUND_TRIPS = 500
TRANSPORTS = ("shm", "tcp")
SIZES = {"64 KiB": 1 << 16, "4 MiB": 1 << 22, "64 MiB": 1 << 26}
VARIANTS = ("plain", "key")


def config(transport: str, key_file: str) -> EngineConfig:
    """Settings with room for the largest transfer, on both sides alike."""
    return EngineConfig(
        transports=(transport,), kv_buffer_size=1 << 27, mem_pool_size_gb=0.05, key_file=key_file
    )


class Far:
    """The other process: for each variant a directory, and an engine for each transport."""

    def __init__(self, key_file: str) -> None:
        self._engines: dict[tuple[str, str], P2pNcclEngine] = {}
        self._directories: dict[str, Directory] = {}
        for variant in VARIANTS:
            path = key_file if variant == "key" else ""
            rank = RankAddress(0, "127.0.0.1:1", 1)
            self._directories[variant] = Directory(config("shm", path), [rank], kv_port=0, role="D")
            for transport in TRANSPORTS:
                self._engines[variant, transport] = P2pNcclEngine(config(transport, path))

    def address(self, variant: str, transport: str = "") -> str:
        """Where to find a directory, or an engine."""
        if not transport:
            return self._directories[variant].address
        return self._engines[variant, transport].zmq_address

    def receive(self, variant: str, transport: str, name: str, checksum: int) -> bool:
        """Take a tensor; whether it is the one that was sent."""
        engine = self._engines[variant, transport]
        tensor = engine.recv_tensor(TransferKey(name), timeout=SECONDS)
        return int(tensor.view(torch.int64).sum()) == checksum

    def close(self) -> None:
        """Close all."""
        for engine in self._engines.values():
            engine.close()
        for directory in self._directories.values():
            directory.close()


class DirectoryAsker(PlaneListener):
    """Asks a directory, one question after the other."""

    def __init__(self, address: str, key_file: str) -> None:
        self._route, self._answered = Route(address), threading.Event()
        self._question = encode(Lookup(1, 0, 0))
        self._control = ControlPlane(
            "127.0.0.1",
            range(1),
            name="p2p-bench",
            listener=self,
            secrets=read_key_file(key_file),
        )
        self._control.start()

    def on_frame(self, route: Route, frame: bytes) -> None:
        """The answer has come."""
        self._answered.set()

    def ask(self) -> float:
        """Return the mean seconds of one round trip, of many in a row."""
        start = time.perf_counter()
        for _ in range(ROUND_TRIPS):
            self._answered.clear()
            self._control.send(self._route, self._question)
            if not self._answered.wait(SECONDS):
                raise RuntimeError("the directory does not answer")
        return (time.perf_counter() - start) / ROUND_TRIPS

    def close(self) -> None:
        """Close."""
        self._control.close(5.0)


class TensorSender:
    """Sends tensors of one size to one engine of the other process."""

    def __init__(self, far: Remote, variant: str, transport: str, key_file: str) -> None:
        self._far, self._place = far, (variant, transport)
        self._address = far.ask("address", variant, transport)
        self._engine = P2pNcclEngine(config(transport, key_file))
        self._number = 0

    def send(self, nbytes: int, seed: int) -> float:
        """Return the seconds from the order to COMMIT."""
        self._number += 1
        name = f"{nbytes}-{self._number}"
        words = np.random.default_rng([seed, self._number]).integers(0, 1 << 60, nbytes // 8)
        tensor = torch.from_numpy(words)
        self._far.tell("receive", *self._place, name, int(tensor.sum()))
        start = time.perf_counter()
        self._engine.send_tensor(TransferKey(name), tensor, self._address).wait(SECONDS)
        seconds = time.perf_counter() - start
        if not self._far.answer():
            raise RuntimeError("the bytes that arrived are not those that were sent")
        return seconds

    def close(self) -> None:
        """Close."""
        self._engine.close()


def rows_of(case: str, seconds: dict[str, list[float]]) -> list[Row]:
    """Return one row for each variant, in microseconds, and the key's cost as a ratio."""
    return [
        {
            "case": case,
            "variant": variant,
            **spread([value * 1e6 for value in samples], "us_", 1),
            "over_plain": ratio(samples, seconds["plain"]),
        }
        for variant, samples in seconds.items()
    ]


def measure(far: Remote, key_file: str, repetitions: int, seed: int) -> list[Row]:
    """Round trips, then transfers of each size by each transport."""
    files = dict(zip(VARIANTS, ("", key_file), strict=True))
    progress("round trips")
    askers = {v: DirectoryAsker(far.ask("address", v), files[v]) for v in VARIANTS}
    rows = rows_of("round trip", alternate({v: askers[v].ask for v in VARIANTS}, repetitions))
    closing: list[Any] = list(askers.values())
    for transport in TRANSPORTS:
        senders = {v: TensorSender(far, v, transport, files[v]) for v in VARIANTS}
        closing += senders.values()
        for title, nbytes in SIZES.items():
            progress(f"{transport}, {title}")
            runs: dict[str, Callable[[], float]] = {
                v: lambda s=senders[v], n=nbytes: s.send(n, seed)  # type: ignore[misc]
                for v in VARIANTS
            }
            rows += rows_of(f"{transport} {title}", alternate(runs, repetitions))
    for part in closing:
        part.close()
    return rows


def main() -> None:
    """Measure, print, record."""
    options = arguments("encryption", __doc__ or "", repetitions=31).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        key_file = str(Path(folder) / "fleet.key")
        write_key_file(Path(key_file))
        with Remote(Far, key_file) as far:
            record(measure(far, key_file, options.repetitions, options.seed), options)


if __name__ == "__main__":
    main()
