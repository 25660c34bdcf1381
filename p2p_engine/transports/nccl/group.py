"""Group: one communicator of two ranks, from its making to its end. Rank 0 sends, rank 1 receives.

    MAKING  → NCCL initialises without blocking, under a deadline
    JOINING → both sides are initialised; one byte moves, so that the first transfer is fast
    READY   → pieces move
    ENDED   → the reaper aborts it, once; bytes that it still delivers do not count

A piece of a failed group ends when the abort has returned, and not with its kernel. Until then,
NCCL may still move its bytes without the kernel: a network card, if the memory is registered, or
the peer's kernel on another GPU of this host.

For the device's thread.
"""

from __future__ import annotations

import collections
import enum
import itertools
import time
from collections.abc import Callable
from typing import TypeAlias

from p2p_engine.errors import TransportError
from p2p_engine.gpu.device import Device
from p2p_engine.transports.nccl.library import Nccl
from p2p_engine.transports.nccl.memory import Side, estimated_bytes
from p2p_engine.transports.nccl.reaper import Reaper

Memory: TypeAlias = tuple[int, int]  # address, bytes

_numbers = itertools.count(1)


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
        self._stream = device.cuda.create_stream()
        self._queue: collections.deque[tuple[int, int, Callable[[], None]]] = collections.deque()
        self._launching: Callable[[], None] | None = None  # NCCL launches it asynchronously
        self._held: list[Callable[[], None]] = []  # pieces whose kernels ended before the abort
        self._is_over = False  # nothing of NCCL touches memory any more

    @staticmethod
    def next_number() -> int:
        """Return a number that no other group of this process has."""
        return next(_numbers)

    @property
    def is_busy(self) -> bool:
        """Whether a call of NCCL is in progress; it refuses other calls until then."""
        return self.state is GroupState.MAKING or self._launching is not None

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
        ended, self._launching = self._launching, None
        if ended is not None:
            self._device.after_now(self._stream, lambda: self._ran(ended))
            self._launch_next()
        return False

    def joined(self) -> None:
        """Note that the first byte has moved."""
        self.state = GroupState.READY
        self.used_at = time.monotonic()
        self.measured_bytes = max(0, self._free_before - self._device.cuda.memory()[0])

    def move(self, address: int, nbytes: int, ended: Callable[[], None]) -> None:
        """Launch this side's kernel after those before it. `ended` is called when nothing of NCCL
        can touch the memory any more. If the group ended before, the memory holds garbage.

        Raises:
            TransportError: NCCL refuses.
        """
        self._queue.append((address, nbytes, ended))
        self.used_at = time.monotonic()
        if self._launching is None:
            self._launch_next()

    def end(self) -> None:
        """Abort in the reaper; idempotent."""
        if self.state is GroupState.ENDED:
            return
        was_connected = self.state is GroupState.READY
        self.state = GroupState.ENDED
        comm, self._comm = self._comm, 0
        for *_, ended in self._queue:
            self._device.post(ended)
        self._queue.clear()
        registrations, self._registrations = self._registrations, []
        if comm:
            self._reaper.abort(comm, registrations, self._release, was_connected=was_connected)
        else:
            self._release()

    def _register(self) -> None:
        """Both sides register, or neither does: NCCL does not define the mixed case."""
        if self._nccl.can_register:
            self._registrations = [self._nccl.register(self._comm, *item) for item in self._memory]

    def _launch_next(self) -> None:
        if self._queue:
            address, nbytes, self._launching = self._queue.popleft()
            call = self._nccl.send if self._rank == 0 else self._nccl.recv
            call(self._comm, address, nbytes, 1 - self._rank, self._stream)

    def _ran(self, ended: Callable[[], None]) -> None:
        """End a piece whose kernel has ended, now or after the abort."""
        if self.state is GroupState.ENDED and not self._is_over:
            self._held.append(ended)
        else:
            ended()

    def _release(self) -> None:
        """End the pieces that were in progress when the group ended, and the one that was being
        launched: its kernel may have run until now."""
        self._is_over = True
        held, self._held = self._held, []
        ended, self._launching = self._launching, None
        for piece_ended in (*held, *([ended] if ended is not None else [])):
            self._device.guard(piece_ended)
        self._device.cuda.destroy_stream(self._stream)


def describe_overdue(state: GroupState, seconds: float) -> TransportError:
    """Return the error of a group that was not made in time."""
    steps = {
        GroupState.WANTED: "the peer did not agree to a group",
        GroupState.MAKING: "ncclCommInitRankConfig did not end",
        GroupState.JOINING: "the first byte did not arrive",
    }
    return TransportError(f"{steps.get(state, 'the group')} within {seconds:g} s")
