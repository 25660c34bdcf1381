"""ControlPlane: every ZMQ socket and every handshake socket of an engine.

It moves frames and calls back; it knows neither messages nor transfers. The sockets belong to
whoever holds the I/O lock: the control thread, or a caller of `pump` that has the interpreter
anyway and would make the control thread wait 5 ms for each of its turns.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import zmq

from p2p_engine.errors import ConfigError
from p2p_engine.messages import MAX_FRAME_BYTES

logger = logging.getLogger(__name__)

TICK_MILLISECONDS = 20  # how late a timer may be
SEND_QUEUE_FRAMES = 10_000  # per peer; libzmq drops or refuses beyond it


@dataclass(frozen=True)
class Route:
    """Where a frame goes: to an address that we dial, or back to who dialled us."""

    address: str = ""
    identity: bytes = field(default=b"", repr=False)


Handler: TypeAlias = Callable[[Route, bytes], None]


def split_address(address: str) -> tuple[str, int]:
    """Split "host:port", where an IPv6 host stands in brackets.

    Raises:
        ValueError: it is not of that form.
    """
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) <= 65535:
        raise ValueError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """Join a host and a port; brackets go around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def restore_affinity() -> None:
    """Let the calling thread run wherever the parent process may: vLLM pins its workers' main
    threads to cores, and threads inherit that."""
    try:
        allowed = os.sched_getaffinity(os.getppid())
        if allowed > os.sched_getaffinity(0):
            os.sched_setaffinity(0, allowed)
    except OSError as error:
        logger.debug("thread affinity unchanged: %s", error)


