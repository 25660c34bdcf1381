"""Authenticator: decides which peers may connect to a ROUTER, and sets the keys of a DEALER.

The keys of a fleet (fleet_key.py) become CURVE keys. Both sides prove that they have theirs, and
all later traffic is encrypted (ZMTP 3.1, RFC 26/CurveZMQ; the client's key is checked as in RFC
27/ZAP). A connection that does not prove itself ends when its handshake times out, and the number
of such connections is bounded. Nothing here blocks or has a thread: the owner of the sockets calls
`serve`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import secrets
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from p2p_engine.bounded import RateLimitedWarnings, most_descriptors, most_peers
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

SILENCE_SECONDS = 10  # until a connection without any packet is closed
ANSWER_QUEUE_FRAMES = 500  # to a peer that dialled us; more are dropped until it asks again
HANDSHAKE_SECONDS = 3.0
MAX_CONNECTIONS = 4096  # of one ROUTER, and at most a quarter of what the process may open
MAX_YOUNG = 128  # from one address: connections whose handshake may still be running
MAX_FAILURES = 3  # handshakes in a row that a peer may break off before we give it up
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
    """The CURVE keys of a fleet's member. Without secrets there are no keys and no encryption."""

    def __init__(self, secrets: Secrets) -> None:
        self._servers = [_key_pair(derive(secret, b"server")) for secret in secrets]
        self._clients = [_key_pair(derive(secret, b"client")) for secret in secrets]
        self._allowed = {z85.decode(public) for public, _ in self._clients}

    def __len__(self) -> int:
        """Return how many keys there are to dial with."""
        return len(self._clients)

    def serve(self, router: zmq.Socket[bytes]) -> None:
        """Admit members only, if there are keys. Call it before the router is bound."""
        router.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_SECONDS * 1000))
        if self:
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.CURVE_SECRETKEY, self._servers[0][1])
            router.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
            router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer, nobody is admitted

    def dial(self, dealer: zmq.Socket[bytes], turn: int = 0) -> None:
        """Dial as a member, with the `turn`-th of our keys, and demand that the listener is one
        too."""
        dealer.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_SECONDS * 1000))
        if self:
            number = turn % len(self)
            public, secret = self._clients[number]
            dealer.setsockopt(zmq.CURVE_SERVERKEY, self._servers[number][0])
            dealer.setsockopt(zmq.CURVE_PUBLICKEY, public)
            dealer.setsockopt(zmq.CURVE_SECRETKEY, secret)

    def allows(self, public: bytes) -> bool:
        """Whether a client's key is one of the fleet's. libzmq has checked the secret behind it."""
        return public in self._allowed


@dataclass(frozen=True)
class Connection:
    """An accepted connection, known by its descriptor."""

    address: str
    since: float


