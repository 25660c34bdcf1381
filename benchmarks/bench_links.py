"""The cost of a link: one engine that has dialled 2,000 peers and that 2,000 peers have dialled.

Measures memory, descriptors, threads, CPU while idle, and the time of a transfer to a healthy peer.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import zmq

from benchmarks.harness import Row, arguments, progress, record, spread
from benchmarks.processes import Remote
from p2p_engine import EngineConfig, P2pNcclEngine, TransferKey
from p2p_engine.memory.layout import TensorSink
from p2p_engine.peers.link import PeerAddress
from p2p_engine.peers.links import REST_SECONDS
from p2p_engine.transfer import Transfer
from p2p_engine.wire.messages import (
    PROTOCOL_VERSION,
    Hello,
    Ping,
    Pong,
    Welcome,
    decode,
    encode,
)

SECONDS = 300.0
SETTLE_SECONDS = 1.25 * REST_SECONDS  # so that each link that rests is asked
EPOCH = 1 << 40
ROUND_TRIPS = 200
AT_ONCE = 50


def config() -> EngineConfig:
    """Settings of every engine here."""
    return EngineConfig(
        host="127.0.0.1", transports=("tcp",), kv_buffer_size=1 << 24, mem_pool_size_gb=0.01
    )


class PoliteCrowd:
    """The other process: a peer behind each of many ports, and one that comes as many times."""

    def __init__(self, num: int) -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._context = zmq.Context()
        self._listening = self._context.socket(zmq.ROUTER)
        self._ports = [self._listening.bind_to_random_port("tcp://127.0.0.1") for _ in range(num)]
        self._dialling = self._context.socket(zmq.ROUTER)
        self._sessions = 0
        self._welcomed: set[bytes] = set()
        self._target = ""
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def ports(self) -> list[int]:
        """Where the peers listen."""
        return self._ports

    def come(self, address: str, num: int) -> None:
        """Dial an engine so many times, and be a session of it each time."""
        self._sessions, self._target = num, address

    def num_welcomed(self) -> int:
        """How many of them were let in."""
        return len(self._welcomed)

    def close(self) -> None:
        """Nothing: the process ends."""

    def _serve(self) -> None:
        poller, come, ping_at = zmq.Poller(), 0, 0.0
        for socket in (self._listening, self._dialling):
            poller.register(socket, zmq.POLLIN)
        while True:
            for socket, _ in poller.poll(5):
                self._answer(socket)
            if come < self._sessions and come - len(self._welcomed) < AT_ONCE:
                self._greet(come)
                come += 1
            if time.monotonic() >= ping_at:
                ping_at = time.monotonic() + REST_SECONDS
                for name in list(self._welcomed):
                    self._dialling.send_multipart([name, encode(Ping(self._epoch(name), 0))])

    def _epoch(self, name: bytes) -> int:
        return EPOCH + 1 + int(name)

    def _greet(self, number: int) -> None:
        name = b"%d" % number
        self._dialling.setsockopt(zmq.CONNECT_ROUTING_ID, name)
        self._dialling.connect(f"tcp://{self._target}")
        address = f"127.1.{number >> 8}.{number & 255}:9"
        hello = Hello(self._epoch(name), 0, PROTOCOL_VERSION, address, None, {})
        self._dialling.send_multipart([name, encode(hello)])

    def _answer(self, socket: zmq.Socket[bytes]) -> None:
        while socket.poll(0):
            name, frame = socket.recv_multipart()
            message = decode(frame)
            if isinstance(message, Hello):
                welcome = Welcome(EPOCH, message.source_epoch, PROTOCOL_VERSION, None, {})
                socket.send_multipart([name, encode(welcome)])
            elif isinstance(message, Ping):
                socket.send_multipart([name, encode(Pong(EPOCH, message.source_epoch))])
            elif isinstance(message, Welcome):
                self._welcomed.add(name)


class FarEngine:
    """The third process: an engine that answers."""

    def __init__(self) -> None:
        self._engine = P2pNcclEngine(config())

    def address(self) -> str:
        """Where it listens."""
        return self._engine.zmq_address

    def receive(self, names: list[str]) -> None:
        """Take tensors, one after the other."""
        for name in names:
            self._engine.recv_tensor(TransferKey(name), timeout=SECONDS)

    def close(self) -> None:
        """Close."""
        self._engine.close()


def resources() -> Row:
    """Return this process's memory, descriptors and threads."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "rss_kib": int(status["VmRSS"].split()[0]),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
    }


