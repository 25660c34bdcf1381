"""A crowd beside a healthy pair: thousands of polite peers, mute ones, and strangers that do harm.

The polite ones are one ROUTER behind many addresses: each connection is an engine of its own epoch
that welcomes and answers pings. The mute ones take connections and never say a word. Strangers send
garbage, messages that never end, and questions whose answers they do not read.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import resource
import socket
import threading
import zlib
from collections.abc import Callable
from multiprocessing.connection import Connection
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

NUM_MUTE = 20
UNRESOLVABLE = [f"prefill-{number}.invalid:4567" for number in range(20)]
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL".ljust(54, b"\0")  # ZMTP 3.0, mechanism NULL
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
PART = b"\x03" + (60_000).to_bytes(8, "big") + bytes(60_000)  # a long frame with MORE set
POLL_MILLISECONDS = 200
PAUSE_SECONDS = 0.5


class Crowd:
    """Two processes, so that no stranger takes the interpreter from the polite ones; `polite` and
    `mute` are addresses to dial."""

    def __init__(self, num_polite: int, victims: list[str], seed: int) -> None:
        """Start it; strangers go for `victims` as soon as `harm` is called."""
        self._members = [_Member(_be_polite, num_polite), _Member(_be_strange, victims, seed)]
        self.polite, self.mute = (member.pipe.recv() for member in self._members)

    def harm(self) -> None:
        """Let the strangers begin."""
        self._members[1].pipe.send("harm")

    def close(self) -> None:
        """End both."""
        for member in self._members:
            member.close()


class _Member:
    """A process that ends when its pipe does."""

    def __init__(self, main: Callable[..., None], *arguments: object) -> None:
        context = multiprocessing.get_context("forkserver")
        self.pipe, theirs = context.Pipe()
        self._process: Any = context.Process(target=main, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def close(self) -> None:
        self.pipe.close()
        self._process.join(10)
        self._process.kill()
        self._process.join(10)


def _be_polite(pipe: Connection, num_polite: int) -> None:
    """Welcome everybody, on so many ports, until the pipe ends."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    stopping = threading.Event()
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    polite = [
        f"127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}" for _ in range(num_polite)
    ]
    welcoming = threading.Thread(target=_welcome, args=(router, stopping))
    welcoming.start()
    pipe.send(polite)
    with contextlib.suppress(EOFError):
        pipe.recv()
    stopping.set()
    welcoming.join(5)
    context.destroy(linger=0)


def _be_strange(pipe: Connection, victims: list[str], seed: int) -> None:
    """Take connections and say nothing; when told so, do harm, until the pipe ends."""
    stopping = threading.Event()
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(NUM_MUTE)]
    threads: list[threading.Thread] = []
    pipe.send([f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners])
    with contextlib.suppress(EOFError):
        while pipe.recv() == "harm":
            for number, victim in enumerate(victims):
                for harm in (_noise, _unfinished, _unread):
                    source = random.Random(f"{seed} {number} {harm.__name__}")
                    threads.append(threading.Thread(target=harm, args=(victim, source, stopping)))
                    threads[-1].start()
    stopping.set()
    for thread in threads:
        thread.join(5)


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
