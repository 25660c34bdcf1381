"""Dispatch: which part of the engine hears which message. Called with the engine's lock."""

from __future__ import annotations

from collections.abc import Mapping

from p2p_engine.control.sockets import Route
from p2p_engine.errors import RemoteProtocolError, TransferRejected
from p2p_engine.peers.links import Link, Links, PeerAddress
from p2p_engine.peers.locator import Locator
from p2p_engine.peers.sessions import Session, Sessions
from p2p_engine.receive.pulls import Pulls
from p2p_engine.receive.renewals import Renewals
from p2p_engine.receive.store import Store
from p2p_engine.send.holds import Holds
from p2p_engine.send.sender import Sender
from p2p_engine.transports.base import Transport
from p2p_engine.wire.messages import (
    Abandon,
    AbandonOk,
    AnyMessage,
    Bye,
    Cancel,
    Cancelled,
    Commit,
    Deny,
    Done,
    Fail,
    Gone,
    Grant,
    Greet,
    Location,
    Offer,
    Ping,
    Pong,
    Release,
    Renew,
    Want,
    shorten,
)


class Dispatch:
    """All that a peer can say. What it may not say, or says too late, changes nothing."""

    def __init__(
        self,
        links: Links,
        locator: Locator,
        sender: Sender,
        pulls: Pulls,
        renewals: Renewals,
        sessions: Sessions,
        holds: Holds,
        store: Store,
        transports: Mapping[str, Transport],
    ) -> None:
        self._links = links
        self._locator = locator
        self._sender = sender
        self._pulls = pulls
        self._renewals = renewals
        self._sessions = sessions
        self._holds = holds
        self._store = store
        self._transports = transports

    def on_message(self, route: Route, message: AnyMessage) -> None:
        """Hand a message to its part, if it comes from who we know and is for this epoch.

        Raises:
            RemoteProtocolError: it cannot be said on this way, or not now.
        """
        if route.address:
            self._from_link(route, message)
        else:
            self._from_session(route, message)

    def _from_link(self, route: Route, message: AnyMessage) -> None:
        """An answer from a peer, or a directory, that we dialled."""
        if isinstance(message, Location):
            self._locator.on_location(route.address, message)
        link = self._links.on_message(route, message)
        if link is not None:
            self._on_answer(link, message)

    def _on_answer(self, link: Link, message: AnyMessage) -> None:
        if isinstance(message, Gone):
            gone = TransferRejected(f"{link.target}: {message.reason}")
            for peer in self._links.names(link):
                self._renewals.on_gone(peer, message.key, gone)
            self._pulls.on_gone(message.key, link.epoch, gone)
        elif not tell_sender(self._sender, link, message) and not isinstance(
            message, Pong | Bye | Greet
        ):
            raise RemoteProtocolError(f"{type(message).__name__} is not an answer")

    def _from_session(self, route: Route, message: AnyMessage) -> None:
        """A message from a peer that dialled us."""
        session = self._sessions.on_message(route, message)
        if session is not None:
            self._on_request(session, message)

    def _on_request(self, session: Session, message: AnyMessage) -> None:
        epoch = message.source_epoch
        if isinstance(message, Offer):
            self._on_offer(epoch, message)
        elif isinstance(message, Done):
            self._store.on_done(epoch, message.seq, message.attempt, message.checksum)
        elif isinstance(message, Cancelled):
            self._store.on_cancelled(epoch, message.seq, message.attempt)
        elif isinstance(message, Abandon):
            abandoned = TransferRejected(f"{session.address}: {message.reason}")
            self._pulls.on_abandon(message.key, epoch, abandoned)
            self._sessions.reply(epoch, AbandonOk, (message.key,))
        elif isinstance(message, Want):
            self._on_want(session, message)
        elif isinstance(message, Renew):
            self._on_renew(session, message)
        elif isinstance(message, Release):
            content = (message.key, message.binding)
            self._holds.on_release(content, PeerAddress(session.address), session.spec)
        elif not isinstance(message, Ping | Pong | Bye):
            raise RemoteProtocolError(f"{type(message).__name__} is not a request")

    def _on_offer(self, epoch: int, offer: Offer) -> None:
        transport = self._transports.get(offer.transport)
        if transport is None:
            raise RemoteProtocolError(f"transport {offer.transport!r} was not agreed on")
        self._pulls.on_offer(offer.key, epoch)
        self._store.on_offer(epoch, offer, transport)

    def _on_renew(self, session: Session, renew: Renew) -> None:
        epoch = renew.source_epoch
        self._sender.on_renew(epoch, set(renew.contents))
        for content in renew.contents:
            reason = self._holds.on_renew(content, session.spec)
            if reason is not None:
                self._sessions.reply(epoch, Gone, (content[0], shorten(reason)))

    def _on_want(self, session: Session, want: Want) -> None:
        def gone(reason: str) -> None:
            self._sessions.reply(want.source_epoch, Gone, (want.key, shorten(reason)))

        content = (want.key, want.binding)
        if want.is_pushed and self._sender.offer_now(want.source_epoch, content):
            return
        peer = PeerAddress(session.address)
        self._holds.on_want(content, peer, session.spec, gone, is_pushed=want.is_pushed)


def tell_sender(sender: Sender, link: Link, message: AnyMessage) -> bool:
    """Hand the answer to a chunk, or to ABANDON, to the sender; False: it is about neither."""
    if isinstance(message, Grant):
        sender.on_grant(link, message)
    elif isinstance(message, Deny):
        sender.on_deny(link, message)
    elif isinstance(message, Commit):
        sender.on_commit(link, message)
    elif isinstance(message, Fail):
        sender.on_fail(link, message)
    elif isinstance(message, Cancel):
        sender.on_cancel(link, message)
    elif isinstance(message, AbandonOk):
        sender.on_abandon_ok(link, message.key)
    else:
        return False
    return True
