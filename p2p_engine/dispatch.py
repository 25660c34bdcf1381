"""Dispatch: checks which messages a peer may send, and hands each to one part of the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeAlias

from p2p_engine.control.plane import PlaneListener
from p2p_engine.control.sockets import Route
from p2p_engine.control.tick_parts import TickParts
from p2p_engine.errors import PeerUnreachable, RemoteProtocolError, TransferRejected
from p2p_engine.health import Counters
from p2p_engine.peers.link import Link, PeerAddress
from p2p_engine.peers.links import Links
from p2p_engine.peers.locator import Locator
from p2p_engine.peers.sessions import Session, Sessions
from p2p_engine.receive.pulls import Pulls
from p2p_engine.receive.renewals import Renewals
from p2p_engine.receive.store import Store
from p2p_engine.send.endings import Ending
from p2p_engine.send.holds import Holds
from p2p_engine.send.sender import Sender
from p2p_engine.transports.base import Transport
from p2p_engine.wire.bindings import weights_in
from p2p_engine.wire.messages import (
    Abandon,
    AbandonOk,
    AnyMessage,
    Bye,
    Cancel,
    Cancelled,
    Commit,
    ContentKey,
    Deny,
    Done,
    Fail,
    Gone,
    Grant,
    Greet,
    Location,
    Message,
    Offer,
    Ping,
    Pong,
    Release,
    Renew,
    Want,
    decode,
    shorten,
)

logger = logging.getLogger(__name__)

Handler: TypeAlias = Callable[[Any, Any], None]  # the arguments: a link or session, and its message
Handlers: TypeAlias = dict[type[Message], Handler]


class Dispatch(PlaneListener):
    """Hears the control plane and takes the engine's lock. A message that a peer may not send
    changes nothing.

    One table has the handlers of answers from peers that we dialled; another has the handlers of
    requests from peers that dialled us. The type of a message selects its handler.
    """

    def __init__(
        self,
        lock: AbstractContextManager[Any],
        counters: Counters,
        ticks: TickParts,
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
        self._lock = lock
        self._counters = counters
        self._ticks = ticks
        self._links = links
        self._locator = locator
        self._sender = sender
        self._pulls = pulls
        self._renewals = renewals
        self._sessions = sessions
        self._holds = holds
        self._store = store
        self._transports = transports
        self.weights = ""  # the name of ours; contents of others are refused. "": no name
        self._answers: Handlers = {
            **answers_to(sender),
            Gone: self._on_gone,
            **dict.fromkeys((Pong, Bye, Greet), _links_have_heard),
        }
        self._requests: Handlers = {
            Offer: self._on_offer,
            Done: self._on_done,
            Cancelled: self._on_cancelled,
            Abandon: self._on_abandon,
            Want: self._on_want,
            Renew: self._on_renew,
            Release: self._on_release,
            **dict.fromkeys((Ping, Pong, Bye), _links_have_heard),
        }

    def use_weights(self, name: str) -> None:
        """Refuse contents of other weights from now on, also to who waits for them already; ""
        refuses none."""
        self.weights = name
        self._holds.refuse_each(self._refusal)

    def check_weights(self, binding: bytes) -> None:
        """Check what a caller is about to send, hold or stash.

        Raises:
            TransferRejected: it is of other weights than ours.
        """
        if reason := self._otherness(binding):
            raise TransferRejected(reason)

    def on_frame(self, route: Route, frame: bytes) -> None:
        """Hand the message in a frame to its part; an invalid one is dropped and counted."""
        with self._lock:
            try:
                self.on_message(route, decode(frame))
            except RemoteProtocolError as error:
                self._counters.wrong_messages += 1
                logger.debug("message dropped: %s", str(error))

    def on_tick(self, now: float) -> None:
        """Run the due work of each part."""
        with self._lock:
            self._ticks.run(now)

    def due_at(self, now: float) -> float:
        """Return when the next tick has something to do, unless something happens before."""
        with self._lock:
            return self._ticks.due_at(now)

    def on_refused(self, address: str, reason: str) -> None:
        """End what needs an address that breaks our handshakes off."""
        with self._lock:
            self._links.refused(address, reason)
            self._locator.refused(address, reason)

    def on_unresolved(self, address: str, error: PeerUnreachable) -> None:
        """End what waits for an address whose name did not resolve."""
        with self._lock:
            self._links.unresolved(address, error)
            self._locator.unresolved(address, error)

    def on_ended(self, route: Route) -> None:
        """Tell the links or sessions that used a connection that it has ended."""
        with self._lock:
            if route.address:
                self._links.connection_ended(route.address)
            else:
                self._sessions.connection_ended(route)

    def on_message(self, route: Route, message: AnyMessage) -> None:
        """Hand a message to its part, if it comes from a known peer and is for this epoch.

        Raises:
            RemoteProtocolError: the peer may not send it in this direction, or not now.
        """
        if route.address:
            if isinstance(message, Location):
                self._locator.on_location(route.address, message)
            self._hand_over(self._answers, self._links.on_message(route, message), message)
        else:
            self._hand_over(self._requests, self._sessions.on_message(route, message), message)

    def _hand_over(
        self, handlers: Handlers, peer: Link | Session | None, message: AnyMessage
    ) -> None:
        if peer is None:
            return
        handler = handlers.get(type(message))
        if handler is None:
            kind = "an answer" if handlers is self._answers else "a request"
            raise RemoteProtocolError(f"{type(message).__name__} is not {kind}")
        handler(peer, message)

    def _on_gone(self, link: Link, gone: Gone) -> None:
        content = (gone.key, gone.binding)
        if self._store.is_over(content, link.epoch, gone.generation):
            return
        error = TransferRejected(f"{link.target}: {gone.reason}")
        for peer in self._links.names(link):
            self._renewals.on_gone(peer, content, link.epoch, error)
        self._pulls.on_gone(content, link.epoch, error)

    def _on_offer(self, session: Session, offer: Offer) -> None:
        transport = self._transports.get(offer.transport)
        if transport is None:
            raise RemoteProtocolError(f"transport {offer.transport!r} was not agreed on")
        if reason := self._otherness(offer.binding):
            self._store.refuse_other(offer.source_epoch, offer, self.weights, reason)
        else:
            self._store.on_offer(offer.source_epoch, offer, transport)

    def _on_done(self, session: Session, done: Done) -> None:
        self._store.on_done(done.source_epoch, done.seq, done.attempt, done.checksum)

    def _on_cancelled(self, session: Session, cancelled: Cancelled) -> None:
        self._store.on_cancelled(cancelled.source_epoch, cancelled.seq, cancelled.attempt)

    def _on_abandon(self, session: Session, abandon: Abandon) -> None:
        error = TransferRejected(f"{session.address}: {abandon.reason}")
        content, epoch = (abandon.key, abandon.binding), abandon.source_epoch
        self._pulls.on_abandon(content, epoch, abandon.generation, error)
        self._sessions.reply(epoch, AbandonOk, (*content, abandon.generation))

    def _on_renew(self, session: Session, renew: Renew) -> None:
        self._sender.on_renew(renew.source_epoch, set(renew.contents))
        if not renew.contents:
            self._sender.on_renew_all(renew.source_epoch)
            self._holds.on_renew_all()
        peer = PeerAddress(session.address)
        for content in renew.contents:
            ending = self._holds.on_renew(content, peer, session.spec, epoch=renew.source_epoch)
            if ending is not None:
                self._gone(renew, content, ending)

    def _on_release(self, session: Session, release: Release) -> None:
        content = (release.key, release.binding)
        peer, epoch = PeerAddress(session.address), release.source_epoch
        self._holds.on_release(content, peer, session.spec, epoch=epoch)

    def _on_want(self, session: Session, want: Want) -> None:
        content = (want.key, want.binding)
        if refusal := self._refusal(content):
            self._gone(want, content, refusal)
            return
        self._holds.on_want(
            content,
            PeerAddress(session.address),
            session.spec,
            partial(self._gone, want, content),
            epoch=want.source_epoch,
            attempt=want.attempt,
            is_pushed=want.is_pushed,
            is_promised=want.is_promised,
        )

    def _refusal(self, content: ContentKey) -> Ending | None:
        """Return why a content will not come from here, if it is of other weights."""
        reason = self._otherness(content[1])
        return Ending(reason) if reason else None

    def _otherness(self, binding: bytes) -> str:
        """Name both weights if a content is of others than ours; ""."""
        theirs = weights_in(binding)
        if not self.weights or theirs in ("", self.weights):
            return ""
        return f"weights: {self.weights} here, {theirs} there"

    def _gone(self, asked: Renew | Want, content: ContentKey, ending: Ending) -> None:
        key, binding = content
        fields = (key, shorten(ending.reason), ending.generation, binding)
        self._sessions.reply(asked.source_epoch, Gone, fields)


def answers_to(sender: Sender) -> Handlers:
    """Return the handlers of the answers to a sender's chunks and to its ABANDON."""
    return {
        Grant: sender.on_grant,
        Deny: sender.on_deny,
        Commit: sender.on_commit,
        Fail: sender.on_fail,
        Cancel: sender.on_cancel,
        AbandonOk: sender.on_abandon_ok,
    }


def _links_have_heard(peer: Link | Session, message: AnyMessage) -> None:
    """Do nothing: links and sessions have handled the message."""
