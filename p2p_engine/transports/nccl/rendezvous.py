"""Rendezvous before launch: why no order of sends and receives can deadlock. No I/O, no NCCL.

A send or receive of NCCL is a kernel that occupies its device until the other side's kernel runs.
So no kernel is launched before both sides hold all that they need:

    sender                                   receiver
    its bytes are packed, takes a send slot
      ASK order, seq, offset, nbytes ─────►  checks the order, finds room for the bytes
                                             takes a receive slot, launches its kernel
      ◄───────────────────────── GO order    (or REFUSE: it is not wanted any more)
    checks the order, launches its kernel

NCCL launches a kernel asynchronously. It needs nothing from the peer for that, except for the first
kernel of a communicator: then both sides must have called NCCL, so GO does not wait for the first
launch. A receive kernel therefore waits only for a sender that holds its slot and needs nothing
more. A sender that waits holds send slots, which no receiver needs. Slots bound the number of
kernels on a device; the kernels of one communicator run in the same order on both sides.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from p2p_engine.errors import TransportError

MAX_ASKED = 2  # pieces of one group in progress: the second starts when the first ends


class Slots:
    """A bounded number of slots, given out first come, first served."""

    def __init__(self, count: int) -> None:
        self._num_free = count
        self._waiting: collections.deque[SlotRequest] = collections.deque()

    @property
    def num_free(self) -> int:
        """Return how many slots are free."""
        return self._num_free

    def take(self, request: SlotRequest) -> None:
        """Call `request.granted` when a slot is free, perhaps at once. It is held until given
        back."""
        self._waiting.append(request)
        self._serve()

    def give_back(self, request: SlotRequest) -> None:
        """Free a slot, or stop waiting for one; idempotent."""
        if request.is_over:
            return
        request.is_over = True
        if request.is_granted:
            self._num_free += 1
            self._serve()

    def give_back_all(self, requests: Iterable[SlotRequest]) -> None:
        """Free many slots; waiting requests go first, so that none of them gets a slot freed
        here."""
        for request in sorted(requests, key=lambda request: request.is_granted):
            self.give_back(request)

    def _serve(self) -> None:
        while self._waiting and self._num_free:
            request = self._waiting.popleft()
            if not request.is_over:
                self._num_free -= 1
                request.is_granted = True
                request.granted()


@dataclass(eq=False)
class SlotRequest:
    """A slot that is held, or a wait for one."""

    granted: Callable[[], None]
    is_granted: bool = False
    is_over: bool = False


@dataclass(frozen=True)
class Piece:
    """Bytes that one pair of kernels moves: part of transfer `seq`, at `offset` bytes in it."""

    seq: int
    offset: int
    nbytes: int


class SendingHalf:
    """The sender's half of one group."""

    def __init__(
        self,
        slots: Slots,
        ask: Callable[[int, Piece], None],
        launch: Callable[[Piece], None],
        refused: Callable[[Piece], None],
    ) -> None:
        """`ask(order, piece)` tells the receiver; `launch` starts a kernel."""
        self._slots = slots
        self._ask = ask
        self._launch = launch
        self._refused = refused
        self._queue: collections.deque[Piece] = collections.deque()
        self._asked: dict[int, Piece] = {}  # by order number, ascending
        self._launched: set[Piece] = set()
        self._held: dict[Piece, SlotRequest] = {}
        self._next_order = 0

    @property
    def is_idle(self) -> bool:
        """Whether no piece waits or is in progress."""
        return not self._queue and not self._held

    @property
    def launched(self) -> set[Piece]:
        """Return the pieces whose kernels may run."""
        return self._launched

    def add(self, piece: Piece) -> None:
        """Send a piece whose bytes are packed."""
        self._queue.append(piece)
        self._advance()

    def on_go(self, order: int) -> None:
        """Launch: the receiver has launched its kernel.

        Raises:
            TransportError: it is not this piece's turn, so the two sides disagree.
        """
        expected = next(iter(self._asked), None)
        if order != expected:
            raise TransportError(f"the receiver launched number {order}, not {expected}")
        piece = self._asked.pop(order)
        self._launched.add(piece)
        self._launch(piece)

    def on_refuse(self, order: int) -> None:
        """Drop a piece that the receiver does not want any more.

        Raises:
            TransportError: the receiver was not asked for it.
        """
        piece = self._asked.pop(order, None)
        if piece is None:
            raise TransportError(f"the receiver refused number {order}, which it was not asked")
        self._give_back(piece)
        self._refused(piece)
        self._advance()

    def sent(self, piece: Piece) -> None:
        """Note that a piece's kernel has ended."""
        self._launched.discard(piece)
        self._give_back(piece)
        self._advance()

    def end(self) -> None:
        """Give all slots back: no kernel of this group runs any more."""
        self._queue.clear()
        self._asked.clear()
        self._launched.clear()
        self._slots.give_back_all(self._held.values())
        self._held.clear()

    def _advance(self) -> None:
        while self._queue and len(self._held) < MAX_ASKED:
            piece = self._queue.popleft()
            self._held[piece] = request = SlotRequest(functools.partial(self._granted, piece))
            self._slots.take(request)

    def _granted(self, piece: Piece) -> None:
        order, self._next_order = self._next_order, self._next_order + 1
        self._asked[order] = piece
        self._ask(order, piece)

    def _give_back(self, piece: Piece) -> None:
        request = self._held.pop(piece, None)
        if request is not None:
            self._slots.give_back(request)


