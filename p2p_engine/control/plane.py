"""ControlPlane: the thread, the timers and the event loop of an engine.

It moves frames and calls back; it knows neither messages nor transfers. The sockets belong to the
holder of the I/O lock: the control thread, or a caller of `pump`. Such a caller has the interpreter
already, and would make the control thread wait 5 ms for each of its turns.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable

from p2p_engine.control.affinity import restore_affinity
from p2p_engine.control.fleet_key import Secrets
from p2p_engine.control.poller import Poller
from p2p_engine.control.reach import Reach
from p2p_engine.control.resolver import Resolver, Told
from p2p_engine.control.sockets import Route, Sockets
from p2p_engine.errors import PeerUnreachable

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.02  # how late a timer may be
REST_SECONDS = 1.0  # between two ticks, at most
REFRESH_SECONDS = 60.0  # until the name of a peer in use is looked up again
RESOLVE_SHARE = 0.9  # of the time for a first contact: a timeout then blames the name


class PlaneListener:
    """Hears the events of a control plane; a subclass overrides those that it needs. Every method
    is called with the I/O lock held; none may block."""

    def on_frame(self, route: Route, frame: bytes) -> None:
        """Take a frame that has come on a route."""

    def on_tick(self, now: float) -> None:
        """Do what is due; called in the control thread, every TICK_SECONDS or as `due_at`
        allows."""

    def due_at(self, now: float) -> float:
        """Return the time by which the next tick must come if nothing happens before. Whatever
        changes this outside of a callback calls `ControlPlane.stir`."""
        return 0.0

    def on_refused(self, address: str, reason: str) -> None:
        """Note that the peer at an address breaks our handshakes off."""

    def on_unresolved(self, address: str, error: PeerUnreachable) -> None:
        """Note that the name in an address was not resolved in time."""

    def on_ended(self, route: Route) -> None:
        """Note that a connection has ended which we did not close."""


class ControlPlane:
    """The loop around the ZMQ sockets, the handshake sockets and the timer.

    If `listener` or any other callback raises, the exception is logged and counted, and the loop
    goes on. `send`, `call_soon`, `pump` and `close` may be called from any thread.
    """

    def __init__(
        self,
        host: str,
        ports: range,
        *,
        name: str,
        listener: PlaneListener | None = None,
        secrets: Secrets = (),
        connect_seconds: float = 5.0,
        rest_seconds: float = REST_SECONDS,
    ) -> None:
        """Bind the first free port of `ports` (0: any). With `secrets`, only members may connect.
        If nothing is due, ticks are up to `rest_seconds` apart.

        If the listener is made later, set it before `start`. A name must resolve within nine tenths
        of `connect_seconds`.

        Raises:
            ConfigError: none of the ports can be bound.
        """
        self.errors = 0
        self.listener = listener or PlaneListener()
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._clocks: set[Callable[[float], None]] = set()
        self._io = threading.Lock()
        self._server = 0  # the thread that serves the sockets now; it will run new calls too
        self._tick_at = 0.0
        self._rest_seconds = rest_seconds
        self._is_resting = False  # the next tick is farther away than TICK_SECONDS
        self._stopping = threading.Event()
        self._watches = Poller()
        self._names = Resolver(connect_seconds * RESOLVE_SHARE, self.call_soon)
        self._reach = Reach(
            self._names, REFRESH_SECONDS, time.monotonic, self._hear,
            lambda *refused: self._guard(lambda: self.listener.on_refused(*refused)),
            lambda *unresolved: self._guard(lambda: self.listener.on_unresolved(*unresolved)),
            lambda route: self._guard(lambda: self.listener.on_ended(route)),
        )  # fmt: skip
        try:
            self.sockets = self._reach.sockets = Sockets(
                host, ports, self._watches.epoll, self._reach.hear, self._reach.refused, secrets,
                on_ended=self._reach.ended,
            )  # fmt: skip
        except BaseException:
            self._watches.close()
            raise
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def address(self) -> str:
        """The address that peers dial."""
        return self.sockets.address

    def start(self) -> None:
        """Start the thread; callbacks may come from now on."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs. If it has died, `pump` still serves the sockets."""
        return self._thread.is_alive()

    def send(self, route: Route, frame: bytes, over: Callable[[], None] = lambda: None) -> None:
        """Queue a frame; never blocks. A frame that cannot be delivered is dropped and counted:
        every sender repeats its messages. `over` is called if the connection that the route replies
        to has ended."""

        def send() -> None:
            if not self._reach.send(route, frame):
                over()

        self.call_soon(send)

    def call_soon(self, call: Callable[[], None]) -> None:
        """Run `call` in the next turn, with the I/O lock held."""
        self._calls.append(call)
        if self._server != threading.get_ident():
            self._watches.wake()

    def pump(self) -> None:
        """Send and receive what is ready, on the calling thread; never blocks."""
        if self._io.acquire(blocking=False):
            try:
                if not self._stopping.is_set() and self._serve():
                    self.stir()
            finally:
                self._io.release()

    def stir(self) -> None:
        """End a rest: something has changed, and may be due soon. From any thread."""
        if self._is_resting:
            self._watches.wake()

    def hang_up(self, address: str) -> None:
        """Close the connection to an address; the next frame dials again."""
        self.call_soon(lambda: self._reach.hang_up(address))

    def resolve(self, host: str, told: Told) -> None:
        """Call `told` once, in a callback, with a host's addresses or the error. It is called at
        once if the answer is known. In callbacks only; never blocks."""
        self._names.resolve(host, told)

    def watch(self, fd: int, callback: Callable[[], None], *, writable: bool = False) -> None:
        """Watch a descriptor, as `Poller.watch` does; in callbacks only, or before start."""
        self._watches.watch(fd, callback, writable=writable)

    def unwatch(self, fd: int) -> None:
        """Stop watching; idempotent; in callbacks only. Call it before the fd is closed."""
        self._watches.unwatch(fd)

    def watch_time(self, callback: Callable[[float], None]) -> None:
        """Call back with the time in every tick; in callbacks only, or before start."""
        self._clocks.add(callback)

    def unwatch_time(self, callback: Callable[[float], None]) -> None:
        """Stop the calls of `watch_time`; idempotent."""
        self._clocks.discard(callback)

    def stop(self, timeout: float) -> bool:
        """Stop and join the thread; idempotent. Returns False if it did not stop in time."""
        self._stopping.set()
        self._names.close()
        if self._thread.ident is not None and self._thread.is_alive():
            self._watches.wake()
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self, timeout: float, linger_seconds: float = 0.2) -> bool:
        """Stop, then close every socket once its queue is sent, or after `linger_seconds`.

        Idempotent. Returns False if the thread did not stop; then nothing is closed.
        """
        stopped = self.stop(timeout)
        if stopped:
            with self._io:
                if not self._watches.is_closed:
                    self.sockets.close(linger_seconds)
                    self._watches.close()
        return stopped

    def _run(self) -> None:
        restore_affinity()
        try:
            while not self._stopping.is_set():
                self._guard(self._turn)
            with self._io:
                self._guard(self._run_calls)
        except BaseException:
            logger.critical("%s has died", self._thread.name, exc_info=True)

    def _turn(self) -> None:
        self._watches.wait(max(0.0, self._tick_at - time.monotonic()))
        with self._io:
            self._serve()
            now = time.monotonic()
            if self._is_resting:
                self._is_resting = False
                self._tick_at = min(self._tick_at, now + TICK_SECONDS)
            if now >= self._tick_at:
                self._tick(now)
                self._tick_at = now + TICK_SECONDS
                self._guard(lambda: self._rest(now))

    def _tick(self, now: float) -> None:
        own = (self._names.tick, self._reach.tick, self.sockets.tick)
        for tell in (self.listener.on_tick, *own, *self._clocks):
            self._guard(lambda tell=tell: tell(now))  # type: ignore[misc]

    def _rest(self, now: float) -> None:
        """Put the next tick off if nothing is due before it."""
        self._is_resting = True  # first: a change after the question then ends the rest
        due_at = min(self.listener.due_at(now), self._names.due_at())
        self._is_resting = due_at > self._tick_at
        if self._is_resting:
            self._tick_at = min(due_at, now + self._rest_seconds)
            self.sockets.watch_intakes()

    def _serve(self) -> bool:
        """Serve what is ready and run the queued calls, once; wakes the thread if work is left.
        Returns whether there was anything to do, or a wake that may have been the thread's."""
        self._server = threading.get_ident()
        num_calls = len(self._calls)
        ready = self._watches.ready()
        was_woken = self._watches.was_woken
        self._guard(lambda: self._serve_ready(ready))
        self._server = 0
        if self._calls or self.sockets.has_more:
            self._watches.wake()
        return bool(ready or num_calls or was_woken)

    def _serve_ready(self, ready: list[int]) -> None:
        for fd in ready:
            if fd in self.sockets:
                self.sockets.receive(fd)
            elif (callback := self._watches.callback(fd)) is not None:
                self._guard(callback)
        self._run_calls()
        self.sockets.receive_more()

    def _hear(self, route: Route, frame: bytes) -> None:
        self._guard(lambda: self.listener.on_frame(route, frame))

    def _run_calls(self) -> None:
        for _ in range(len(self._calls)):
            self._guard(self._calls.popleft())

    def _guard(self, call: Callable[[], None]) -> None:
        """Run a call, and survive any exception: no peer and no bug may end the thread."""
        try:
            call()
        except Exception:
            self.errors += 1
            logger.exception("error in the control thread; the thread continues")