class ControlPlane:
    """One ROUTER that everybody may dial, one DEALER for each address that we dial.

    All callbacks run with the I/O lock held, `on_tick` in the control thread; an exception in them
    is logged, counted and survived. `send`, `call_soon`, `pump` and `close` may be called from any
    thread.
    """

    def __init__(
        self,
        host: str,
        ports: range,
        *,
        on_frame: Handler,
        on_tick: Callable[[float], None],
        name: str,
    ) -> None:
        """Bind the first free port of `ports` (0: any).

        Raises:
            ConfigError: none of the ports can be bound.
        """
        self.errors = 0
        self.dropped_frames = 0
        self.frames_sent = 0
        self.frames_received = 0
        self._on_frame = on_frame
        self._on_tick = on_tick
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._watched: dict[int, Callable[[], None]] = {}
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._dialled: dict[zmq.Socket[bytes], Route] = {}
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._suspects: set[zmq.Socket[bytes]] = set()  # may hold frames that no event tells of
        self._io = threading.Lock()
        self._server = 0  # the thread that serves the sockets now and will see what is queued
        self._tick_at = 0.0
        self._stopping = threading.Event()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._context = zmq.Context(io_threads=1)
        try:
            self._router = self._socket(zmq.ROUTER)
            self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self.address = join_address(host, self._bind(host, ports))
        except BaseException:
            self._release()
            raise
        self._identity = os.urandom(8).hex().encode()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread; callbacks may come from now on."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def send(self, route: Route, frame: bytes) -> None:
        """Queue a frame; what cannot be delivered is dropped and counted: senders say it again."""
        self.call_soon(lambda: self._transmit(route, frame))

    def call_soon(self, call: Callable[[], None]) -> None:
        """Run `call` in the next turn, with the I/O lock held."""
        self._calls.append(call)
        if self._server != threading.get_ident():
            self._wake()

    def pump(self) -> None:
        """Send and receive what is ready, on the calling thread; never blocks."""
        if self._io.acquire(blocking=False):
            try:
                if not self._stopping.is_set():
                    self._serve()
            finally:
                self._io.release()

    def hang_up(self, address: str) -> None:
        """Close the DEALER to an address; the next frame dials afresh."""
        self.call_soon(lambda: self._close_dealer(address))

    def watch(self, fd: int, callback: Callable[[], None], *, writable: bool = False) -> None:
        """Call back when `fd` is readable (or writable) or hung up, instead of the callback before.

        In callbacks only, or before start.
        """
        events = select.EPOLLOUT if writable else select.EPOLLIN
        if fd in self._watched:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._watched[fd] = callback

    def unwatch(self, fd: int) -> None:
        """Stop watching; idempotent; in callbacks only. Call it before the fd is closed."""
        if self._watched.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def stop(self, timeout: float) -> bool:
        """Stop and join the thread; idempotent; False if it did not stop in time."""
        self._stopping.set()
        if self._thread.ident is not None and self._thread.is_alive():
            self._wake()
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self, timeout: float, linger_seconds: float = 0.2) -> bool:
        """Stop, then close every socket, after what is queued has left or `linger_seconds`.

        Idempotent; False if the thread did not stop, and then everything is left as it is.
        """
        stopped = self.stop(timeout)
        if stopped:
            with self._io:
                self._release(linger_seconds)
        return stopped

    def _run(self) -> None:
        restore_affinity()
        while not self._stopping.is_set():
            self._guard(self._turn)
        with self._io:
            self._guard(self._run_calls)

    def _turn(self) -> None:
        self._epoll.poll(TICK_MILLISECONDS / 1000)
        with self._io:
            self._serve()
            now = time.monotonic()
            if now >= self._tick_at:
                self._tick_at = now + TICK_MILLISECONDS / 1000
                self._guard(lambda: self._on_tick(now))

    def _serve(self) -> None:
        """Serve what is ready and run what is queued, once; what is left over wakes the thread."""
        self._server = threading.get_ident()
        self._guard(self._serve_ready)
        self._server = 0
        if self._calls or self._suspects:
            self._wake()

    def _serve_ready(self) -> None:
        for fd, _ in self._epoll.poll(0):
            if fd in self._sockets:
                self._receive(self._sockets[fd])
            elif fd in self._watched:
                self._guard(self._watched[fd])
            elif fd == self._wake_fd:
                os.eventfd_read(self._wake_fd)
        self._run_calls()
        suspects, self._suspects = self._suspects, set()
        for source in suspects:
            self._receive(source)

    def _run_calls(self) -> None:
        for _ in range(len(self._calls)):
            self._guard(self._calls.popleft())

    def _guard(self, call: Callable[[], None]) -> None:
        """Whatever a peer or a bug does, the thread lives on."""
        try:
            call()
        except Exception:
            self.errors += 1
            logger.exception("error in the control thread, which goes on")

    def _receive(self, source: zmq.Socket[bytes]) -> None:
        for _ in range(64):  # then let the others have their turn
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
            self._guard(lambda r=route, f=frames[-1]: self._on_frame(r, f))  # type: ignore[misc]
        self._suspects.add(source)

    def _transmit(self, route: Route, frame: bytes) -> None:
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

    def _dealer(self, address: str) -> zmq.Socket[bytes]:
        if address not in self._dealers:
            dealer = self._socket(zmq.DEALER)
            dealer.setsockopt(zmq.IDENTITY, self._identity + f"@{address}".encode()[:200])
            try:
                dealer.connect(f"tcp://{address}")
            except zmq.ZMQError:
                self._forget(dealer)
                dealer.close()  # left open, it would keep the context from ending
                raise
            self._dealers[address], self._dialled[dealer] = dealer, Route(address)
        return self._dealers[address]

    def _close_dealer(self, address: str) -> None:
        dealer = self._dealers.pop(address, None)
        if dealer is not None:
            self._suspects.discard(dealer)
            del self._dialled[dealer]
            self._forget(dealer)
            dealer.close(linger=100)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
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

    def _wake(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed: nobody is left to be woken
            os.eventfd_write(self._wake_fd, 1)

    def _release(self, linger_seconds: float = 0.0) -> None:
        if self._context.closed:
            return
        self._epoll.close()
        for opened in self._sockets.values():
            opened.close(linger=int(linger_seconds * 1000))
        self._context.term()  # bounded: every socket's linger is
        os.close(self._wake_fd)
        self._wake_fd = -1
