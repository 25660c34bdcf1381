"""The sender's side of a pair: it cuts writes into pieces, packs them into slabs, asks and sends.

For the device's thread. A write ends when its source is not read any more and the receiver has
answered every ask. A write that was cancelled may have been sent all the same.
"""

from __future__ import annotations

import enum
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from p2p_engine.errors import TransportError
from p2p_engine.gpu.device import DeviceJob
from p2p_engine.memory.jobs import Moment
from p2p_engine.memory.layout import Regions
from p2p_engine.transports.nccl.group import Group, GroupState
from p2p_engine.transports.nccl.groups import Groups
from p2p_engine.transports.nccl.pair import FIRST, NcclPair, Resources
from p2p_engine.transports.nccl.rendezvous import MAX_ASKED, Piece, SendingHalf
from p2p_engine.transports.nccl.slabs import Cutter, Slab
from p2p_engine.transports.nccl.wire import Frame, FrameKind

MAX_SLABS = MAX_ASKED + 1  # of one pair: two being sent, one being packed


class Stage(enum.Enum):
    """The progress of a piece."""

    WAITING = enum.auto()  # for a slab
    PACKING = enum.auto()
    PACKED = enum.auto()
    ASKED = enum.auto()
    LAUNCHED = enum.auto()


@dataclass(eq=False)
class Write:
    """One granted transfer of this pair."""

    seq: int
    nbytes: int
    cutter: Cutter
    job: DeviceJob
    is_computed: bool = False  # the source is valid
    cut_bytes: int = 0
    sent_bytes: int = 0
    num_open: int = 0  # pieces in progress
    is_stopping: bool = False
    is_refused: bool = False

    @property
    def has_more(self) -> bool:
        """Whether another piece is to be cut."""
        is_wanted = self.is_computed and not self.is_stopping and not self.is_refused
        return is_wanted and self.cut_bytes < self.nbytes


@dataclass(eq=False)
class Flight:
    """A piece in progress."""

    write: Write
    slab: Slab | None = None
    stage: Stage = Stage.WAITING


