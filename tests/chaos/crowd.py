"""A crowd beside a healthy pair: thousands of polite peers, mute ones, and strangers that do harm.

The polite ones are one ROUTER behind many addresses: each connection is an engine of its own epoch
that welcomes and answers pings. The mute ones take connections and never say a word. Strangers send
garbage, messages that never end, and questions whose answers they do not read.
"""

from __future__ import annotations

import contextlib
import random
import resource
import socket
import threading
import zlib
from typing import Any

import zmq

from p2p_engine.errors import RemoteProtocolError
from p2p_engine.wire.addresses import split_address
from p2p_engine.wire.messages import (
    PROTOCOL_VERSION,
    Hello,
    Lookup,
    Ping,
    Pong,
    Welcome,
    decode,
    encode,
)
from tests.processes import Child

NUM_MUTE = 20
UNRESOLVABLE = [f"prefill-{number}.invalid:4567" for number in range(20)]
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL".ljust(54, b"\0")  # ZMTP 3.0, mechanism NULL
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
PART = b"\x03" + (60_000).to_bytes(8, "big") + bytes(60_000)  # a long frame with MORE set
POLL_MILLISECONDS = 200
PAUSE_SECONDS = 0.5


class PoliteProcess:
    """The commands of those who welcome everybody, on so many ports."""

    def __init__(self, num_polite: int) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._stopping = threading.Event()
        self._context = zmq.Context()
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        ports = [router.bind_to_random_port("tcp://127.0.0.1") for _ in range(num_polite)]
        self._addresses = [f"127.0.0.1:{port}" for port in ports]
        self._welcoming = threading.Thread(target=_welcome, args=(router, self._stopping))
        self._welcoming.start()

    def addresses(self) -> list[str]:
        """Where to dial."""
        return self._addresses

    def close(self) -> None:
        """End them."""
        self._stopping.set()
        self._welcoming.join(5)
        self._context.destroy(linger=0)


class StrangeProcess:
    """The commands of those who take connections and say nothing and, when told so, do harm."""

    def __init__(self, victims: list[str], seed: int) -> None:
        self._victims, self._seed = victims, seed
        self._stopping = threading.Event()
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(NUM_MUTE)]
        self._threads: list[threading.Thread] = []

    def addresses(self) -> list[str]:
        """Of the mute ones."""
        return [f"127.0.0.1:{listener.getsockname()[1]}" for listener in self._listeners]

    def harm(self) -> None:
        """Let the strangers begin."""
        for number, victim in enumerate(self._victims):
            for harm in (_noise, _unfinished, _unread):
                source = random.Random(f"{self._seed} {number} {harm.__name__}")
                arguments = (victim, source, self._stopping)
                self._threads.append(threading.Thread(target=harm, args=arguments))
                self._threads[-1].start()

    def close(self) -> None:
        """End them."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(5)


class Crowd:
    """Two processes, so that no stranger takes the interpreter from the polite ones; `polite` and
    `mute` are addresses to dial."""

    def __init__(self, num_polite: int, victims: list[str], seed: int) -> None:
        """Start it; strangers go for `victims` as soon as `harm` is called."""
        self._strange = Child(StrangeProcess, victims, seed)
        self._members = (Child(PoliteProcess, num_polite), self._strange)
        self.polite, self.mute = (member.ask("addresses") for member in self._members)

    def harm(self) -> None:
        """Let the strangers begin."""
        self._strange.ask("harm")

    def close(self) -> None:
        """End both."""
        for member in self._members:
            member.close()


def _welcome(router: zmq.Socket[bytes], stopping: threading.Event) -> None:
    """Be a polite peer to every connection."""
    while not stopping.is_set():
        if not router.poll(POLL_MILLISECONDS):
            continue
        identity, frame = router.recv_multipart()
        with contextlib.suppress(RemoteProtocolError):
            message = decode(frame)
            epoch = zlib.crc32(identity) | 1 << 40
            if isinstance(message, Hello):
                answer: Any = Welcome(epoch, message.source_epoch, PROTOCOL_VERSION, None, {})
            elif isinstance(message, Ping):
                answer = Pong(epoch, message.source_epoch)
            else:
                continue
            router.send_multipart([identity, encode(answer)])


def _noise(victim: str, source: random.Random, stopping: threading.Event) -> None:
    """Connect, say anything, leave."""
    while not stopping.wait(PAUSE_SECONDS):
        with (
            contextlib.suppress(OSError),
            socket.create_connection(split_address(victim), 5) as held,
        ):
            held.sendall(source.choice([b"", GREETING[:11], GREETING + READY]))
            held.sendall(source.randbytes(source.choice([1, 100, 10_000])))


def _unfinished(victim: str, source: random.Random, stopping: threading.Event) -> None:
    """Begin messages that never end, as many bytes as are taken."""
    while not stopping.wait(PAUSE_SECONDS):
        with (
            contextlib.suppress(OSError),
            socket.create_connection(split_address(victim), 5) as held,
        ):
            held.sendall(GREETING + READY)
            for _ in range(source.randrange(1000)):
                held.sendall(PART)


def _unread(victim: str, source: random.Random, stopping: threading.Event) -> None:
    """Ask, and do not read the answers."""
    context = zmq.Context()
    while not stopping.wait(PAUSE_SECONDS):
        asking = context.socket(zmq.DEALER)
        asking.setsockopt(zmq.LINGER, 0)
        asking.setsockopt(zmq.RCVHWM, 1)
        asking.setsockopt(zmq.RCVBUF, 4096)
        asking.connect(f"tcp://{victim}")
        with contextlib.suppress(zmq.Again):
            for _ in range(source.randrange(5000)):
                asking.send(encode(Lookup(1, 0, 0)), zmq.NOBLOCK)
        stopping.wait(PAUSE_SECONDS)
        asking.close()
    context.destroy(linger=0)
