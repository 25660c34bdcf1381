"""Sockets: the ZMQ sockets of one control plane, which send and receive its frames.

They belong to the holder of the I/O lock of plane.py; nothing here blocks.
"""

from __future__ import annotations

import contextlib
import logging
import select
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import zmq

from p2p_engine.bounded import RateLimitedWarnings
from p2p_engine.control.affinity import cores_to_take_back
from p2p_engine.control.auth import (
    ANSWER_QUEUE_FRAMES,
    Authenticator,
    Curve,
    open_dealer,
    open_router,
    send,
)
from p2p_engine.control.dialler import Dialler, Refused
from p2p_engine.control.fleet_key import Secrets
from p2p_engine.control.listener import Listener
from p2p_engine.wire import nixl_handshake
from p2p_engine.wire.addresses import join_address

logger = logging.getLogger(__name__)

FRAMES_PER_TURN = 64  # from one socket, before the others have their turn


@dataclass(frozen=True)
class Route:
    """The destination of a frame: an address that we dial, or a peer that dialled us."""

    address: str = ""
    identity: bytes = field(default=b"", repr=False)


Handler: TypeAlias = Callable[[Route, bytes], None]
Ended: TypeAlias = Callable[[Route], None]


class Sockets:
    """One listening socket (a ROUTER if it answers) and one ROUTER that dials."""

    def __init__(
        self,
        host: str,
        ports: range,
        epoll: select.epoll,
        on_frame: Handler,
        on_refused: Refused,
        secrets: Secrets = (),
        *,
        answers: bool = True,
        on_ended: Ended = lambda route: None,
    ) -> None:
        """Bind the first free port of `ports` (0: any). `epoll` tells when to call `receive`.

        With `secrets`, all traffic is encrypted, and only members are talked to. `on_refused` is
        called with an address that breaks its handshakes off, and the reason. `on_ended` is called
        with a route whose connection has ended, if a frame came on it or if we had dialled it.

        Without `answers`, peers that dial us are only heard: their routes lead nowhere, and they
        may use any routing id. The old connectors choose theirs, and reconnect under the same id
        before their last connection is known to have ended. A ROUTER would ignore such a
        connection. With ROUTER_HANDOVER, libzmq would keep the older connection for ever if data
        follow on it (its #4407).

        Raises:
            ConfigError: none of the ports can be bound, or there are too few descriptors.
        """
        self.dropped_frames = 0
        self.frames_sent = 0
        self.frames_received = 0
        self._epoll = epoll
        self._on_frame = on_frame
        self._on_ended = on_ended
        self._names: dict[int, bytes] = {}  # routing ids of peers that dialled us, by descriptor
        self._served: dict[int, Callable[[], None]] = {}  # by descriptor
        self._suspects: set[zmq.Socket[bytes]] = set()  # may hold unsignalled frames
        self._answers = answers
        self._warnings = RateLimitedWarnings(logger)
        self._is_closed = False
        self._listener = Listener(host, ports)
        self.address = join_address(host, self._listener.port)
        self._context = zmq.Context(io_threads=1)
        try:
            self._open(Curve(secrets), on_refused)
        except BaseException:
            self._context.destroy(linger=0)
            self._listener.close()
            raise

    def __contains__(self, fd: int) -> bool:
        """Whether a descriptor is one of ours."""
        return fd in self._served

    @property
    def has_more(self) -> bool:
        """Whether frames may be waiting that no descriptor signals."""
        return bool(self._suspects)

    @property
    def is_short(self) -> bool:
        """Whether no peer can connect, because the process has no descriptor left."""
        return self._listener.is_short

    @property
    def refused_connections(self) -> int:
        """Return how many connections were ended because they failed the handshake, were over a
        limit, or brought too many unread bytes or a message of several parts."""
        cut = sum(intake.num_cut for intake in self._intakes.values())
        return self._authenticator.refused + self._listener.turned_away + cut

    def send(self, route: Route, frame: bytes) -> bool:
        """Send a frame; one that cannot be delivered is dropped and counted. False: the connection
        that the route replies to has ended."""
        try:
            if route.address:
                self._suspects.add(self._dialler.socket)  # sending consumes an input event
                self._dialler.send(route.address, frame)
            else:
                self._suspects.add(self._router)
                send(self._router, route.identity, frame)
            self.frames_sent += 1
        except zmq.ZMQError as error:
            self.dropped_frames += 1
            logger.debug("frame to %s dropped: %s", route, str(error))
            return bool(route.address) or error.errno != zmq.EHOSTUNREACH
        return True

    def receive(self, fd: int) -> None:
        """Take in the frames on the socket behind a descriptor."""
        self._served[fd]()

    def receive_more(self) -> None:
        """Take in frames that no descriptor has signalled."""
        suspects, self._suspects = self._suspects, set()
        for source in suspects:
            self._receive(source)

    def hang_up(self, address: str) -> None:
        """Close the connection to an address; the next frame dials again."""
        self._dialler.hang_up(address)

    def tick(self, now: float) -> None:
        """Cut connections that are over a limit, and close idle ones; call it in every tick."""
        self._listener.check()
        for source, intake in self._intakes.items():
            self._receive(source)
            intake.check(now)
        self._dialler.close_idle(now)

    def watch_intakes(self) -> None:
        """Let bytes that come on any connection, once, make the epoll ready: until then, the next
        `tick` may be late."""
        for intake in self._intakes.values():
            self._epoll.modify(intake.fileno(), select.EPOLLIN | select.EPOLLONESHOT)

    def close(self, linger_seconds: float = 0.0) -> None:
        """Close every socket once its queue is sent, or after `linger_seconds`; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        linger_milliseconds = int(linger_seconds * 1000)
        self._authenticator.close()
        self._dialler.close(linger_milliseconds)
        self._router.close(linger=linger_milliseconds)
        self._served.clear()
        self._context.term()  # bounded, because every socket has a linger
        self._listener.close()

    def _open(self, curve: Curve, on_refused: Refused) -> None:
        for core in cores_to_take_back():
            self._context.set(zmq.THREAD_AFFINITY_CPU_ADD, core)
        self._router = (
            open_router(self._context, ANSWER_QUEUE_FRAMES)
            if self._answers
            else open_dealer(self._context)
        )
        self._authenticator = Authenticator(
            self._context, self._router, self._listener, curve, on_ended=self._session_ended
        )
        self._dialler = Dialler(
            self._context, curve, on_refused, lambda address: self._on_ended(Route(address))
        )
        self._intakes = {
            self._router: self._authenticator.intake,
            self._dialler.socket: self._dialler.intake,
        }
        for guarded in self._authenticator.sockets():
            self._serve(guarded, self._authenticator.serve)
        self._serve(self._dialler.monitor, self._dialler.serve)
        for source, intake in self._intakes.items():
            self._serve(source, partial(self._receive, source))
            self._epoll.register(intake.fileno(), 0)

    def _serve(self, socket: zmq.Socket[bytes], serve: Callable[[], None]) -> None:
        fd = int(socket.getsockopt(zmq.FD))
        self._served[fd] = serve
        self._epoll.register(fd, select.EPOLLIN)

    def _receive(self, source: zmq.Socket[bytes]) -> None:
        has_names = self._answers or source is not self._router
        for _ in range(FRAMES_PER_TURN):
            try:
                name = source.recv(zmq.NOBLOCK) if has_names else b""
                frame = source.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self._suspects.discard(source)
                self._intakes[source].drained = True
                return
            self._take(source, name, frame)
        self._suspects.add(source)

    def _session_ended(self, fd: int) -> None:
        name = self._names.pop(fd, None)
        if name is not None:
            self._on_ended(Route(identity=name))

    def _serve_events(self) -> None:
        self._authenticator.serve()
        self._dialler.serve()

    def _take(self, source: zmq.Socket[bytes], name: bytes, frame: zmq.Frame) -> None:
        intake, fd = self._intakes[source], _descriptor_of(frame)
        if frame.more:
            self._take_parts(source, name, frame)
            return
        self.frames_received += 1
        intake.take(fd, len(frame))
        if source is self._router:
            if self._names.get(fd) != name:  # the event that ended its former peer may be unread
                self._authenticator.serve()
            self._authenticator.connections.prove(fd)
            self._names[fd] = name
            self._on_frame(Route(identity=name), frame.bytes)
        elif address := self._dialler.address_of(name):
            self._on_frame(Route(address), frame.bytes)

    def _take_parts(self, source: zmq.Socket[bytes], name: bytes, first: zmq.Frame) -> None:
        """Drop a message of several parts, as none of ours is, and cut its connection; refuse a
        NixlConnector by name."""
        second = last = source.recv(zmq.NOBLOCK, copy=False)
        while last.more:
            last = source.recv(zmq.NOBLOCK, copy=False)
        self.dropped_frames += 1
        self._serve_events()  # the intake may not know the connection yet
        parts = [first.bytes, second.bytes] if second is last else []
        if source is self._router and self._answers and nixl_handshake.is_question(parts):
            self._refuse_nixl(name, first, sum(map(len, parts)))
        else:
            self._intakes[source].end(_descriptor_of(first), "it sends messages of several parts")

    def _refuse_nixl(self, name: bytes, frame: zmq.Frame, num_bytes: int) -> None:
        fd = _descriptor_of(frame)
        self._authenticator.connections.prove(fd)
        self._authenticator.intake.take(fd, num_bytes)
        host = frame.get("Peer-Address")
        self._warnings.warn("%s asked for NIXL's handshake; %s", host, nixl_handshake.REFUSAL)
        self._suspects.add(self._router)
        with contextlib.suppress(zmq.ZMQError):  # it has gone, or does not read
            self._router.send_multipart([name, *nixl_handshake.refusal()], zmq.NOBLOCK)


def _descriptor_of(frame: zmq.Frame) -> int:
    """Return the descriptor of the connection that brought a frame; -1 if it is unknown."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1
