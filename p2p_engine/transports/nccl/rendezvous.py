"""Rendezvous before launch: why no order of sends and receives can deadlock. No I/O, no NCCL.

A send or receive of NCCL is a kernel that occupies its device until the other side's kernel runs.
So no kernel is launched before both sides hold all that they need. They agree on bursts: up to
MAX_PIECES pieces of one transfer, each of which fits into one slab, and has a kernel on each side.

    sender                                   receiver
    its source is computed, takes a send
    slot, to which slabs belong
      ASK order, seq, offset, nbytes ─────►  checks the order, finds room for the bytes
                                             takes a receive slot
      ◄───────────────────────── GO order    (or REFUSE: it is not wanted any more)
    checks the order, packs, and launches    launches its kernels
    its kernels

After GO, a kernel waits only for a side that holds its slot and its memory, and needs nothing more
but its own device's time. A sender that waits for GO holds a send slot, which no receiver needs.

NCCL runs the kernels of one communicator one after the other, so all bursts of a group share one
slot, and slots bound the number of kernels that occupy a device. While others wait for a slot, the
bursts of a group wait behind them.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from p2p_engine.errors import TransportError

MAX_ASKED = 4  # bursts of one group in progress: their round trips hide behind each other
MAX_PIECES = 4  # of a burst


class Slots:
    """A bounded number of slots, given out first come, first served. Requests of one owner share a
    slot."""

    def __init__(self, count: int) -> None:
        self._free = list(reversed(range(count)))
        self._owned: dict[object, tuple[int, int]] = {}  # slot and requests, by owner
        self._waiting: collections.deque[SlotRequest] = collections.deque()

    @property
    def num_free(self) -> int:
        """Return how many slots are free."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Return how many slots are held."""
        return len(self._owned)

    def take(self, request: SlotRequest) -> None:
        """Call `request.granted` when a slot is free or the owner has one, perhaps at once. It is
        held until given back."""
        self._waiting.append(request)
        self._serve()

    def give_back(self, request: SlotRequest) -> None:
        """Free a slot, or stop waiting for one; idempotent."""
        if request.is_over:
            return
        request.is_over = True
        if request.is_granted:
            slot, count = self._owned.pop(request.owner)
            if count > 1:
                self._owned[request.owner] = slot, count - 1
            else:
                self._free.append(slot)
        self._serve()

    def give_back_all(self, requests: Iterable[SlotRequest]) -> None:
        """Free many slots; waiting requests go first, so that none of them gets a slot freed
        here."""
        for request in sorted(requests, key=lambda request: request.is_granted):
            self.give_back(request)

    def _serve(self) -> None:
        while self._waiting:
            request = self._waiting[0]
            if not request.is_over:
                slot, count = self._owned.get(request.owner, (-1, 0))
                if not count and not self._free:
                    return
                request.slot = slot if count else self._free.pop()
                self._owned[request.owner] = request.slot, count + 1
            self._waiting.popleft()
            if not request.is_over:
                request.is_granted = True
                request.granted()


@dataclass(eq=False)
class SlotRequest:
    """A slot that is held, or a wait for one. All requests of one `owner` share a slot."""

    granted: Callable[[], None]
    owner: object = None
    slot: int = -1
    is_granted: bool = False
    is_over: bool = False

    def __post_init__(self) -> None:
        """A request without an owner is its own."""
        self.owner = self.owner if self.owner is not None else self


@dataclass(frozen=True)
class Burst:
    """Bytes that both sides agree to move: part of transfer `seq`, at `offset` bytes in it."""

    seq: int
    offset: int
    nbytes: int

    def pieces(self, piece_bytes: int) -> Iterator[tuple[int, int]]:
        """Cut it, alike on both sides: (offset in the burst, bytes) of each piece."""
        for offset in range(0, self.nbytes, piece_bytes):
            yield offset, min(piece_bytes, self.nbytes - offset)


