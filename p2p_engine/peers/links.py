"""Links: the peers that this engine dials, from the first look-up to the end.

    LOCATING → the directory of the instance is asked for the rank (if one is given)
    GREETING → HELLO is sent; the peer answers WELCOME or REFUSE
    READY    → messages may be sent
    CLOSED   → the end; `error` says why; the next use of the target makes a new link

While something is open over a READY link, PING asks regularly whether the peer is alive. If the
peer has dropped our session after a long silence, it says GREET, and the link goes back to
GREETING.

A link rests when nothing is open over it and the last PING was answered. The kernel still reports
the end of its connection. That, the next use, or REST_SECONDS end the rest with a PING, and only
silence after that PING counts.

A caller that wants to send bytes asks for a channel too. The transports are tried in order, the
best first. If a channel ends, its link does not; a caller that needs another channel asks again.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from p2p_engine.bounded import Index
from p2p_engine.config import GPU_TRANSPORTS, EngineConfig
from p2p_engine.control.plane import ControlPlane
from p2p_engine.control.sockets import Route
from p2p_engine.control.tick_parts import for_each
from p2p_engine.control.timers import Timers
from p2p_engine.errors import (
    AuthenticationFailed,
    P2pError,
    PeerError,
    PeerLost,
    PeerRefused,
    PeerRestarted,
    PeerUnreachable,
    TransportError,
    named,
)
from p2p_engine.peers.closing_channels import ClosingChannels
from p2p_engine.peers.link import Link, LinkState, PeerAddress
from p2p_engine.peers.listeners import LinkListener, SessionListener
from p2p_engine.transports.base import Channel, ConnectionInterrupted, Transport, WritesLost
from p2p_engine.transports.handshake import TOKEN_SECONDS
from p2p_engine.wire.messages import (
    OLDEST_VERSION,
    AnyMessage,
    Bye,
    CacheSpec,
    Greet,
    Hello,
    Location,
    Lookup,
    Message,
    Ping,
    Pong,
    Refuse,
    Welcome,
    encode,
)

logger = logging.getLogger(__name__)

MAX_CORRUPTED = 2  # chunks over one transport to one peer; then others are tried first
REST_SECONDS = 120.0  # between two PINGs of a resting link; less than dialler.IDLE_SECONDS


class Links(SessionListener):
    """The dialled peers of one engine. The engine's lock guards them."""

    def __init__(
        self,
        config: EngineConfig,
        control: ControlPlane,
        epoch: int,
        spec: CacheSpec | None,
        transports: list[Transport],
        *,
        lock: AbstractContextManager[Any],
        clock: Callable[[], float],
        listening: Callable[[], float],
    ) -> None:
        """`listening` counts the seconds in which a peer could have been heard."""
        self._config = config
        self._control = control
        self._epoch = epoch
        self._spec = spec
        self._transports = transports
        self._lock = lock
        self._clock = clock
        self._listening = listening
        self.listeners: Sequence[LinkListener] = ()
        self._links: dict[PeerAddress, Link] = {}
        self._by_contact: Index[str, Link] = Index()
        self._by_epoch: Index[int, Link] = Index()  # several links may lead to one engine
        self._numbers: set[int] = set()  # of unanswered HELLOs
        self._timers: Timers[Link] = Timers()
        self._late: dict[Link, None] = {}  # past their deadlines, but not closed
        self._closing = ClosingChannels(clock)

    def get(self, target: PeerAddress, *, data: bool) -> Link:
        """Return the link to a peer, dialling it if there is none; never blocks. With `data`, the
        link also gets a channel, soon.

        Raises:
            PeerUnreachable: the address is not host:port.
        """
        link = self._links.get(target)
        if link is None:
            target.check()
            located = target.rank is None
            link = Link(
                target,
                target.address if located else "",
                LinkState.GREETING if located else LinkState.LOCATING,
                deadline=self._clock() + self._config.connect_timeout_seconds,
            )
            self._links[target] = link
            self._by_contact.add(link.contact, link)
            self._ask(link)
            self._look_soon(link)
        elif link.is_resting:
            self._look_soon(link)
        if data and not link.data:
            link.data = True
            self._look_soon(link)
            self._later(lambda: self._open_channel(link))
        return link

    def count(self) -> dict[str, int]:
        """Return how many links are in each state."""
        counts: dict[str, int] = {}
        for link in self._links.values():
            counts[link.state.name.lower()] = counts.get(link.state.name.lower(), 0) + 1
        return counts

    def all_ready(self) -> list[Link]:
        """Return the links over which messages may be sent; several may lead to one engine."""
        return [link for link in self._links.values() if link.ready]

    def to_engine(self, epoch: int) -> list[Link]:
        """Return the links to the engine of an epoch."""
        return self._by_epoch.get(epoch)

    def names(self, link: Link) -> list[PeerAddress]:
        """Return all targets that lead to the engine of a link, the link's own first."""
        return [link.target, *(twin.target for twin in self._twins(link))]

    def num_unclosed_channels(self) -> int:
        """Return how many channels cannot be closed yet because a copy does not stop."""
        return len(self._closing)

    def send(self, link: Link, kind: type[Message], *fields: Any) -> None:
        """Send a message over a link that was welcomed; never blocks."""
        self._control.send(Route(link.address), encode(kind(self._epoch, link.epoch, *fields)))  # type: ignore[arg-type]

    def on_message(self, route: Route, message: AnyMessage) -> Link | None:
        """Take a message from a dialled address; returns the link if it came from the link's
        engine."""
        if isinstance(message, Location):
            self._located(route.address, message)
            return None
        if isinstance(message, Ping):
            number = message.number if message.number in self._numbers else 0
            self._control.send(route, encode(Pong(self._epoch, message.source_epoch, number)))
            return None
        known = None
        for link in self._reached_at(route.address):
            if isinstance(message, Welcome):
                self._welcomed(link, message)
            elif isinstance(message, Refuse):
                self._heard_refuse(link, message)
            elif link.epoch != message.source_epoch:
                if isinstance(message, Pong) and link.epoch:
                    self.close_link(link, PeerRestarted(f"peer {link.target} was restarted"))
            else:
                link.heard_at, link.is_answered = self._listening(), True
                known = link
                if isinstance(message, Bye):
                    self.close_link(link, PeerLost(f"peer {link.target} is closing"))
                elif isinstance(message, Greet):
                    self._greet_again(link)
        return known

    def tick(self, now: float) -> None:
        """Repeat unanswered messages, send PINGs, and end what is overdue."""
        self.end_closing()
        attended = self._listening()
        self._timers.look(now, lambda link: self._look(link, now, attended))

    def due_at(self, now: float) -> float:
        """Return when the next tick has something to do; 0 means that each tick has."""
        return 0.0 if self._closing else self._timers.due_at()

    def _look(self, link: Link, now: float, attended: float) -> None:
        if link.is_resting:  # the rest is over: send PING now and await its answer
            link.is_resting, link.is_answered = False, False
            link.watched_since, link.resend_at = attended, now
        silence = attended - max(link.heard_at, link.watched_since)
        patience = self._config.peer_timeout_seconds
        if link.awaits_answer and now >= link.deadline:
            self._late[link] = None
        if not link.ready and now >= link.deadline:
            waited = self._config.connect_timeout_seconds
            reason = f"peer {link.target} did not answer within {waited:g} s"
            self.close_link(link, PeerUnreachable(f"{reason} ({link.state.name})"))
        elif link.ready and silence >= patience:
            self.close_link(link, PeerLost(f"peer {link.target} is silent for {silence:.1f} s"))
        else:
            self._look_open(link, now)
            # The listening clock is never faster, so the silence cannot be long enough earlier.
            self._look_again(link, now, now + patience - silence)

    def _look_again(self, link: Link, now: float, silent_at: float) -> None:
        if link.state is LinkState.CLOSED:
            return
        if not link.ready:
            self._timers.set(link, min(link.resend_at, link.deadline))
        elif link.is_resting:
            self._timers.set(link, link.resend_at)
        else:  # a channel depends on many conditions: look in each tick
            self._timers.set(link, now if link.lacks_channel else min(link.resend_at, silent_at))

    def _look_soon(self, link: Link) -> None:
        """Look at a link in the next tick, because its next time has changed."""
        self._timers.set(link, self._clock())

    def _look_open(self, link: Link, now: float) -> None:
        if now >= link.resend_at:
            if self._may_rest(link):
                link.is_resting, link.resend_at = True, now + REST_SECONDS
            else:
                self._ask(link)
        if link.connecting and now >= link.deadline:
            waited = link.connect_patience
            reason = f"peer {link.target} answered no data connection within {waited:g} s"
            self._not_connected(link, PeerUnreachable(reason))
        elif link.asking and now >= link.hello_at:
            self._greet(link)
        else:
            self._open_channel(link)

    def _may_rest(self, link: Link) -> bool:
        is_asking = link.awaits_answer or link.asking or link.lacks_channel
        is_heard = link.is_answered and not link.is_cut
        is_used = any(listener.uses_link(link) for listener in self.listeners)
        return is_heard and not is_asking and not is_used

    def connection_ended(self, address: str) -> None:
        """Ask whether the peer is alive: the connection to its address has ended."""
        for link in self._by_contact.get(address):
            link.is_cut = True
            if link.is_resting:
                self._look_soon(link)

    def overdue(self, now: float) -> list[str]:
        """Return the names of peers that should have answered, and of channels that should be
        closed."""
        waiting = [link for link in self._late if link.awaits_answer and now >= link.deadline]
        names = [f"contact with {link.target}, {link.state.name}" for link in waiting]
        return names + [f"end of a channel's copies, {len(self._closing)}"] * bool(self._closing)

    def close_link(self, link: Link, error: P2pError) -> None:
        """End a link, and start to close its channel. In callbacks only."""
        if link.state is LinkState.CLOSED:
            return
        link.state, link.error, link.connecting = LinkState.CLOSED, error, False
        self._forget(link)
        logger.info("link closed: peer=%s reason=%s", link.target, named(error))
        self._close_channel(link)
        if link.address and not self._reached_at(link.address):
            self._control.hang_up(link.address)
        for_each(self.listeners, lambda listener: listener.link_closed(link))

    def _forget(self, link: Link) -> None:
        self._links.pop(link.target, None)
        self._by_contact.discard(link.contact, link)
        self._by_epoch.discard(link.epoch, link)
        self._timers.cancel(link)
        self._late.pop(link, None)
        self._numbers.discard(link.number)

    def _reached_at(self, address: str) -> list[Link]:
        """Return the links to the engine at an address."""
        return [link for link in self._by_contact.get(address) if link.address == address]

    def refused(self, address: str, reason: str) -> None:
        """End the links to an address that breaks our handshakes off. In callbacks only."""
        for link in self._by_contact.get(address):
            self.close_link(link, AuthenticationFailed(f"peer {link.target}: {reason}"))

    def unresolved(self, address: str, error: PeerUnreachable) -> None:
        """End the links that wait for a name that does not resolve. In callbacks only."""
        for link in self._by_contact.get(address):
            if not link.ready:
                self.close_link(link, PeerUnreachable(f"peer {link.target}: {error}"))

    def session_over(self, epoch: int, error: P2pError) -> None:
        """End the links to an engine that is known to have ended. In callbacks only."""
        for link in self._by_epoch.get(epoch):
            self.close_link(link, error)

    def break_channel(self, link: Link, error: TransportError) -> None:
        """End a link's channel soon, from any thread. Links that share the channel stay."""
        channel = link.channel
        self._later(lambda: self._channel_broken(channel, error))

    def lose_channel(self, link: Link, error: TransportError) -> None:
        """End a link's channel at once. In callbacks only."""
        self._channel_broken(link.channel, error)

    def note_corrupted(self, link: Link, channel: Channel | None) -> None:
        """Note that a chunk came with wrong bytes. If a transport does that twice, leave it for
        another one that both have; if no other one works, it is used again."""
        transport = link.transport
        if transport is None or channel is not link.channel:
            return
        link.num_corrupted[transport.name] += 1
        num_corrupted = link.num_corrupted[transport.name]
        if num_corrupted >= MAX_CORRUPTED and self._usable(link)[:1] != [transport]:
            text = f"{num_corrupted} chunks arrived with wrong bytes"
            logger.warning("peer=%s transport=%s is left: %s", link.target, transport.name, text)
            self.break_channel(link, TransportError(text))

    def close_channels(self) -> None:
        """Start to close every channel, for good. In callbacks only."""
        for link in self._links.values():
            link.data = False
            self._close_channel(link)

    def close(self, error: P2pError) -> None:
        """End every link. If its channel is closed by now, BYE says that nothing follows."""
        for link in list(self._links.values()):
            if link.epoch:
                self.send(link, Bye)
            self.close_link(link, error)

    def end_closing(self) -> None:
        """Close channels whose copies have stopped; in callbacks, or after the control thread has
        ended."""
        self._closing.try_again()

    def _close_channel(self, link: Link, then: Callable[[], None] = lambda: None) -> None:
        """Close a link's channel unless another link shares it, and call `then`: now, or when its
        copies have stopped."""
        channel, link.channel, link.transport = link.channel, None, None
        is_shared = any(other.channel is channel for other in self._twins(link))
        if channel is None or is_shared:
            then()
        else:
            self._closing.close(channel, str(link.target), then)

    def _ask(self, link: Link) -> None:
        interval = self._config.retry_seconds
        if link.state is LinkState.LOCATING:
            message: AnyMessage = Lookup(self._epoch, 0, link.target.rank or 0)
            self._control.send(Route(link.target.address), encode(message))
        elif link.state is LinkState.GREETING:
            self._greet(link)
        elif link.ready:
            link.is_answered = link.is_cut = False
            self.send(link, Ping)
            interval = self._config.peer_timeout_seconds / 4
        link.resend_at = self._clock() + interval

    def _greet(self, link: Link) -> None:
        link.hello_at = self._clock() + self._config.retry_seconds
        link.number = link.number or secrets.randbits(63) | 1
        self._numbers.add(link.number)
        address, spec = self._control.address, self._spec
        hello = Hello(self._epoch, 0, link.version, address, spec, {}, link.number)
        self._control.send(Route(link.address), encode(hello))

    def _heard_refuse(self, link: Link, refuse: Refuse) -> None:
        """End a link, unless its peer speaks an older version that we speak, too."""
        if link.state is LinkState.GREETING and OLDEST_VERSION <= refuse.version < link.version:
            link.version = refuse.version
            self._ask(link)
        else:
            self.close_link(link, PeerRefused(f"peer {link.target} refused: {refuse.reason}"))

    def _greet_again(self, link: Link) -> None:
        """Say HELLO again: the peer is alive but has dropped our session. Open transfers
        continue."""
        if link.ready:
            logger.info("link greets again: peer=%s", link.target)
            link.state, link.is_resting = LinkState.GREETING, False
            link.deadline = self._clock() + self._config.connect_timeout_seconds
            self._ask(link)
            self._look_soon(link)

    def _located(self, directory: str, message: Location) -> None:
        link = self._links.get(PeerAddress(directory, message.rank))
        if link is None or link.state is not LinkState.LOCATING:
            return
        if not message.address:
            reason = f"{directory} has {message.num_ranks} ranks, no rank {message.rank}"
            self.close_link(link, PeerRefused(reason))
            return
        try:
            PeerAddress(message.address).check()
        except PeerUnreachable as error:
            self.close_link(link, error)
            return
        self._by_contact.discard(link.contact, link)
        link.address, link.state = message.address, LinkState.GREETING
        self._by_contact.add(link.contact, link)
        self._ask(link)
        self._look_soon(link)

    def _welcomed(self, link: Link, message: Welcome) -> None:
        if link.epoch not in (0, message.source_epoch):
            self.close_link(link, PeerRestarted(f"peer {link.target} was restarted"))
            return
        self._numbers.discard(link.number)
        link.number = 0
        if link.state is LinkState.GREETING:
            link.epoch, link.heard_at = message.source_epoch, self._listening()
            link.is_answered = True
            self._by_epoch.add(link.epoch, link)
            for twin in self._twins(link):
                link.num_corrupted = twin.num_corrupted
            self._look_soon(link)
            link.endpoints, link.state = message.endpoints, LinkState.READY
            link.invited_at = self._clock()
            link.spec, link.checksum = message.spec, message.checksum
            link.largest_landing = message.largest_landing
            link.lease = message.lease
            for_each(self.listeners, lambda listener: listener.link_ready(link))
        if link.asking:
            link.endpoints = message.endpoints
            self._dial(link)
        else:
            self._open_channel(link)

    def _open_channel(self, link: Link) -> None:
        if not link.ready or not link.data or link.connecting or link.channel is not None:
            return
        if link.is_losing:
            return  # the old channel's copies have to stop first
        for twin in self._twins(link):
            if twin.channel is not None:
                link.channel, link.transport, link.connected = twin.channel, twin.transport, True
                for_each(self.listeners, lambda listener: listener.channel_ready(link))
                return
            if twin.connecting:
                return  # that channel will serve this link too
        now = self._clock()
        if now < link.connect_at:
            return
        link.connect_patience = self._config.connect_timeout_seconds
        link.deadline, link.connecting = now + link.connect_patience, True
        if link.invited_at is not None and now - link.invited_at < TOKEN_SECONDS / 2:
            self._dial(link)
        else:  # a token allows one connection, for a short time
            link.asking = True
            self._greet(link)

    def _twins(self, link: Link) -> list[Link]:
        """Return the other links to the same engine; all of them share one channel."""
        return [other for other in self._by_epoch.get(link.epoch) if other is not link]

    def _dial(self, link: Link) -> None:
        link.invited_at, link.asking = None, False
        link.untried = self._usable(link)
        self._connect(link, link.untried)

    def _usable(self, link: Link) -> list[Transport]:
        """Return the transports that both have, the best first; last those that have corrupted too
        many chunks."""
        shared = [item for item in self._transports if item.name in link.endpoints]
        return sorted(shared, key=lambda item: link.num_corrupted[item.name] >= MAX_CORRUPTED)

    def _no_transport(self, link: Link, last: TransportError | None) -> PeerRefused:
        ours, theirs = [item.name for item in self._transports], list(link.endpoints)
        here, there = ", ".join(ours), ", ".join(theirs) or "nothing"
        text = f"peer {link.target}: no transport works ({here} here, {there} there)"
        text += f": {last}" if last is not None else ""
        if set(GPU_TRANSPORTS) & {*ours, *theirs}:
            text += '; to go through host memory, set "kv_buffer_device": "cpu" on both sides'
        return PeerRefused(text)

    def _connect(
        self, link: Link, untried: list[Transport], last: TransportError | None = None
    ) -> None:
        """Try the next transport; `last` is the error of the one before, or of one that was
        interrupted."""
        if not untried:
            if isinstance(last, ConnectionInterrupted):
                self._not_connected(link, last)
            else:
                self._not_connected(link, self._no_transport(link, last))
            return
        transport = untried.pop(0)

        def connected(outcome: Channel | TransportError) -> None:
            with self._lock:  # called without the lock, when a socket is readable
                if link.connecting and link.untried is untried:
                    self._connected(link, transport, outcome, last)
                elif not isinstance(outcome, TransportError):
                    outcome.close()  # the attempt was given up

        try:
            endpoint = link.endpoints[transport.name]
            patience = transport.patience(endpoint)
            if last is not None:  # the one before may have taken all the time
                patience = max(patience, self._config.connect_timeout_seconds)
            link.connect_patience = max(link.connect_patience, patience)
            link.deadline = max(link.deadline, self._clock() + patience)
            transport.connect(endpoint, connected)
        except Exception as error:  # a peer's endpoint may be anything; it must not stall us
            logger.exception("peer=%s transport=%s cannot be dialled", link.target, transport.name)
            connected(TransportError(f"{transport.name}: {error!r}"))

    def _connected(
        self,
        link: Link,
        transport: Transport,
        outcome: Channel | TransportError,
        last: TransportError | None,
    ) -> None:
        if isinstance(outcome, TransportError):
            level = logging.WARNING if isinstance(outcome, WritesLost) else logging.INFO
            text = "peer=%s transport=%s not usable: %s"
            logger.log(level, text, link.target, transport.name, outcome)
            was_interrupted = isinstance(last, ConnectionInterrupted)
            self._connect(link, link.untried, last if was_interrupted else outcome)
            return
        link.channel, link.transport, link.connecting = outcome, transport, False
        link.connected, link.connect_at = True, self._clock() + self._config.retry_seconds
        outcome.watch(lambda error: self._later(lambda: self._channel_broken(outcome, error)))
        logger.info("link ready: peer=%s transport=%s", link.target, transport.name)
        for_each(self.listeners, lambda listener: listener.channel_ready(link))
        for twin in self._twins(link):
            self._open_channel(twin)

    def _not_connected(self, link: Link, error: PeerError | TransportError) -> None:
        """Report that no channel could be made. If there was one before, or the connection was
        interrupted, it may work later, so the error is a TransportError then; only another first
        failure concerns the two peers."""
        link.connect_at = self._clock() + self._config.retry_seconds
        self._lose_channel(link, TransportError(str(error)) if link.connected else error)

    def _channel_broken(self, channel: Channel | None, error: TransportError) -> None:
        everybody = self._links.values() if channel is not None else ()
        links = [link for link in everybody if link.channel is channel]

        def lose() -> None:
            for link in links:
                link.is_losing = False
                if link.state is not LinkState.CLOSED:
                    self._lose_channel(link, error)

        for link in links:
            logger.info("channel broken: peer=%s reason=%s", link.target, named(error))
            link.is_losing = True
            self._close_channel(link, lose if link is links[-1] else lambda: None)

    def _lose_channel(self, link: Link, error: P2pError) -> None:
        link.data = link.connecting = link.asking = False
        for_each(self.listeners, lambda listener: listener.channel_lost(link, error))

    def _later(self, step: Callable[[], None]) -> None:
        def locked() -> None:
            with self._lock:
                step()

        self._control.call_soon(locked)
