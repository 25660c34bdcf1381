"""Abandonments: tells peers which contents will never be completed. ABANDON is repeated until the
peer has answered. The engine's lock guards everything here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from p2p_engine.bounded import Index
from p2p_engine.config import EngineConfig
from p2p_engine.control.tick_parts import for_each
from p2p_engine.control.timers import Timers
from p2p_engine.peers.link import Link, PeerAddress
from p2p_engine.peers.links import Links
from p2p_engine.wire.messages import Abandon, ContentKey, shorten


@dataclass(eq=False)
class Abandonment:
    """A content that a peer must be told will never be completed."""

    content: ContentKey
    link: Link
    reason: str
    deadline: float
    generation: int


class Abandonments:
    """The abandonments of one engine, with an index for each question, so that nothing is a
    scan."""

    def __init__(self, config: EngineConfig, links: Links, clock: Callable[[], float]) -> None:
        self._config = config
        self._links = links
        self._clock = clock
        self._items: dict[tuple[ContentKey, PeerAddress], Abandonment] = {}
        self._of_content: Index[ContentKey, Abandonment] = Index()
        self._of_link: Index[Link, Abandonment] = Index()
        self._timers: Timers[Abandonment] = Timers()

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._items)

    def __iter__(self) -> Iterator[ContentKey]:
        """Iterate over the contents; one that several peers must be told comes several times."""
        return (content for content, _ in self._items)

    def uses_link(self, link: Link) -> bool:
        """Whether an ABANDON has to go over a link."""
        return self._of_link.count(link) > 0

    def add(self, content: ContentKey, peer: PeerAddress, reason: str, generation: int) -> None:
        """Tell the peer until it answers, for at most transfer_timeout_seconds.

        Raises:
            PeerUnreachable: the peer's address is not host:port.
        """
        link = self._links.get(peer, data=False)
        if (content, peer) in self._items:
            self._remove(self._items[content, peer])
        deadline = self._clock() + self._config.transfer_timeout_seconds
        item = Abandonment(content, link, reason, deadline, generation)
        self._items[content, peer] = item
        self._of_content.add(content, item)
        self._of_link.add(link, item)
        self._tell(item)

    def on_heard(self, link: Link, content: ContentKey, generation: int) -> None:
        """Stop: the peer has noted that attempts up to this generation have ended."""
        for item in self._of_content.get(content):
            if generation >= item.generation and item.link.epoch == link.epoch:
                self._remove(item)

    def link_ready(self, link: Link) -> None:
        """Send the ABANDONs that waited for this link."""
        for_each(self._of_link.get(link), self._tell)

    def link_closed(self, link: Link) -> None:
        """Drop the ABANDONs of a link that is closed."""
        for item in self._of_link.get(link):
            self._remove(item)

    def tick(self, now: float) -> None:
        """Repeat what is unanswered; drop what is overdue."""
        self._timers.look(now, lambda item: self._tick_one(item, now))

    def due_at(self) -> float:
        """Return when the next tick has something to do."""
        return self._timers.due_at()

    def _tick_one(self, item: Abandonment, now: float) -> None:
        if now >= item.deadline:
            self._remove(item)
        else:
            self._tell(item)

    def _tell(self, item: Abandonment) -> None:
        soon = self._clock() + self._config.retry_seconds
        self._timers.set(item, min(item.deadline, soon))
        if item.link.ready:
            (key, binding), reason = item.content, shorten(item.reason)
            self._links.send(item.link, Abandon, key, reason, item.generation, binding)

    def _remove(self, item: Abandonment) -> None:
        del self._items[item.content, item.link.target]
        self._of_content.discard(item.content, item)
        self._of_link.discard(item.link, item)
        self._timers.cancel(item)
