"""Sockets: the ZMQ sockets of one control plane, whose frames come and go here.

They belong to whoever holds the I/O lock of control.py; nothing here blocks.
"""

from __future__ import annotations

import logging
import os
import select
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import zmq

from p2p_engine.addresses import join_address, split_address
from p2p_engine.affinity import cores_to_take_back
from p2p_engine.errors import ConfigError
from p2p_engine.messages import MAX_FRAME_BYTES

logger = logging.getLogger(__name__)

SEND_QUEUE_FRAMES = 10_000  # per peer; libzmq drops or refuses beyond it
FRAMES_PER_TURN = 64  # then the other sockets have theirs


@dataclass(frozen=True)
class Route:
    """Where a frame goes: to an address that we dial, or back to who dialled us."""

    address: str = ""
    identity: bytes = field(default=b"", repr=False)


Handler: TypeAlias = Callable[[Route, bytes], None]


class Sockets:
    """One ROUTER that everybody may dial, one DEALER for each address that we dial."""

    def __init__(self, host: str, ports: range, epoll: select.epoll, on_frame: Handler) -> None:
        """Bind the first free port of `ports` (0: any); `epoll` tells when to call `receive`.

        Raises:
            ConfigError: none of the ports can be bound.
        """
        self.dropped_frames = 0
        self.frames_sent = 0
        self.frames_received = 0
        self._epoll = epoll
        self._on_frame = on_frame
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._dialled: dict[zmq.Socket[bytes], Route] = {}
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._suspects: set[zmq.Socket[bytes]] = set()  # may hold frames that no event tells of
        self._identity = os.urandom(8).hex().encode()
        self._context = zmq.Context(io_threads=1)
        for core in cores_to_take_back():
            self._context.set(zmq.THREAD_AFFINITY_CPU_ADD, core)
        try:
            self._router = self._open(zmq.ROUTER)
            self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self.address = join_address(host, self._bind(host, ports))
        except BaseException:
            self.close()
            raise

    def __contains__(self, fd: int) -> bool:
        """Whether a descriptor is one of ours."""
        return fd in self._sockets

    @property
    def has_more(self) -> bool:
        """Whether frames may be waiting of which no descriptor tells."""
        return bool(self._suspects)

    def send(self, route: Route, frame: bytes) -> None:
        """Send a frame; what cannot be delivered is dropped and counted."""
        try:
            sender = self._dealer(route.address) if route.address else self._router
            self._suspects.add(sender)  # sending takes in the event of a frame that has come
            sender.send_multipart(
                [frame] if route.address else [route.identity, frame], zmq.NOBLOCK
            )
            self.frames_sent += 1
        except zmq.ZMQError as error:
            self.dropped_frames += 1
            logger.debug("frame to %s dropped: %s", route, error)

    def receive(self, fd: int) -> None:
        """Hand on what has come on the socket behind a descriptor."""
        self._receive(self._sockets[fd])

    def receive_more(self) -> None:
        """Hand on what has come without a descriptor's telling."""
        suspects, self._suspects = self._suspects, set()
        for source in suspects:
            self._receive(source)

    def hang_up(self, address: str) -> None:
        """Close the DEALER to an address; the next frame dials afresh."""
        dealer = self._dealers.pop(address, None)
        if dealer is not None:
            self._suspects.discard(dealer)
            del self._dialled[dealer]
            self._forget(dealer)
            dealer.close(linger=100)

    def close(self, linger_seconds: float = 0.0) -> None:
        """Close every socket, after what is queued has left or `linger_seconds`; idempotent."""
        for opened in self._sockets.values():
            opened.close(linger=int(linger_seconds * 1000))
        self._sockets.clear()
        self._context.term()  # bounded: every socket's linger is

    def _receive(self, source: zmq.Socket[bytes]) -> None:
        for _ in range(FRAMES_PER_TURN):
            try:
                frames = source.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._suspects.discard(source)
                return
            self.frames_received += 1
            expected = 2 if source is self._router else 1
            if len(frames) != expected:
                self.dropped_frames += 1
                continue
            route = self._dialled.get(source) or Route(identity=frames[0])
            self._on_frame(route, frames[-1])
        self._suspects.add(source)

    def _dealer(self, address: str) -> zmq.Socket[bytes]:
        if address not in self._dealers:
            dealer = self._open(zmq.DEALER)
            dealer.setsockopt(zmq.IDENTITY, self._identity + f"@{address}".encode()[:200])
            try:
                dealer.connect(f"tcp://{address}")
            except zmq.ZMQError:
                self._forget(dealer)
                dealer.close()  # left open, it would keep the context from ending
                raise
            self._dealers[address], self._dialled[dealer] = dealer, Route(address)
        return self._dealers[address]

    def _open(self, kind: int) -> zmq.Socket[bytes]:
        opened: zmq.Socket[bytes] = self._context.socket(kind)
        opened.setsockopt(zmq.LINGER, 0)
        opened.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        opened.setsockopt(zmq.SNDHWM, SEND_QUEUE_FRAMES)
        opened.setsockopt(zmq.RCVHWM, SEND_QUEUE_FRAMES)
        opened.setsockopt(zmq.IPV6, 1)
        fd = int(opened.getsockopt(zmq.FD))
        self._sockets[fd] = opened
        self._epoll.register(fd, select.EPOLLIN)
        return opened

    def _forget(self, socket: zmq.Socket[bytes]) -> None:
        fd = int(socket.getsockopt(zmq.FD))
        del self._sockets[fd]
        self._epoll.unregister(fd)

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
