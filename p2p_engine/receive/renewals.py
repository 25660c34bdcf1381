"""Renewals: keeps contents alive that requests here will ask for later. Such a content must not end
here, where it may have landed, nor at the peer that holds it (GET) or was denied room for it (PUT).

Here, a kept content outlives its lease (`is_kept`) without any message. A peer is told RENEW, for
all its contents together: at once for new ones, then four times in a lease (its own or ours,
whichever is shorter). Neither side keeps anything for longer than `max_renewal_seconds`: a caller
that never calls `drop` cannot pin memory for ever.

While a step of the caller takes longer than such a quarter, requests that come meanwhile wait where
no caller sees them. So everything is kept here, and every linked peer is told RENEW without names.

A caller whose steps have no work is paused, or stands. No peer is told anything then: two callers
that wait for what both hold for each other would wait for ever. The engine's lock guards everything
here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from p2p_engine.config import EngineConfig
from p2p_engine.errors import P2pError, PeerLost
from p2p_engine.memory.plan import givers, keepers
from p2p_engine.peers.link import InstanceAddress, Link, PeerAddress
from p2p_engine.peers.links import Links
from p2p_engine.peers.listeners import LinkListener
from p2p_engine.peers.locator import Locator
from p2p_engine.receive.expectations import Expectations, Kept
from p2p_engine.receive.store import Store
from p2p_engine.wire.messages import (
    MAX_FRAME_BYTES,
    MAX_RENEWED,
    CacheSpec,
    ContentKey,
    Renew,
)

logger = logging.getLogger(__name__)

ROUNDS_IN_A_LEASE = 4  # so that three messages may be lost
_OVERHEAD_BYTES = 64  # of a frame, and of one content beside its texts


@dataclass(eq=False)
class Duty:
    """The contents that one rank of a peer is asked to keep; `fresh` were not sent to it yet."""

    due_at: float
    contents: dict[ContentKey, Kept] = field(default_factory=dict)
    fresh: dict[ContentKey, None] = field(default_factory=dict)
    epoch: int = 0  # of the engine that was told
    told_at: dict[ContentKey, float] = field(default_factory=dict)  # the link's heard_at then
    heard_at: float = 0.0  # of its last link, which has closed


class Renewals(LinkListener):
    """The contents that this engine keeps alive."""

    def __init__(
        self,
        config: EngineConfig,
        links: Links,
        locator: Locator,
        spec: CacheSpec | None,
        clock: Callable[[], float],
        store: Store,
        expectations: Expectations,
    ) -> None:
        self._config = config
        self._links = links
        self._locator = locator
        self._spec = spec
        self._clock = clock
        self._store = store
        self._expectations = expectations
        self._duties: dict[PeerAddress, Duty] = {}
        self._unplanned: dict[InstanceAddress, set[ContentKey]] = {}  # no answer yet
        self._look_at = math.inf  # the next time that a tick has work
        self._step_began_at = math.inf
        self._works_until = math.inf  # a caller that tells of no steps always works
        self._step_told_at = -math.inf
        self._keeps_all_until = -math.inf

    def step_began(self, *, has_work: bool) -> None:
        """Note that the caller begins a step; any thread, without the lock."""
        self._step_began_at = self._clock()
        if has_work:
            self._works_until = math.inf

    def step_ended(self) -> None:
        """Note that the caller's step is over; any thread, without the lock."""
        self._step_began_at = math.inf
        self._works_until = min(self._works_until, self._clock() + self._gap_seconds)

    def keep(self, content: ContentKey, peer: PeerAddress | InstanceAddress | None) -> None:
        """Keep a content alive until `drop`: here and, if `peer` is known, there.

        Raises:
            PeerUnreachable: the address is not host:port.
        """
        if peer is not None:
            peer.check()
        self._remove(content)
        kept = Kept(content, self._clock())
        self._expectations.keep(kept)
        self._look_at = min(self._look_at, self._end_of(kept))
        if isinstance(peer, PeerAddress):
            self._plan(kept, [peer], [])
        elif peer is not None:
            self._ask(peer, kept)

    def drop(self, content: ContentKey) -> None:
        """Stop keeping a content; idempotent. If it was left for another receive, it is discarded
        and its peer is told. Later arrivals end with their leases."""
        self._remove(content)
        self._store.dropped(content)
        let_go = self._expectations.let_go.pop(content, None)
        if let_go is not None:
            let_go()

    def _remove(self, content: ContentKey) -> None:
        kept = self._expectations.drop(content)
        if kept is not None:
            self._stop_telling(kept)

    def uses_link(self, link: Link) -> bool:
        """Whether a peer is asked to keep anything."""
        return link.target in self._duties

    def on_gone(self, peer: PeerAddress, content: ContentKey, epoch: int, error: P2pError) -> None:
        """Note that a peer, the engine of this epoch, will not give a content, or not again."""
        duty = self._duties.get(peer)
        kept = duty.contents.get(content) if duty is not None else None
        if kept is not None and peer in kept.sources:
            self._lose(kept, error, epoch)
        else:
            self._forget(peer, content)

    def link_ready(self, link: Link) -> None:
        """Let the next tick tell a peer everything. A restarted peer has lost what it held."""
        duty = self._duties.get(link.target)
        if duty is None:
            return
        if duty.epoch not in (0, link.epoch):
            self._lose_all(link, duty)
        duty.due_at = self._look_at = self._clock()

    def link_closed(self, link: Link) -> None:
        """Note that a link is closed. The next tick that is due dials it again, before leases
        end."""
        duty = self._duties.get(link.target)
        if duty is not None:
            duty.heard_at = link.heard_at
            soon = self._clock() + self._interval(link) / ROUNDS_IN_A_LEASE
            duty.due_at = min(duty.due_at, soon)
            self._look_at = min(self._look_at, duty.due_at)

    def tick(self, now: float) -> None:
        """Send the RENEWs that are due, and stop keeping what was kept for too long."""
        self._look_at_step(now)
        if now < self._look_at:
            return
        for kept in self._overaged(now):
            logger.warning(
                "no longer renewed: key=%s seconds=%g",
                kept.content[0], self._config.max_renewal_seconds,
            )  # fmt: skip
            self.drop(kept.content)
        unplanned, self._unplanned = self._unplanned, {}
        for instance, contents in unplanned.items():
            for still in filter(None, map(self._expectations.kept, contents)):
                self._ask(instance, still)
        is_working = now < self._works_until
        for peer, duty in list(self._duties.items()) if is_working else ():
            if now >= duty.due_at or duty.fresh:
                self._tell(peer, duty, now)
        self._look_at = self._next_look(now, is_working=is_working)

    def _look_at_step(self, now: float) -> None:
        """Keep everything, here and at all linked peers, while a step takes long, and for a round
        after it: the requests that have come meanwhile are known only in a later step."""
        seconds = now - self._step_began_at
        self._expectations.keeps_all = now < self._keeps_all_until
        if not self._config.retry_seconds <= seconds < self._config.max_renewal_seconds:
            return
        links = self._links.all_ready()
        interval = min(map(self._interval, links), default=self._interval())
        if seconds < interval:
            return
        self._expectations.keeps_all, self._keeps_all_until = True, now + interval
        if now >= self._step_told_at + interval:
            self._step_told_at = now
            for link in {link.epoch: link for link in links}.values():
                self._links.send(link, Renew, [])

    def due_at(self, now: float) -> float:
        """Return when the next tick has something to do."""
        return self._look_at

    def _interval(self, link: Link | None = None) -> float:
        lease = self._config.lease_seconds
        if link is not None:  # a very short lease does not mean a message in every tick
            lease = min(lease, max(link.lease, self._config.retry_seconds))
        return lease / ROUNDS_IN_A_LEASE

    @property
    def _gap_seconds(self) -> float:
        """How long a caller that works may be between two steps."""
        return min(self._config.retry_seconds, self._interval())

    def _next_look(self, now: float, *, is_working: bool) -> float:
        times = [duty.due_at for duty in self._duties.values()] if is_working else []
        times += [now + self._gap_seconds] * bool(self._duties and not is_working)
        times += [self._end_of(kept) for kept in islice(self._expectations.all_kept(), 1)]
        times += [now + self._interval()] * bool(self._unplanned)
        return min(times, default=math.inf)

    def _overaged(self, now: float) -> list[Kept]:
        overaged = []
        for kept in self._expectations.all_kept():
            if now < self._end_of(kept):
                break
            overaged.append(kept)
        return overaged

    def _end_of(self, kept: Kept) -> float:
        return kept.began_at + self._config.max_renewal_seconds

    def _ask(self, instance: InstanceAddress, kept: Kept) -> None:
        self._locator.ask(instance, lambda answer: self._found(instance, kept, answer))

    def _found(self, instance: InstanceAddress, kept: Kept, answer: CacheSpec | P2pError) -> None:
        key, binding = kept.content
        if self._expectations.kept(kept.content) is not kept:
            return
        if isinstance(answer, P2pError):
            self._unplanned.setdefault(instance, set()).add(kept.content)
            self._look_at = min(self._look_at, self._clock() + self._interval())
            return
        sources = [instance.rank(rank) for rank in givers(self._spec, key, answer)]
        idle = [
            (instance.rank(rank), (name, binding))
            for name, rank in keepers(self._spec, key, answer)
        ]
        self._plan(kept, sources, idle)

    def _plan(
        self, kept: Kept, sources: list[PeerAddress], idle: list[tuple[PeerAddress, ContentKey]]
    ) -> None:
        kept.sources = frozenset(sources)
        kept.told = [(peer, kept.content) for peer in sources] + idle
        for peer, name in kept.told:
            duty = self._duties.get(peer)
            if duty is None:
                duty = self._duties[peer] = Duty(self._clock())
            duty.contents[name] = kept
            duty.fresh[name] = None
            self._look_at = 0.0

    def _lose_all(self, link: Link, duty: Duty) -> None:
        """Handle a peer's restart. A content that the previous start was told of and survived is
        lost, unless part of it is here. The others may belong to the new start."""
        error = PeerLost(f"peer {link.target} was restarted")
        for kept in list(duty.contents.values()):
            was_told = duty.told_at.get(kept.content, duty.heard_at) < duty.heard_at
            if link.target in kept.sources and was_told and not self._store.has_any(kept.content):
                self._lose(kept, error, duty.epoch)
        duty.told_at.clear()

    def _lose(self, kept: Kept, error: P2pError, epoch: int) -> None:
        """Fail a content. It is remembered as failed for as long as it is kept."""
        self._stop_telling(kept)
        self._store.fail_content(kept.content, error, said_by=epoch)

    def _stop_telling(self, kept: Kept) -> None:
        told, kept.told = kept.told, []
        for peer, name in told:
            self._forget(peer, name)

    def _forget(self, peer: PeerAddress, name: ContentKey) -> None:
        duty = self._duties.get(peer)
        if duty is not None:
            duty.contents.pop(name, None)
            duty.fresh.pop(name, None)
            duty.told_at.pop(name, None)
            if not duty.contents:
                del self._duties[peer]

    def _tell(self, peer: PeerAddress, duty: Duty, now: float) -> None:
        """Tell a peer the new contents, or in a new round all of them. If its link is not ready,
        `link_ready` makes up for it."""
        link = self._links.get(peer, data=False)
        is_round = now >= duty.due_at
        if is_round:
            duty.due_at = now + self._interval(link)
        if link.ready:
            names = duty.contents if is_round else duty.fresh
            wanted = [name for name in names if not duty.contents[name].is_released]
            for contents in batches(wanted):
                self._links.send(link, Renew, contents)
                for name in contents:
                    duty.told_at.setdefault(name, link.heard_at)
            duty.epoch = link.epoch
        duty.fresh.clear()


def batches(contents: Iterable[ContentKey]) -> Iterator[list[ContentKey]]:
    """Split contents over as few messages as can carry them."""
    batch: list[ContentKey] = []
    room = MAX_FRAME_BYTES - _OVERHEAD_BYTES
    for key, binding in contents:
        texts = len(key.transfer_id.encode()) + len(key.layer.encode())
        nbytes = texts + len(binding) + _OVERHEAD_BYTES
        if len(batch) == MAX_RENEWED or nbytes > room:
            yield batch
            batch, room = [], MAX_FRAME_BYTES - _OVERHEAD_BYTES
        batch.append((key, binding))
        room -= nbytes
    if batch:
        yield batch
