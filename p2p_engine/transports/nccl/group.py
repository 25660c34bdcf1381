"""Group: one communicator of two ranks, from its making to its end. Rank 0 sends, rank 1 receives.

    MAKING  → NCCL initialises without blocking, under a deadline
    JOINING → both sides are initialised; one byte moves, so that the first transfer is fast
    READY   → pieces move
    ENDED   → the reaper aborts it, once; bytes that it still delivers do not count

A burst of a failed group ends when the abort has returned, and not with its kernels. Until then,
NCCL may still move its bytes without a kernel: a network card, if the memory is registered, or the
peer's kernel on another GPU of this host.

For the device's thread.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from p2p_engine.errors import P2pError, TransportError
from p2p_engine.gpu.device import Device, Event
from p2p_engine.gpu.pack import PackOrder
from p2p_engine.transports.nccl.library import Nccl
from p2p_engine.transports.nccl.memory import Side, estimated_bytes
from p2p_engine.transports.nccl.reaper import Reaper

Memory: TypeAlias = tuple[int, int]  # address, bytes
Release: TypeAlias = Callable[[], None]

TURN_SECONDS = 0.002  # that launches may keep the device's thread from all else
SPIN_SECONDS = 0.0002  # to wait for a launch: NCCL's thread takes a fifth of it, a sleep as long

_numbers = itertools.count(1)


@dataclass
class PieceStep:
    """One piece. The copies that `prepare` plans fill the memory, in the same stream, just before
    its kernel."""

    address: int
    nbytes: int
    stream: int
    prepare: Callable[[], PackOrder] | None = None


@dataclass(eq=False)
class Run:
    """The pieces of a burst that are not launched yet."""

    steps: collections.deque[PieceStep]
    ended: Callable[[], None]
    order: PackOrder | None = None  # of the first step
    releases: list[Release] = field(default_factory=list)  # of what is not recorded yet
    streams: set[int] = field(default_factory=set)  # that it has used


class GroupState(enum.Enum):
    """See the module's docstring."""

    WANTED = enum.auto()
    MAKING = enum.auto()
    JOINING = enum.auto()
    READY = enum.auto()
    ENDED = enum.auto()