class Connections:
    """Counts accepted connections, and bounds how many of one address are young. A connection is
    young for as long as a handshake may last, so every unproven connection is among them."""

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
        """Count a connection. False: it is over a limit, and the caller must end it."""
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
        """Note that a connection brought a whole message, so its handshake is over; idempotent."""
        self._grow_old(fd)

    def remove(self, fd: int) -> None:
        """Forget a connection that has ended; idempotent."""
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
        """Guard a router that is not bound yet, and bind it. The context must be the router's own.
        `on_ended` is called with the descriptor of each connection that ends."""
        self.refused = 0  # connections that failed the handshake, or were over a limit
        most = most_peers(MAX_CONNECTIONS)
        self.connections = Connections(most)
        if most < MAX_CONNECTIONS:
            text = "descriptors are limited to %d (ulimit -n): at most %d peers may connect"
            logger.warning(text, most_descriptors(), most)
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
        router.bind(f"tcp://127.0.0.1:{listener.port}")  # the descriptor is bound already

    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Return the authenticator's own sockets. Call `serve` when one of them is readable."""
        return [self._monitor] if self._zap is None else [self._monitor, self._zap]

    def serve(self) -> None:
        """Answer the waiting ZAP requests and count connections; never blocks."""
        while self._zap is not None:
            try:
                self._zap.send_multipart(self._judge(self._zap.recv_multipart(zmq.NOBLOCK)))
            except zmq.Again:
                break
        for event, value, _ in read_events(self._monitor):
            self._count(event, value)

    def close(self) -> None:
        """Close the authenticator's own sockets. Call it before the router is closed."""
        close_monitor(self._router, self._monitor)
        if self._zap is not None:
            self._zap.close()
        self.intake.close()

    def _judge(self, request: list[bytes]) -> list[bytes]:
        _, request_id, _, _, _, mechanism, *credentials = request  # the format is libzmq's
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
            self._refuse("a client does not speak our protocol, or asks for a key")

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
    """The handshakes of one DEALER. Only these events tell that one has failed."""

    EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | _FAILURES

    def __init__(self, num_keys: int) -> None:
        self.failures = 0  # in a row
        self._has_keys = num_keys > 0
        self._max_failures = MAX_FAILURES + max(0, num_keys - 1)  # each key is tried

    def take(self, event: int, value: int) -> str:
        """Take an event; returns why the peer cannot be reached, or "" (for now)."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.failures = 0
            return ""
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and value == errno.EAGAIN:
            return ""  # timed out without a hang-up: the peer does not run at the moment
        self.failures += 1
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return f"it does not accept our key ({value})"
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value != _MECHANISM_MISMATCH:
            return f"the handshake failed (ZMTP error {value:#x})"
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            if self._has_keys:
                return "it takes no keys: it was started without key_file, or is an old connector"
            return "it asks for a key, and no key_file is named here"
        if self.failures < self._max_failures:
            return ""  # the peer may be starting, stopping or full
        hint = "has another key, or takes none" if self._has_keys else "may ask for a key"
        return f"it breaks every handshake off: it {hint}, or this is no kv_port (an HTTP port?)"


def open_router(
    context: zmq.Context[zmq.Socket[bytes]], send_queue_frames: int
) -> zmq.Socket[bytes]:
    """Return a ROUTER with bounded queues, frames and kernel buffers for each peer."""
    _scatter_names()
    opened = _open(context, zmq.ROUTER, send_queue_frames)
    opened.setsockopt(zmq.ROUTER_MANDATORY, 1)
    return opened


def open_dealer(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Return a DEALER that only receives, with the same bounds. It does not use the routing ids of
    its peers, so no peer can pose as another one."""
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
    # TCP keep-alive, not ZMTP heartbeats: with those, libzmq aborts the process (its #4767).
    opened.setsockopt(zmq.TCP_KEEPALIVE, 1)
    opened.setsockopt(zmq.TCP_KEEPALIVE_IDLE, SILENCE_SECONDS // 2)
    opened.setsockopt(zmq.TCP_KEEPALIVE_INTVL, max(1, SILENCE_SECONDS // 10))
    opened.setsockopt(zmq.TCP_MAXRT, SILENCE_SECONDS * 1000)
    return opened


def _scatter_names() -> None:
    """Let the next ROUTER start at a random number when it makes up ids for peers without one.

    libzmq numbers them from rand(), which is the same in every process that does not seed it. If a
    stranger has chosen the next id already, libzmq ends the process.
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
        router.getsockopt(zmq.EVENTS)  # lets the socket notice what has been sent meanwhile
        router.send_multipart([name, frame], zmq.NOBLOCK)


def open_monitor(
    context: zmq.Context[zmq.Socket[bytes]], watched: zmq.Socket[bytes], events: int
) -> zmq.Socket[bytes]:
    """Return a socket that reports the events of `watched`. Call it before that one is bound or
    connected.

    Its queue has no limit. With one, libzmq's I/O thread would wait until we read.
    """
    address = f"inproc://monitor-{os.urandom(8).hex()}"
    watched.monitor(address, events)
    monitor: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.connect(address)
    monitor.getsockopt(zmq.EVENTS)  # until a pipe was read once, its descriptor signals nothing
    return monitor


def close_monitor(watched: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    """Stop the events and close their socket. Call it before the watched one is closed."""
    watched.monitor(None, 0)
    monitor.close()


def read_events(monitor: zmq.Socket[bytes]) -> list[tuple[int, int, str]]:
    """Return the waiting events as (event, value, endpoint); never blocks."""
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
