"""Authenticator: who may connect to a ROUTER, and with which keys a DEALER does.

The keys of a fleet (fleet_key.py) become CURVE keys: both sides prove theirs, and all after that is
encrypted (ZMTP 3.1, RFC 26/CurveZMQ; the client's key is checked as RFC 27/ZAP says). A
connection that does not prove itself ends with its handshake's deadline, and there are never many
of them. Nothing here blocks or has a thread: who owns the sockets calls `serve`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import resource
import secrets
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from p2p_engine.bounded import RateLimitedWarnings
from p2p_engine.control.fleet_key import Secrets, derive
from p2p_engine.control.intake import (
    KERNEL_BUFFER_BYTES,
    RECEIVE_QUEUE_FRAMES,
    Intake,
    duplicate,
)
from p2p_engine.control.listener import Listener
from p2p_engine.wire.messages import MAX_FRAME_BYTES

logger = logging.getLogger(__name__)

SILENCE_SECONDS = 10  # of a connection that no packet ends: its host is gone, or the way there
ANSWER_QUEUE_FRAMES = 500  # for who dialled us; what is more is dropped, and said again when asked
HANDSHAKE_SECONDS = 3.0
MAX_CONNECTIONS = 4096  # of one ROUTER, and at most a quarter of what the process may open
MAX_YOUNG = 128  # from one address, whose handshake may not be over
MAX_FAILURES = 3  # handshakes in a row that a peer may break off before it is given up
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"p2p-engine"
_EVENT = struct.Struct("=HI")
_MECHANISM_MISMATCH = 0x11000002
_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Curve:
    """The CURVE keys of a member of a fleet; without secrets there are none, and no encryption."""

    def __init__(self, secrets: Secrets) -> None:
        self._servers = [_key_pair(derive(secret, b"server")) for secret in secrets]
        self._clients = [_key_pair(derive(secret, b"client")) for secret in secrets]
        self._allowed = {z85.decode(public) for public, _ in self._clients}

    def __len__(self) -> int:
        """How many keys there are to dial with."""
        return len(self._clients)

    def serve(self, router: zmq.Socket[bytes]) -> None:
        """Let only members in, if there are keys; before it is bound."""
        router.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_SECONDS * 1000))
        if self:
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.CURVE_SECRETKEY, self._servers[0][1])
            router.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
            router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer nobody is let in

    def dial(self, dealer: zmq.Socket[bytes], turn: int = 0) -> None:
        """Be a member, and demand that the other side is one; the `turn`-th of our keys."""
        dealer.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_SECONDS * 1000))
        if self:
            number = turn % len(self)
            public, secret = self._clients[number]
            dealer.setsockopt(zmq.CURVE_SERVERKEY, self._servers[number][0])
            dealer.setsockopt(zmq.CURVE_PUBLICKEY, public)
            dealer.setsockopt(zmq.CURVE_SECRETKEY, secret)

    def allows(self, public: bytes) -> bool:
        """Whether a client's key is one of the fleet's; it has proven that it has the secret."""
        return public in self._allowed


@dataclass(frozen=True)
class Connection:
    """One that was accepted, known by its descriptor."""

    address: str
    since: float


class Connections:
    """Counts what was accepted. No more than some of one address are young at a time: that is how
    long a handshake may last, so that all who have not proven themselves are among them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: dict[int, Connection] = {}
        self._young: dict[int, Connection] = {}  # the oldest first
        self._num_open: Counter[str] = Counter()
        self._num_young: Counter[str] = Counter()

    def __len__(self) -> int:
        """How many are open."""
        return len(self._open)

    def add(self, fd: int, address: str, now: float) -> bool:
        """Count one; False: it is one too many, whoever calls ends it."""
        self.remove(fd)
        for young, item in list(self._young.items()):
            if now - item.since < HANDSHAKE_SECONDS:
                break
            self._grow_old(young)
        if (
            len(self) >= self._limit
            or self._num_open[address] >= self._limit // 2
            or self._num_young[address] >= MAX_YOUNG
        ):
            return False
        self._open[fd] = self._young[fd] = Connection(address, now)
        self._num_open[address] += 1
        self._num_young[address] += 1
        return True

    def prove(self, fd: int) -> None:
        """A whole message came on one, so its handshake is over; idempotent."""
        self._grow_old(fd)

    def remove(self, fd: int) -> None:
        """One has ended; idempotent."""
        self._grow_old(fd)
        item = self._open.pop(fd, None)
        if item is not None:
            _count_down(self._num_open, item.address)

    def _grow_old(self, fd: int) -> None:
        item = self._young.pop(fd, None)
        if item is not None:
            _count_down(self._num_young, item.address)


