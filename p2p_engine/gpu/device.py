"""Device: the one thread that works with a GPU, and the work that it does.

Only this thread launches copies and communication, so their order is known. It never waits for the
GPU: it polls whether events are complete. Other threads post work to it. A copy that depends on a
caller's kernels is launched only after their event is complete. So a slow kernel delays nothing
else, and no stale byte can leave.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import operator
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from mempool import write_word
from p2p_engine.errors import P2pError, TransportError
from p2p_engine.gpu.checksum import ONES, batches
from p2p_engine.gpu.cuda import Cuda
from p2p_engine.gpu.cuts import cut_at
from p2p_engine.gpu.pack import Pack, PackOrder, Way
from p2p_engine.gpu.pins import HostPins
from p2p_engine.gpu.worker_loop import Loop
from p2p_engine.memory.jobs import Job, Moment, still_running
from p2p_engine.memory.layout import Int64s

logger = logging.getLogger(__name__)

START_SECONDS = 60.0  # the first use of a GPU in a process may be slow


class Event:
    """A point in a stream. Its event goes back to the device when nothing refers to it any more."""

    def __init__(self, device: Device, handle: int) -> None:
        self._device = device
        self._handle = handle
        self._is_complete = False

    def is_complete(self) -> bool:
        """Whether all earlier work in its stream is done; never blocks.

        Raises:
            TransportError: the device has failed.
        """
        if not self._is_complete:
            self._is_complete = self._device.cuda.is_complete(self._handle)
        return self._is_complete

    def __del__(self) -> None:
        self._device.take_back(self._handle)


class DeviceJob:
    """One movement of bytes on, to or from a GPU; a p2p_engine.memory.jobs.Job."""

    def __init__(
        self, device: Device, nbytes: int, tag: object, keep: object, stop: Callable[[], None]
    ) -> None:
        """`stop` is called in the device's thread if the job is cancelled."""
        self.state = "queued"
        self.checksum: int | None = None  # set before its end, if it was asked for
        self.error: str | None = None
        self.tag = tag
        self.nbytes = nbytes
        self.is_in_peer = False  # the device has been told to write into a peer's memory
        self._keep = keep
        self._device = device
        self._stop = stop
        self._ended = threading.Event()
        device.open_jobs.add(self)

    @property
    def done(self) -> bool:
        """Whether the job has ended."""
        return self._ended.is_set()

    def cancel(self) -> None:
        """Ask the job to end; returns at once."""
        if not self.done:
            self._device.post(self._stop)

    def wait(self, timeout: float) -> bool:
        """Block until the job has ended, for at most `timeout` seconds; returns whether it has."""
        return self._ended.wait(timeout)

    def end(self, state: str, error: str | None = None) -> None:
        """Set how the job ended; device's thread only. A second call does nothing."""
        if not self.done:
            self.state, self.error, self._keep = state, error, None
            self._stop = _nothing  # release the moments and all else that it refers to
            self._ended.set()
            self._device.tell(self)


def _nothing() -> None:
    """Do nothing: a job that has ended cannot be stopped."""


