"""A state of the model: what P and D remember, and what is on its way between them.

P is one rank that sends. D is an instance of one or two ranks that receive. A message is a tuple of
kind, source epoch, destination epoch, the sender's lowest open number, and fields. Each way has a
queue in order; what a fault takes out of its order is a stray, which may come at any time or never.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

from tests.property.core_model.table import TABLES, NoSuchRow, Table, TableRow

State: TypeAlias = tuple[Any, ...]
ChunkName: TypeAlias = tuple[int, int]
NO_REGION = -1  # of a chunk that D does not lack
CLOSED = ("taken", "over")
OPEN_ASKS = ("wanted", "loading", "here")


@dataclasses.dataclass(frozen=True)
class Scope:
    """What a run plays, and how much may go wrong on one path."""

    name: str
    pushes: tuple[bool, ...] = (True,)  # by try: pushed, or held until it is asked for
    try_contents: tuple[int, ...] = (0,)
    ask_contents: tuple[int, ...] = (0,)
    is_ticketed: bool = False  # D's request brings P's number
    num_ranks: int = 1
    num_blocks: int = 2
    num_regions: int = 1
    aborts: int = 0
    give_ups: int = 0
    faults: tuple[str, ...] = ()
    num_faults: int = 0
    is_checked: bool = False  # D believes DONE only: it brings a checksum
    may_fail: bool = True  # no: what goes wrong in this setting costs no ask
    tables: dict[str, Table] = dataclasses.field(default_factory=lambda: TABLES, hash=False)
    without: frozenset[str] = frozenset()  # rules that a mutation drops

    def row(self, kind: str, state: str, event: str) -> TableRow:
        """Look a row up.

        Raises:
            NoSuchRow: the state does not have this event.
        """
        found = self.tables[kind].get((state, event))
        if found is None:
            raise NoSuchRow(f"{kind} in state {state} met {event}")
        return found


@dataclasses.dataclass(eq=False)
class Try:
    """One of P's tries to have a content leave."""

    state: str = "unborn"
    ask: int = 0  # that it serves
    taken: int = 0  # by these ranks, as bits


@dataclasses.dataclass(eq=False)
class ShipmentModel:
    """One of P's, to one rank. Its chunks are [state, block, region]."""

    of: int
    rank: int
    ask: int
    epoch: int  # of the engine that it goes to
    status: str
    chunks: list[list[Any]]

    @property
    def lowest(self) -> int:
        """Its lowest open chunk."""
        numbers = (i for i, chunk in enumerate(self.chunks) if chunk[0] not in CLOSED)
        return next(numbers, len(self.chunks))


@dataclasses.dataclass(eq=False)
class ArrivingChunk:
    """A chunk that comes in: one row of D's."""

    state: str
    region: int
    block: int
    has_died: bool = False  # the process that wrote it


@dataclasses.dataclass(eq=False)
class ReceivingRank:
    """What one rank of D remembers."""

    epoch: int
    sender_epoch: int  # that it knows
    asks: list[list[Any]]  # by number: state, blocks in place
    bound: dict[int, int]  # by shipment: its ask; 0: provisional; -1: stopped
    rows: dict[ChunkName, ArrivingChunk]
    words: list[Any]  # by region: which chunk filled it; or ("lost", chunk)
    lowest: int  # shipment that may be open
    lowest_chunks: dict[int, int]


