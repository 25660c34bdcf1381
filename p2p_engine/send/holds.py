"""Holds: sources that wait, under a lease, for a peer to pull them (GET), and peers that wait for a
source. sender.py serves a pull as a shipment. If the caller needs its memory, the source is copied
into the pool and served from there. The engine's lock guards everything here."""

from __future__ import annotations

import math
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
from p2p_engine.memory.ready_layers import ReadyLayers
from p2p_engine.peers.link import PeerAddress
from p2p_engine.receive.placement import Placement
from p2p_engine.send.endings import Ending, Endings
from p2p_engine.send.sender import Sender, as_withdrawn
from p2p_engine.send.shipment import Shipment
from p2p_engine.send.unheld_wants import PendingWant, UnheldWants
from p2p_engine.transfer import Transfer, lane_of, note_stage
from p2p_engine.wire.messages import CacheSpec, ContentKey, Manifest, TransferKey

UNNAMED_ROUNDS = 16  # in a lease, at most
UNNAMED_LEASES = 5  # RENEW without names keeps a hold for so many leases, counted from its start


@dataclass(eq=False)
class Hold:
    """A source that waits, until its lease ends, for a WANT from each of its `readers`. These are
    ranks of the peer; they are known when the first of them has sent a message."""

    content: ContentKey
    source: Source
    transfer: Transfer
    held_at: float
    lease_ends_at: float
    lease: float  # in seconds; each RENEW gives it again, up to
    latest_end: float
    after: tuple[Moment, ...] = ()  # moments after which the source is valid
    generation: int = 0  # of the attempt to send its key
    readers: frozenset[int] | None = None
    served: dict[int, PeerAddress] = field(default_factory=dict)  # by rank
    pulled: set[PeerAddress] = field(default_factory=set)
    shipments: dict[PeerAddress, Shipment] = field(default_factory=dict)
    spaces: list[Space] = field(default_factory=list)  # its copy's place in the pool or the buffer
    copying: Job | None = None
    wants: dict[PeerAddress, PendingWant] = field(default_factory=dict)  # being served
    error: P2pError | None = None  # with which it ends

    @property
    def is_waiting(self) -> bool:
        """Whether only the caller may be using the source: no shipment and no copy reads it."""
        return not self.shipments and self.copying is None

    @property
    def is_over(self) -> bool:
        """Whether all readers are served and no shipment reads it."""
        is_served = self.readers is not None and self.readers <= self.served.keys()
        return is_served and not self.shipments


