"""The sender's side of a pair: it cuts writes into bursts, asks, packs their pieces and sends them.

For the device's thread. A write ends when its source is not read any more and the receiver has
answered every ask. A write that was cancelled may have been sent all the same.

The device packs and sends the pieces of a burst by itself, in the streams of the lane's slabs. Host
memory is the exception: a copy of it may hold up the thread that starts it until the stream gets
there, so it does not start before its slab is idle, and is waited for.
"""

from __future__ import annotations

import collections
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from p2p_engine.errors import P2pError, TransportError
from p2p_engine.gpu.device import DeviceJob
from p2p_engine.gpu.pack import PackOrder
from p2p_engine.memory.jobs import Moment
from p2p_engine.memory.layout import Regions
from p2p_engine.transports.nccl.group import Group, GroupState, PieceStep
from p2p_engine.transports.nccl.groups import Groups
from p2p_engine.transports.nccl.pair import FIRST, NcclPair, Resources
from p2p_engine.transports.nccl.rendezvous import MAX_ASKED, MAX_PIECES, Burst, SendingHalf
from p2p_engine.transports.nccl.slabs import RECV_SLAB_SHARE, Cutter, Lane, LaneSlab
from p2p_engine.transports.nccl.wire import Frame, FrameKind

SHORT_SECONDS = 0.012  # a burst that takes less gets more pieces, one that takes
LONG_SECONDS = 0.03  # more gets fewer: what is granted is sent, even if it is not wanted any more


@dataclass(eq=False)
class Write:
    """One granted transfer of this pair."""

    seq: int
    nbytes: int
    cutter: Cutter
    job: DeviceJob
    is_host: bool  # the source
    is_host_there: bool
    is_computed: bool = False  # the source is valid
    cut_bytes: int = 0
    sent_bytes: int = 0
    num_open: int = 0  # bursts in progress
    is_stopping: bool = False
    is_refused: bool = False

    @property
    def has_more(self) -> bool:
        """Whether another burst is to be cut."""
        is_wanted = self.is_computed and not self.is_stopping and not self.is_refused
        return is_wanted and self.cut_bytes < self.nbytes


