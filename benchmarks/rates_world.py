"""A model of two GPUs, a link and two interpreters, in virtual time, under real device threads.

The turns of `Loop`, the copies of `Device`, and both halves of a pair of the transport nccl are the
code that ships. CUDA, NCCL, sockets and the clock are replaced: each call costs what `Costs` says.
A turn of a thread is one step: what other threads do in the meantime, it sees in its next turn.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from p2p_engine.gpu import worker_loop
from p2p_engine.gpu.device import Device
from p2p_engine.gpu.pack import PackOrder, Way
from p2p_engine.memory.layout import Int64s
from p2p_engine.transports.nccl import group, groups, sending

MIB = 1 << 20
SECOND_OF = (worker_loop, group, groups, sending)


@dataclass(frozen=True)
class Costs:
    """Seconds, unless a name says something else. Estimates: nothing here was measured on a GPU."""

    turn: float = 20e-6  # of a device thread, with nothing to do
    oversleep: float = 60e-6  # beyond what a sleep asks for
    cuda_call: float = 4e-6
    nccl_call: float = 30e-6  # starts a thread
    nccl_launch: float = 40e-6  # until that thread has launched the kernel
    socket_call: float = 8e-6
    frame: float = 25e-6  # to handle what one recv brought
    wire: float = 60e-6  # one way, with the kernels of both hosts
    pack_call: float = 60e-6  # to cut a piece and to launch its copy
    pack_region: float = 70e-9  # in the table of one
    pack_start: float = 10e-6
    pack_rate: float = 1e12  # bytes per second
    kernel: float = 30e-6  # start of a send's kernel, and the end of its last bytes
    grant: float = 500e-6  # from the end of a write to the grant of the next chunk
    link_rate: float = 50e9
    wake: float = 20e-6  # of a thread that nothing has kept awake
    # Until a thread that has slept has the interpreter. Who gives it up for a short call mostly has
    # it again before anybody else has woken up: CPython signals, and does not hand over.
    interpreter: float = 0.0
    short_calls: float = 0.05  # that lose it all the same


@dataclass
class VirtualTime:
    """The virtual time, and what happens later."""

    now: float = 0.0
    slept: int = 0  # times
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def monotonic(self) -> float:
        """Take the place of time.monotonic."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Take the place of time.sleep."""
        self.now += seconds
        self.slept += 1

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call at a time."""
        heapq.heappush(self._events, (when, next(self._numbers), call))

    def run_until(self, is_over: Callable[[], bool], limit: float) -> None:
        """Let time pass.

        Raises:
            RuntimeError: it is not over at `limit`, or nothing happens any more.
        """
        while not is_over():
            if not self._events:
                raise RuntimeError("nothing happens any more")
            self.now, _, call = heapq.heappop(self._events)
            if self.now > limit:
                raise RuntimeError(f"not over after {limit:g} s")
            call()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Be the clock of the transport's modules."""
        with contextlib.ExitStack() as stack:
            for module in SECOND_OF:
                stack.enter_context(mock.patch.object(module, "time", self))
            yield


class ModelStream:
    """Operations in order. Each is called with a function that says when it has ended."""

    def __init__(self) -> None:
        self._waiting: collections.deque[Callable[[Callable[[], None]], None]] = collections.deque()
        self._is_busy = False

    def add(self, operation: Callable[[Callable[[], None]], None]) -> None:
        """Enqueue one."""
        self._waiting.append(operation)
        self._start()

    def _start(self) -> None:
        while self._waiting and not self._is_busy:
            self._is_busy = True
            self._waiting.popleft()(self._ended)

    def _ended(self) -> None:
        self._is_busy = False
        self._start()


class ModelCuda:
    """One process's CUDA; every call gives up the interpreter."""

    def __init__(self, clock: VirtualTime, costs: Costs) -> None:
        self.clock = clock
        self.costs = costs
        self.streams: dict[int, ModelStream] = {}
        self.host_ranges: dict[int, int] = {}
        self.num_kernels = 0
        self._numbers = itertools.count(1)
        self._pending: dict[int, int] = {}

    def call(self, seconds: float) -> None:
        """Pay for a call that gives up the interpreter."""
        self.clock.now += seconds + self.costs.interpreter * self.costs.short_calls

    def on(self, _: int, call: Callable[[], Any]) -> Any:
        """Run a call."""
        return call()

    def is_host(self, _: int) -> bool:
        """Nothing is in host memory."""
        return False

    def memory(self) -> tuple[int, int]:
        """Free and total."""
        return 1 << 36, 1 << 36

    def create_stream(self, **_: Any) -> int:
        """Make a stream."""
        number = next(self._numbers)
        self.streams[number] = ModelStream()
        return number

    def destroy_stream(self, _: int) -> None:
        """Keep it: it may have work."""

    def create_event(self) -> int:
        """Make an event."""
        return next(self._numbers)

    def destroy_event(self, _: int) -> None:
        """Forget nothing."""

    def record(self, event: int, stream: int) -> None:
        """Complete an event after what is in the stream."""
        self.call(self.costs.cuda_call)
        self._pending[event] = self._pending.get(event, 0) + 1

        def complete(ended: Callable[[], None]) -> None:
            self._pending[event] -= 1
            ended()

        self.later(self.clock.now, lambda: self.streams[stream].add(complete))

    def is_complete(self, event: int) -> bool:
        """Whether it has been reached."""
        self.call(self.costs.cuda_call)
        return not self._pending.get(event)

    def work(self, stream: int, seconds: float) -> None:
        """Enqueue what takes time and needs nobody."""

        def run(ended: Callable[[], None]) -> None:
            self.clock.at(self.clock.now + seconds, ended)

        self.later(self.clock.now, lambda: self.streams[stream].add(run))

    def later(self, when: float, call: Callable[[], None]) -> None:
        """Do what a thread has ordered at its own time."""
        self.clock.at(when, call)