class SendingHalf:
    """The sender's half of one group."""

    def __init__(
        self,
        slots: Slots,
        ask: Callable[[int, Burst], None],
        launch: Callable[[Burst, int], None],
        refused: Callable[[Burst], None],
    ) -> None:
        """`ask(order, burst)` tells the receiver; `launch(burst, slot)` starts its kernels."""
        self._slots = slots
        self._ask = ask
        self._launch = launch
        self._refused = refused
        self._queue: collections.deque[Burst] = collections.deque()
        self._asked: dict[int, Burst] = {}  # by order number, ascending
        self._launched: set[Burst] = set()
        self._held: dict[Burst, SlotRequest] = {}
        self._next_order = 0

    @property
    def is_idle(self) -> bool:
        """Whether no burst waits or is in progress."""
        return not self._queue and not self._held

    def add(self, burst: Burst) -> None:
        """Send a burst whose source is computed."""
        self._queue.append(burst)
        self._advance()

    def on_go(self, order: int) -> None:
        """Launch: the receiver holds all that it needs.

        Raises:
            TransportError: it is not this burst's turn, so the two sides disagree.
        """
        expected = next(iter(self._asked), None)
        if order != expected:
            raise TransportError(f"the receiver said GO to number {order}, not {expected}")
        burst = self._asked.pop(order)
        self._launched.add(burst)
        self._launch(burst, self._held[burst].slot)

    def on_refuse(self, order: int) -> None:
        """Drop a burst that the receiver does not want any more.

        Raises:
            TransportError: the receiver was not asked for it.
        """
        burst = self._asked.pop(order, None)
        if burst is None:
            raise TransportError(f"the receiver refused number {order}, which it was not asked")
        self._give_back(burst)
        self._refused(burst)
        self._advance()

    def drop(self, burst: Burst) -> bool:
        """Forget a burst that was not asked for yet; returns whether that was so."""
        if burst in self._queue:
            self._queue.remove(burst)
            return True
        request = self._held.get(burst)
        if request is None or request.is_granted:
            return False
        self._give_back(burst)
        self._advance()
        return True

    def sent(self, burst: Burst) -> None:
        """Note that a burst's kernels have ended, also of a half that has ended before."""
        self._launched.discard(burst)
        self._give_back(burst)
        self._advance()

    def end(self) -> None:
        """Start no more. Slots whose kernels may run are held until those have ended."""
        self._queue.clear()
        self._asked.clear()
        _give_back_unused(self._slots, self._held, self._launched)

    def _advance(self) -> None:
        while self._queue and len(self._held) < MAX_ASKED:
            burst = self._queue.popleft()
            self._held[burst] = request = SlotRequest(functools.partial(self._granted, burst), self)
            self._slots.take(request)

    def _granted(self, burst: Burst) -> None:
        order, self._next_order = self._next_order, self._next_order + 1
        self._asked[order] = burst
        self._ask(order, burst)

    def _give_back(self, burst: Burst) -> None:
        request = self._held.pop(burst, None)
        if request is not None:
            self._slots.give_back(request)


class ReceivingHalf:
    """The receiver's half of one group."""

    def __init__(
        self,
        slots: Slots,
        find_room: Callable[[Burst, Callable[[], None]], None],
        is_wanted: Callable[[Burst], bool],
        launch: Callable[[Burst, int], None],
        answer: Callable[[int, bool], None],
    ) -> None:
        """`find_room(burst, found)` calls `found` when there is memory for a burst, perhaps at
        once. `answer(order, is_wanted)` tells the sender. `is_wanted` also checks the burst.
        `launch(burst, slot)` starts its kernels."""
        self._slots = slots
        self._find_room = find_room
        self._is_wanted = is_wanted
        self._launch = launch
        self._answer = answer
        self._asked: collections.deque[Burst] = collections.deque()  # not answered yet
        self._held: dict[Burst, SlotRequest] = {}
        self._launched: set[Burst] = set()
        self._next_order = 0

    @property
    def is_idle(self) -> bool:
        """Whether no burst waits or is in progress."""
        return not self._held

    def on_ask(self, order: int, burst: Burst) -> None:
        """Serve a burst: the sender holds all that it needs.

        Raises:
            TransportError: its order number is wrong, or it asks twice, or for too much.
        """
        if order != self._next_order or burst in self._held:
            raise TransportError(f"the sender asked for number {order}, not {self._next_order}")
        if len(self._held) >= 3 * MAX_ASKED:  # it may see the end of its kernels before we see ours
            raise TransportError(f"the sender asked for more than {len(self._held)} bursts at once")
        self._next_order += 1
        self._held[burst] = SlotRequest(functools.partial(self._granted, order, burst), self)
        self._asked.append(burst)
        if len(self._asked) == 1:
            self._serve(burst)

    def received(self, burst: Burst) -> None:
        """Note that a burst's kernels have ended, or that it was refused; also of a half that has
        ended before."""
        self._launched.discard(burst)
        request = self._held.pop(burst, None)
        if request is not None:
            self._slots.give_back(request)

    def end(self) -> None:
        """Start no more. Slots whose kernels may run are held until those have ended."""
        self._asked.clear()
        _give_back_unused(self._slots, self._held, self._launched)

    def _serve(self, burst: Burst) -> None:
        """Find room first, then take a slot: a burst that waits for room holds nothing that others
        need."""
        self._find_room(burst, lambda: self._slots.take(self._held[burst]))

    def _granted(self, order: int, burst: Burst) -> None:
        self._asked.popleft()
        slot = self._held[burst].slot
        is_wanted = self._is_wanted(burst)  # if not, this half may have ended
        self._answer(order, is_wanted)
        if is_wanted:
            self._launched.add(burst)
            self._launch(burst, slot)
        else:
            self.received(burst)
        if self._asked:
            self._serve(self._asked[0])


def _give_back_unused(slots: Slots, held: dict[Burst, SlotRequest], launched: set[Burst]) -> None:
    unused = [held.pop(burst) for burst in list(held) if burst not in launched]
    slots.give_back_all(unused)