def idle_cost() -> Row:
    """Return the share of a core, and the times in a second that a thread wakes up, while nothing
    is asked of this process."""
    processor, wakeups, start = time.process_time(), num_wakeups(), time.monotonic()
    time.sleep(SETTLE_SECONDS)
    seconds = time.monotonic() - start
    return {
        "idle_share": round((time.process_time() - processor) / seconds, 5),
        "wakeups_per_s": round((num_wakeups() - wakeups) / seconds, 2),
    }


def num_wakeups() -> int:
    """Return how often this process's threads have waited so far."""
    statuses = [path.read_text() for path in Path("/proc/self/task").glob("*/status")]
    lines = [line for status in statuses for line in status.splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt"))


def transfers(engine: P2pNcclEngine, peer: Remote, address: str, prefix: str) -> list[float]:
    """Return how long small tensors take from the order to COMMIT, in milliseconds."""
    names = [f"{prefix}-{number}" for number in range(ROUND_TRIPS)]
    peer.tell("receive", names)
    took = []
    for name in names:
        start = time.perf_counter()
        engine.send_tensor(TransferKey(name), torch.ones(16), address).wait(SECONDS)
        took.append((time.perf_counter() - start) * 1e3)
    peer.answer(SECONDS)
    return took


def ask(engine: P2pNcclEngine, port: int) -> Transfer:
    """Wait for what nobody sends: so the engine links with a peer."""
    peer = PeerAddress(f"127.0.0.1:{port}")
    return engine.receive(TransferKey(f"link-{port}"), TensorSink(), peer=peer, timeout=SECONDS)


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for it."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {SECONDS:g} s: {what}")
        time.sleep(0.05)


def measure(num: int) -> list[Row]:
    """Alone, with the links, with the sessions as well."""
    rows: list[Row] = []
    with (
        Remote(PoliteCrowd, num) as crowd,
        Remote(FarEngine) as peer,
        P2pNcclEngine(config()) as engine,
    ):
        address = peer.ask("address")

        def look(case: str) -> None:
            stats = engine.stats()
            rows.append(
                {
                    "case": case,
                    "links": stats["links"].get("ready", 0),
                    "sessions": stats["sessions"],
                    **resources(),
                    **idle_cost(),
                    **spread(transfers(engine, peer, address, case), "transfer_ms_"),
                }
            )

        look("alone")
        progress("links")
        ports = crowd.ask("ports")
        for start in range(0, num, AT_ONCE):
            asked = [ask(engine, port) for port in ports[start : start + AT_ONCE]]
            linked = start + len(asked)
            until(lambda n=linked: engine.stats()["links"].get("ready", 0) > n, "linked")  # type: ignore[misc]
            for transfer in asked:
                transfer.cancel()
        look("links")
        progress("sessions")
        crowd.ask("come", engine.zmq_address, num)
        until(lambda: engine.stats()["sessions"] >= num, "all are sessions")
        look("links and sessions")
    alone = rows[0]
    for row in rows:
        others = max(1, row["links"] - alone["links"] + row["sessions"] - alone["sessions"])
        for name in ("rss_kib", "descriptors", "threads"):
            row[f"{name}_each"] = round((row[name] - alone[name]) / others, 2)
    return rows


def main() -> None:
    """Measure, print, record."""
    parser = arguments("links", __doc__ or "", repetitions=1)
    parser.add_argument("--peers", type=int, default=2000, help="of each kind (%(default)s)")
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    record(measure(options.peers), options, {"descriptor_limit": hard, "soft_limit": soft})


if __name__ == "__main__":
    main()
