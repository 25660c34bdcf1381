"""Who hears of links and sessions. Every method is called with the engine's lock; none blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from p2p_engine.errors import P2pError, PeerLost
    from p2p_engine.peers.link import Link


class LinkListener:
    """Hears of all links. What a listener does not care for, it does not override."""

    def link_ready(self, link: Link) -> None:
        """The peer has said WELCOME, for the first time or again."""

    def link_closed(self, link: Link) -> None:
        """The link is over; `link.error` says why."""

    def channel_ready(self, link: Link) -> None:
        """Bytes can leave over the link's channel."""

    def channel_lost(self, link: Link, error: P2pError) -> None:
        """The channel broke, or none of those asked for could be made."""

    def uses_link(self, link: Link) -> bool:
        """Whether anything is open over a link. If nobody uses a link, it rests."""
        return False


class SessionListener:
    """Hears of all sessions. What a listener does not care for, it does not override."""

    def session_lost(self, epoch: int, error: PeerLost) -> None:
        """Nothing more will be heard in this session."""

    def session_over(self, epoch: int, error: PeerLost) -> None:
        """The session was lost, and its engine is known to have ended."""

    def uses_session(self, epoch: int) -> bool:
        """Whether anything of a session is open here. If nobody uses a session, it rests."""
        return False