class JobEnd:
    """A moment: a job of another thread has ended."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def is_complete(self) -> bool:
        """Whether that is so; never blocks."""
        return self._job.done


class Device(Loop):
    """One GPU of this process: its worker thread, streams, events and jobs."""

    def __init__(self, cuda: Cuda, index: int) -> None:
        """Start the thread and initialise the GPU; blocks until that is done.

        Raises:
            TransportError: the GPU cannot be used.
        """
        self.cuda = cuda
        self.index = index
        self.pins = HostPins(cuda, index)
        self.open_jobs: set[DeviceJob] = set()
        self.check_host: Callable[[Int64s, Int64s], Job] | None = None  # the mover's
        self.failure = ""  # why the device cannot be used any more
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

    # From any thread

    def fileno(self) -> int:
        """Return a descriptor that is readable while there are ended jobs to drain."""
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
        """Return the moment that a caller's stream has reached; never waits for the device."""

        def record() -> Event:  # an event belongs to the device where it was made
            event = self._make_event()
            self.cuda.record(event._handle, stream)
            return event

        return self.cuda.on(self.index, record)

    def take_back(self, event: int) -> None:
        """Keep an unused event for the next moment."""
        self._spare_events.append(event)
        if self._is_over:
            with contextlib.suppress(P2pError, RuntimeError):  # CUDA or Python ends: so do they
                self.cuda.on(self.index, self._destroy_events)

    def copy(
        self,
        sources: Int64s,
        destinations: Int64s,
        lengths: Int64s,
        *,
        word_address: int = 0,
        word_value: int = 0,
        lane: int = 0,
        checked: bool = False,
        tag: object = None,
        keep: object = None,
        after: Iterable[Moment] = (),
    ) -> DeviceJob:
        """Copy between device, registered and peer memory once `after` is complete. Then write the
        word, which is in host memory. If `checked`, the job has the checksum of the sources, which
        is computed first. Never blocks.

        Raises:
            TransportError: the device is closed.
        """
        self._check_open("copy")
        job = DeviceJob(self, int(lengths.sum()), tag, keep, lambda: self._cancel_copy(job))
        regions = (sources, destinations, lengths)
        launch = partial(self._launch_copy, job, regions, word_address, word_value)
        begin = partial(self._check, job, sources, lengths, launch) if checked else launch
        self.post(lambda: self.when(after, begin))
        return job

    def check(
        self,
        addresses: Int64s,
        lengths: Int64s,
        *,
        lane: int = 0,
        tag: object = None,
        keep: object = None,
    ) -> DeviceJob:
        """Compute the CRC-32C of regions, all on this device or all in host memory. Never blocks.

        Raises:
            TransportError: the device is closed.
        """
        self._check_open("check")
        job = DeviceJob(self, int(lengths.sum()), tag, keep, lambda: self._cancel_copy(job))
        self.post(partial(self._check, job, addresses, lengths, lambda: job.end("done")))
        return job

    @property
    def can_check(self) -> bool:
        """Whether this device can compute checksums: it has the kernel."""
        return self._pack.kernel is not None

    def stop_jobs(self, timeout: float) -> bool:
        """Accept no more copies and cancel every job. Blocks for at most `timeout` seconds; returns
        whether all have ended."""
        self._takes_no_more = True
        for job in list(self.open_jobs):
            job.cancel()
        return not still_running(list(self.open_jobs), timeout)

    def close(self, timeout: float) -> bool:
        """Stop the thread and destroy streams and events; idempotent. Returns False if it did not
        stop."""
        is_closed = super().close(timeout) and self.pins.close(timeout)
        if is_closed and self._ended_fd >= 0:
            os.close(self._ended_fd)
            self._ended_fd = -1
        return is_closed

    # From the device's thread

    def after_now(self, stream: int, done: Callable[[], None]) -> None:
        """Call `done` when all that is in the stream now is complete."""
        self.later([self.record(stream)], done)

    def pack(
        self,
        regions: tuple[Int64s, Int64s, Int64s],
        done: Callable[[], None],
        failed: Callable[[P2pError], None],
    ) -> None:
        """Copy (sources, destinations, lengths) when the host memory of them is page-locked; call
        `done` when all bytes are there, or `failed` if the device refuses, when nothing of it runs
        any more. `done` may be called at once.

        Copies to the host, from the host and on the device use different streams, and do not wait
        for each other.
        """
        self.when(self._unpinned(regions), lambda: self._pack_now(regions, done, failed))

    def pack_in(self, stream: int, regions: tuple[Int64s, Int64s, Int64s]) -> PackOrder:
        """Plan copies of device memory in a stream of the caller's, who advances the order."""
        return self._pack.order(*regions, Way.ON_DEVICE, stream)

    def checksum(
        self,
        addresses: Int64s,
        lengths: Int64s,
        done: Callable[[int], None],
        failed: Callable[[P2pError], None],
    ) -> None:
        """Compute the CRC-32C of regions, as `check` does; call `done` with it, or `failed` if the
        device refuses."""
        kept = lengths > 0
        addresses, lengths = addresses[kept], lengths[kept]
        if not len(lengths):
            done(0)
            return
        if not self.is_host(addresses):
            self._add_checksums(batches(addresses, lengths), [], done, failed)
            return
        if self.check_host is None:
            failed(TransportError("nothing computes checksums of host memory here"))
            return
        job = self.check_host(addresses, lengths)

        def tell() -> None:
            if job.checksum is None:
                failed(TransportError(f"the checksum of host memory: {job.error or job.state}"))
            else:
                done(job.checksum)

        self.later([JobEnd(job)], tell)

    def is_host(self, addresses: Int64s) -> bool:
        """Whether one of these addresses is in host memory."""
        return self._pack.way(addresses, addresses) is not Way.ON_DEVICE

    def lost(self, error: P2pError) -> None:
        """End jobs as failed: the device reports an error that belongs to no call. CUDA then
        refuses every call of this process, and only a new process can use the device.

        A copy into a peer's memory that has been submitted stays open: nothing says that it runs
        no more. So no farewell is said, and the peer keeps that memory until this process ends.
        """
        if not self.failure:
            self.failure = text = f"the GPU has failed: {error}"
            logger.error("%s; every transfer ends, start the process again", text)
        self._waiting.clear()
        for job in list(self.open_jobs):
            if not job.is_in_peer:
                job.end("failed", self.failure)

    def tell(self, job: DeviceJob) -> None:
        """Queue an ended job for `drain`."""
        self.open_jobs.discard(job)
        self._ended.append(job)
        os.eventfd_write(self._ended_fd, 1)

    # Internal

    def _check_open(self, call: str) -> None:
        if self._takes_no_more or self.failure:
            raise TransportError(f"{call}: {self.failure or 'the device is closed'}")

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
        if unpinned := self._unpinned(regions):  # it can still be cancelled
            again = partial(self._launch_copy, job, regions, word_address, word_value)
            self.later(unpinned, again)
            return
        job.state = "running"
        job.is_in_peer = word_address != 0

        def finish() -> None:
            if word_address:
                write_word(word_address, word_value)
            job.end("done")

        self._pack_now(regions, finish, lambda error: job.end("failed", str(error)))

    def _check(
        self, job: DeviceJob, addresses: Int64s, lengths: Int64s, done: Callable[[], None]
    ) -> None:
        """Give a job its checksum, and go on."""
        if job.done:
            return  # cancelled before it began
        job.state = "running"

        def have(checksum: int) -> None:
            job.checksum = checksum
            done()

        self.checksum(addresses, lengths, have, lambda error: job.end("failed", str(error)))

    def _add_checksums(
        self,
        rest: Iterator[tuple[Int64s, Int64s, Int64s]],
        sums: list[int],
        done: Callable[[int], None],
        failed: Callable[[P2pError], None],
    ) -> None:
        """Launch one batch after the other; a checksum holds one table at a time."""
        rows, stream = next(rest, None), self._streams[Way.ON_DEVICE]
        if rows is None:
            done(functools.reduce(operator.xor, sums, ONES))
            return
        order = self._pack.checksum(rows, stream, sums, is_start=not sums)
        again = partial(self._add_checksums, rest, sums, done, failed)
        self._advance(order, stream, again, failed)

    def _unpinned(self, regions: tuple[Int64s, Int64s, Int64s]) -> list[Moment]:
        """Return the moments for which copies wait: host memory that is not page-locked yet would
        hold up the thread that starts them."""
        sources, destinations, lengths = regions
        return [*self.pins.pending(sources, lengths), *self.pins.pending(destinations, lengths)]

    def _pack_now(
        self,
        regions: tuple[Int64s, Int64s, Int64s],
        done: Callable[[], None],
        failed: Callable[[P2pError], None],
    ) -> None:
        sources, destinations, lengths = self._split(regions)
        way = self._pack.way(sources, destinations)
        stream = self._streams[way]
        slices = self.pins.boundary(destinations if way is Way.TO_HOST else sources)
        order = self._pack.order(sources, destinations, lengths, way, stream, slices)
        self._advance(order, stream, done, failed)

    def _advance(
        self,
        order: PackOrder,
        stream: int,
        done: Callable[[], None],
        failed: Callable[[P2pError], None],
    ) -> None:
        """Enqueue a step of an order; others have their turn before the next one."""

        def finish() -> None:
            order.release()
            done()

        try:
            if order.advance():
                self.after_now(stream, finish)
            else:
                self.post(lambda: self._advance(order, stream, done, failed))
        except P2pError as error:
            self._end_after(stream, order.release, partial(failed, error))

    def _end_after(self, stream: int, *calls: Callable[[], None]) -> None:
        """Call when what a stream was given before it refused more has ended."""

        def end() -> None:
            for call in calls:
                self.guard(call)

        try:
            self.after_now(stream, end)
        except P2pError as error:
            self.lost(error)

    def _split(self, regions: tuple[Int64s, Int64s, Int64s]) -> tuple[Int64s, Int64s, Int64s]:
        """Cut regions where two slices of page-locked memory meet: CUDA takes no copy of both."""
        sources, destinations, lengths = regions
        if (boundary := self.pins.boundary(sources)) is not None:
            sources, destinations, lengths = cut_at(sources, destinations, lengths, *boundary)
        if (boundary := self.pins.boundary(destinations)) is not None:
            destinations, sources, lengths = cut_at(destinations, sources, lengths, *boundary)
        return sources, destinations, lengths

    def _cancel_copy(self, job: DeviceJob) -> None:
        if job.state == "queued":
            job.end("cancelled")

    def _make_event(self) -> Event:
        with contextlib.suppress(IndexError):
            return Event(self, self._spare_events.popleft())
        return Event(self, self.cuda.create_event())
