"""Device: the one thread that works with a GPU, and what runs on it.

It alone launches copies and communication, so that their order is known; it never waits for the
GPU, but looks again and again whether events are complete. Others post to it. What depends on a
caller's kernels is launched only after their event is complete: a slow kernel delays nobody else,
and no old byte can leave.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TypeVar

from mempool import write_word
from p2p_engine.affinity import restore_affinity
from p2p_engine.cuda import Cuda
from p2p_engine.errors import P2pError, TransportError
from p2p_engine.jobs import Moment, still_running
from p2p_engine.layout import Int64s
from p2p_engine.pack import Pack, Way

logger = logging.getLogger(__name__)

T = TypeVar("T")
TICK_SECONDS = 0.02
LOOK_SECONDS = 0.0001  # between two looks at what runs on the GPU
START_SECONDS = 60.0  # the first use of a GPU in a process may take long


class Event:
    """A moment in a stream; its handle goes back to the device when nobody refers to it."""

    def __init__(self, device: Device, handle: int) -> None:
        self._device = device
        self._handle = handle
        self._is_complete = False

    def is_complete(self) -> bool:
        """Whether all that came before it in its stream is done; never blocks.

        Raises:
            TransportError: the device has failed.
        """
        if not self._is_complete:
            self._is_complete = self._device.cuda.is_complete(self._handle)
        return self._is_complete

    def __del__(self) -> None:
        self._device.take_back(self._handle)


class DeviceJob:
    """One movement of bytes on, to or from a GPU; p2p_engine.jobs.Job."""

    def __init__(
        self, device: Device, nbytes: int, tag: object, keep: object, stop: Callable[[], None]
    ) -> None:
        """`stop` is called in the device's thread when somebody cancels."""
        self.state = "queued"
        self.checksum: int | None = None  # a host's processor would have to read the GPU's memory
        self.error: str | None = None
        self.tag = tag
        self.nbytes = nbytes
        self._keep = keep
        self._device = device
        self._stop = stop
        self._ended = threading.Event()
        device.open_jobs.add(self)

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._ended.is_set()

    def cancel(self) -> None:
        """Ask for its end; returns at once."""
        if not self.done:
            self._device.post(self._stop)

    def wait(self, timeout: float) -> bool:
        """Block until it has ended, at most `timeout` seconds; whether it has."""
        return self._ended.wait(timeout)

    def end(self, state: str, error: str | None = None) -> None:
        """Device's thread only: say how it ended; a second call changes nothing."""
        if not self.done:
            self.state, self.error, self._keep = state, error, None
            self._stop = _nothing  # and what it refers to, events among it
            self._ended.set()
            self._device.tell(self)


def _nothing() -> None:
    """A job that has ended cannot be stopped."""


