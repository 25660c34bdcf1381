"""Sockets: the ZMQ sockets of one control plane, whose frames come and go here.

They belong to whoever holds the I/O lock of plane.py; nothing here blocks.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import zmq

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
from p2p_engine.wire.addresses import join_address

logger = logging.getLogger(__name__)

FRAMES_PER_TURN = 64  # then the other sockets have theirs


@dataclass(frozen=True)
class Route:
    """Where a frame goes: to an address that we dial, or back to who dialled us."""

    address: str = ""
    identity: bytes = field(default=b"", repr=False)


Handler: TypeAlias = Callable[[Route, bytes], None]
Ended: TypeAlias = Callable[[Route], None]


class Sockets:
    """One socket that is dialled, a ROUTER if it answers, and one ROUTER that dials."""

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
        """Bind the first free port of `ports` (0: any); `epoll` tells when to call `receive`.

        With `secrets` all is encrypted, and only who has one of them is talked to. `on_refused` is
        told which address breaks its handshakes off, and why; `on_ended`, on which route somebody
        has gone, if he had said something or we had dialled him.

        Without `answers`, who dials us is only heard: its routes lead nowhere, and any name will
        do. The old connectors choose theirs, and come back under it while their last connection is
        not known to have ended. A ROUTER would be deaf to them then; or, if it lets the newer one
        take over, libzmq keeps the older one for ever, when data follow on it (its #4407).

        Raises:
            ConfigError: none of the ports can be bound, or there are too few descriptors.
        """
        self.dropped_frames = 0
        self.frames_sent = 0
        self.frames_received = 0
        self._epoll = epoll
        self._on_frame = on_frame
        self._on_ended = on_ended
        self._names: dict[int, bytes] = {}  # of who dialled us, by descriptor
        self._served: dict[int, Callable[[], None]] = {}  # by descriptor
        self._suspects: set[zmq.Socket[bytes]] = set()  # may hold frames unannounced
        self._answers = answers
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
        """Whether frames may be waiting of which no descriptor tells."""
        return bool(self._suspects)

    @property
    def refused_connections(self) -> int:
        """How many connections were ended because they proved nothing, were too many, or brought
        what nobody can take."""
        cut = sum(intake.num_cut for intake in self._intakes.values())
        return self._authenticator.refused + self._listener.turned_away + cut

    def send(self, route: Route, frame: bytes) -> bool:
        """Send a frame; what cannot be delivered is dropped and counted. False: the connection that
        the route leads back over has ended."""
        try:
            if route.address:
                self._suspects.add(self._dialler.socket)  # sending takes in a frame's event
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
        """Take in what has come on the socket behind a descriptor."""
        self._served[fd]()

    def receive_more(self) -> None:
        """Hand on what has come without a descriptor's telling."""
        suspects, self._suspects = self._suspects, set()
        for source in suspects:
            self._receive(source)

    def hang_up(self, address: str) -> None:
        """Close the connection to an address; the next frame dials afresh."""
        self._dialler.hang_up(address)

    def tick(self, now: float) -> None:
        """Cut what costs too much, and close what is idle; some fifty times a second."""
        self._listener.check()
        for source, intake in self._intakes.items():
            self._receive(source)
            intake.check()
        self._dialler.close_idle(now)

    def close(self, linger_seconds: float = 0.0) -> None:
        """Close every socket, after what is queued has left or `linger_seconds`; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        linger_milliseconds = int(linger_seconds * 1000)
        self._authenticator.close()
        self._dialler.close(linger_milliseconds)
        self._router.close(linger=linger_milliseconds)
        self._served.clear()
        self._context.term()  # bounded: every socket's linger is
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
        for source in self._intakes:
            self._serve(source, partial(self._receive, source))

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
            while source.recv(zmq.NOBLOCK, copy=False).more:
                pass
            self.dropped_frames += 1
            self._serve_events()  # the intake may not know the connection yet
            intake.end(fd, "it sends messages of several parts")
            return
        self.frames_received += 1
        intake.take(fd, len(frame))
        if source is self._router:
            if self._names.get(fd) != name:  # the end of who had it before may be unread
                self._authenticator.serve()
            self._authenticator.connections.prove(fd)
            self._names[fd] = name
            self._on_frame(Route(identity=name), frame.bytes)
        elif address := self._dialler.address_of(name):
            self._on_frame(Route(address), frame.bytes)


def _descriptor_of(frame: zmq.Frame) -> int:
    """Return the descriptor of the connection that brought a frame; -1 where nothing tells."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1
