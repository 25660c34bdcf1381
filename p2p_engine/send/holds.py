"""Holds: GET. Sources that wait, under a lease, for a peer to pull them, and peers that wait for a
source. Serving one is a shipment of sender.py. When the caller needs its memory, what it holds is
copied into the pool and served from there. The engine's lock guards everything here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from p2p_engine.bounded import BoundedMap, Index
from p2p_engine.config import EngineConfig
from p2p_engine.control.timers import Timers
from p2p_engine.errors import P2pError, TransferCancelled, TransferError, TransferTimeout
from p2p_engine.health import Counters
from p2p_engine.memory.arena import BUFFER, POOL, LandingArena, Space
from p2p_engine.memory.jobs import Copier, Job, Moment, after
from p2p_engine.memory.layout import Int64s, Source, ask, ask_regions, pair
from p2p_engine.memory.plan import takers
from p2p_engine.peers.link import PeerAddress
from p2p_engine.receive.placement import Placement
from p2p_engine.send.sender import Sender, as_withdrawn
from p2p_engine.send.shipment import Shipment
from p2p_engine.send.unheld_wants import PendingWant, UnheldWants
from p2p_engine.transfer import Transfer, lane_of
from p2p_engine.wire.messages import CacheSpec, ContentKey, Manifest, TransferKey


@dataclass(frozen=True)
class Ending:
    """Why a key is held no more; `is_served`: all who read it have got it, or have released it."""

    reason: str
    is_served: bool


@dataclass(eq=False)
class Hold:
    """A source that waits, until its lease ends, to be wanted by all `readers`: ranks of the peer,
    which are known when the first of them has spoken."""

    content: ContentKey
    source: Source
    transfer: Transfer
    lease_ends_at: float
    lease: float  # in seconds; RENEW gives it again, until
    latest_end: float
    after: tuple[Moment, ...] = ()  # when the source is valid
    readers: frozenset[int] | None = None
    served: set[int] = field(default_factory=set)
    shipments: dict[PeerAddress, Shipment] = field(default_factory=dict)
    spaces: list[Space] = field(default_factory=list)  # where the pool has it, or will have it
    copying: Job | None = None
    wants: dict[PeerAddress, PendingWant] = field(default_factory=dict)  # that are being served
    error: P2pError | None = None  # of its end

    @property
    def is_waiting(self) -> bool:
        """Whether nothing reads the source but its caller."""
        return not self.shipments and self.copying is None

    @property
    def is_over(self) -> bool:
        """Whether nobody is left who may read it."""
        return self.readers is not None and self.readers <= self.served and not self.shipments


class Holds:
    """All that is held, and all that is wanted and not held yet."""

    def __init__(
        self,
        config: EngineConfig,
        changed: threading.Condition,
        sender: Sender,
        places: Placement,
        copier: Copier,
        counters: Counters,
        clock: Callable[[], float],
        spec: CacheSpec | None = None,
    ) -> None:
        self._config = config
        self._changed = changed
        self._sender = sender
        self._placement = places
        self._copier = copier
        self._counters = counters
        self._clock = clock
        self._spec = spec
        self._holds: dict[ContentKey, Hold] = {}
        self._of_key: Index[TransferKey, Hold] = Index()
        self._by_transfer: dict[Transfer, Hold] = {}
        self._unheld = UnheldWants()
        self._timers: Timers[Hold] = Timers()
        self._late: dict[Hold, None] = {}  # past their leases, and not over
        self._released: BoundedMap[ContentKey, tuple[frozenset[int], frozenset[int]]] = BoundedMap()
        self._gone: BoundedMap[TransferKey, Ending] = BoundedMap()
        self._renewed: BoundedMap[ContentKey, float] = (
            BoundedMap()
        )  # what is not held, and until when
        self._ending: set[Hold] = set()  # until their copies have stopped

    def hold(
        self,
        key: TransferKey,
        source: Source,
        binding: bytes,
        lease: float,
        moments: tuple[Moment, ...] = (),
    ) -> Transfer:
        """Keep a source, which is valid after all `moments`, for a WANT.

        Raises:
            TransferError: the key is held already.
        """
        content = (key, binding)
        if content in self._holds:
            raise TransferError(f"{key} is held already")
        transfer = Transfer(key, source.manifest.nbytes, self._changed, self._cancel_transfer)
        now = self._clock()
        latest_end = now + max(lease, self._config.max_renewal_seconds)
        self._holds[content] = hold = Hold(
            content, source, transfer, now + lease, lease, latest_end, moments
        )
        self._of_key.add(key, hold)
        self._by_transfer[transfer] = hold
        self._timers.set(hold, hold.lease_ends_at)
        self.take_back(key)
        for peer, want in self._unheld.take(content):
            self._serve(hold, peer, want)
        early = self._released.pop(content)
        if early is not None:
            hold.readers, served = early
            hold.served |= served
        if hold.is_over:
            self._end(hold, None, "the peer released it before it was held")
        return transfer

    def spill(self, transfer: Transfer) -> bool:
        """Start to copy what is held into the pool; the transfer is released at the copy's end.

        False: it stays where it is, because there is no room, or it is on its way already.
        """
        hold, arena = self._held_as(transfer), self._placement.arena
        if hold is None or not hold.is_waiting or hold.spaces or arena is None:
            return False
        manifest = hold.source.manifest
        if not manifest.nbytes:
            return False  # nothing, or blocks that have no pages
        whole = (manifest.first_block, manifest.num_blocks)
        regions = ask_regions(lambda: hold.source.regions(*whole), manifest.nbytes)
        most = min(max(1, self._config.chunk_bytes // manifest.block_bytes), manifest.num_blocks)
        spaces = self._reserve(manifest, most)
        if not spaces:
            return False
        starts = _starts_in(arena, spaces, manifest, most)
        hold.spaces = spaces
        try:
            spilled = ask(lambda: hold.source.packed(starts))
            hold.copying = ask(
                lambda: self._copier.copy(
                    *pair(regions, spilled.regions(*whole)),
                    lane=lane_of(transfer.key),
                    tag=lambda job: self._copied(hold, spilled, job),
                    keep=(hold.source, arena),
                    **after(hold.after),
                )
            )
        except P2pError:
            self._placement.take_back(spaces)
            raise
        return True

    def _reserve(self, manifest: Manifest, most: int) -> list[Space]:
        """Reserve room for all of it in one place, for `most` blocks at a time; none if there is
        not enough."""
        counts = range(manifest.num_blocks, 0, -most)
        sizes = [min(most, count) * manifest.block_bytes for count in counts]
        # Of these one may be on a GPU.
        return self._placement.spare(sizes, POOL) or self._placement.spare(sizes, BUFFER)

    def let_go(self, key: TransferKey, reason: str) -> None:
        """Tell whoever wants this key, now or later, that it will not be held."""
        self._gone.put(key, Ending(reason, is_served=False))
        self._unheld.refuse_key(key, reason)

    def take_back(self, key: TransferKey) -> None:
        """Say no more that a key is gone: it is held, or sent, after all."""
        self._gone.pop(key)

    def on_want(
        self,
        content: ContentKey,
        peer: PeerAddress,
        spec: CacheSpec | None,
        refuse: Callable[[str], None],
        *,
        is_pushed: bool = False,
    ) -> None:
        """Offer what is held, wait for what may be held soon unless it `is_pushed`, or `refuse`
        with a reason."""
        self._expect(content, spec)
        hold, gone = self._holds.get(content), self._gone.get(content[0])
        want = PendingWant(spec, self._clock() + self._config.transfer_timeout_seconds, refuse)
        if hold is not None:
            self._serve(hold, peer, want)
        elif gone is not None:
            refuse(gone.reason)
        elif self._of_key.count(content[0]):
            refuse("held for another content: the prompts differ")
        elif not is_pushed:  # what is pushed comes by itself
            self._unheld.put(content, peer, want)

    def on_renew(self, content: ContentKey, spec: CacheSpec | None) -> str | None:
        """Give a held source another lease; returns why its peer will not get it, if that is known.

        A peer that has got it from here goes on renewing while other ranks send theirs.
        """
        self._expect(content, spec)
        hold = self._holds.get(content)
        if hold is None:
            self._renewed.put(content, self._clock() + self._config.lease_seconds)
            gone = self._gone.get(content[0])
            return gone.reason if gone is not None and not gone.is_served else None
        lease_ends_at = min(self._clock() + hold.lease, hold.latest_end)
        hold.lease_ends_at = max(hold.lease_ends_at, lease_ends_at)
        return None

    def _expect(self, content: ContentKey, spec: CacheSpec | None) -> None:
        """A rank of the peer will ask: what it released before it was held may be held for it."""
        readers, served = self._released.pop(content) or (frozenset(), frozenset())
        served -= {_rank_of(spec)}
        if served:
            self._released.put(content, (readers, served))

    def is_renewed(self, content: ContentKey) -> bool:
        """Whether a peer has renewed, within the last lease, what is not held here yet."""
        until = self._renewed.get(content)
        return until is not None and self._clock() < until

    def on_release(self, content: ContentKey, peer: PeerAddress, spec: CacheSpec | None) -> None:
        """The peer wants nothing more of a held key."""
        self._unheld.discard(content, peer)
        self._renewed.pop(content)
        hold = self._holds.get(content)
        if hold is not None:
            hold.readers = self._readers(content, spec)
            hold.wants.pop(peer, None)
            self._served(hold, spec, "the peer released it")
        else:  # it may be held yet: nothing is, between a preemption and the second computation
            _, served = self._released.get(content) or (None, frozenset())
            self._released.put(content, (self._readers(content, spec), served | {_rank_of(spec)}))

    def tick(self, now: float) -> None:
        """End what is overdue."""
        try:
            self._timers.look(now, lambda hold: self._tick_hold(hold, now))
        finally:
            self._unheld.tick(now)

    def _tick_hold(self, hold: Hold, now: float) -> None:
        if hold.shipments:
            return  # it is looked at again soon, until nobody is pulling it
        if now < hold.lease_ends_at:
            self._timers.set(hold, hold.lease_ends_at)
        else:
            self._late[hold] = None
            self._counters.expired += 1
            error = TransferTimeout(f"nobody wanted {hold.content[0]} during its lease")
            self._end(hold, error, "its lease has ended")

    def overdue(self, now: float) -> list[str]:
        """Name what is held past its lease, though nobody is pulling it, and cannot be let go."""
        late = [hold for hold in self._late if now >= hold.lease_ends_at and not hold.shipments]
        return [f"hold {item.content[0]}" for item in (*late, *self._ending)]

    def close(self, error: P2pError) -> None:
        """End everything; the mover is stopped and the sender closed."""
        for hold in list(self._holds.values()):
            self._end(hold, error, "the engine was closed")
        while self._ending:
            self._finish(self._ending.pop())

    def num_open(self) -> int:
        """How many sources are held."""
        return len(self._holds)

    def _copied(self, hold: Hold, spilled: Source, job: Job) -> None:
        hold.copying = None
        if hold in self._ending:
            self._ending.discard(hold)
            self._finish(hold)
            return
        if job.state == "done":
            hold.source = spilled
            self._counters.spilled_bytes += hold.source.manifest.nbytes
            hold.transfer.release()
        else:
            self._placement.take_back(hold.spaces)
        for peer, want in list(hold.wants.items()):
            self._serve(hold, peer, want)

    def _serve(self, hold: Hold, peer: PeerAddress, want: PendingWant) -> None:
        hold.readers = self._readers(hold.content, want.spec)
        hold.wants.setdefault(peer, want)
        hold.served.discard(_rank_of(want.spec))  # it has released it before, or got it
        if hold.copying is None and peer not in hold.shipments:
            key, binding = hold.content
            shipment = self._sender.send(
                key,
                peer,
                hold.source,
                binding,
                self._config.transfer_timeout_seconds,
                ready=True,
                on_end=lambda shipment: self._pulled(hold, peer, want.spec, shipment),
                is_held=True,
                moments=hold.after,
            )
            if not shipment.transfer.done:
                hold.shipments[peer] = shipment

    def _pulled(
        self, hold: Hold, peer: PeerAddress, spec: CacheSpec | None, shipment: Shipment
    ) -> None:
        hold.shipments.pop(peer, None)  # after a failure it may be wanted again during its lease
        hold.wants.pop(peer, None)
        if not hold.shipments and self._holds.get(hold.content) is hold:
            self._timers.set(hold, hold.lease_ends_at)
        if shipment.transfer.error is None:
            self._served(hold, spec, "it was pulled already")
        elif hold.is_over:
            self._end(hold, None, "the peer released it")  # while it was on its way

    def _served(self, hold: Hold, spec: CacheSpec | None, reason: str) -> None:
        """A rank of the peer wants nothing more of it."""
        hold.served.add(_rank_of(spec))
        if hold.is_over:
            self._end(hold, None, reason)

    def _readers(self, content: ContentKey, spec: CacheSpec | None) -> frozenset[int]:
        """The ranks of a peer's instance that pull from here."""
        if self._spec is None or spec is None or not spec.has_ranks:
            return frozenset({_rank_of(spec)})
        return frozenset(takers(self._spec, content[0], spec))

    def _end(self, hold: Hold, error: P2pError | None, reason: str) -> None:
        """Forget it, and tell so whoever still asks for it."""
        self._gone.put(hold.content[0], Ending(reason, is_served=error is None))
        self._stop(hold, error, reason)

    def _stop(self, hold: Hold, error: P2pError | None, reason: str) -> None:
        """Its transfer ends as soon as nothing reads its source or writes its space."""
        del self._holds[hold.content], self._by_transfer[hold.transfer]
        self._of_key.discard(hold.content[0], hold)
        self._timers.cancel(hold)
        self._late.pop(hold, None)
        hold.error = error
        if hold.copying is not None:
            self._ending.add(hold)
            hold.copying.cancel()
        elif hold.shipments:
            for peer, shipment in list(hold.shipments.items()):
                shipment.on_end = lambda _, peer=peer: self._stopped(hold, peer)
                self._sender.stop(shipment, error or TransferCancelled(reason))
        else:
            self._finish(hold)

    def _stopped(self, hold: Hold, peer: PeerAddress) -> None:
        hold.shipments.pop(peer, None)
        if not hold.shipments:
            self._finish(hold)

    def _finish(self, hold: Hold) -> None:
        self._placement.take_back(hold.spaces)
        hold.transfer.end(hold.error)

    def _held_as(self, transfer: Transfer) -> Hold | None:
        return self._by_transfer.get(transfer)

    def _cancel_transfer(self, transfer: Transfer, reason: str) -> None:
        with self._changed:
            hold = self._held_as(transfer)
            if hold is not None:
                # Withdrawn is not gone: after a preemption it is held again, unless it is let go.
                for peer, want in hold.wants.items():
                    self._unheld.put(hold.content, peer, want)
                error = as_withdrawn(transfer, reason)
                self._stop(hold, error, str(error))


def _starts_in(arena: LandingArena, spaces: list[Space], manifest: Manifest, most: int) -> Int64s:
    """Where each block begins, when each space but the last has `most` of them."""
    firsts = np.array([arena.address(space) for space in spaces], np.int64)
    inside = np.arange(most, dtype=np.int64) * manifest.block_bytes
    starts: Int64s = (firsts[:, None] + inside).ravel()[: manifest.num_blocks]
    return starts


def _rank_of(spec: CacheSpec | None) -> int:
    return 0 if spec is None else spec.rank