class CoreState:
    """A state that moves change. `frozen` names it."""

    def __init__(self, setting: Scope) -> None:
        self.setting = setting
        num_asks = len(setting.ask_contents) + 1  # numbers begin with 1
        ranks = range(setting.num_ranks)
        self.epoch = 1
        self.tries = [Try() for _ in setting.try_contents]
        self.ships: dict[int, ShipmentModel] = {}
        self.made: list[int] = []  # the try of each shipment, by number less one
        self.heard = [["none"] * num_asks for _ in ranks]
        self.heard_lowest = [1 for _ in ranks]
        self.known_epochs = [1 for _ in ranks]
        self.ranks = [
            ReceivingRank(1, 1, [["unborn", 0] for _ in range(num_asks)], {}, {},
                 [None] * setting.num_regions, 1, {})
            for _ in ranks
        ]  # fmt: skip
        self.queues: list[list[State]] = [[] for _ in range(2 * setting.num_ranks)]
        self.strays: list[tuple[int, State]] = []
        self.aborted = 0  # asks that D's scheduler gave up, as bits
        self.left = [setting.aborts, setting.give_ups, setting.num_faults]
        self.num_sent = 0  # not part of the state

    def send(self, to_receiver: bool, rank: int, kind: str, *fields: Any) -> None:
        """Put a message on its way."""
        self.num_sent += 1
        if to_receiver:
            epochs = (self.epoch, self.known_epochs[rank])
            lowest = self.lowest_shipment(rank)
        else:
            here = self.ranks[rank]
            epochs, lowest = (here.epoch, here.sender_epoch), self.lowest_ask(rank)
        self.queues[2 * rank + to_receiver].append((kind, *epochs, lowest, *fields))

    def lowest_shipment(self, rank: int) -> int:
        """P's lowest open shipment to a rank."""
        return min((m for m, ship in self.ships.items() if ship.rank == rank),
                   default=len(self.made) + 1)  # fmt: skip

    def lowest_ask(self, rank: int) -> int:
        """A rank's lowest open ask."""
        asks = self.ranks[rank].asks
        for number in range(1, len(asks)):
            if asks[number][0] in ("unborn", *OPEN_ASKS):
                return number
        return len(asks)

    def frozen(self) -> State:
        """Name the state; ranks that change places make the same state."""
        orders = [(0,)] if len(self.ranks) == 1 else [(0, 1), (1, 0)]
        names = [self._frozen(order) for order in orders]
        return names[0] if len(names) == 1 else min(names, key=repr)

    def _frozen(self, order: tuple[int, ...]) -> State:
        place = {rank: index for index, rank in enumerate(order)}
        tries = tuple((t.state, t.ask, _permuted(t.taken, place)) for t in self.tries)
        ships = tuple(
            (m, s.of, place[s.rank], s.ask, s.epoch, s.status, tuple(map(tuple, s.chunks)))
            for m, s in self.ships.items()
        )
        ranks = tuple(_named(self.ranks[rank]) for rank in order)
        queues = tuple((*self.queues[2 * r], "|", *self.queues[2 * r + 1]) for r in order)
        heard = tuple(
            (tuple(self.heard[r]), self.heard_lowest[r], self.known_epochs[r]) for r in order
        )
        strays = tuple(sorted((2 * place[way // 2] + way % 2, text) for way, text in self.strays))
        return (
            self.epoch, tries, ships, tuple(self.made),
            heard, ranks, queues, strays, self.aborted, tuple(self.left),
        )  # fmt: skip

    def copy(self) -> CoreState:
        """Copy the state."""
        other = CoreState.__new__(CoreState)
        other.__dict__.update(self.__dict__)
        other.tries = [Try(t.state, t.ask, t.taken) for t in self.tries]
        other.ships = {
            m: ShipmentModel(s.of, s.rank, s.ask, s.epoch, s.status, [c[:] for c in s.chunks])
            for m, s in self.ships.items()
        }
        other.made = self.made[:]
        other.heard = [row[:] for row in self.heard]
        other.heard_lowest, other.known_epochs = self.heard_lowest[:], self.known_epochs[:]
        other.ranks = [_copied(rank) for rank in self.ranks]
        other.queues = [queue[:] for queue in self.queues]
        other.strays, other.left = self.strays[:], self.left[:]
        return other


def _copied(rank: ReceivingRank) -> ReceivingRank:
    rows = {
        name: ArrivingChunk(row.state, row.region, row.block, row.has_died)
        for name, row in rank.rows.items()
    }
    return ReceivingRank(
        rank.epoch, rank.sender_epoch, [ask[:] for ask in rank.asks], dict(rank.bound), rows,
        rank.words[:], rank.lowest, dict(rank.lowest_chunks),
    )  # fmt: skip


def _named(rank: ReceivingRank) -> State:
    rows = tuple(
        (*name, row.state, row.region, row.block, row.has_died)
        for name, row in sorted(rank.rows.items())
    )
    return (
        rank.epoch, rank.sender_epoch, tuple(map(tuple, rank.asks)),
        tuple(sorted(rank.bound.items())), rows, tuple(rank.words), rank.lowest,
        tuple(sorted(rank.lowest_chunks.items())),
    )  # fmt: skip


def _permuted(bits: int, place: dict[int, int]) -> int:
    return sum(1 << place[rank] for rank in place if bits >> rank & 1)
