"""Pair: the common part of both sides of one direction: a wire, a group, an end.

For the device's thread, except where said. If anything fails, the whole pair fails: the group is
aborted, the wire is closed so that the other side does the same, and each job ends as soon as
neither a kernel nor a network card can touch its memory any more. Bytes from an aborted group are
never published.
"""

from __future__ import annotations

import abc
import logging
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from p2p_engine.errors import P2pError, TransportError, named
from p2p_engine.gpu.device import Device
from p2p_engine.transports.nccl.group import (
    Group,
    GroupState,
    Memory,
    PieceStep,
    describe_overdue,
)
from p2p_engine.transports.nccl.library import Nccl
from p2p_engine.transports.nccl.reaper import Reaper
from p2p_engine.transports.nccl.rendezvous import Burst, Slots
from p2p_engine.transports.nccl.slabs import Lanes, Slabs
from p2p_engine.transports.nccl.wire import Frame, FrameKind, Wire

logger = logging.getLogger(__name__)

FIRST = Burst(0, 0, 1)  # the byte that connects a group


@dataclass
class Resources:
    """The parts that all pairs of one engine share."""

    nccl: Nccl
    device: Device
    reaper: Reaper
    send_slots: Slots
    recv_slots: Slots
    lanes: Lanes  # to send from, one for each sending slot
    recv_streams: list[int]  # one for each receiving slot
    recv_slabs: Slabs  # separate: else senders that wait for each other could hold all slabs
    registered: tuple[Memory, ...]  # if the peer agrees: all that NCCL reads and writes, or nothing
    num_channels: int
    patience_seconds: float  # to make a group, and for a kernel
    first_seconds: float  # to make one, if it is the first of either process


class NcclPair(abc.ABC):
    """One direction between two engines, on one of its sides."""

    rank: int

    def __init__(self, shared: Resources, connection: socket.socket) -> None:
        self.shared = shared
        self.error: TransportError | None = None
        self.group: Group | None = None
        self._wire = Wire(shared.device, connection, self._heard, self.fail)

    @property
    def is_broken(self) -> bool:
        """Whether the pair has failed or was closed."""
        return self.error is not None

    @property
    @abc.abstractmethod
    def is_idle(self) -> bool:
        """Whether its group is ready and moves nothing."""

    def tick(self, now: float) -> None:
        """Check the group: its making, its errors, kernels that do not end."""
        group = self.group
        if group is None or self.is_broken:
            return
        self.look(group)
        patience = self._patience(group)
        try:
            if group.state is not GroupState.READY and now - group.made_at > patience:
                raise describe_overdue(group.state, patience)
            if group.waits_since is not None and now - group.waits_since > patience:
                raise TransportError(f"a kernel of a group has not ended within {patience:g} s")
        except TransportError as error:
            self.fail(error)

    def make(self, group: Group, unique_id: bytes) -> None:
        """Start to initialise a group; `made` is called later.

        Raises:
            TransportError: NCCL refuses.
        """
        group.make(unique_id)
        self._follow(group)

    def look(self, group: Group) -> None:
        """Check whether a group was made, has launched a kernel, or has failed."""
        try:
            if group.look():
                self.made()
        except P2pError as error:
            self.fail(TransportError(str(error)))

    def fail(self, error: TransportError) -> None:
        """End the pair: abort the group, close the wire, end the jobs without a kernel;
        idempotent."""
        if self.is_broken:
            return
        self.error = error
        logger.info("nccl pair ended: rank=%d reason=%s", self.rank, named(error))
        self._wire.close()
        self.end_group()
        self.broken()

    def end_group(self) -> None:
        """End the group; the pair may make another one."""
        group, self.group = self.group, None
        if group is not None:
            group.end()

    def say(self, kind: FrameKind, **fields: int | bytes) -> None:
        """Send the other side a frame about the live group."""
        number = self.group.number if self.group is not None else 0
        self._wire.say(Frame(kind, number, **fields))  # type: ignore[arg-type]

    def launch(self, burst: Burst, steps: Iterable[PieceStep]) -> None:
        """Start this side's kernels. `ended` is called later; the burst counts unless the group
        ends first."""
        group = self.group
        if group is None:
            return
        try:
            is_followed = group.is_busy
            group.move(steps, lambda: self._burst_ended(group, burst))
            if group.is_busy and not is_followed:
                self._follow(group)
        except P2pError as error:
            self.fail(TransportError(str(error)))

    def new_group(
        self, number: int, num_channels: int, *, is_first_there: bool, registers: bool
    ) -> Group:
        """Return this side's group, not initialised yet. `is_first_there`: it is the first one of
        the other process. `registers`: both sides register their memory."""
        shared = self.shared
        is_first = is_first_there or not shared.nccl.has_initialised
        return Group(
            shared.nccl, shared.device, shared.reaper,
            number=number, rank=self.rank, num_channels=num_channels, is_first=is_first,
            registered=shared.registered if registers else (),
        )  # fmt: skip

    # Implemented by the two kinds of pairs

    @abc.abstractmethod
    def evict(self) -> None:
        """End an idle group on both sides, soon."""

    @abc.abstractmethod
    def made(self) -> None:
        """Go on: the communicator is initialised."""

    @abc.abstractmethod
    def heard(self, frame: Frame) -> None:
        """Take a frame about the live group.

        Raises:
            TransportError: the other side must not send it now.
        """

    @abc.abstractmethod
    def ended(self, burst: Burst, *, counts: bool) -> None:
        """Note that the kernels of a burst have ended. Its bytes count only if its group was not
        aborted."""

    @abc.abstractmethod
    def broken(self) -> None:
        """End the jobs without a kernel: the pair has failed."""

    def _patience(self, group: Group) -> float:
        """Return how long the steps of making a group, or a kernel, may take."""
        is_agreeing = group.state is GroupState.WANTED and self.rank == 0
        if group.is_first and not is_agreeing and group.state is not GroupState.READY:
            return max(self.shared.first_seconds, self.shared.patience_seconds)
        return self.shared.patience_seconds

    def _follow(self, group: Group) -> None:
        """Poll until NCCL has finished the calls of a group."""
        self.shared.device.when([_Progress(self, group)], lambda: None)

    def _burst_ended(self, group: Group, burst: Burst) -> None:
        self.ended(burst, counts=group is self.group)

    def _heard(self, frame: Frame) -> None:
        if not self.is_broken:
            self.heard(frame)


class _Progress:
    """A moment: NCCL has finished the calls of a group, or the group has failed."""

    def __init__(self, pair: NcclPair, group: Group) -> None:
        self._pair = pair
        self._group = group

    def is_complete(self) -> bool:
        """Check the group, and tell the pair."""
        self._pair.look(self._group)
        return self._group.state is GroupState.ENDED or not self._group.is_busy
