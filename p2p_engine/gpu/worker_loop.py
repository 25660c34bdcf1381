"""Loop: one thread that runs posted calls, watches descriptors, and polls moments that nothing
signals. It never blocks on a single one of them."""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar

from p2p_engine.control.affinity import restore_affinity
from p2p_engine.control.poller import Poller
from p2p_engine.errors import P2pError, TransportError
from p2p_engine.memory.jobs import Moment

logger = logging.getLogger(__name__)

T = TypeVar("T")
TICK_SECONDS = 0.02
LOOK_SECONDS = 0.0001  # between two polls of moments


class Loop:
    """A thread with its posted calls, descriptors and moments."""

    def __init__(self, name: str) -> None:
        """Start the thread under this name."""
        self._name = name
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._waiting: list[tuple[list[Moment], Callable[[], None]]] = []
        self._ticks: list[Callable[[float], None]] = []
        self._tick_at = 0.0
        self._is_stopping = False
        self._watches = Poller()
        self._start_thread()

    # From any thread

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` in the thread, soon; never blocks."""
        self._calls.append(call)
        self._watches.wake()

    def run(self, call: Callable[[], T], timeout: float) -> T:
        """Run `call` in the thread and return its result; blocks. An exception of `call` is raised
        here.

        Raises:
            TransportError: it did not end within `timeout` seconds, or the thread is dead.
        """
        if not self.alive:
            raise TransportError(f"the thread {self._name} has ended")
        future: Future[T] = Future()

        def answer() -> None:
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001  # it is the caller's
                future.set_exception(error)

        self.post(answer)
        try:
            return future.result(timeout)
        except FutureTimeoutError:  # before Python 3.11, not a TimeoutError
            raise TransportError(
                f"the thread {self._name} did not answer in {timeout:g} s"
            ) from None

    def close(self, timeout: float) -> bool:
        """Stop the thread; idempotent. Blocks for at most `timeout` seconds; returns False if it
        did not stop."""
        if self._watches.is_closed:
            return True
        self._is_stopping = True
        self.post(lambda: None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        self._watches.close()
        return True

    # From the thread itself

    def when(self, moments: Iterable[Moment], done: Callable[[], None]) -> None:
        """Call `done` when all moments are complete, perhaps at once; if one has failed, see
        `lost`."""
        try:
            pending = [moment for moment in moments if not moment.is_complete()]
        except TransportError as error:
            self.lost(error)
            return
        if pending:
            self.later(pending, done)
        else:
            done()

    def later(self, moments: Iterable[Moment], done: Callable[[], None]) -> None:
        """Call `done` when all moments are complete, but not at once."""
        self._waiting.append((list(moments), done))

    def on_tick(self, call: Callable[[float], None]) -> None:
        """Call every TICK_SECONDS with the monotonic time."""
        self._ticks.append(call)

    def watch(self, fd: int, callback: Callable[[], None], *, writable: bool = False) -> None:
        """Call back when `fd` is readable (with `writable`: or writable) or hung up."""
        self._watches.watch(fd, callback, writable=writable)

    def unwatch(self, fd: int) -> None:
        """Stop watching; idempotent. Call it before the fd is closed."""
        self._watches.unwatch(fd)

    def run_posted(self) -> None:
        """Run the calls that were posted until now."""
        for _ in range(len(self._calls)):
            self.guard(self._calls.popleft())

    def guard(self, call: Callable[[], object]) -> None:
        """Run a call, and survive any exception: other callbacks must still run."""
        try:
            call()
        except Exception:
            logger.exception("error in the thread %s; the thread continues", self._name)

    def lost(self, error: P2pError) -> None:
        """Handle the failure of a moment: nothing that waits can be trusted any more."""
        logger.error("a moment that the thread %s waits for has failed: %s", self._name, str(error))
        self._waiting.clear()

    # Internal

    def _give_back(self) -> None:
        """Release resources, as the thread's last action."""

    def _start_thread(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        restore_affinity()
        while not self._is_stopping:
            self._turn()
        self.run_posted()
        self._waiting.clear()
        self.guard(self._give_back)

    def _turn(self) -> None:
        ready = self._watches.ready(0.0 if self._waiting or self._calls else TICK_SECONDS)
        self.run_posted()
        for fd in ready:
            if (callback := self._watches.callback(fd)) is not None:
                self.guard(callback)
        has_ended = self._look()
        now = time.monotonic()
        if now >= self._tick_at:
            self._tick_at = now + TICK_SECONDS
            for call in self._ticks:
                self.guard(lambda call=call: call(now))  # type: ignore[misc]
        if self._waiting and not (ready or has_ended or self._calls):
            time.sleep(LOOK_SECONDS)

    def _look(self) -> bool:
        """Run the callbacks whose moments are complete; returns whether there were any."""
        waiting, self._waiting = self._waiting, []
        complete = []
        for moments, done in waiting:
            try:
                pending = [moment for moment in moments if not moment.is_complete()]
            except TransportError as error:
                self.lost(error)
                return False
            if pending:
                self._waiting.append((pending, done))
            else:
                complete.append(done)
        for done in complete:
            self.guard(done)
        return bool(complete)
