"""Awaited: what this engine waits for from a named peer. It pulls (GET), and it notices that the
peer is gone, refuses, or no longer has it. The engine's lock guards everything here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from p2p_engine.config import EngineConfig
from p2p_engine.errors import P2pError, PeerLost
from p2p_engine.messages import ContentKey, Release, TransferKey, Want
from p2p_engine.peers import Link, Links, PeerAddress
from p2p_engine.transfer import Transfer


@dataclass(eq=False)
class Expected:
    """One receive whose sender is known."""

    link: Link
    transfer: Transfer
    binding: bytes
    pull: bool
    offered: bool = False
    resend_at: float = 0.0


class Awaited:
    """All receives whose sender is known."""

    def __init__(
        self,
        config: EngineConfig,
        links: Links,
        clock: Callable[[], float],
        fail: Callable[[TransferKey, P2pError], None],
        bereave: Callable[[TransferKey, P2pError], None],
    ) -> None:
        """`fail(key, error)` ends the receives of a key, `bereave` unless all of it is here."""
        self._config = config
        self._links = links
        self._clock = clock
        self._fail = fail
        self._bereave = bereave
        self._expected: dict[TransferKey, Expected] = {}
        self._to_release: list[tuple[Link, ContentKey]] = []

    def add(self, transfer: Transfer, peer: PeerAddress, binding: bytes, *, pull: bool) -> None:
        """Watch the peer until the transfer has ended; with `pull`, ask it for the key."""
        item = Expected(self._links.get(peer, data=False), transfer, binding, pull)
        self._expected[transfer.key] = item
        self._ask(item, self._clock())

    def release(self, content: ContentKey, peer: PeerAddress) -> None:
        """Tell the holder once, soon, that nothing is wanted; its lease covers a lost message."""
        link = self._links.get(peer, data=False)
        if link.ready:
            self._links.send(link, Release, *content)
        else:
            self._to_release.append((link, content))

    def on_offer(self, key: TransferKey) -> None:
        """The peer has answered."""
        item = self._expected.get(key)
        if item is not None:
            item.offered = True

    def on_gone(self, key: TransferKey, error: P2pError) -> None:
        """The peer does not have it."""
        item = self._expected.pop(key, None)
        if item is not None:
            self._fail(key, error)

    def link_ready(self, link: Link) -> None:
        """Ask what could not be asked before."""
        for item in self._expected.values():
            if item.link is link:
                self._ask(item, self._clock())
        for _, content in self._take_releases(link):
            self._links.send(link, Release, *content)

    def link_closed(self, link: Link) -> None:
        """Nothing will come from there any more."""
        self._take_releases(link)
        for key in [key for key, item in self._expected.items() if item.link is link]:
            item = self._expected.pop(key)
            if not item.transfer.done:
                self._bereave(key, link.error or PeerLost(f"peer {link.target} is gone"))

    def tick(self, now: float) -> None:
        """Ask again; let go of what has ended."""
        for key, item in list(self._expected.items()):
            if item.transfer.done:
                del self._expected[key]
                if item.pull and item.transfer.error is not None and item.link.ready:
                    self._links.send(item.link, Release, key, item.binding)
            elif now >= item.resend_at:
                self._ask(item, now)

    def _take_releases(self, link: Link) -> list[tuple[Link, ContentKey]]:
        taken = [item for item in self._to_release if item[0] is link]
        self._to_release = [item for item in self._to_release if item[0] is not link]
        return taken

    def _ask(self, item: Expected, now: float) -> None:
        if item.pull and not item.offered and item.link.ready:
            item.resend_at = now + self._config.retry_seconds
            self._links.send(item.link, Want, item.transfer.key, item.binding)
