"""Sockets: the ZMQ sockets of one control plane, whose frames come and go here.

They belong to whoever holds the I/O lock of control.py; nothing here blocks.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import zmq

from p2p_engine.addresses import join_address, split_address
from p2p_engine.affinity import cores_to_take_back
from p2p_engine.errors import ConfigError
from p2p_engine.gate import Curve, Gate, Handshakes, close_monitor, open_monitor, read_events
from p2p_engine.keys import Secrets
from p2p_engine.messages import MAX_FRAME_BYTES
from p2p_engine.recent import Recent

logger = logging.getLogger(__name__)

SILENCE_SECONDS = 10  # of a connection that no packet ends: its host is gone, or the way there
IDLE_SECONDS = 60.0  # without a word of ours: a dialled connection is closed
SEND_QUEUE_FRAMES = 10_000  # per peer; libzmq drops or refuses beyond it
RECEIVE_QUEUE_FRAMES = 1_000  # per peer; what is more waits at the peer
MAX_RECONNECT_MILLISECONDS = 1_000
FRAMES_PER_TURN = 64  # then the other sockets have theirs


@dataclass(frozen=True)
class Route:
    """Where a frame goes: to an address that we dial, or back to who dialled us."""

    address: str = ""
    identity: bytes = field(default=b"", repr=False)


Handler: TypeAlias = Callable[[Route, bytes], None]
Refused: TypeAlias = Callable[[str, str], None]


@dataclass(eq=False)
class Dialled:
    """A DEALER to an address, and how its handshakes end."""

    address: str
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    handshakes: Handshakes
    turn: int  # which of our keys it uses
    said_at: float  # the last time


class Sockets:
    """One ROUTER that may be dialled, one DEALER for each address that we dial."""

    def __init__(
        self,
        host: str,
        ports: range,
        epoll: select.epoll,
        on_frame: Handler,
        on_refused: Refused,
        secrets: Secrets = (),
        *,
        named: bool = False,
    ) -> None:
        """Bind the first free port of `ports` (0: any); `epoll` tells when to call `receive`.

        With `secrets` all is encrypted, and only who has one of them is talked to. `on_refused` is
        told which address breaks its handshakes off, and why. Where who dials us is `named`, by
        itself, it comes back under its name while its last connection is not known to have ended;
        our own sockets have none: libzmq keeps a connection so replaced for ever, when data follow
        on it (its #4407).

        Raises:
            ConfigError: none of the ports can be bound.
        """
        self.dropped_frames = 0
        self.frames_sent = 0
        self.frames_received = 0
        self._epoll = epoll
        self._on_frame = on_frame
        self._on_refused = on_refused
        self._curve = Curve(secrets)
        self._turns: Recent[str, int] = Recent(1024)  # by address, while secrets are replaced
        self._dialled: dict[str, Dialled] = {}
        self._served: dict[int, Callable[[], None]] = {}  # by descriptor
        self._opened: set[zmq.Socket[bytes]] = set()
        self._suspects: dict[zmq.Socket[bytes], Route | None] = {}  # may hold frames unannounced
        self._context = zmq.Context(io_threads=1)
        for core in cores_to_take_back():
            self._context.set(zmq.THREAD_AFFINITY_CPU_ADD, core)
        self._gate: Gate | None = None
        try:
            self._router = self._open(zmq.ROUTER)
            self._router.setsockopt(zmq.ROUTER_HANDOVER, int(named))
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._gate = Gate(self._context, self._router, self._curve)
            for guarded in self._gate.sockets():
                self._serve(guarded, self._gate.serve)
            self._serve(self._router, partial(self._receive, self._router, None))
            self.address = join_address(host, self._bind(host, ports))
        except BaseException:
            self.close()
            raise

    def __contains__(self, fd: int) -> bool:
        """Whether a descriptor is one of ours."""
        return fd in self._served

    @property
    def has_more(self) -> bool:
        """Whether frames may be waiting of which no descriptor tells."""
        return bool(self._suspects)

    @property
    def refused_connections(self) -> int:
        """How many connections were ended because they proved nothing, or were too many."""
        return self._gate.refused if self._gate is not None else 0

    def send(self, route: Route, frame: bytes) -> bool:
        """Send a frame; what cannot be delivered is dropped and counted. False: the connection that
        the route leads back over has ended."""
        try:
            sender = self._dealer(route.address) if route.address else self._router
            # Sending takes in the event of a frame that has come.
            self._suspects[sender] = Route(route.address) if route.address else None
            sender.send_multipart(
                [frame] if route.address else [route.identity, frame], zmq.NOBLOCK
            )
            self.frames_sent += 1
        except zmq.ZMQError as error:
            self.dropped_frames += 1
            logger.debug("frame to %s dropped: %s", route, error)
            return error.errno != zmq.EHOSTUNREACH
        return True

    def receive(self, fd: int) -> None:
        """Take in what has come on the socket behind a descriptor."""
        self._served[fd]()

    def receive_more(self) -> None:
        """Hand on what has come without a descriptor's telling."""
        suspects, self._suspects = self._suspects, {}
        for source, route in suspects.items():
            if source in self._opened:
                self._receive(source, route)

    def hang_up(self, address: str, *, linger_milliseconds: int = 100) -> None:
        """Close the DEALER to an address; the next frame dials afresh."""
        dialled = self._dialled.pop(address, None)
        if dialled is not None:
            self._forget(dialled.socket)
            self._forget(dialled.monitor)
            close_monitor(dialled.socket, dialled.monitor)
            dialled.socket.close(linger=linger_milliseconds)

    def close_idle(self, now: float) -> None:
        """Close the connections that nothing was said on for long: who they led to may be gone."""
        for dialled in list(self._dialled.values()):
            if now - dialled.said_at >= IDLE_SECONDS:
                self.hang_up(dialled.address)

    def close(self, linger_seconds: float = 0.0) -> None:
        """Close every socket, after what is queued has left or `linger_seconds`; idempotent."""
        for address in list(self._dialled):
            self.hang_up(address, linger_milliseconds=int(linger_seconds * 1000))
        if self._gate is not None:
            self._gate.close()
        for opened in self._opened:
            opened.close(linger=int(linger_seconds * 1000))
        self._opened.clear()
        self._served.clear()
        self._context.term()  # bounded: every socket's linger is

    def _receive(self, source: zmq.Socket[bytes], route: Route | None) -> None:
        for _ in range(FRAMES_PER_TURN):
            try:
                frames = source.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._suspects.pop(source, None)
                return
            self.frames_received += 1
            if len(frames) != (2 if route is None else 1):
                self.dropped_frames += 1
                continue
            self._on_frame(route or Route(identity=frames[0]), frames[-1])
            if source not in self._opened:
                return  # hung up by what it said
        self._suspects[source] = route

    def _dealer(self, address: str) -> zmq.Socket[bytes]:
        if address not in self._dialled:
            self._dial(address, self._turns.get(address) or 0, Handshakes(len(self._curve)))
        dialled = self._dialled[address]
        dialled.said_at = time.monotonic()
        return dialled.socket

    def _dial(self, address: str, turn: int, handshakes: Handshakes) -> None:
        dealer = self._open(zmq.DEALER)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MILLISECONDS)
        self._curve.dial(dealer, turn)
        monitor = open_monitor(self._context, dealer, Handshakes.EVENTS)
        dialled = Dialled(address, dealer, monitor, handshakes, turn, time.monotonic())
        self._dialled[address] = dialled
        self._serve(dealer, partial(self._receive, dealer, Route(address)))
        self._serve(monitor, partial(self._shaken, dialled))
        try:
            dealer.connect(f"tcp://{address}")
        except zmq.ZMQError:
            self.hang_up(address)
            raise

    def _shaken(self, dialled: Dialled) -> None:
        """Handshakes have ended, well or not."""
        handshakes, address = dialled.handshakes, dialled.address
        for event, value in read_events(dialled.monitor):
            reason = handshakes.take(event, value)
            if reason:
                self.hang_up(address, linger_milliseconds=0)
                self._turns.pop(address)
                self._on_refused(address, reason)
                return
        if handshakes.failures and len(self._curve) > 1:  # it may serve with another of our keys
            self.hang_up(address, linger_milliseconds=0)
            self._dial(address, dialled.turn + 1, handshakes)
        elif not handshakes.failures and dialled.turn:
            self._turns.put(address, dialled.turn)

    def _open(self, kind: int) -> zmq.Socket[bytes]:
        opened: zmq.Socket[bytes] = self._context.socket(kind)
        opened.setsockopt(zmq.LINGER, 0)
        opened.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        opened.setsockopt(zmq.SNDHWM, SEND_QUEUE_FRAMES)
        opened.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE_FRAMES)
        opened.setsockopt(zmq.IPV6, 1)
        # The kernel asks, not ZMTP's heartbeats: with those libzmq aborts the process (its #4767).
        opened.setsockopt(zmq.TCP_KEEPALIVE, 1)
        opened.setsockopt(zmq.TCP_KEEPALIVE_IDLE, SILENCE_SECONDS // 2)
        opened.setsockopt(zmq.TCP_KEEPALIVE_INTVL, max(1, SILENCE_SECONDS // 10))
        opened.setsockopt(zmq.TCP_MAXRT, SILENCE_SECONDS * 1000)
        self._opened.add(opened)
        return opened

    def _serve(self, socket: zmq.Socket[bytes], serve: Callable[[], None]) -> None:
        fd = int(socket.getsockopt(zmq.FD))
        self._served[fd] = serve
        self._epoll.register(fd, select.EPOLLIN)

    def _forget(self, socket: zmq.Socket[bytes]) -> None:
        fd = int(socket.getsockopt(zmq.FD))
        del self._served[fd]
        self._epoll.unregister(fd)
        self._opened.discard(socket)
        self._suspects.pop(socket, None)

    def _bind(self, host: str, ports: range) -> int:
        wildcard = f"[{host}]" if ":" in host else host
        refusal: zmq.ZMQError | None = None
        for port in ports:
            try:
                self._router.bind(f"tcp://{wildcard}:{port or '*'}")
            except zmq.ZMQError as error:
                refusal = error
                continue
            endpoint = self._router.getsockopt(zmq.LAST_ENDPOINT)
            return split_address(bytes(endpoint).rstrip(b"\0").decode().removeprefix("tcp://"))[1]
        raise ConfigError(f"cannot bind {host} on any port of {ports}: {refusal}") from refusal
