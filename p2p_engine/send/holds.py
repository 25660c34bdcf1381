"""Holds: sources that wait, under a lease, for a peer to pull them (GET), and peers that wait for a
source. sender.py serves a pull as a shipment. If the caller needs its memory, the source is copied
into the pool and served from there. The engine's lock guards everything here.

A stash is a hold that is copied at once, and of which a peer may pull a beginning. Nobody is owed
it: the oldest stashes make room for newer ones and for other holds' spills. It is made once, so
after its end a WANT for anything of its key is refused at once."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from p2p_engine.bounded import Budget, Index, Notes
from p2p_engine.config import EngineConfig
from p2p_engine.control.tick_parts import for_each
from p2p_engine.control.timers import Timers
from p2p_engine.errors import (
    P2pError,
    PeerLost,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from p2p_engine.health import Counters
from p2p_engine.memory.arena import BUFFER, POOL, LandingArena, Space
from p2p_engine.memory.jobs import Copier, Job, Moment, after
from p2p_engine.memory.layout import Int64s, Source, ask, ask_regions, pair
from p2p_engine.memory.paged import Beginning, PagedSource
from p2p_engine.memory.plan import takers
from p2p_engine.memory.ready_layers import ReadyLayers
from p2p_engine.peers.link import PeerAddress
from p2p_engine.peers.listeners import SessionListener
from p2p_engine.receive.placement import Placement
from p2p_engine.send.endings import Ending, Endings, want_again
from p2p_engine.send.sender import Sender, as_withdrawn
from p2p_engine.send.shipment import Shipment
from p2p_engine.send.unheld_wants import PendingWant, UnheldWants
from p2p_engine.transfer import Transfer, lane_of, note_stage
from p2p_engine.wire.messages import CacheSpec, ContentKey, Manifest, TransferKey

OTHERS_SECONDS = 1.0  # that a WANT waits while its key is held for other contents only
UNASKED_SECONDS = 1.0  # that a hold waits for who may ask yet, though others have released it
PROMISED_SECONDS = 1.0  # that one waits for what was said to be here, and is not
UNNAMED_ROUNDS = 16  # in a lease, at most
UNNAMED_LEASES = 5  # RENEW without names keeps a hold for so many leases, counted from its start
STASH_SHARE = 2  # stashes take one part in so many of the pool
Reader: TypeAlias = tuple[PeerAddress, bytes]  # a rank of a peer, and the binding of what it wants


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
    is_stash: bool = False
    beginnings: Mapping[bytes, Beginning] = field(default_factory=dict)  # by binding; of a stash
    readers: frozenset[int] | None = None
    served: dict[int, PeerAddress] = field(default_factory=dict)  # by rank
    asked: set[PeerAddress] = field(default_factory=set)  # who has said WANT
    unasked: dict[int, PeerAddress] = field(default_factory=dict)  # released, by who has not
    pulled: set[PeerAddress] = field(default_factory=set)
    counted: set[PeerAddress] = field(default_factory=set)  # ended it before it was held
    shipments: dict[Reader, Shipment] = field(default_factory=dict)
    spaces: list[Space] = field(default_factory=list)  # its copy's place in the pool or the buffer
    copying: Job | None = None
    wants: dict[Reader, PendingWant] = field(default_factory=dict)  # not served yet
    error: P2pError | None = None  # with which it ends

    @property
    def is_waiting(self) -> bool:
        """Whether only the caller may be using the source: no shipment and no copy reads it."""
        return not self.shipments and self.copying is None

    @property
    def is_over(self) -> bool:
        """Whether all readers are served or have released it, and nobody waits for it or for a
        beginning of it."""
        gone = self.served.keys() | self.unasked.keys()
        is_served = self.readers is not None and self.readers <= gone
        return is_served and not self.shipments and not self.wants

    @property
    def is_surely_over(self) -> bool:
        """Whether it is over for the instance that asks. Who has released it, while others pulled
        it or asked for it, may belong to another one, on which a router has tried the request
        before."""
        if not self.asked:
            return self.is_over
        all_asked = self.readers is not None and self.readers <= self.served.keys()
        have_it = [peer in self.pulled for peer in self.served.values()]
        return self.is_over and all_asked and len(set(have_it)) == 1

    def ask(self, rank: int, peer: PeerAddress) -> None:
        """Note that a rank wants it."""
        self.asked.add(peer)
        self.counted.discard(peer)
        self.unasked.pop(rank, None)
        want_again(self.served, rank, peer)

    def expect(self, rank: int, peer: PeerAddress) -> None:
        """Note that a rank will want it, unless it has got it or has given it up: such a rank may
        go on renewing for others."""
        self.unasked.pop(rank, None)
        if self.served.get(rank, peer) != peer:
            want_again(self.served, rank, peer)

    @property
    def contents(self) -> list[ContentKey]:
        """What a peer may ask for: the whole, or one of its beginnings."""
        key, binding = self.content
        return [(key, name) for name in {binding: None, **self.beginnings}]

    def source_of(self, binding: bytes) -> Source:
        """The source of the whole, or of the beginning with this binding."""
        found = self.beginnings.get(binding)
        if found is None or not isinstance(self.source, PagedSource):
            return self.source
        return self.source.beginning(found)


class Holds(SessionListener):
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
        budget: Budget,
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
        self._started_at = clock()
        self._spec = spec
        self._holds: dict[ContentKey, Hold] = {}  # a stash under each of its contents
        self._stashes: dict[Hold, None] = {}  # oldest first
        self._of_key: Index[TransferKey, Hold] = Index()
        self._by_transfer: dict[Transfer, Hold] = {}
        self._unheld = UnheldWants(budget)
        self._all_renewed_at = -math.inf
        self._timers: Timers[Hold] = Timers()
        self._late: dict[Hold, None] = {}  # past their leases, but not ended
        # Until when what is not held is renewed.
        self._renewed: Notes[ContentKey, float] = Notes(budget)
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
        hold = self._new((key, binding), source, lease, moments)
        hold.generation = generation
        self._add(hold)
        self._begin(hold)
        return hold.transfer

    def stash(
        self,
        key: TransferKey,
        source: PagedSource,
        binding: bytes,
        lease: float,
        beginnings: Mapping[bytes, Beginning],
        moments: tuple[Moment, ...] = (),
    ) -> Transfer:
        """Copy a source into the pool and hold it there; older stashes make room. A peer may pull
        the whole or one of the beginnings. The transfer is released when the copy has ended; it
        ends at once if there is no room, or if it is larger than the stashes' share of the pool.
        Never blocks.

        Raises:
            TransferError: the key is held already.
            P2pError: the source failed.
        """
        hold = self._new((key, binding), source, lease, moments)
        hold.is_stash, hold.beginnings = True, beginnings
        self._add(hold)
        try:
            has_room = self._make_room(source.manifest.nbytes) and self._copy(hold, (POOL,))
        except P2pError as error:
            self._end(hold, error, str(error))
            raise
        self._stashes[hold] = None
        if has_room:
            self._begin(hold)
        else:
            self._end(hold, TransferCancelled("there is no room for it"), "it found no room")
        return hold.transfer

    def _new(
        self, content: ContentKey, source: Source, lease: float, moments: tuple[Moment, ...]
    ) -> Hold:
        key, nbytes, now = content[0], source.manifest.nbytes, self._clock()
        transfer = Transfer(key, nbytes, self._changed, self._cancel_transfer)
        latest_end = now + max(lease, self._config.max_renewal_seconds)
        return Hold(content, source, transfer, now, now + lease, lease, latest_end, moments)

    def _add(self, hold: Hold) -> None:
        key = hold.content[0]
        if not self._holds.keys().isdisjoint(hold.contents):
            raise TransferError(f"{key} is held already")
        self._holds.update(dict.fromkeys(hold.contents, hold))
        self._of_key.add(key, hold)
        self._by_transfer[hold.transfer] = hold
        self._timers.set(hold, hold.lease_ends_at)

    def _begin(self, hold: Hold) -> None:
        """Serve who has asked for it already."""
        for content in hold.contents:
            departed = self._endings.begin(content)
            self._renewed.pop(content)
            if departed is not None:
                hold.readers = departed.readers
                hold.asked |= departed.pulled
                hold.counted |= set(departed.ranks.values())
                for rank, peer in departed.ranks.items():
                    (hold.served if peer in hold.asked else hold.unasked)[rank] = peer
        wanted, contents = self._unheld.take(hold.content[0]), hold.contents
        self._serve_all(hold, [(name[1], want) for name, want in wanted if name[0] in contents])
        for (content, peer), want in wanted:
            if content not in contents:
                self._want_later(content, peer, want)
        if self._is_held(hold) and hold.is_over:  # who gave an earlier attempt up may ask at once
            self._end_soon(hold)

    def _serve_all(self, hold: Hold, wants: list[tuple[PeerAddress, PendingWant]]) -> None:
        """Serve several; if one fails at once, the hold does not end before the others are."""
        for peer, want in wants:
            hold.wants[peer, want.binding] = want
        for peer, want in wants:
            if self._is_held(hold):
                self._serve(hold, peer, want)

    def _make_room(self, nbytes: int) -> bool:
        """End the oldest stashes until so many bytes more are within their share of the pool;
        returns whether they are."""
        room = self._config.pool_bytes // STASH_SHARE - nbytes
        taken = sum(hold.source.manifest.nbytes for hold in self._stashes)
        while room >= 0 and taken > room and (oldest := self._oldest_stash()) is not None:
            taken -= oldest.source.manifest.nbytes
            self._end(oldest, TransferCancelled("a newer one needs its room"), "it made room")
        return taken <= room

    def _oldest_stash(self) -> Hold | None:
        """The oldest stash whose memory is free as soon as it ends."""
        return next((hold for hold in self._stashes if hold.is_waiting), None)

    def spill(self, transfer: Transfer) -> bool:
        """Start to copy a held source into the pool; when the copy ends, the transfer is released.

        Returns False if the source stays where it is: there is no room, or it is being pulled or
        copied already. Never blocks.

        Raises:
            P2pError: the source failed, or the copy was refused.
        """
        hold = self._held_as(transfer)
        if hold is None or not hold.is_waiting or hold.spaces:
            return False
        # One of the two may be on a GPU.
        return self._copy(hold, (POOL, BUFFER))

    def _copy(self, hold: Hold, places: Iterable[str]) -> bool:
        """Start to copy a source into one of these places; stashes make room for it."""
        manifest, arena = hold.source.manifest, self._placement.arena
        if not manifest.nbytes or arena is None:
            return False  # there are no bytes, or there is no room
        whole = (manifest.first_block, manifest.num_blocks)
        regions = ask_regions(lambda: hold.source.regions(*whole), manifest.nbytes)
        most = min(max(1, self._config.chunk_bytes // manifest.block_bytes), manifest.num_blocks)
        spaces = self._reserve(manifest, most, places)
        freed = 0
        while not spaces and freed < manifest.nbytes and (oldest := self._oldest_stash()):
            freed += oldest.source.manifest.nbytes
            self._end(oldest, TransferCancelled("a spill needs its room"), "it made room")
            spaces = self._reserve(manifest, most, places)
        if not spaces:
            return False
        starts = _starts_in(arena, spaces, manifest, most)
        hold.spaces = spaces
        try:
            spilled = ask(lambda: hold.source.packed(starts))
            hold.copying = ask(
                lambda: self._copier.copy(
                    *pair(regions, spilled.regions(*whole)),
                    lane=lane_of(hold.content[0]),
                    tag=lambda job: self._copied(hold, spilled, job),
                    keep=(hold.source, arena),
                    **after(hold.after),
                )
            )
        except P2pError:
            self._placement.take_back(spaces)
            raise
        return True

    def _reserve(self, manifest: Manifest, most: int, places: Iterable[str]) -> list[Space]:
        """Reserve room for the whole manifest in one of these places, for at most `most` blocks per
        space; [] if there is not enough."""
        counts = range(manifest.num_blocks, 0, -most)
        sizes = [min(most, count) * manifest.block_bytes for count in counts]
        found = (self._placement.spare(sizes, place) for place in places)
        return next(filter(None, found), [])

    def let_go(self, content: ContentKey, reason: str, generation: int = 0) -> None:
        """Refuse a content to every peer that wants it, now or later, in this attempt: it will not
        be held."""
        ending = self._endings.end(content, reason, generation=generation)
        if ending.reason:
            self._unheld.refuse_all(content, ending)

    def refuse_each(self, refusal: Callable[[ContentKey], Ending | None]) -> None:
        """Refuse what peers want and nobody holds, where a `refusal` of the content is known
        now."""
        self._unheld.refuse_each(refusal)

    def on_want(
        self,
        content: ContentKey,
        peer: PeerAddress,
        spec: CacheSpec | None,
        refuse: Callable[[Ending], None],
        *,
        epoch: int = 0,
        attempt: int = 0,
        is_pushed: bool = False,
        is_promised: bool = False,
    ) -> None:
        """Offer the content if it is held, or on its way to the engine of the `epoch` that asks. If
        it may be held soon, remember the WANT; what `is_pushed` needs none. If it will not come
        from here, call `refuse` with the reason. What the rank has released already refuses it
        nothing.

        While the key is held for other contents only, or another one was given up, a WANT is
        refused soon, but not at once: a router may send several prompts under one id. So is one for
        what this instance has promised, if it may have been restarted since: it has not run for as
        long as a promise may be old, and knows nothing of the content.
        """
        note_stage(content[0], "WANT heard")
        hold = self._holds.get(content)
        ending = self._endings.expect(content, _rank_of(spec), peer)
        deadline = self._clock() + self._config.transfer_timeout_seconds
        want = PendingWant(spec, deadline, refuse, binding=content[1], attempt=(epoch, attempt))
        if hold is not None:
            self._endings.meet(content, peer, epoch)
            self._serve(hold, peer, want)
        elif ending is not None:
            self._renewed.pop(content)
            refuse(ending)
        elif not self._sender.offer_now(epoch, content):
            is_lost = is_promised and self._is_young() and not self._endings.has_ended(content)
            want = replace(want, comes=lambda: self._sender.offer_now(epoch, content))
            self._want_later(content, peer, want, is_pushed=is_pushed, is_lost=is_lost)

    def _is_young(self) -> bool:
        """Whether an earlier start of this instance may have made promises that still count."""
        longest = max(self._config.lease_seconds, self._config.stash_seconds)
        return self._clock() < self._started_at + longest

    def _want_later(
        self,
        content: ContentKey,
        peer: PeerAddress,
        want: PendingWant,
        *,
        is_pushed: bool = False,
        is_lost: bool = False,
    ) -> None:
        """Remember a WANT for what is not held; `is_lost`: and probably never will be."""
        held, reason = self._of_key.get(content[0]), ""
        if any(_rank_of(want.spec) not in item.served for item in held):
            reason = "held for another content: the prompts differ"
        elif why := self._endings.why_over(content[0]):
            reason = f"another content (another prompt, or of other weights) was given up: {why}"
        elif is_pushed:
            return
        if reason:
            soon = self._clock() + OTHERS_SECONDS
            want = replace(want, deadline=min(want.deadline, soon), reason=reason)
        elif is_lost:
            reason = "it is not held here any more"
            want = replace(want, deadline=self._clock() + PROMISED_SECONDS, reason=reason)
        self._unheld.put(content, peer, want)

    def on_renew(
        self, content: ContentKey, peer: PeerAddress, spec: CacheSpec | None, *, epoch: int = 0
    ) -> Ending | None:
        """Give a held source another lease; returns why its peer will not get it, if that is known.

        A peer that has got its part from here still renews while other ranks send theirs.
        """
        hold = self._holds.get(content)
        if hold is None:
            self._renewed.put(content, self._clock() + self._config.lease_seconds, epoch)
            if self._endings.is_served(content):
                return None
            return self._endings.expect(content, _rank_of(spec), peer, renews=True)
        hold.expect(_rank_of(spec), peer)
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
        for hold in self._by_transfer.values():
            self._renew(hold, hold.held_at + UNNAMED_LEASES * hold.lease)

    def _renew(self, hold: Hold, latest_end: float) -> None:
        lease_ends_at = min(self._clock() + hold.lease, latest_end)
        hold.lease_ends_at = max(hold.lease_ends_at, lease_ends_at)

    def is_renewed(self, content: ContentKey) -> bool:
        """Whether a peer has renewed, within the last lease, a content that is not held here
        yet."""
        until = self._renewed.get(content)
        return until is not None and self._clock() < until

    def on_release(
        self, content: ContentKey, peer: PeerAddress, spec: CacheSpec | None, *, epoch: int = 0
    ) -> None:
        """Note that a rank of the peer wants no more of a content; without a binding, of all that
        is held under its key, if that content is not."""
        held = [] if content[1] else self._of_key.get(content[0])
        for name in [hold.content for hold in held] or [content]:
            self._release(name, peer, spec, epoch)

    def _release(
        self, content: ContentKey, peer: PeerAddress, spec: CacheSpec | None, epoch: int
    ) -> None:
        self._unheld.discard(content, peer)
        is_renewed = self._renewed.pop(content) is not None
        hold, readers = self._holds.get(content), self._readers(content, spec)
        if hold is not None:
            has_asked = peer in hold.asked
            hold.readers = readers if has_asked or not hold.asked else hold.readers
            hold.wants.pop((peer, content[1]), None)
            hold.pulled.discard(peer)
            (hold.served if has_asked else hold.unasked)[_rank_of(spec)] = peer
            self._end_if_over(hold, "the peer released it")
            return
        if self._endings.is_final(content[0]):
            return
        if is_renewed and self._endings.is_served(content):
            self._endings.begin(content)  # this ends its next attempt
        # It may be held later: after a preemption, it is computed again.
        self._endings.depart(content, _rank_of(spec), peer, readers, epoch=epoch)

    def session_lost(self, epoch: int, error: PeerLost) -> None:
        """Forget what an engine wants and nobody holds yet."""
        self._unheld.engine_lost(epoch)

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
        if hold.is_over:
            self._end(hold, None, "the peer released it")
        elif now < hold.lease_ends_at:
            self._timers.set(hold, hold.lease_ends_at)
        else:
            self._late[hold] = None
            self._counters.expired += not hold.is_stash
            error = TransferTimeout(f"nobody wanted {hold.content[0]} during its lease")
            self._end(hold, error, "its lease has ended")

    def overdue(self, now: float) -> list[str]:
        """Return the names of holds past their lease that no shipment reads, and that cannot be
        freed."""
        late = [hold for hold in self._late if now >= hold.lease_ends_at and not hold.shipments]
        return [f"hold {item.content[0]}" for item in (*late, *self._ending)]

    def close(self, error: P2pError) -> None:
        """End everything. The mover must have stopped, and the sender must be closed."""
        for hold in list(self._by_transfer.values()):
            self._end(hold, error, "the engine was closed")
        while self._ending:
            self._finish(self._ending.pop())

    def num_open(self) -> int:
        """Return how many sources are held."""
        return len(self._by_transfer)

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
            if hold.is_stash:
                self._end(hold, TransferCancelled("its copy has failed"), "its copy has failed")
                return
        self._serve_all(hold, [(peer, want) for (peer, _), want in hold.wants.items()])

    def _serve(self, hold: Hold, peer: PeerAddress, want: PendingWant) -> None:
        """Send to a reader what it wants. What was on its way for another receive of its is stopped
        first: that one may have taken a part of it."""
        reader = (peer, want.binding)
        hold.readers = self._readers(hold.content, want.spec)
        known = hold.wants.get(reader)
        if known is not None and want.is_before(known):
            return
        if known is not None and known.attempt == want.attempt:
            want = known  # a repetition
        hold.wants[reader] = want
        hold.ask(_rank_of(want.spec), peer)
        shipment = hold.shipments.get(reader)
        if shipment is not None and want is not known:
            self._sender.stop(shipment, TransferCancelled(f"{peer} asks anew"))
        elif shipment is None and hold.copying is None:
            self._ship(hold, reader, want)

    def _ship(self, hold: Hold, reader: Reader, want: PendingWant) -> None:
        shipment = self._sender.send(
            hold.content[0],
            reader[0],
            hold.source_of(want.binding),
            want.binding,
            self._config.transfer_timeout_seconds,
            ready_layers=ReadyLayers.whole(hold.after),
            on_end=lambda shipment: self._pulled(hold, reader, want, shipment),
            is_held=True,
            generation=hold.generation,
            answers=want.attempt[1],
        )
        if not shipment.transfer.done:
            hold.shipments[reader] = shipment

    def _pulled(self, hold: Hold, reader: Reader, sent: PendingWant, shipment: Shipment) -> None:
        """Handle the end of a shipment that was `sent` for a WANT. After a failure, its peer may
        ask again, or has done so."""
        hold.shipments.pop(reader, None)
        latest, error = hold.wants.get(reader), shipment.transfer.error
        if latest is not None and latest is not sent:
            self._ship(hold, reader, latest)
            return
        hold.wants.pop(reader, None)
        if latest is not None and shipment.is_given_up:
            latest.refuse(Ending(str(error), generation=hold.generation))
        if not hold.shipments and self._is_held(hold):
            self._timers.set(hold, hold.lease_ends_at)
        if error is None:
            if latest is not None:  # else it was released since, for it came too late
                hold.pulled.add(reader[0])
            hold.served[_rank_of(sent.spec)] = reader[0]
            self._end_if_over(hold, "it was pulled already")
        else:
            self._end_if_over(hold, "the peer released it")  # while a shipment was open

    def _end_if_over(self, hold: Hold, reason: str) -> None:
        """End what nobody needs any more; soon, if some have not asked for it that may ask yet."""
        if hold.is_surely_over:
            self._end(hold, None, reason)
        elif hold.is_over:
            self._end_soon(hold)

    def _end_soon(self, hold: Hold) -> None:
        self._timers.set(hold, min(hold.lease_ends_at, self._clock() + UNASKED_SECONDS))

    def _readers(self, content: ContentKey, spec: CacheSpec | None) -> frozenset[int]:
        """Return the ranks of a peer's instance that pull from here."""
        if self._spec is None or spec is None or not spec.has_ranks:
            return frozenset({_rank_of(spec)})
        return frozenset(takers(self._spec, content[0], spec))

    def _end(self, hold: Hold, error: P2pError | None, reason: str) -> None:
        """Forget a hold, and refuse later WANTs and RENEWs of what it has."""
        is_served = error is None
        if hold.is_stash:
            ending = self._endings.end_key(hold.content[0], reason, is_served=is_served)
            for content in hold.contents:
                self._unheld.refuse_all(content, ending)
        else:
            ending = self._endings.end(
                hold.content, reason, is_served=is_served, generation=hold.generation
            )
            self._depart(hold)
        waiting = list(hold.wants.values())
        self._stop(hold, error, reason)
        for_each(waiting, lambda want: want.refuse(ending))

    def _depart(self, hold: Hold) -> None:
        """Note which ranks of the peer will not ask for a hold again."""
        readers = hold.readers or frozenset()
        for rank, peer in (hold.unasked | hold.served).items():
            has_pulled = peer in hold.pulled
            self._endings.depart(
                hold.content,
                rank,
                peer,
                readers,
                has_pulled=has_pulled,
                is_counted=peer in hold.counted,
            )

    def _stop(self, hold: Hold, error: P2pError | None, reason: str) -> None:
        """End the transfer as soon as nothing reads its source or writes its spaces."""
        for content in hold.contents:
            del self._holds[content]
        del self._by_transfer[hold.transfer]
        self._stashes.pop(hold, None)
        self._of_key.discard(hold.content[0], hold)
        self._timers.cancel(hold)
        self._late.pop(hold, None)
        hold.error = error
        if hold.copying is not None:
            self._ending.add(hold)
            hold.copying.cancel()
        elif hold.shipments:
            for reader, shipment in list(hold.shipments.items()):
                shipment.on_end = lambda _, reader=reader: self._stopped(hold, reader)
                self._sender.stop(shipment, error or TransferCancelled(reason))
        else:
            self._finish(hold)

    def _stopped(self, hold: Hold, reader: Reader) -> None:
        hold.shipments.pop(reader, None)
        if not hold.shipments:
            self._finish(hold)

    def _finish(self, hold: Hold) -> None:
        self._placement.take_back(hold.spaces)
        hold.transfer.end(hold.error)

    def _is_held(self, hold: Hold) -> bool:
        return self._by_transfer.get(hold.transfer) is hold

    def _held_as(self, transfer: Transfer) -> Hold | None:
        return self._by_transfer.get(transfer)

    def _cancel_transfer(self, transfer: Transfer, reason: str) -> None:
        with self._changed:
            hold = self._held_as(transfer)
            if hold is None:
                return
            error = as_withdrawn(transfer, reason)
            if hold.is_stash:
                self._end(hold, error, str(error))
                return
            # A withdrawn key is not gone: after a preemption it is held again, unless `let_go` is
            # called.
            for (peer, _), want in hold.wants.items():
                self._unheld.put(hold.content, peer, want)
            self._depart(hold)
            self._stop(hold, error, str(error))


def _starts_in(arena: LandingArena, spaces: list[Space], manifest: Manifest, most: int) -> Int64s:
    """Return where each block begins, if each space but the last has `most` blocks."""
    firsts = np.array([arena.address(space) for space in spaces], np.int64)
    inside = np.arange(most, dtype=np.int64) * manifest.block_bytes
    starts: Int64s = (firsts[:, None] + inside).ravel()[: manifest.num_blocks]
    return starts


def _rank_of(spec: CacheSpec | None) -> int:
    return 0 if spec is None else spec.rank