class Group:
    """One group; `rank` 0 is the sender's side."""

    def __init__(
        self,
        nccl: Nccl,
        device: Device,
        reaper: Reaper,
        *,
        number: int,
        rank: int,
        num_channels: int,
        registered: tuple[Memory, ...],
        is_first: bool = False,
    ) -> None:
        """`registered` is all memory that is sent from and received into, or nothing. `is_first`:
        one of the two processes has not initialised a communicator yet, which takes longer."""
        self.number = number
        self.is_first = is_first
        self.state = GroupState.WANTED
        self.used_at = self.made_at = time.monotonic()
        self.measured_bytes = 0
        self._nccl = nccl
        self._device = device
        self._reaper = reaper
        self._rank = rank
        self._num_channels = num_channels
        self._memory = registered
        self._registrations: list[int] = []
        self._comm = 0
        self._free_before = 0
        self._runs: collections.deque[Run] = collections.deque()
        self._launching: PieceStep | None = None  # of the first run, asynchronously
        self._launched: collections.deque[tuple[Event, list[Release]]] = collections.deque()
        self._moved_at = 0.0  # when the first kernel of those in progress became the first
        self._held: list[Callable[[], None]] = []  # bursts whose kernels ended before the abort
        self._is_over = False  # nothing of NCCL touches memory any more

    @staticmethod
    def next_number() -> int:
        """Return a number that no other group of this process has."""
        return next(_numbers)

    @property
    def is_busy(self) -> bool:
        """Whether a call of NCCL is in progress, or is still to be made."""
        return self.state is GroupState.MAKING or bool(self._runs)

    @property
    def waits_since(self) -> float | None:
        """Return since when the first kernel in progress is the first one; None without any."""
        return self._moved_at if self._runs or self._launched else None

    @property
    def estimated_bytes(self) -> int:
        """Return the device memory in bytes, by the formula of `nccl/memory.py`."""
        if self.state in (GroupState.WANTED, GroupState.ENDED):
            return 0
        side = Side.SENDER if self._rank == 0 else Side.RECEIVER
        return estimated_bytes(
            self._num_channels, side if self.state is GroupState.READY else Side.IDLE
        )

    @property
    def registered_bytes(self) -> int:
        """Return the bytes of our memory registered here, which a network card may access
        directly."""
        return sum(nbytes for _, nbytes in self._memory) if self._registrations else 0

    def make(self, unique_id: bytes) -> None:
        """Start to initialise; never blocks.

        Raises:
            TransportError: NCCL refuses.
        """
        self._free_before = self._device.cuda.memory()[0]
        self._comm = self._nccl.init(unique_id, self._rank, self._num_channels)
        self.state = GroupState.MAKING

    def look(self) -> bool:
        """Check the communicator's progress; returns True once, when it is initialised.

        Raises:
            TransportError: it has failed.
        """
        if not self._comm or self._nccl.is_in_progress(self._comm):
            return False
        if self.state is GroupState.MAKING:
            self.state = GroupState.JOINING
            self._nccl.has_initialised = True
            self._register()
            return True
        if self._launching is not None:
            self._note_launch()
        self._launch()
        return False

    def joined(self) -> None:
        """Note that the first byte has moved."""
        self.state = GroupState.READY
        self.used_at = time.monotonic()
        with contextlib.suppress(TransportError):  # the figure is only shown
            self.measured_bytes = max(0, self._free_before - self._device.cuda.memory()[0])

    def move(self, steps: Iterable[PieceStep], ended: Callable[[], None]) -> None:
        """Launch this side's kernels after those before them. `ended` is called when nothing of
        NCCL can touch the memory any more. If the group ended before, the memory holds garbage.

        Raises:
            TransportError: NCCL or the device refuses.
        """
        if self.waits_since is None:
            self._moved_at = time.monotonic()
        self._runs.append(Run(collections.deque(steps), ended))
        self.used_at = time.monotonic()
        if self._launching is None:
            self._launch()

    def end(self) -> None:
        """Abort in the reaper; idempotent."""
        if self.state is GroupState.ENDED:
            return
        was_connected = self.state is GroupState.READY
        self.state = GroupState.ENDED
        comm, self._comm = self._comm, 0
        for run in self._runs:
            if not run.streams:  # not begun
                self._device.post(run.ended)
        registrations, self._registrations = self._registrations, []
        if comm:
            self._reaper.abort(comm, registrations, self._release, was_connected=was_connected)
        else:
            self._release()

    def _register(self) -> None:
        """Both sides register, or neither does: NCCL does not define the mixed case."""
        if self._nccl.can_register:
            self._registrations = [self._nccl.register(self._comm, *item) for item in self._memory]

    def _launch(self) -> None:
        """Launch what waits, for a bounded time. NCCL refuses a call while another one is in
        progress; each takes less time than a sleep of this thread."""
        until = time.monotonic() + TURN_SECONDS
        while self._runs and time.monotonic() < until:
            run = self._runs[0]
            run.streams.add(run.steps[0].stream)
            if not self._is_prepared(run):
                continue
            self._launching = step = run.steps.popleft()
            call = self._nccl.send if self._rank == 0 else self._nccl.recv
            call(self._comm, step.address, step.nbytes, 1 - self._rank, step.stream)
            spun = time.monotonic() + SPIN_SECONDS
            while self._nccl.is_in_progress(self._comm):
                if time.monotonic() > spun:
                    return
            self._note_launch()

    def _is_prepared(self, run: Run) -> bool:
        """Enqueue some of the copies before the first step; returns whether all are enqueued."""
        step = run.steps[0]
        if step.prepare is None:
            return True
        if run.order is None:
            run.order = step.prepare()
            run.releases.append(run.order.release)
        if not run.order.advance():
            return False
        run.order = None
        return True

    def _note_launch(self) -> None:
        """Follow a kernel that is in its stream now."""
        step, self._launching = self._launching, None
        if step is None:
            return
        run, event = self._runs[0], self._device.record(step.stream)
        calls, run.releases = run.releases, []
        if not run.steps:
            self._runs.popleft()
            calls.append(lambda: self._ran(run.ended))
        self._launched.append((event, calls))
        if len(self._launched) == 1:
            self._follow()

    def _follow(self) -> None:
        self._device.later([self._launched[0][0]], self._note_ends)

    def _note_ends(self) -> None:
        """Go on behind the kernels that have ended; they end in the order of their launch."""
        calls: list[Release] = []
        try:
            while self._launched and self._launched[0][0].is_complete():
                calls += self._launched.popleft()[1]
        except TransportError as error:
            self._device.lost(error)
            return
        self._moved_at = time.monotonic()
        if self._launched:
            self._follow()
        for call in calls:
            self._device.guard(call)

    def _ran(self, ended: Callable[[], None]) -> None:
        """End a burst whose kernels have ended, now or after the abort."""
        if self.state is GroupState.ENDED and not self._is_over:
            self._held.append(ended)
        else:
            ended()

    def _release(self) -> None:
        """End the bursts that were in progress when the group ended, and the one that was being
        launched: its kernel may have run until now."""
        self._is_over = True
        self._launching = None
        held, self._held = self._held, []
        for ended in held:
            self._device.guard(ended)
        runs, self._runs = self._runs, collections.deque()
        for run in runs:
            if run.streams:
                self._end_behind(run)

    def _end_behind(self, run: Run) -> None:
        try:
            events = [self._device.record(stream) for stream in run.streams]
        except P2pError as error:
            self._device.lost(error)
            return
        self._device.later(events, partial(self._end_run, run))

    def _end_run(self, run: Run) -> None:
        for call in (*run.releases, run.ended):
            self._device.guard(call)


def describe_overdue(state: GroupState, seconds: float) -> TransportError:
    """Return the error of a group that was not made in time."""
    steps = {
        GroupState.WANTED: "the peer did not agree to a group",
        GroupState.MAKING: "ncclCommInitRankConfig did not end",
        GroupState.JOINING: "the first byte did not arrive",
    }
    return TransportError(f"{steps.get(state, 'the group')} within {seconds:g} s")
