"""Pulls: receives whose sender is a named peer. It pulls their contents (GET), and it notices if
the peer is gone, refuses, or no longer has one. The engine's lock guards everything here.

A peer is one engine, or those ranks of an instance that the plan names.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

from p2p_engine.bounded import Budget, Index, Notes
from p2p_engine.config import EngineConfig
from p2p_engine.control.tick_parts import for_each
from p2p_engine.control.timers import Timers
from p2p_engine.errors import P2pError, PeerLost, PeerRefused, RemoteProtocolError
from p2p_engine.memory.plan import givers, keepers
from p2p_engine.peers.link import InstanceAddress, Link, PeerAddress
from p2p_engine.peers.links import Links
from p2p_engine.peers.listeners import LinkListener
from p2p_engine.peers.locator import Locator
from p2p_engine.receive.expectations import AskedRank, Expectations, Expected
from p2p_engine.receive.store import Store
from p2p_engine.transfer import Transfer, note_stage
from p2p_engine.wire.messages import CacheSpec, ContentKey, Release, Want

WANTS_IN_A_LEASE = 4
MAX_DOUBLINGS = 16


class Pulls(LinkListener):
    """The receives with a named sender."""

    def __init__(
        self,
        config: EngineConfig,
        links: Links,
        locator: Locator,
        spec: CacheSpec | None,
        clock: Callable[[], float],
        store: Store,
        expectations: Expectations,
        budget: Budget,
    ) -> None:
        self._config = config
        self._links = links
        self._locator = locator
        self._spec = spec
        self._clock = clock
        self._store = store
        self._expectations = expectations
        self._let_go_later = expectations.let_go
        self._attempts = itertools.count(1)
        self._of_link: Index[Link, Expected] = Index()
        self._timers: Timers[Expected] = Timers()  # receives to ask for, or that have ended
        self._to_release: Index[Link, ContentKey] = Index()
        # Contents that an engine has abandoned before they were awaited from it, and until when a
        # receive asks it at once.
        self._doubted: Notes[tuple[ContentKey, int], float] = Notes(budget)

    def add(
        self,
        transfer: Transfer,
        peer: PeerAddress | InstanceAddress,
        binding: bytes,
        *,
        pull: bool,
        has_held: bool = False,
        is_promised: bool = False,
    ) -> None:
        """Watch the peer until the transfer has ended. With `pull`, ask it for the key at once.
        Without, ask only if nothing has come for `retry_seconds`: the peer may hold KV that we
        expect it to push. If it `has_held` what nobody pulls, it is told at the end."""
        previous = self._expectations.awaited((transfer.key, binding))
        item = Expected(
            transfer, peer, binding, pull, has_held, is_promised or has_held, next(self._attempts),
        )  # fmt: skip
        self._let_go_later.pop(item.content, None)
        if previous is not None:
            self._remove(previous)
            if previous.peer != peer:  # else its RELEASE would end the new pull, too
                self._say_release(previous)
        self._expectations.expect(item)
        transfer.on_end = partial(self._ended, item)
        if isinstance(peer, PeerAddress):
            self._watch(item, [peer])
        else:
            self._locator.ask(peer, partial(self._found, item, peer))

    def release(self, content: ContentKey, peer: PeerAddress | InstanceAddress) -> None:
        """Tell the holders once that a content is not wanted; if the message is lost, their lease
        ends. If it is left for another receive here, they are told when it is no longer kept."""
        if self._store.is_left(content):
            self._let_go_later[content] = partial(self.release, content, peer)
            return
        if isinstance(peer, PeerAddress):
            self._release(content, peer)
            return

        def found(answer: CacheSpec | P2pError) -> None:
            key, binding = content
            sources = [(key, rank) for rank in givers(self._spec, key, answer)]
            for name, rank in [*sources, *keepers(self._spec, key, answer)]:
                self._release((name, binding), peer.rank(rank))

        self._locator.ask(peer, found)

    def uses_link(self, link: Link) -> bool:
        """Whether a receive, or a RELEASE that was not sent yet, needs a link."""
        return self._of_link.count(link) + self._to_release.count(link) > 0

    def on_gone(self, content: ContentKey, epoch: int, error: P2pError) -> None:
        """Fail a receive: the peer does not have its content (any more).

        Raises:
            RemoteProtocolError: the peer was not asked for it.
        """
        item = self._expectations.awaited(content)
        if item is None:  # it has ended by now
            return
        if epoch not in item.epochs:
            key = content[0]
            raise RemoteProtocolError(f"GONE of {key} from {epoch:x}, which was not asked for it")
        # What has arrived may complete the receive; then the tick after its end lets it go.
        self._store.fail_content(content, error, said_by=epoch)
        if item.transfer.done:
            self._remove(item)
            self._let_go(item)

    def on_abandon(self, content: ContentKey, epoch: int, generation: int, error: P2pError) -> None:
        """Note that a peer will not complete a content, in attempts up to this generation. Each
        receive that awaits a content of the key from there asks: the peer may have begun, or be
        about to begin, the attempt that the receive is for; or it never will, as it knows the
        prompt as another content. A receive without a named peer fails.

        Raises:
            RemoteProtocolError: it is awaited from another peer, or another one sends it.
        """
        if self._store.is_over(content, epoch, generation):
            return
        key, awaited = content[0], self._expectations.awaited(content)
        from_it = [item for item in self._expectations.awaited_of(key) if epoch in item.epochs]
        for item in from_it:
            self._ask_again(item, epoch)
        if awaited in from_it:
            return
        if awaited is None:
            self._store.on_abandon(content, epoch, error)
        elif awaited.epochs and 0 not in awaited.epochs:
            raise RemoteProtocolError(f"ABANDON of {key} from {epoch:x}, which does not send it")
        until = self._clock() + self._config.lease_seconds
        self._doubted.put((content, epoch), until, epoch)

    def link_ready(self, link: Link) -> None:
        """Send the RELEASEs and WANTs that waited for a link. What is awaited now is of a later
        attempt than what was released, so its WANT goes behind."""
        for content in self._to_release.pop(link):
            self._links.send(link, Release, *content)
        for_each(self._of_link.get(link), lambda item: self._meet_by(item, link))

    def link_closed(self, link: Link) -> None:
        """Fail the receives that only a lost peer could complete."""
        self._to_release.pop(link)
        error = link.error or PeerLost(f"peer {link.target} is gone")
        for_each(self._of_link.get(link), lambda item: self._lose(item, error))

    def tick(self, now: float) -> None:
        """Repeat the WANTs that are due, and release what has ended."""
        self._timers.look(now, lambda item: self._tick_one(item, now))

    def due_at(self, now: float) -> float:
        """Return when the next tick has something to do."""
        return self._timers.due_at()

    def _tick_one(self, item: Expected, now: float) -> None:
        if item.transfer.done:
            self._remove(item)
            self._let_go(item)
            return
        for asked in item.asked:
            self._ask(item, asked, now)
        self._schedule(item)

    def _schedule(self, item: Expected) -> None:
        """Set the time of the next WANT. A link that becomes ready calls `link_ready`; that can be
        missed, so there is a time for links that are not ready, too."""
        if item.transfer.done:
            return  # it is due already
        later = self._clock() + self._config.retry_seconds
        times = [
            max(asked.resend_at if asked.link.ready else max(later, asked.resend_at),
                self._offered_until(item, asked))
            for asked in item.asked
        ]  # fmt: skip
        at = min(times, default=math.inf)
        if at < math.inf:
            self._timers.set(item, at)
        else:
            self._timers.cancel(item)

    def _ended(self, item: Expected) -> None:
        """Let the next tick release a receive whose transfer has ended."""
        if self._expectations.awaited(item.content) is item:
            self._timers.set(item, 0.0)

    def _remove(self, item: Expected) -> None:
        self._expectations.expect_no_more(item)
        item.transfer.on_end = None
        for asked in item.asked:
            self._of_link.discard(asked.link, item)
        self._timers.cancel(item)

    def _lose(self, item: Expected, error: P2pError) -> None:
        self._remove(item)
        if not item.transfer.done:
            self._store.source_lost(item.content, error)

    def _found(self, item: Expected, peer: InstanceAddress, answer: CacheSpec | P2pError) -> None:
        key = item.transfer.key
        if self._expectations.awaited(item.content) is not item or item.transfer.done:
            return
        if isinstance(answer, P2pError):
            self._remove(item)
            self._store.fail_content(item.content, answer)
            return
        item.idle = [(name, peer.rank(rank)) for name, rank in keepers(self._spec, key, answer)]
        sources = givers(self._spec, key, answer)
        self._watch(item, [peer.rank(rank) for rank in sources])
        if not sources:
            error = PeerRefused(f"peer {peer}: no rank there has these layers")
            self._store.fail_content(item.content, error)

    def _watch(self, item: Expected, peers: list[PeerAddress]) -> None:
        patient_until = 0.0 if item.pull else self._clock() + self._config.retry_seconds
        item.asked = [
            AskedRank(self._links.get(peer, data=False), resend_at=patient_until) for peer in peers
        ]
        for asked in item.asked:
            self._of_link.add(asked.link, item)
        for asked in item.asked:
            self._meet(item, asked)
        self._schedule(item)

    def _meet_by(self, item: Expected, link: Link) -> None:
        for asked in item.asked:
            if asked.link is link:
                if item.pull:  # the previous WANT may be lost
                    asked.resend_at = 0.0
                self._meet(item, asked)
        self._schedule(item)

    def _meet(self, item: Expected, asked: AskedRank) -> None:
        """Ask a rank whose link is ready for the key; at once if it said earlier that the key will
        not come."""
        if not asked.link.ready:
            return
        now = self._clock()
        self._store.sender_known(item.content)
        if self._is_doubted(item, asked.link.epoch, now):
            self._say_want(item, asked, now)
        else:
            self._ask(item, asked, now)

    def _is_doubted(self, item: Expected, epoch: int, now: float) -> bool:
        """Whether an engine said before that it would not send this; it is asked, and is trusted
        again."""
        until = self._doubted.pop((item.content, epoch))
        return until is not None and until > now

    def _ask_again(self, item: Expected, epoch: int) -> None:
        now = self._clock()
        for asked in item.asked:
            if asked.link.epoch == epoch:
                self._say_want(item, asked, now)
        self._schedule(item)

    def _let_go(self, item: Expected) -> None:
        has_come = item.transfer.error is None
        if not has_come and self._store.is_left(item.content):
            self._let_go_later[item.content] = partial(self._let_go, item)
            return
        self._say_release(item)
        # The rest may be pushed after all, before the peer has heard that it is not wanted.
        if has_come and item.has_held and not self._store.leave(item.content, is_pulled=False):
            self._store.discard(item.content, "all of it is here")

    def _say_release(self, item: Expected) -> None:
        """Tell the peer of a receive that has ended what is not wanted of it."""
        idle = item.idle if item.pull or item.has_held else []
        is_unwanted = item.transfer.error is not None or (item.has_held and not item.pull)
        if item.kept is not None and (idle or is_unwanted):
            item.kept.is_released = True
        for key, peer in idle:
            self._release((key, item.binding), peer)
        if is_unwanted:
            for asked in item.asked:
                self._release(item.content, asked.link.target)
            if not item.asked:  # the peer's directory has not answered yet
                self.release(item.content, item.peer)

    def _release(self, content: ContentKey, peer: PeerAddress) -> None:
        link = self._links.get(peer, data=False)
        if link.ready:
            self._links.send(link, Release, *content)
        else:
            self._to_release.add(link, content)

    def _ask(self, item: Expected, asked: AskedRank, now: float) -> None:
        if asked.link.ready and now >= max(asked.resend_at, self._offered_until(item, asked)):
            self._say_want(item, asked, now)

    def _say_want(self, item: Expected, asked: AskedRank, now: float) -> None:
        asked.resend_at = now + self._pause(asked)
        asked.num_wants += 1
        note_stage(item.transfer.key, "WANT said")
        fields = (not item.pull, item.is_promised, item.attempt)
        self._links.send(asked.link, Want, *item.content, *fields)

    def _offered_until(self, item: Expected, asked: AskedRank) -> float:
        if item.pull and item.has_held:
            return 0.0  # what was offered may be what is pushed, and not the rest
        return self._store.offered_until(item.content, asked.link.epoch)

    def _pause(self, asked: AskedRank) -> float:
        """Return the seconds until the next WANT. They double each time, but a lease of the peer
        has room for WANTS_IN_A_LEASE at least. Few are needed: the peer remembers a WANT, and a
        push needs none."""
        pause = self._config.retry_seconds
        doubled = pause * 2.0 ** min(asked.num_wants, MAX_DOUBLINGS)
        return max(pause, min(doubled, asked.link.lease / WANTS_IN_A_LEASE))