class ModelPack:
    """The pack kernel."""

    def __init__(self, cuda: ModelCuda) -> None:
        self._cuda = cuda

    def way(self, *_: Int64s) -> Way:
        """All is on the device."""
        return Way.ON_DEVICE

    def order(
        self, _: Int64s, __: Int64s, lengths: Int64s, ___: Way, stream: int, *____: object
    ) -> PackOrder:
        """Copy in one step: a table, its copy to the device, and a launch."""
        cuda, costs = self._cuda, self._cuda.costs
        cuda.clock.now += costs.pack_call + costs.pack_region * len(lengths)
        cuda.call(costs.cuda_call)
        cuda.call(costs.cuda_call)
        cuda.work(stream, costs.pack_start + int(lengths.sum()) / costs.pack_rate)
        return PackOrder(iter(()), lambda: None)


class ModelPoller:
    """Descriptors of sockets of the model."""

    is_closed = False

    def __init__(self, thread: ModelDevice) -> None:
        self._thread = thread
        self._callbacks: dict[int, Callable[[], None]] = {}
        self.readable: set[int] = set()

    def wake(self) -> None:
        """End the thread's wait."""
        self._thread.wake()

    def watch(self, fd: int, callback: Callable[[], None], **_: bool) -> None:
        """Watch a socket."""
        self._callbacks[fd] = callback

    def unwatch(self, fd: int) -> None:
        """Stop it."""
        self._callbacks.pop(fd, None)

    def callback(self, fd: int) -> Callable[[], None] | None:
        """Return who is called for it."""
        return self._callbacks.get(fd)

    def ready(self, _: float) -> list[int]:
        """Return the readable ones: here the thread gives up the interpreter."""
        costs = self._thread.cuda.costs
        self._thread.cuda.call(costs.turn)
        return sorted(self.readable)


class ModelPins:
    """Nothing has to be page-locked."""

    def pending(self, *_: Any) -> list[Any]:
        """Nothing to wait for."""
        return []

    def boundary(self, _: Any) -> None:
        """Nothing is cut."""


class ModelDevice(Device):
    """A device's thread, whose turns the clock calls."""

    cuda: Any

    def __init__(self, clock: VirtualTime, costs: Costs) -> None:
        self.cuda = ModelCuda(clock, costs)
        self.index = 0
        self.pins: Any = ModelPins()
        self.open_jobs = set()
        self.on_end: Callable[[Any], None] = lambda job: None
        self._clock = clock
        self._spare_events = collections.deque()
        self._is_over = self._is_stopping = False
        self.failure = ""
        self._takes_no_more = False
        self._calls = collections.deque()
        self._waiting, self._ticks, self._tick_at = [], [], 0.0
        self._watches: Any = ModelPoller(self)
        self._is_planned = self._is_running = False
        self._streams = {way: self.cuda.create_stream() for way in Way}
        self._pack: Any = ModelPack(self.cuda)

    def wake(self) -> None:
        """Take a turn soon, unless one is due anyway."""
        if not self._is_planned and not self._is_running:
            costs = self.cuda.costs
            self._is_planned = True
            self._clock.at(self._clock.now + costs.wake + costs.interpreter, self._take_turn)

    def tell(self, job: Any) -> None:
        """Tell the model."""
        self.open_jobs.discard(job)
        self.on_end(job)

    def guard(self, call: Callable[[], object]) -> None:
        """Let errors through: this is no service."""
        call()

    def _take_turn(self) -> None:
        self._is_planned, self._is_running = False, True
        slept = self._clock.slept
        self._turn()
        costs = self.cuda.costs
        if self._clock.slept > slept:
            self._clock.now += costs.oversleep + costs.interpreter
        self._is_running = False
        if self._waiting or self._calls or self._watches.readable:
            self._is_planned = True
            self._clock.at(self._clock.now, self._take_turn)