class Device:
    """One GPU of this process, its worker thread, its streams and what waits for them."""

    def __init__(self, cuda: Cuda, index: int) -> None:
        """Start the thread and make the GPU ready; blocks as long as that takes.

        Raises:
            TransportError: the GPU cannot be used.
        """
        self.cuda = cuda
        self.index = index
        self._spare_events: collections.deque[int] = collections.deque()
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._ended: collections.deque[DeviceJob] = collections.deque()
        self._waiting: list[tuple[list[Moment], Callable[[], None]]] = []
        self.open_jobs: set[DeviceJob] = set()
        self._ticks: list[Callable[[float], None]] = []
        self._watched: dict[int, Callable[[], None]] = {}
        self._tick_at = 0.0
        self._is_stopping = self._is_stopped = self._takes_no_more = self._has_failed = False
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ended_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="p2p-device", daemon=True)
        self._thread.start()
        try:
            self.run(self._start, START_SECONDS)
        except BaseException:
            self.close(1.0)
            raise

    # For any thread

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def fileno(self) -> int:
        """Readable while there are ended jobs to drain."""
        return self._ended_fd

    def drain(self) -> list[DeviceJob]:
        """Return the jobs that ended since the last call, in order."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._ended_fd)
        jobs = []
        while self._ended:
            jobs.append(self._ended.popleft())
        return jobs

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` in the device's thread, soon."""
        self._calls.append(call)
        with contextlib.suppress(OSError):  # closed: nothing runs any more
            os.eventfd_write(self._wake_fd, 1)

    def run(self, call: Callable[[], T], timeout: float) -> T:
        """Run `call` in the device's thread and return what it returns.

        Raises:
            TransportError: it did not end within `timeout` seconds, or the thread is dead.
        """
        if not self.alive:
            raise TransportError(f"the thread of device {self.index} has ended")
        future: Future[T] = Future()

        def answer() -> None:
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001  # it is the caller's
                future.set_exception(error)

        self.post(answer)
        try:
            return future.result(timeout)
        except TimeoutError:
            raise TransportError(f"device {self.index} did not answer in {timeout:g} s") from None

    def record(self, stream: int) -> Event:
        """Return the moment that a stream of the caller's has reached."""
        with self.cuda.on(self.index):  # an event is of the device on which it was made
            event = self._make_event()
            self.cuda.record(event._handle, stream)
        return event

    def take_back(self, event: int) -> None:
        """Keep the handle of an event that nobody refers to, for the next one."""
        self._spare_events.append(event)
        if self._is_stopped:
            self._destroy_events()

    def copy(
        self,
        sources: Int64s,
        destinations: Int64s,
        lengths: Int64s,
        *,
        word_address: int = 0,
        word_value: int = 0,
        lane: int = 0,
        tag: object = None,
        keep: object = None,
        after: Iterable[Moment] = (),
    ) -> DeviceJob:
        """Copy between device, registered and peers' memory once `after` is complete; then write
        the word, which is in host memory.

        Raises:
            TransportError: the device is closed.
        """
        if self._takes_no_more:
            raise TransportError("copy: the device is closed")
        job = DeviceJob(self, int(lengths.sum()), tag, keep, lambda: self._cancel_copy(job))
        regions = (sources, destinations, lengths)

        def start() -> None:
            self.when(after, lambda: self._launch_copy(job, regions, word_address, word_value))

        self.post(start)
        return job

    def stop_jobs(self, timeout: float) -> bool:
        """Take no more copies and cancel every job; whether all have ended in time."""
        self._takes_no_more = True
        for job in list(self.open_jobs):
            job.cancel()
        return not still_running(list(self.open_jobs), timeout)

    def close(self, timeout: float) -> bool:
        """Stop the thread and let streams and events go; idempotent. False: it did not stop."""
        if self._wake_fd < 0:
            return True
        self._is_stopping = True
        self.post(lambda: None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        self._epoll.close()
        for fd in (self._wake_fd, self._ended_fd):
            os.close(fd)
        self._wake_fd = self._ended_fd = -1
        return True

    # For the device's thread

    def when(self, events: Iterable[Moment], done: Callable[[], None]) -> None:
        """Call `done` when all events are complete, perhaps at once."""
        pending = [event for event in events if not event.is_complete()]
        if pending:
            self._waiting.append((pending, done))
        else:
            done()

    def after_now(self, stream: int, done: Callable[[], None]) -> None:
        """Call `done` when what is in the stream now is complete."""
        self._waiting.append(([self.record(stream)], done))

    def pack(self, regions: tuple[Int64s, Int64s, Int64s], done: Callable[[], None]) -> None:
        """Copy (sources, destinations, lengths) now; call `done` when all is there. What goes to
        the host, what comes from it and what stays on the device do not wait for each other.

        Raises:
            TransportError: the device refuses; some of it may have begun.
        """
        sources, destinations, _ = regions
        stream = self._streams[self._pack.way(sources, destinations)]
        release = self._pack.enqueue(*regions, stream)

        def finish() -> None:
            release()
            done()

        self.after_now(stream, finish)

    def on_tick(self, call: Callable[[float], None]) -> None:
        """Call every TICK_SECONDS with the monotonic time."""
        self._ticks.append(call)

    def watch(self, fd: int, callback: Callable[[], None], *, writable: bool = False) -> None:
        """Call back when `fd` is readable (with `writable`: or writable) or hung up."""
        events = select.EPOLLIN | (select.EPOLLOUT if writable else 0)
        if fd in self._watched:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._watched[fd] = callback

    def unwatch(self, fd: int) -> None:
        """Stop watching; idempotent. Call it before the fd is closed."""
        if self._watched.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def run_posted(self) -> None:
        """Run what others have posted until now."""
        for _ in range(len(self._calls)):
            self._guard(self._calls.popleft())

    def tell(self, job: DeviceJob) -> None:
        """Let somebody drain an ended job."""
        self.open_jobs.discard(job)
        self._ended.append(job)
        os.eventfd_write(self._ended_fd, 1)

    # Inside

    def _start(self) -> None:
        self.cuda.use(self.index)
        self._streams = {way: self.cuda.create_stream() for way in Way}
        self._pack = Pack(self.cuda, self.index)

    def _run(self) -> None:
        restore_affinity()
        while not self._is_stopping:
            self._turn()
        self.run_posted()
        self._stop()

    def _stop(self) -> None:
        self._waiting.clear()
        if hasattr(self, "_pack"):
            self._guard(self._pack.close)
            for stream in self._streams.values():
                self._guard(lambda stream=stream: self.cuda.destroy_stream(stream))  # type: ignore[misc]
        self._is_stopped = True
        self._destroy_events()

    def _destroy_events(self) -> None:
        with contextlib.suppress(IndexError):  # another thread may do the same
            while True:
                event = self._spare_events.popleft()
                self._guard(lambda event=event: self.cuda.destroy_event(event))  # type: ignore[misc]

    def _turn(self) -> None:
        ready = self._epoll.poll(0 if self._waiting or self._calls else TICK_SECONDS)
        self.run_posted()
        for fd, _ in ready:
            if fd == self._wake_fd:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(fd)
            elif fd in self._watched:
                self._guard(self._watched[fd])
        has_ended = self._look()
        now = time.monotonic()
        if now >= self._tick_at:
            self._tick_at = now + TICK_SECONDS
            for call in self._ticks:
                self._guard(lambda call=call: call(now))  # type: ignore[misc]
        if self._waiting and not (ready or has_ended or self._calls):
            time.sleep(LOOK_SECONDS)

    def _look(self) -> bool:
        """Call whoever waits for events that are complete by now; whether there was one."""
        waiting, self._waiting = self._waiting, []
        complete = []
        for events, done in waiting:
            try:
                pending = [event for event in events if not event.is_complete()]
            except TransportError:
                if not self._has_failed:
                    logger.exception("device %d has failed", self.index)
                self._has_failed = True
                pending = events  # for ever: what it may still touch stays reserved
            if pending:
                self._waiting.append((pending, done))
            else:
                complete.append(done)
        for done in complete:
            self._guard(done)
        return bool(complete)

    def _launch_copy(
        self,
        job: DeviceJob,
        regions: tuple[Int64s, Int64s, Int64s],
        word_address: int,
        word_value: int,
    ) -> None:
        if job.done:
            return  # cancelled before it began
        job.state = "running"

        def finish() -> None:
            if word_address:
                write_word(word_address, word_value)
            job.end("done")

        try:
            self.pack(regions, finish)
        except P2pError as error:  # what was launched before it must have ended, too
            reason = str(error)
            begun = [self.record(stream) for stream in self._streams.values()]
            self.when(begun, lambda: job.end("failed", reason))

    def _cancel_copy(self, job: DeviceJob) -> None:
        if job.state == "queued":
            job.end("cancelled")

    def _make_event(self) -> Event:
        with contextlib.suppress(IndexError):
            return Event(self, self._spare_events.popleft())
        return Event(self, self.cuda.create_event())

    def _guard(self, call: Callable[[], object]) -> None:
        """A bug in one callback must not cost the others theirs."""
        try:
            call()
        except Exception:
            logger.exception("error in the thread of device %d, which goes on", self.index)
