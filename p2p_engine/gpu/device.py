"""Device: the one thread that works with a GPU, and what runs on it.

It alone launches copies and communication, so that their order is known; it never waits for the
GPU, but looks again and again whether events are complete. Others post to it. What depends on a
caller's kernels is launched only after their event is complete: a slow kernel delays nobody else,
and no old byte can leave.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
from collections.abc import Callable, Iterable

from mempool import write_word
from p2p_engine.errors import P2pError, TransportError
from p2p_engine.gpu.cuda import Cuda
from p2p_engine.gpu.pack import Pack, Way
from p2p_engine.gpu.worker_loop import Loop
from p2p_engine.memory.jobs import Moment, still_running
from p2p_engine.memory.layout import Int64s

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
    """One movement of bytes on, to or from a GPU; p2p_engine.memory.jobs.Job."""

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


class Device(Loop):
    """One GPU of this process: its worker thread, its streams, events and jobs."""

    def __init__(self, cuda: Cuda, index: int) -> None:
        """Start the thread and make the GPU ready; blocks as long as that takes.

        Raises:
            TransportError: the GPU cannot be used.
        """
        self.cuda = cuda
        self.index = index
        self.open_jobs: set[DeviceJob] = set()
        self._spare_events: collections.deque[int] = collections.deque()
        self._ended: collections.deque[DeviceJob] = collections.deque()
        self._takes_no_more = self._is_over = False
        self._ended_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        super().__init__("p2p-device")
        try:
            self.run(self._start, START_SECONDS)
        except BaseException:
            self.close(1.0)
            raise

    # For any thread

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

    def record(self, stream: int) -> Event:
        """Return the moment that a stream of the caller's has reached."""
        with self.cuda.on(self.index):  # an event is of the device on which it was made
            event = self._make_event()
            self.cuda.record(event._handle, stream)
        return event

    def take_back(self, event: int) -> None:
        """Keep the handle of an event that nobody refers to, for the next one."""
        self._spare_events.append(event)
        if self._is_over:
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
        is_closed = super().close(timeout)
        if is_closed and self._ended_fd >= 0:
            os.close(self._ended_fd)
            self._ended_fd = -1
        return is_closed

    # For the device's thread

    def after_now(self, stream: int, done: Callable[[], None]) -> None:
        """Call `done` when what is in the stream now is complete."""
        self.later([self.record(stream)], done)

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

    def _give_back(self) -> None:
        if hasattr(self, "_pack"):
            self.guard(self._pack.close)
            for stream in self._streams.values():
                self.guard(lambda stream=stream: self.cuda.destroy_stream(stream))  # type: ignore[misc]
        self._is_over = True
        self._destroy_events()

    def _destroy_events(self) -> None:
        with contextlib.suppress(IndexError):  # another thread may do the same
            while True:
                event = self._spare_events.popleft()
                self.guard(lambda event=event: self.cuda.destroy_event(event))  # type: ignore[misc]

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