class Authenticator:
    """Guards one ROUTER."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        router: zmq.Socket[bytes],
        listener: Listener,
        curve: Curve,
        clock: Callable[[], float] = time.monotonic,
        on_ended: Callable[[int], None] = lambda fd: None,
    ) -> None:
        """Guard a router that is not bound yet, and bind it; the context must be its own.
        `on_ended` is told the descriptor of a connection that has ended."""
        self.refused = 0  # connections that proved nothing, or were too many
        self.connections = Connections(min(MAX_CONNECTIONS, _most_files() // 4))
        if _most_files() < 4 * MAX_CONNECTIONS:
            text = "descriptors are limited to %d (ulimit -n): at most %d peers may connect"
            logger.warning(text, _most_files(), _most_files() // 4)
        self.intake = Intake()
        self._listener = listener
        self._curve = curve
        self._clock = clock
        self._on_ended = on_ended
        self._warnings = RateLimitedWarnings(logger, clock)
        self._router = router
        self._zap: zmq.Socket[bytes] | None = None
        if curve:
            self._zap = context.socket(zmq.REP)
            self._zap.setsockopt(zmq.LINGER, 0)
            self._zap.bind(_ZAP_ADDRESS)
        curve.serve(router)
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | _FAILURES
        self._monitor = open_monitor(context, router, events)
        router.setsockopt(zmq.USE_FD, listener.lend())
        router.bind(f"tcp://127.0.0.1:{listener.port}")  # where it is bound the descriptor says

    def sockets(self) -> list[zmq.Socket[bytes]]:
        """The authenticator's own. Call `serve` when one of them is readable."""
        return [self._monitor] if self._zap is None else [self._monitor, self._zap]

    def serve(self) -> None:
        """Answer who asks to be let in, and count who came; until nothing is waiting."""
        while self._zap is not None:
            try:
                self._zap.send_multipart(self._judge(self._zap.recv_multipart(zmq.NOBLOCK)))
            except zmq.Again:
                break
        for event, value, _ in read_events(self._monitor):
            self._count(event, value)

    def close(self) -> None:
        """Close the authenticator's own sockets; before the router is closed."""
        close_monitor(self._router, self._monitor)
        if self._zap is not None:
            self._zap.close()
        self.intake.close()

    def _judge(self, request: list[bytes]) -> list[bytes]:
        _, request_id, _, _, _, mechanism, *credentials = request  # libzmq's own words
        is_member = mechanism == b"CURVE" and self._curve.allows(b"".join(credentials))
        status = [b"200", b"OK"] if is_member else [b"400", b"not of this fleet"]
        return [b"1.0", request_id, *status, b"", b""]

    def _count(self, event: int, fd: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._accept(fd)
        elif event == zmq.EVENT_DISCONNECTED:
            self.connections.remove(fd)
            self.intake.remove(fd)
            self._on_ended(fd)
        elif self._curve:
            self._refuse("no key of this fleet; the old connector has none and cannot join it")
        else:
            self._refuse("somebody does not speak our protocol, or asks for a key")

    def _accept(self, fd: int) -> None:
        with contextlib.suppress(OSError), duplicate(fd) as accepted:
            is_ours = accepted.family in (socket.AF_INET, socket.AF_INET6)
            if not is_ours or accepted.getsockname()[1] != self._listener.port:
                return
            address = accepted.getpeername()[0]
            if self._listener.is_short:
                self._refuse("no descriptor is left")
                accepted.shutdown(socket.SHUT_RDWR)
            elif not self.connections.add(fd, address, self._clock()):
                self._refuse(f"too many connections from {address}, or in all")
                accepted.shutdown(socket.SHUT_RDWR)
            else:
                self.intake.add(fd)

    def _refuse(self, why: str) -> None:
        self.refused += 1
        self._warnings.warn("refused: %s; %d in all", why, self.refused)


class Handshakes:
    """Those of one DEALER: libzmq says nothing of their failure but in these events."""

    EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | _FAILURES

    def __init__(self, num_keys: int) -> None:
        self.failures = 0  # in a row
        self._has_keys = num_keys > 0
        self._max_failures = MAX_FAILURES + max(0, num_keys - 1)  # each key is tried

    def take(self, event: int, value: int) -> str:
        """Take an event; returns why the peer is not to be had, or "" (yet)."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.failures = 0
            return ""
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and value == errno.EAGAIN:
            return ""  # its time is over, and nobody has hung up: a peer that does not run now
        self.failures += 1
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return f"it does not accept our key ({value})"
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value != _MECHANISM_MISMATCH:
            return f"the handshake failed (ZMTP error {value:#x})"
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            if self._has_keys:
                return "it takes no keys: it was started without key_file, or is of the old kind"
            return "it asks for a key, and no key_file is named here"
        if self.failures < self._max_failures:
            return ""  # it may be starting, ending, or full
        hint = "has another key, or takes none" if self._has_keys else "may ask for a key"
        return f"it breaks every handshake off: it {hint}"


def open_router(
    context: zmq.Context[zmq.Socket[bytes]], send_queue_frames: int
) -> zmq.Socket[bytes]:
    """Return a ROUTER whose queues, frames and kernel buffers are bounded, for each peer."""
    _scatter_names()
    opened = _open(context, zmq.ROUTER, send_queue_frames)
    opened.setsockopt(zmq.ROUTER_MANDATORY, 1)
    return opened


def open_dealer(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Return a DEALER that only hears, with the same bounds. It asks nobody for a name, so nobody
    can come under the name of somebody else, or of who comes next."""
    return _open(context, zmq.DEALER, 1)


def _open(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, send_queue_frames: int
) -> zmq.Socket[bytes]:
    opened: zmq.Socket[bytes] = context.socket(kind)
    opened.setsockopt(zmq.LINGER, 0)
    opened.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    opened.setsockopt(zmq.SNDHWM, send_queue_frames)
    opened.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE_FRAMES)
    opened.setsockopt(zmq.SNDBUF, KERNEL_BUFFER_BYTES)
    opened.setsockopt(zmq.RCVBUF, KERNEL_BUFFER_BYTES)
    opened.setsockopt(zmq.IPV6, 1)
    # The kernel asks, not ZMTP's heartbeats: with those libzmq aborts the process (its #4767).
    opened.setsockopt(zmq.TCP_KEEPALIVE, 1)
    opened.setsockopt(zmq.TCP_KEEPALIVE_IDLE, SILENCE_SECONDS // 2)
    opened.setsockopt(zmq.TCP_KEEPALIVE_INTVL, max(1, SILENCE_SECONDS // 10))
    opened.setsockopt(zmq.TCP_MAXRT, SILENCE_SECONDS * 1000)
    return opened


def _scatter_names() -> None:
    """Let the next ROUTER begin anywhere with the names that it makes up for who has none.

    It counts from rand(), which is the same in every process that nobody seeds. libzmq ends the
    process when the next of these names is borne already, by a stranger who has chosen it.
    """
    ctypes.CDLL(None).srand(ctypes.c_uint(secrets.randbits(32)))


def send(router: zmq.Socket[bytes], name: bytes, frame: bytes) -> None:
    """Send a frame to one peer of a ROUTER; never blocks.

    Raises:
        zmq.ZMQError: there is no such peer, or too much waits for it.
    """
    try:
        router.send_multipart([name, frame], zmq.NOBLOCK)
    except zmq.Again:
        router.getsockopt(zmq.EVENTS)  # lets it hear what has left meanwhile
        router.send_multipart([name, frame], zmq.NOBLOCK)


def open_monitor(
    context: zmq.Context[zmq.Socket[bytes]], watched: zmq.Socket[bytes], events: int
) -> zmq.Socket[bytes]:
    """Return a socket on which the events of another one can be read; before that one is bound
    or connected.

    Its queue has no limit: at one, libzmq's I/O thread would wait for us to read.
    """
    address = f"inproc://monitor-{os.urandom(8).hex()}"
    watched.monitor(address, events)
    monitor: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.connect(address)
    monitor.getsockopt(zmq.EVENTS)  # a pipe that was never looked at tells its descriptor nothing
    return monitor


def close_monitor(watched: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    """Stop the events and close their socket; before the watched one is closed."""
    watched.monitor(None, 0)
    monitor.close()


def read_events(monitor: zmq.Socket[bytes]) -> list[tuple[int, int, str]]:
    """Return what has happened, as (event, value, endpoint), until nothing is waiting."""
    events: list[tuple[int, int, str]] = []
    while True:
        try:
            description, endpoint = monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return events
        events.append((*_EVENT.unpack(description), endpoint.decode(errors="replace")))


def _count_down(counter: Counter[str], address: str) -> None:
    counter[address] -= 1
    if not counter[address]:
        del counter[address]


def _key_pair(secret: bytes) -> tuple[bytes, bytes]:
    text = z85.encode(secret)
    return zmq.curve_public(text), text


def _most_files() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_CONNECTIONS * 4 if limit == resource.RLIM_INFINITY else limit