@dataclass(eq=False)
class Flight:
    """A burst in progress."""

    write: Write
    slabs: list[LaneSlab] = field(default_factory=list)  # that it uses
    granted_at: float = 0.0  # when the receiver said GO
    is_begun: bool = False  # copies or kernels may run


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
        self._flights: dict[Burst, Flight] = {}
        self._granted: collections.deque[tuple[Burst, Lane]] = collections.deque()  # not begun
        self._pieces = MAX_PIECES  # of a burst
        self._ended_at = 0.0  # when the last burst had been sent
        self._half: SendingHalf | None = None
        self._halves: dict[Burst, SendingHalf] = {}  # of the bursts that were launched
        self._is_up = False  # the receiver's side is initialised
        groups.want(self)

    @property
    def is_idle(self) -> bool:
        """Whether its group is ready and moves nothing."""
        is_ready = self.group is not None and self.group.state is GroupState.READY
        return is_ready and not self._writes

    def write(
        self,
        seq: int,
        regions: Regions,
        after: Iterable[Moment],
        job: DeviceJob,
        *,
        is_host_there: bool = False,
        is_checked: bool = False,
    ) -> None:
        """Send regions as transfer `seq`, once the moments are complete. The receiver has slabs for
        few pieces at a time if they go into its host memory. If it is checked, the job gets the
        checksum of the source first."""
        if self.error is not None:
            job.end("failed", str(self.error))
            return
        is_host = self.shared.device.is_host(regions.addresses)
        write = Write(seq, regions.nbytes, Cutter(regions), job, is_host, is_host_there)
        if not write.nbytes:
            job.end("done")
            return
        self._writes[seq] = write
        if is_checked:
            self.shared.device.when(after, lambda: self._check(write, regions))
        else:
            self.shared.device.when(after, lambda: self._computed(write))

    def stop(self, job: DeviceJob) -> None:
        """Send no more bursts of a write, and tell the receiver."""
        write = next((item for item in self._writes.values() if item.job is job), None)
        if write is None or write.is_stopping:
            return
        write.is_stopping = True
        self.say(FrameKind.STOP, seq=write.seq)
        for burst, flight in list(self._flights.items()):
            if flight.write is write and self._half is not None and self._half.drop(burst):
                self._land(burst)
        self._settle(write)

    def start_group(self) -> None:
        """Ask the receiver for a group: it is this pair's turn."""
        channels = self.shared.num_channels
        self.group = group = self.new_group(
            Group.next_number(), channels,
            is_first_there=self._is_first_there, registers=self._registers,
        )  # fmt: skip
        self._is_up = False
        self._half = SendingHalf(self.shared.send_slots, self._ask, self._launch, self._refused)
        order, seq, offset = int(group.is_first), int(self._registers), self._piece_bytes
        self.say(FrameKind.NEW, nbytes=channels, order=order, seq=seq, offset=offset)

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

    def ended(self, burst: Burst, *, counts: bool) -> None:
        """Note that the kernels of a burst have ended."""
        self._halves.pop(burst).sent(burst)
        if burst == FIRST:
            if counts and self.group is not None:
                self.group.joined()
                self._is_first_there = False
                self._groups.made(self)
                self._on_ready()
                self._feed()
            return
        if counts:
            self._flights[burst].write.sent_bytes += burst.nbytes
            self._pace(self._flights[burst])
        self._land(burst)
        self._begin_granted()
        self._feed()

    def broken(self) -> None:
        """End the writes without a kernel."""
        self._end_half()
        self._granted.clear()
        for burst, flight in list(self._flights.items()):
            if not flight.is_begun:
                if flight.granted_at:
                    self._halves.pop(burst).sent(burst)
                self._land(burst)
        for write in list(self._writes.values()):
            self._settle(write)
        self._groups.gone(self)
        if self.error is not None:
            self._on_broken(self.error)

    def _check(self, write: Write, regions: Regions) -> None:
        """Compute the checksum of a source; until it is there, the source is being read."""
        if write.job.done:
            return
        write.num_open += 1

        def ended(checksum: int | None) -> None:
            write.num_open -= 1
            write.job.checksum = checksum
            self._settle(write)
            self._computed(write)

        def failed(error: P2pError) -> None:
            self.fail(TransportError(str(error)))
            ended(None)

        self.shared.device.checksum(regions.addresses, regions.lengths, ended, failed)

    def _computed(self, write: Write) -> None:
        write.is_computed = True
        self._feed()

    @property
    def _piece_bytes(self) -> int:
        return self.shared.lanes.slab_bytes

    def _feed(self) -> None:
        """Cut and ask for as many bursts as this pair may have in progress."""
        if self.is_broken:
            return
        if self.group is None and any(write.has_more for write in self._writes.values()):
            self._groups.want(self)
        if self.group is None or self.group.state is not GroupState.READY:
            return
        most = MAX_ASKED if self._pieces > 1 else MAX_ASKED // 2
        while len(self._flights) < most and self._half is not None:
            write = next((item for item in self._writes.values() if item.has_more), None)
            if write is None:
                return
            rest = write.nbytes - write.cut_bytes
            burst = Burst(write.seq, write.cut_bytes, min(rest, self._burst_bytes(write)))
            write.cut_bytes += burst.nbytes
            write.num_open += 1
            self._flights[burst] = Flight(write)
            self._half.add(burst)

    def _burst_bytes(self, write: Write) -> int:
        if write.is_host_there:
            return self._piece_bytes // RECV_SLAB_SHARE
        return self._piece_bytes * (1 if write.is_host else self._pieces)

    def _pace(self, flight: Flight) -> None:
        """Let the next bursts take some milliseconds, whatever the link."""
        now = time.monotonic()
        seconds, self._ended_at = now - max(flight.granted_at, self._ended_at), now
        if seconds > LONG_SECONDS:
            self._pieces = max(1, self._pieces // 2)
        elif seconds < SHORT_SECONDS:
            self._pieces = min(MAX_PIECES, self._pieces * 2)

    def _ask(self, order: int, burst: Burst) -> None:
        self.say(
            FrameKind.ASK, order=order, seq=burst.seq, offset=burst.offset, nbytes=burst.nbytes
        )

    def _launch(self, burst: Burst, slot: int) -> None:
        if self._half is None:
            return
        self._halves[burst] = self._half
        lane = self.shared.lanes.lanes[slot]
        if burst == FIRST:
            self.launch(burst, [PieceStep(self.shared.lanes.scratch, 1, lane.next.stream)])
            return
        self._flights[burst].granted_at = time.monotonic()
        self._granted.append((burst, lane))
        self._begin_granted()

    def _begin_granted(self) -> None:
        """Pack and send in the order of the receiver's answers."""
        while self._granted and not self.is_broken:
            burst, lane = self._granted[0]
            flight = self._flights[burst]
            if flight.is_begun:  # its copy from the host is in progress
                return
            if flight.write.is_host and lane.next.num_used:
                return
            flight.is_begun = True
            flight.write.job.state = "running"
            if flight.write.is_host:
                self._begin_from_host(burst, flight, lane)
                return
            self._granted.popleft()
            pieces = burst.pieces(self._piece_bytes)
            self.launch(burst, [self._step(burst, flight, lane, *piece) for piece in pieces])

    def _step(
        self, burst: Burst, flight: Flight, lane: Lane, offset: int, nbytes: int
    ) -> PieceStep:
        """Return the step that packs a piece into the next slab and sends it."""
        slab = self._use(flight, lane)
        start = burst.offset + offset

        def prepare() -> PackOrder:
            source = flight.write.cutter.cut(start, nbytes)
            regions = (source.addresses, slab.address + source.starts, source.lengths)
            return self.shared.device.pack_in(slab.stream, regions)

        return PieceStep(slab.address, nbytes, slab.stream, prepare)

    def _begin_from_host(self, burst: Burst, flight: Flight, lane: Lane) -> None:
        """Copy a burst of one piece into an idle slab, and send it then."""
        slab = self._use(flight, lane)
        source = flight.write.cutter.cut(burst.offset, burst.nbytes)
        regions = (source.addresses, slab.address + source.starts, source.lengths)

        def packed() -> None:
            if self.is_broken:
                self._halves.pop(burst).sent(burst)
                self._land(burst)
                return
            self._granted.popleft()
            self.launch(burst, [PieceStep(slab.address, burst.nbytes, slab.stream)])
            self._begin_granted()

        def failed(error: P2pError) -> None:
            self.fail(TransportError(str(error)))
            self._halves.pop(burst).sent(burst)
            self._land(burst)

        self.shared.device.pack(regions, packed, failed)

    def _use(self, flight: Flight, lane: Lane) -> LaneSlab:
        slab = lane.turn()
        slab.num_used += 1
        flight.slabs.append(slab)
        return slab

    def _refused(self, burst: Burst) -> None:
        self._flights[burst].write.is_refused = True
        self._land(burst)

    def _land(self, burst: Burst) -> None:
        """Note that a burst is not in progress any more."""
        flight = self._flights.pop(burst)
        for slab in flight.slabs:
            slab.num_used -= 1
        flight.write.num_open -= 1
        self._settle(flight.write)

    def _settle(self, write: Write) -> None:
        """End a write without bursts in progress."""
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
        if is_sent:
            self.say(FrameKind.SENT, seq=write.seq)
        write.job.end(state, str(self.error) if state == "failed" else None)

    def _end_half(self) -> None:
        if self._half is not None:
            self._half.end()
            self._half = None