class SendingPair(NcclPair):
    """Rank 0."""

    rank = 0

    def __init__(
        self,
        shared: Resources,
        groups: Groups,
        connection: socket.socket,
        on_ready: Callable[[], None],
        on_broken: Callable[[TransportError], None],
        *,
        is_first_there: bool = False,
        registers_there: bool = False,
    ) -> None:
        """Either `on_ready` is called, when the first group is ready, or `on_broken`.
        `is_first_there`: the receiver's process has not made a group yet. `registers_there`: its
        setting is to register memory."""
        super().__init__(shared, connection)
        self._is_first_there = is_first_there
        self._registers = registers_there and bool(shared.registered)
        self._groups = groups
        self._on_ready = on_ready
        self._on_broken = on_broken
        self._writes: dict[int, Write] = {}
        self._flights: dict[Piece, Flight] = {}
        self._half: SendingHalf | None = None
        self._is_up = False  # the receiver's side is initialised
        groups.want(self)

    @property
    def is_idle(self) -> bool:
        """Whether its group is ready and moves nothing."""
        is_ready = self.group is not None and self.group.state is GroupState.READY
        return is_ready and not self._writes

    def write(self, seq: int, regions: Regions, after: Iterable[Moment], job: DeviceJob) -> None:
        """Send regions as transfer `seq`, once the moments are complete."""
        if self.error is not None:
            job.end("failed", str(self.error))
            return
        write = Write(seq, regions.nbytes, Cutter(regions), job)
        if not write.nbytes:
            job.end("done")
            return
        self._writes[seq] = write
        self.shared.device.when(after, lambda: self._computed(write))

    def stop(self, job: DeviceJob) -> None:
        """Send no more pieces of a write, and tell the receiver."""
        write = next((item for item in self._writes.values() if item.job is job), None)
        if write is None or write.is_stopping:
            return
        write.is_stopping = True
        self.say(FrameKind.STOP, seq=write.seq)
        for piece, flight in list(self._flights.items()):
            if flight.write is write and flight.stage in (Stage.WAITING, Stage.PACKED):
                self._land(piece)
        self._settle(write)
        self._ask_packed()

    def start_group(self) -> None:
        """Ask the receiver for a group: it is this pair's turn."""
        channels = self.shared.num_channels
        self.group = group = self.new_group(
            Group.next_number(), channels,
            is_first_there=self._is_first_there, registers=self._registers,
        )  # fmt: skip
        self._is_up = False
        self._half = SendingHalf(self.shared.send_slots, self._ask, self._launch, self._refused)
        order, seq = int(group.is_first), int(self._registers)
        self.say(FrameKind.NEW, nbytes=channels, order=order, seq=seq)

    def evict(self) -> None:
        """End an idle group, on both sides."""
        self.say(FrameKind.END)
        self._end_half()
        self.end_group()

    def made(self) -> None:
        """Send the first byte once the receiver's side is initialised too."""
        if self._is_up and self._half is not None:
            self._half.add(FIRST)

    def heard(self, frame: Frame) -> None:
        """Handle a frame about the live group; frames about older groups do not count."""
        group, half = self.group, self._half
        if group is None or half is None or frame.group != group.number:
            return
        if frame.kind is FrameKind.ACK and group.state is GroupState.WANTED:
            unique_id = self.shared.nccl.unique_id()
            self.say(FrameKind.ID, unique_id=unique_id)
            self.make(group, unique_id)
        elif frame.kind is FrameKind.UP and not self._is_up:
            self._is_up = True
            if group.state is GroupState.JOINING:
                half.add(FIRST)
        elif frame.kind is FrameKind.GO:
            half.on_go(frame.order)
        elif frame.kind is FrameKind.REFUSE:
            half.on_refuse(frame.order)
        elif frame.kind is FrameKind.IDLE:
            if self.is_idle:
                self.evict()
        else:
            raise TransportError(f"the receiver said {frame.kind.name} to a {group.state.name}")

    def ended(self, piece: Piece, *, counts: bool) -> None:
        """Note that a send kernel has ended."""
        if counts and self._half is not None:
            self._half.sent(piece)
        if piece == FIRST:
            if counts and self.group is not None:
                self.group.joined()
                self._is_first_there = False
                self._groups.made(self)
                self._on_ready()
                self._feed()
            return
        if counts:
            self._flights[piece].write.sent_bytes += piece.nbytes
        self._land(piece)
        self._feed()

    def broken(self) -> None:
        """End the writes without a kernel."""
        self._end_half()
        for piece, flight in list(self._flights.items()):
            if flight.stage in (Stage.WAITING, Stage.PACKED, Stage.ASKED):
                self._land(piece)
        for write in list(self._writes.values()):
            self._settle(write)
        self._groups.gone(self)
        if self.error is not None:
            self._on_broken(self.error)

    def _computed(self, write: Write) -> None:
        write.is_computed = True
        self._feed()

    def _feed(self) -> None:
        """Cut and pack as many pieces as this pair may have in progress."""
        if self.is_broken:
            return
        if self.group is None and any(write.has_more for write in self._writes.values()):
            self._groups.want(self)
        if self.group is None or self.group.state is not GroupState.READY:
            return
        while len(self._flights) < MAX_SLABS:
            write = next((item for item in self._writes.values() if item.has_more), None)
            if write is None:
                return
            rest = write.nbytes - write.cut_bytes
            piece = Piece(write.seq, write.cut_bytes, min(rest, self.shared.slabs.slab_bytes))
            write.cut_bytes += piece.nbytes
            write.num_open += 1
            self._take_slab(piece, Flight(write))

    def _take_slab(self, piece: Piece, flight: Flight) -> None:
        self._flights[piece] = flight

        def granted(slab: Slab) -> None:
            flight.slab = slab
            self._pack(piece, flight, slab)

        slab = self.shared.slabs.take(granted)
        if self._flights.get(piece) is flight:
            flight.slab = slab

    def _pack(self, piece: Piece, flight: Flight, slab: Slab) -> None:
        source = flight.write.cutter.cut(piece.offset, piece.nbytes)
        regions = (source.addresses, slab.address + source.starts, source.lengths)
        flight.stage = Stage.PACKING
        flight.write.job.state = "running"
        # If it fails, a copy may have begun: the memory is kept.
        self.shared.device.pack(regions, lambda: self._packed(piece, flight), self._pack_failed)

    def _packed(self, piece: Piece, flight: Flight) -> None:
        write = flight.write
        if self.is_broken or write.is_stopping or write.is_refused:
            self._land(piece)
        else:
            flight.stage = Stage.PACKED
        self._ask_packed()

    def _ask_packed(self) -> None:
        """Ask in stream order: two events may be seen in the wrong order."""
        for piece, flight in list(self._flights.items()):
            if flight.stage in (Stage.WAITING, Stage.PACKING) or self._half is None:
                return
            if flight.stage is Stage.PACKED:
                flight.stage = Stage.ASKED
                self._half.add(piece)

    def _ask(self, order: int, piece: Piece) -> None:
        self.say(
            FrameKind.ASK, order=order, seq=piece.seq, offset=piece.offset, nbytes=piece.nbytes
        )

    def _launch(self, piece: Piece) -> None:
        address = self.shared.slabs.scratch
        if piece != FIRST:
            flight = self._flights[piece]
            flight.stage = Stage.LAUNCHED
            address = flight.slab.address if flight.slab is not None else 0
        self.launch(piece, address)

    def _refused(self, piece: Piece) -> None:
        self._flights[piece].write.is_refused = True
        self._land(piece)

    def _land(self, piece: Piece) -> None:
        """Note that a piece is not in progress any more."""
        flight = self._flights.pop(piece)
        if flight.slab is not None:
            self.shared.slabs.give_back(flight.slab)
        flight.write.num_open -= 1
        self._settle(flight.write)

    def _settle(self, write: Write) -> None:
        """End a write without pieces in progress."""
        if write.num_open or write.job.done:
            return
        is_sent = write.sent_bytes == write.nbytes
        if is_sent or (write.is_refused and not write.is_stopping):
            state = "done"  # the receiver refused the rest, and says so itself
        elif self.is_broken:
            state = "failed"
        elif write.is_stopping:
            state = "cancelled"
        else:
            return
        del self._writes[write.seq]
        write.job.end(state, str(self.error) if state == "failed" else None)

    def _end_half(self) -> None:
        if self._half is not None:
            self._half.end()
            self._half = None