class ModelSocket:
    """One end of a connection."""

    _numbers = itertools.count(100)

    def __init__(self, device: ModelDevice) -> None:
        self.device = device
        self.peer: ModelSocket | None = None
        self._fd = next(self._numbers)
        self._received = bytearray()

    def fileno(self) -> int:
        """Return its number."""
        return self._fd

    def setblocking(self, _: bool) -> None:
        """Never block."""

    def close(self) -> None:
        """Close."""
        self._fd = -1

    def send(self, data: bytes) -> int:
        """Let the peer have it later."""
        cuda, peer, copied = self.device.cuda, self.peer, bytes(data)
        cuda.call(cuda.costs.socket_call)
        if peer is not None:
            cuda.clock.at(cuda.clock.now + cuda.costs.wire, lambda: peer.arrive(copied))
        return len(copied)

    def arrive(self, data: bytes) -> None:
        """Be readable."""
        self._received += data
        self.device._watches.readable.add(self._fd)
        self.device.wake()

    def recv(self, _: int) -> bytes:
        """Return what has come.

        Raises:
            BlockingIOError: nothing has.
        """
        cuda = self.device.cuda
        cuda.call(cuda.costs.socket_call)
        if not self._received:
            raise BlockingIOError
        data = bytes(self._received)
        self._received.clear()
        self.device._watches.readable.discard(self._fd)
        cuda.clock.now += cuda.costs.frame
        return data


class Meeting:
    """A communicator's kernels: number n of one rank ends with number n of the other."""

    def __init__(self, clock: VirtualTime, costs: Costs, link: LinkUse) -> None:
        self._clock = clock
        self._costs = costs
        self._link = link
        self._arrived: dict[int, list[tuple[int, Callable[[], None]]]] = {}
        self._numbers = {0: itertools.count(), 1: itertools.count()}
        self._orders = {
            0: ModelStream(),
            1: ModelStream(),
        }  # NCCL's, of each communicator

    def kernel(self, rank: int, nbytes: int) -> Callable[[Callable[[], None]], None]:
        """Return the operation that is the next kernel of a rank."""
        number = next(self._numbers[rank])

        def run(ended: Callable[[], None]) -> None:
            self._orders[rank].add(lambda next_one: self._arrive(number, nbytes, ended, next_one))

        return run

    def _arrive(
        self, number: int, nbytes: int, ended: Callable[[], None], next_one: Callable[[], None]
    ) -> None:
        def both() -> None:
            ended()
            next_one()

        arrived = self._arrived.setdefault(number, [])
        arrived.append((nbytes, both))
        if len(arrived) == 2:
            del self._arrived[number]
            if arrived[0][0] != arrived[1][0]:
                raise RuntimeError(f"a send of {arrived[0][0]} meets a receive of {arrived[1][0]}")
            start = max(self._clock.now + self._costs.kernel, self._link.free_at)
            self._link.free_at = start + nbytes / self._costs.link_rate
            for _, call in arrived:
                self._clock.at(self._link.free_at, call)


@dataclass
class LinkUse:
    """One direction between two GPUs, which one kernel at a time fills."""

    free_at: float = 0.0


class ModelNccl:
    """One process's NCCL, without blocking: a call returns before its kernel is launched."""

    can_register = False
    has_initialised = True
    version = 22809

    def __init__(self, cuda: ModelCuda, meetings: dict[bytes, Meeting], link: LinkUse) -> None:
        self._cuda = cuda
        self._meetings = meetings
        self._link = link
        self._comms: dict[int, tuple[Meeting, int]] = {}
        self._busy_until: dict[int, float] = {}
        self._numbers = itertools.count(1)

    def unique_id(self) -> bytes:
        """Return a name."""
        return bytes(128)

    def init(self, unique_id: bytes, rank: int, _: int) -> int:
        """Make one side."""
        clock, costs = self._cuda.clock, self._cuda.costs
        number = next(self._numbers)
        meeting = self._meetings.setdefault(unique_id, Meeting(clock, costs, self._link))
        self._comms[number] = meeting, rank
        self._busy_until[number] = clock.now + 1e-3
        return number

    def is_in_progress(self, comm: int) -> bool:
        """Whether a call has not ended."""
        self._cuda.call(self._cuda.costs.cuda_call)
        return self._cuda.clock.now < self._busy_until[comm]

    def send(self, comm: int, _: int, nbytes: int, __: int, stream: int) -> None:
        """Launch a kernel, later."""
        cuda = self._cuda
        if cuda.clock.now < self._busy_until[comm]:
            raise RuntimeError("a call of NCCL while another one is in progress")
        cuda.call(cuda.costs.nccl_call)
        self._busy_until[comm] = when = cuda.clock.now + cuda.costs.nccl_launch
        meeting, rank = self._comms[comm]
        kernel = meeting.kernel(rank, nbytes)
        cuda.later(when, lambda: cuda.streams[stream].add(kernel))

    recv = send


class NoReaper:
    """Nothing is aborted."""

    def num_pending(self) -> int:
        """Return none."""
        return 0

    num_quarantined = num_pending