class ReceivingHalf:
    """The receiver's half of one group."""

    def __init__(
        self,
        slots: Slots,
        find_room: Callable[[Piece, Callable[[], None]], None],
        is_wanted: Callable[[Piece], bool],
        launch: Callable[[Piece], None],
        answer: Callable[[int, bool], None],
    ) -> None:
        """`find_room(piece, found)` calls `found` when there is memory for a piece, perhaps at
        once. `answer(order, is_launched)` tells the sender. `is_wanted` also checks the piece."""
        self._slots = slots
        self._find_room = find_room
        self._is_wanted = is_wanted
        self._launch = launch
        self._answer = answer
        self._asked: collections.deque[Piece] = collections.deque()  # not answered yet
        self._held: dict[Piece, SlotRequest] = {}
        self._launched: set[Piece] = set()
        self._next_order = 0

    @property
    def is_idle(self) -> bool:
        """Whether no piece waits or is in progress."""
        return not self._held

    @property
    def launched(self) -> set[Piece]:
        """Return the pieces whose kernels may run."""
        return self._launched

    def on_ask(self, order: int, piece: Piece) -> None:
        """Serve a piece: the sender holds all that it needs.

        Raises:
            TransportError: its order number is wrong, or it asks twice.
        """
        if order != self._next_order or piece in self._held:
            raise TransportError(f"the sender asked for number {order}, not {self._next_order}")
        self._next_order += 1
        self._held[piece] = SlotRequest(functools.partial(self._granted, order, piece))
        self._asked.append(piece)
        if len(self._asked) == 1:
            self._serve(piece)

    def received(self, piece: Piece) -> None:
        """Note that a piece's kernel has ended, or that it was refused."""
        self._launched.discard(piece)
        request = self._held.pop(piece, None)
        if request is not None:
            self._slots.give_back(request)

    def end(self) -> None:
        """Give all slots back: no kernel of this group runs any more."""
        self._asked.clear()
        self._launched.clear()
        self._slots.give_back_all(self._held.values())
        self._held.clear()

    def _serve(self, piece: Piece) -> None:
        """Find room first, then take a slot: a piece that waits for room holds nothing that others
        need."""
        self._find_room(piece, lambda: self._slots.take(self._held[piece]))

    def _granted(self, order: int, piece: Piece) -> None:
        self._asked.popleft()
        is_wanted = self._is_wanted(piece)
        if is_wanted:
            self._launched.add(piece)
            self._launch(piece)
        self._answer(order, is_wanted)
        if not is_wanted:
            self.received(piece)
        if self._asked:
            self._serve(self._asked[0])