class Holds:
    """The held sources, and the WANTs for content that is not held yet."""

    def __init__(
        self,
        config: EngineConfig,
        changed: threading.Condition,
        sender: Sender,
        endings: Endings,
        places: Placement,
        copier: Copier,
        counters: Counters,
        clock: Callable[[], float],
        spec: CacheSpec | None = None,
    ) -> None:
        self._config = config
        self._changed = changed
        self._sender = sender
        self._endings = endings
        self._placement = places
        self._copier = copier
        self._counters = counters
        self._clock = clock
        self._spec = spec
        self._holds: dict[ContentKey, Hold] = {}
        self._of_key: Index[TransferKey, Hold] = Index()
        self._by_transfer: dict[Transfer, Hold] = {}
        self._unheld = UnheldWants()
        self._all_renewed_at = -math.inf
        self._timers: Timers[Hold] = Timers()
        self._late: dict[Hold, None] = {}  # past their leases, but not ended
        self._renewed: BoundedMap[ContentKey, float] = BoundedMap()  # not held; renewed until
        self._ending: set[Hold] = set()  # until their copies have stopped

    def hold(
        self,
        key: TransferKey,
        source: Source,
        binding: bytes,
        lease: float,
        moments: tuple[Moment, ...] = (),
        generation: int = 0,
    ) -> Transfer:
        """Hold a source, which is valid after all `moments`, for a WANT; never blocks.

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
            content, source, transfer, now, now + lease, lease, latest_end, moments, generation
        )
        self._of_key.add(key, hold)
        self._by_transfer[transfer] = hold
        self._timers.set(hold, hold.lease_ends_at)
        departed = self._endings.begin(content)
        self._renewed.pop(content)
        for peer, want in self._unheld.take(content):
            self._serve(hold, peer, want)
        if departed is not None:
            hold.readers = departed.readers
            hold.served |= departed.ranks
        if hold.is_over:
            self._end(hold, None, "the peer released it before it was held")
        return transfer

    def spill(self, transfer: Transfer) -> bool:
        """Start to copy a held source into the pool; when the copy ends, the transfer is released.

        Returns False if the source stays where it is: there is no room, or it is being pulled or
        copied already. Never blocks.

        Raises:
            P2pError: the source failed, or the copy was refused.
        """
        hold, arena = self._held_as(transfer), self._placement.arena
        if hold is None or not hold.is_waiting or hold.spaces or arena is None:
            return False
        manifest = hold.source.manifest
        if not manifest.nbytes:
            return False  # there are no bytes
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
        """Reserve room for the whole manifest in one place, for at most `most` blocks per space; []
        if there is not enough."""
        counts = range(manifest.num_blocks, 0, -most)
        sizes = [min(most, count) * manifest.block_bytes for count in counts]
        # One of the two may be on a GPU.
        return self._placement.spare(sizes, POOL) or self._placement.spare(sizes, BUFFER)

    def let_go(self, key: TransferKey, reason: str, generation: int = 0) -> None:
        """Refuse this key to every peer that wants it, now or later, in this attempt: it will not
        be held."""
        ending = self._endings.end(key, reason, generation=generation)
        if ending.reason:
            self._unheld.refuse_key(key, ending)

    def on_want(
        self,
        content: ContentKey,
        peer: PeerAddress,
        spec: CacheSpec | None,
        refuse: Callable[[Ending], None],
        *,
        pushed_to: int | None = None,
    ) -> None:
        """Offer the content if it is held, or on its way to the engine of the epoch `pushed_to`. If
        it may be held soon, remember the WANT; a push needs none. If it will not come from here,
        call `refuse` with the reason. What the rank has released already refuses it nothing."""
        note_stage(content[0], "WANT heard")
        hold = self._holds.get(content)
        ending = self._endings.expect(content, _rank_of(spec), peer)
        want = PendingWant(spec, self._clock() + self._config.transfer_timeout_seconds, refuse)
        if hold is not None:
            self._endings.meet(content[0], peer)
            self._serve(hold, peer, want)
        elif ending is not None:
            self._renewed.pop(content)
            refuse(ending)
        elif pushed_to is not None and self._sender.offer_now(pushed_to, content):
            return
        elif any(_rank_of(spec) not in item.served for item in self._of_key.get(content[0])):
            refuse(Ending("held for another content: the prompts differ"))
        elif pushed_to is None:
            self._unheld.put(content, peer, want)

    def on_renew(
        self, content: ContentKey, peer: PeerAddress, spec: CacheSpec | None
    ) -> Ending | None:
        """Give a held source another lease; returns why its peer will not get it, if that is known.

        A peer that has got its part from here still renews while other ranks send theirs.
        """
        hold = self._holds.get(content)
        if hold is None:
            self._renewed.put(content, self._clock() + self._config.lease_seconds)
            if self._endings.is_served(content[0]):
                return None
            return self._endings.expect(content, _rank_of(spec), peer, renews=True)
        self._renew(hold, hold.latest_end)
        return None

    def on_renew_all(self) -> None:
        """Give every held source another lease, up to UNNAMED_LEASES: a peer may want any of them,
        and cannot say yet which. A call soon after another one does nothing: a peer cannot make
        this cost more than a few looks at each hold in a lease."""
        now = self._clock()
        if now < self._all_renewed_at + self._config.lease_seconds / UNNAMED_ROUNDS:
            return
        self._all_renewed_at = now
        for hold in self._holds.values():
            self._renew(hold, hold.held_at + UNNAMED_LEASES * hold.lease)

    def _renew(self, hold: Hold, latest_end: float) -> None:
        lease_ends_at = min(self._clock() + hold.lease, latest_end)
        hold.lease_ends_at = max(hold.lease_ends_at, lease_ends_at)

    def is_renewed(self, content: ContentKey) -> bool:
        """Whether a peer has renewed, within the last lease, a content that is not held here
        yet."""
        until = self._renewed.get(content)
        return until is not None and self._clock() < until

    def on_release(self, content: ContentKey, peer: PeerAddress, spec: CacheSpec | None) -> None:
        """Note that a rank of the peer wants no more of a key."""
        self._unheld.discard(content, peer)
        is_renewed = self._renewed.pop(content) is not None
        hold, readers = self._holds.get(content), self._readers(content, spec)
        if hold is not None:
            hold.readers = readers
            hold.wants.pop(peer, None)
            hold.pulled.discard(peer)
            self._served(hold, peer, spec, "the peer released it")
            return
        if is_renewed and self._endings.is_served(content[0]):
            self._endings.begin(content)  # this ends its next attempt
        # It may be held later: after a preemption, it is computed again.
        self._endings.depart(content, _rank_of(spec), peer, readers)

    def tick(self, now: float) -> None:
        """End the holds and WANTs that are overdue."""
        try:
            self._timers.look(now, lambda hold: self._tick_hold(hold, now))
        finally:
            self._unheld.tick(now)

    def due_at(self, now: float) -> float:
        """Return when the next tick has something to do."""
        return min(self._timers.due_at(), self._unheld.due_at())

    def _tick_hold(self, hold: Hold, now: float) -> None:
        if hold.shipments:
            return  # it is due again soon, until no shipment reads it
        if now < hold.lease_ends_at:
            self._timers.set(hold, hold.lease_ends_at)
        else:
            self._late[hold] = None
            self._counters.expired += 1
            error = TransferTimeout(f"nobody wanted {hold.content[0]} during its lease")
            self._end(hold, error, "its lease has ended")

    def overdue(self, now: float) -> list[str]:
        """Return the names of holds past their lease that no shipment reads, and that cannot be
        freed."""
        late = [hold for hold in self._late if now >= hold.lease_ends_at and not hold.shipments]
        return [f"hold {item.content[0]}" for item in (*late, *self._ending)]

    def close(self, error: P2pError) -> None:
        """End everything. The mover must have stopped, and the sender must be closed."""
        for hold in list(self._holds.values()):
            self._end(hold, error, "the engine was closed")
        while self._ending:
            self._finish(self._ending.pop())

    def num_open(self) -> int:
        """Return how many sources are held."""
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
        hold.served.pop(_rank_of(want.spec), None)  # a repeated WANT after RELEASE or a pull
        if hold.copying is None and peer not in hold.shipments:
            key, binding = hold.content
            shipment = self._sender.send(
                key,
                peer,
                hold.source,
                binding,
                self._config.transfer_timeout_seconds,
                ready_layers=ReadyLayers.whole(hold.after),
                on_end=lambda shipment: self._pulled(hold, peer, want.spec, shipment),
                is_held=True,
                generation=hold.generation,
            )
            if not shipment.transfer.done:
                hold.shipments[peer] = shipment

    def _pulled(
        self, hold: Hold, peer: PeerAddress, spec: CacheSpec | None, shipment: Shipment
    ) -> None:
        hold.shipments.pop(peer, None)  # after a failure, its peer may ask again
        want, error = hold.wants.pop(peer, None), shipment.transfer.error
        if want is not None and shipment.is_given_up:
            want.refuse(Ending(str(error), generation=hold.generation))
        if not hold.shipments and self._holds.get(hold.content) is hold:
            self._timers.set(hold, hold.lease_ends_at)
        if error is None:
            hold.pulled.add(peer)
            self._served(hold, peer, spec, "it was pulled already")
        elif hold.is_over:
            self._end(hold, None, "the peer released it")  # while a shipment was open

    def _served(self, hold: Hold, peer: PeerAddress, spec: CacheSpec | None, reason: str) -> None:
        """Note that a rank of the peer wants no more of a hold."""
        hold.served[_rank_of(spec)] = peer
        if hold.is_over:
            self._end(hold, None, reason)

    def _readers(self, content: ContentKey, spec: CacheSpec | None) -> frozenset[int]:
        """Return the ranks of a peer's instance that pull from here."""
        if self._spec is None or spec is None or not spec.has_ranks:
            return frozenset({_rank_of(spec)})
        return frozenset(takers(self._spec, content[0], spec))

    def _end(self, hold: Hold, error: P2pError | None, reason: str) -> None:
        """Forget a hold, and refuse later WANTs and RENEWs of its key."""
        self._endings.end(
            hold.content[0], reason, is_served=error is None, generation=hold.generation
        )
        self._depart(hold)
        self._stop(hold, error, reason)

    def _depart(self, hold: Hold) -> None:
        """Note which ranks of the peer will not ask for a hold again."""
        for rank, peer in hold.served.items():
            self._endings.depart(
                hold.content, rank, peer, hold.readers or frozenset(),
                has_pulled=peer in hold.pulled,
            )  # fmt: skip

    def _stop(self, hold: Hold, error: P2pError | None, reason: str) -> None:
        """End the transfer as soon as nothing reads its source or writes its spaces."""
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
                # A withdrawn key is not gone: after a preemption it is held again, unless `let_go`
                # is called.
                for peer, want in hold.wants.items():
                    self._unheld.put(hold.content, peer, want)
                self._depart(hold)
                error = as_withdrawn(transfer, reason)
                self._stop(hold, error, str(error))


def _starts_in(arena: LandingArena, spaces: list[Space], manifest: Manifest, most: int) -> Int64s:
    """Return where each block begins, if each space but the last has `most` blocks."""
    firsts = np.array([arena.address(space) for space in spaces], np.int64)
    inside = np.arange(most, dtype=np.int64) * manifest.block_bytes
    starts: Int64s = (firsts[:, None] + inside).ravel()[: manifest.num_blocks]
    return starts


def _rank_of(spec: CacheSpec | None) -> int:
    return 0 if spec is None else spec.rank
