"""The receiver's side of a pair: it agrees to groups, and receives bursts where they are expected.

A burst for host memory has one piece, which is received into a slab and copied from there. The slab
is held from before the kernel is launched until the copy has ended. For the device's thread.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from p2p_engine.errors import P2pError, TransportError
from p2p_engine.gpu.device import DeviceJob
from p2p_engine.transports.nccl.group import GroupState, PieceStep
from p2p_engine.transports.nccl.pair import FIRST, NcclPair, Resources
from p2p_engine.transports.nccl.rendezvous import MAX_PIECES, Burst, ReceivingHalf
from p2p_engine.transports.nccl.slabs import Slab
from p2p_engine.transports.nccl.wire import Frame, FrameKind

MOST_PIECE_BYTES = 1 << 30


@dataclass(eq=False)
class GrantedReceive:
    """One granted transfer: `nbytes` at `address`."""

    seq: int
    address: int
    nbytes: int
    job: DeviceJob
    is_host: bool
    launched_bytes: int = 0
    received_bytes: int = 0
    num_running: int = 0  # bursts
    is_stopping: bool = False
    is_given_up: bool = False  # by us
    is_confirmed: bool = False  # by the sender: no kernel of its side was aborted
    is_spoilt: bool = False  # a burst came over a group that was aborted


@dataclass(eq=False)
class SlabRoom:
    """A slab for one burst, or a wait for one."""

    found: Callable[[], None]
    slab: Slab | None = None
    is_used: bool = False  # a kernel or a copy may use it

    @property
    def is_waiting(self) -> bool:
        """Whether it has no slab yet."""
        return self.slab is None or not self.slab.address


class ReceivingPair(NcclPair):
    """Rank 1."""

    rank = 1

    def __init__(self, shared: Resources, connection: socket.socket) -> None:
        super().__init__(shared, connection)
        self._half: ReceivingHalf | None = None
        self._halves: dict[Burst, ReceivingHalf] = {}  # of the bursts that were launched
        self._piece_bytes = 0  # the sender's
        self._receives: dict[int, GrantedReceive] = {}
        self._rooms: dict[Burst, SlabRoom] = {}
        self._is_ending = False
        self._deferred: list[Frame] = []  # frames that came after END

    @property
    def is_idle(self) -> bool:
        """Whether its group is ready and moves nothing."""
        is_ready = self.group is not None and self.group.state is GroupState.READY
        return is_ready and self._half is not None and self._half.is_idle and not self._receives

    def expect(self, seq: int, address: int, nbytes: int, job: DeviceJob) -> None:
        """Receive transfer `seq` at `address`."""
        if self.error is not None:
            job.end("failed", str(self.error))
        elif not nbytes:
            job.end("done")
        else:
            is_host = self.shared.device.cuda.is_host(address)
            self._receives[seq] = GrantedReceive(seq, address, nbytes, job, is_host)

    def stop(self, job: DeviceJob) -> None:
        """Refuse further bursts of a receive."""
        for receive in list(self._receives.values()):
            if receive.job is job:
                receive.is_given_up = True
                self._stop(receive)

    def evict(self) -> None:
        """Ask the sender to end a group that is idle here."""
        self.say(FrameKind.IDLE)

    def made(self) -> None:
        """Tell the sender: our side is initialised."""
        self.say(FrameKind.UP)

    def heard(self, frame: Frame) -> None:
        """Handle a frame from the sender."""
        if frame.kind is FrameKind.STOP:
            receive = self._receives.get(frame.seq)
            if receive is not None:
                self._stop(receive)
        elif frame.kind is FrameKind.SENT:
            receive = self._receives.get(frame.seq)
            if receive is not None:
                receive.is_confirmed = True
                self._settle(receive)
        elif self._is_ending:
            self._deferred.append(frame)
        elif frame.kind is FrameKind.NEW:
            self._agree(frame)
        else:
            self._go_on(frame)

    def ended(self, burst: Burst, *, counts: bool) -> None:
        """Note that the kernels of a burst have ended."""
        self._halves.pop(burst).received(burst)
        if burst == FIRST:
            if counts and self.group is not None:
                self.group.joined()
        elif counts and burst in self._rooms:
            self._unload(burst)
        else:
            self._arrived(burst, counts=counts)
        self._end_if_idle()

    def broken(self) -> None:
        """End the receives without a kernel."""
        for burst in [burst for burst, room in self._rooms.items() if not room.is_used]:
            self._leave_room(burst)
        self._end_half()
        for receive in list(self._receives.values()):
            self._settle(receive)

    def _agree(self, frame: Frame) -> None:
        channels = frame.nbytes
        if self.group is not None or not 1 <= channels <= 64 or channels & (channels - 1):
            raise TransportError(f"the sender wants a group of {channels} channels")
        if not 1 <= frame.offset <= MOST_PIECE_BYTES:
            raise TransportError(f"the sender wants pieces of {frame.offset} bytes")
        if frame.seq and not self.shared.registered:
            raise TransportError("the sender registers its memory, and we do not")
        self.group = self.new_group(
            frame.group, channels, is_first_there=bool(frame.order), registers=bool(frame.seq)
        )
        self._piece_bytes = frame.offset
        self._half = ReceivingHalf(
            self.shared.recv_slots, self._find_room, self._is_wanted, self._launch, self._answer
        )
        self.say(FrameKind.ACK)

    def _go_on(self, frame: Frame) -> None:
        group, half = self.group, self._half
        if group is None or half is None or frame.group != group.number:
            raise TransportError(f"the sender said {frame.kind.name} about no group of ours")
        if frame.kind is FrameKind.ID and group.state is GroupState.WANTED:
            self.make(group, frame.unique_id)
        elif frame.kind is FrameKind.ASK and group.state in (GroupState.JOINING, GroupState.READY):
            half.on_ask(frame.order, Burst(frame.seq, frame.offset, frame.nbytes))
        elif frame.kind is FrameKind.END:
            self._is_ending = True
            self._end_if_idle()
        else:
            raise TransportError(f"the sender said {frame.kind.name} to a {group.state.name}")

    def _find_room(self, burst: Burst, found: Callable[[], None]) -> None:
        receive = self._receives.get(burst.seq) if burst != FIRST else None
        if receive is None or receive.is_stopping or not receive.is_host:
            found()
            return
        if burst.nbytes > self.shared.recv_slabs.slab_bytes:
            self.fail(TransportError(f"{burst} does not fit into a slab"))
            return
        self._rooms[burst] = room = SlabRoom(found)

        def granted(slab: Slab) -> None:
            room.slab = slab
            found()

        room.slab = self.shared.recv_slabs.take(granted)

    def _leave_room(self, burst: Burst) -> None:
        room = self._rooms.pop(burst, None)
        if room is not None and room.slab is not None:
            self.shared.recv_slabs.give_back(room.slab)

    def _unload(self, burst: Burst) -> None:
        """Copy a burst from its slab to its memory; nothing waits for that."""
        receive, slab = self._receives[burst.seq], self._rooms[burst].slab
        source = slab.address if slab is not None else 0
        regions = np.array([[source], [receive.address + burst.offset], [burst.nbytes]], np.int64)

        def failed(error: P2pError) -> None:
            self.fail(TransportError(str(error)))
            self._arrived(burst, counts=False)

        self.shared.device.pack(
            (regions[0], regions[1], regions[2]),
            lambda: self._arrived(burst, counts=True),
            failed,
        )

    def _arrived(self, burst: Burst, *, counts: bool) -> None:
        """Note that nothing touches a burst's memory any more."""
        receive = self._receives[burst.seq]
        receive.num_running -= 1
        receive.received_bytes += burst.nbytes if counts else 0
        receive.is_spoilt |= not counts
        self._leave_room(burst)
        self._settle(receive)

    def _is_wanted(self, burst: Burst) -> bool:
        if burst == FIRST:
            return True
        receive = self._receives.get(burst.seq)
        if receive is None or receive.is_stopping:
            self._leave_room(burst)
            return False
        is_next = burst.offset == receive.launched_bytes
        most = min(receive.nbytes - burst.offset, MAX_PIECES * self._piece_bytes)
        fits = is_next and 0 < burst.nbytes <= most
        if not fits:
            self.fail(TransportError(f"{burst} does not follow {receive.launched_bytes} bytes"))
        return fits

    def _launch(self, burst: Burst, slot: int) -> None:
        if self._half is None:
            return
        self._halves[burst] = self._half
        address, stream = self.shared.lanes.scratch, self.shared.recv_streams[slot]
        if burst != FIRST:
            receive, room = self._receives[burst.seq], self._rooms.get(burst)
            address = receive.address + burst.offset
            if room is not None and room.slab is not None:
                room.is_used = True
                address = room.slab.address
            receive.launched_bytes += burst.nbytes
            receive.num_running += 1
            receive.job.state = "running"
        pieces = burst.pieces(self._piece_bytes)
        self.launch(burst, [PieceStep(address + start, nbytes, stream) for start, nbytes in pieces])

    def _answer(self, order: int, is_launched: bool) -> None:
        self.say(FrameKind.GO if is_launched else FrameKind.REFUSE, order=order)

    def _stop(self, receive: GrantedReceive) -> None:
        receive.is_stopping = True
        for burst, room in list(self._rooms.items()):
            if burst.seq == receive.seq and room.is_waiting:
                self._leave_room(burst)
                room.found()  # it is refused then
        self._settle(receive)

    def _settle(self, receive: GrantedReceive) -> None:
        """End a receive that has no kernel and gets no more bursts. The end of our kernels proves
        nothing alone: on one host, a sender's that is aborted tells ours that all has come."""
        if receive.num_running or receive.job.done:
            return
        is_all = receive.received_bytes == receive.nbytes
        if is_all and receive.is_confirmed:
            state = "done"
        elif self.is_broken or receive.is_spoilt:
            state = "failed"
        elif receive.is_stopping and (receive.is_given_up or not is_all):
            state = "cancelled"  # else the sender says SENT, or the pair ends
        else:
            return
        del self._receives[receive.seq]
        receive.job.end(state, str(self.error) if state == "failed" else None)

    def _end_if_idle(self) -> None:
        if self._is_ending and self._half is not None and self._half.is_idle:
            self._end_half()
            self.end_group()
            self._is_ending = False
            deferred, self._deferred = self._deferred, []
            for frame in deferred:
                self.heard(frame)

    def _end_half(self) -> None:
        if self._half is not None:
            self._half.end()
            self._half = None
