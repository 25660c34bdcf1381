"""Listeners of links and sessions. Every method is called with the engine's lock; none may
block."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from p2p_engine.errors import P2pError, PeerLost
    from p2p_engine.peers.link import Link


class LinkListener:
    """Hears the events of all links; a subclass overrides those that it needs."""

    def link_ready(self, link: Link) -> None:
        """Note that the peer has said WELCOME, for the first time or again."""

    def link_closed(self, link: Link) -> None:
        """Note that the link has ended; `link.error` says why."""

    def channel_ready(self, link: Link) -> None:
        """Note that bytes can leave over the link's channel."""

    def channel_lost(self, link: Link, error: P2pError) -> None:
        """Note that the channel broke, or that none could be made."""

    def uses_link(self, link: Link) -> bool:
        """Whether anything is open over a link. If no listener uses a link, it rests."""
        return False


class SessionListener:
    """Hears the events of all sessions; a subclass overrides those that it needs."""

    def session_lost(self, epoch: int, error: PeerLost) -> None:
        """Note that a session has ended: nothing more will be heard in it."""

    def session_over(self, epoch: int, error: PeerLost) -> None:
        """Note that the session was lost and its engine is known to have ended."""

    def uses_session(self, epoch: int) -> bool:
        """Whether anything of a session is open here. If no listener uses a session, it rests."""
        return False
