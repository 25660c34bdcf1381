"""Sessions: the peers that dialled us, from HELLO to their end. links.py is the other direction.

A session is known by its peer's epoch, and answers go over the route of its HELLO. An address
belongs to one session at a time. If another engine says HELLO with the same address, it is the
engine after a restart, or another engine that claims the address. The session is asked (PING). If
its connection has ended, the newcomer replaces it. If it answers, the newcomer is refused.
Otherwise the newcomer waits until the session answers or has been silent for too long.

If a HELLO brings the epoch of a session over another connection, it comes from that engine, which
has a new connection or dialled another of our addresses, or from a stranger that has read the
epoch. The session is asked in the same way. If its connection has ended, or it answers that it said
this HELLO, the session moves to the new connection, and all its transfers continue. If it answers
anything else, the newcomer gets no answer: it repeats its HELLO, and the session is asked again.

A session with nothing open rests, and its peer seldom says PING (links.py). The engine watches a
session if something of it is open here, its connection has ended, another peer claims its place, or
its rest has lasted too long. If a watched session is silent, it is asked (PING); if it does not
answer, it ends. The engine's lock guards everything here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import msgspec

from p2p_engine.bounded import (
    BUDGET_BYTES,
    Budget,
    Index,
    RateLimitedWarnings,
    digest,
    heap_bytes,
    most_peers,
)
from p2p_engine.config import EngineConfig
from p2p_engine.control.plane import ControlPlane
from p2p_engine.control.sockets import Route
from p2p_engine.control.tick_parts import for_each
from p2p_engine.control.timers import Timers
from p2p_engine.errors import PeerLost, PeerRestarted, PeerUnreachable
from p2p_engine.memory.plan import obstacles
from p2p_engine.peers.link import PeerAddress
from p2p_engine.peers.listeners import SessionListener
from p2p_engine.transports.base import Transport
from p2p_engine.wire.messages import (
    OLDEST_VERSION,
    PROTOCOL_VERSION,
    AnyMessage,
    Bye,
    CacheSpec,
    Greet,
    Hello,
    Message,
    Ping,
    Pong,
    Refuse,
    Welcome,
    encode,
    shorten,
)

logger = logging.getLogger(__name__)

MAX_SESSIONS = 4096
NO_ROOM = "there is no memory left to remember the description of another cache"
SESSION_REST_SECONDS = 240.0  # of silence of a resting session; more than links.py:REST_SECONDS


@dataclass
class Session:
    """A peer that dialled us."""

    route: Route
    address: str
    heard_at: float  # by the listening clock
    spec: CacheSpec | None
    challenger: tuple[Route, Hello] | None = None  # another peer that claims its place
    watched_since: float | None = None  # by that clock: earlier silence does not count
    has_gone: bool = False  # its connection has ended


@dataclass(eq=False)
class SharedSpec:
    """The description of a cache that several peers have."""

    spec: CacheSpec | None
    epoch: int  # of the engine that brought it first: it is charged for it
    name: bytes
    nbytes: int
    num_users: int = 0


class SharedSpecs:
    """The descriptions of the peers' caches. Equal ones are one: a fleet has few, of some KiB, but
    a HELLO can bring one of 600 KiB."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._shared: dict[bytes, SharedSpec] = {}

    def share(self, hello: Hello) -> Hello | None:
        """Use the description of a HELLO. Returns as much of the HELLO as a session needs; None if
        there is no room to remember it."""
        name = digest(hello.spec)
        shared = self._shared.get(name)
        if shared is None:
            shared = SharedSpec(hello.spec, hello.source_epoch, name, heap_bytes(hello.spec))
            if not self._budget.take(shared.epoch, shared.nbytes):
                return None
            self._shared[name] = shared
        shared.num_users += 1
        return msgspec.structs.replace(hello, spec=shared.spec, endpoints={})

    def give_back(self, spec: CacheSpec | None) -> None:
        """Use a description no longer."""
        shared = self._shared[digest(spec)]
        shared.num_users -= 1
        if not shared.num_users:
            del self._shared[shared.name]
            self._budget.give_back(shared.epoch, shared.nbytes)


class Sessions:
    """The sessions of one engine, and the terms of their WELCOME."""

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
        largest_landing: int = 0,
    ) -> None:
        """`listening` counts the seconds in which a session could have been heard.
        `largest_landing` is the most bytes that can ever land at once; 0: no limit."""
        self._config = config
        self._control = control
        self._epoch = epoch
        self._spec = spec
        self._largest_landing = largest_landing
        self._transports = transports
        self._lock = lock
        self._listening = listening
        self._step = config.peer_timeout_seconds / 4
        self.listeners: Sequence[SessionListener] = ()
        self.budget = Budget(BUDGET_BYTES)  # of all parts, for all but offered chunks
        self._specs = SharedSpecs(self.budget)
        self._sessions: dict[int, Session] = {}
        self._of_route: Index[Route, int] = Index()
        self._of_address: Index[str, int] = Index()
        self._timers: Timers[int] = Timers()  # by the listening clock
        self._warnings = RateLimitedWarnings(logger, clock)

    def __len__(self) -> int:
        """Return how many sessions there are."""
        return len(self._sessions)

    def on_message(self, route: Route, message: AnyMessage) -> Session | None:
        """Take a message; returns the session if it came from one and is for this engine."""
        epoch = message.source_epoch
        if isinstance(message, Hello):
            self._greet(route, message)
            return None
        if isinstance(message, Ping):
            self._say(route, Pong(self._epoch, epoch))
        session = self._sessions.get(epoch)
        if message.destination_epoch != self._epoch:
            return None  # for a previous engine at this address; PONG names the present one
        if session is None or session.route != route:
            self._control.send(route, encode(Greet(self._epoch, epoch)))
            return None
        session.heard_at, session.has_gone = self._listening(), False
        if session.watched_since is None and not isinstance(message, Ping | Pong):
            self._timers.set(epoch, session.heard_at + self._step)  # it may open something
        if isinstance(message, Pong):
            self._answer_challenger(session, message)
        if isinstance(message, Bye):
            self._end(epoch, PeerLost(f"sender {session.address} is closing"))
        return session

    def reply(self, epoch: int, kind: type[Message], fields: tuple[Any, ...]) -> None:
        """Send a session a message; does nothing if the session has ended."""
        session = self._sessions.get(epoch)
        if session is not None:
            self._say(session.route, kind(self._epoch, epoch, *fields))  # type: ignore[arg-type]

    def _say(self, route: Route, message: AnyMessage) -> None:
        """Send a message. If its connection has ended, this is noticed now at the latest."""

        def over() -> None:
            with self._lock:
                self.connection_ended(route)

        self._control.send(route, encode(message), over)

    def tick(self) -> None:
        """End the sessions that are silent for too long."""
        now = self._listening()
        self._timers.look(now, lambda epoch: self._tick_session(epoch, now))

    def due_at(self, now: float) -> float:
        """Return when the next tick has something to do."""
        # The listening clock is never faster, so nothing is due earlier.
        return now + self._timers.due_at() - self._listening()

    def _tick_session(self, epoch: int, now: float) -> None:
        if epoch not in self._sessions:
            self._forget(epoch)
            return
        session, patience = self._sessions[epoch], self._config.peer_timeout_seconds
        rested_at = session.heard_at + SESSION_REST_SECONDS
        if not self._needs_watch(epoch, session) and now < rested_at:
            session.watched_since = None
            self._timers.set(epoch, rested_at)
            return
        if session.watched_since is None:
            session.watched_since = session.heard_at if now < rested_at else now
        silence = now - max(session.heard_at, session.watched_since)
        if silence >= patience:
            reason = f"sender {session.address} is silent for {silence:.1f} s"
            self._lose(epoch, PeerLost(reason))
            return
        if now - session.heard_at >= 2 * self._step and not session.has_gone:
            number = session.challenger[1].number if session.challenger is not None else 0
            self.reply(epoch, Ping, (number,))
        self._timers.set(epoch, now + min(self._step, patience - silence))

    def _needs_watch(self, epoch: int, session: Session) -> bool:
        return session.has_gone or session.challenger is not None or self._is_used(epoch)

    def _is_used(self, epoch: int) -> bool:
        return any(listener.uses_session(epoch) for listener in self.listeners)

    def _watch(self, epoch: int, session: Session) -> None:
        if session.watched_since is None:
            session.watched_since = self._listening()
            self._timers.set(epoch, session.watched_since + self._step)

    def connection_ended(self, route: Route) -> None:
        """Watch the sessions of a connection that has ended: each comes back on another one, or
        ends."""
        for epoch in self._of_route.get(route):
            self._sessions[epoch].has_gone = True
            self._watch(epoch, self._sessions[epoch])

    def say_goodbye(self) -> None:
        """Tell every session that this engine is closing."""
        for epoch in self._sessions:
            self.reply(epoch, Bye, ())

    def _greet(self, route: Route, hello: Hello) -> None:
        epoch, refusal = hello.source_epoch, self._refusal(hello)
        if refusal:
            self._refuse(route, hello, refusal)
            return
        for other in self._of_route.get(route):
            if other != epoch:
                self._end(other, _restarted(self._sessions[other]))
        claimed = dict.fromkeys([epoch, *self._of_address.get(hello.address)])
        rivals = {name: self._sessions[name] for name in claimed if name in self._sessions}
        rivals = {name: session for name, session in rivals.items() if session.route != route}
        for other, session in rivals.items():
            self._challenge(other, session, route, hello)
        if not rivals:
            self._admit(route, hello)

    def _challenge(self, epoch: int, session: Session, route: Route, hello: Hello) -> None:
        """Ask a session whether it is alive: another connection claims its address or its epoch."""
        shared = self._specs.share(hello)
        if shared is None:
            self._refuse(route, hello, NO_ROOM)
            return
        self._forget_challenger(session)
        session.challenger = route, shared
        self._watch(epoch, session)

        def over() -> None:
            with self._lock:
                if self._sessions.get(epoch) is session:
                    self._make_way(epoch, session, hello)
                    self._greet(route, hello)

        self._control.send(session.route, encode(Ping(self._epoch, epoch, hello.number)), over)

    def _make_way(self, epoch: int, session: Session, hello: Hello) -> None:
        if hello.source_epoch == epoch:
            self._remove(epoch)  # it is admitted again at once, on its new connection
        else:
            self._end(epoch, _restarted(session))

    def _answer_challenger(self, session: Session, message: Pong) -> None:
        if session.challenger is None:
            return
        route, hello = session.challenger
        self._forget_challenger(session)
        if hello.source_epoch == message.source_epoch and hello.number != 0:
            if message.number == hello.number:
                self._make_way(message.source_epoch, session, hello)
                self._greet(route, hello)
            # Else this may answer an older PING. The newcomer repeats its HELLO, and the session is
            # asked again.
        else:
            text = f"{session.address} is the address of another engine, which is alive"
            reason = f"{text}; give each engine a host or a port of its own"
            self._refuse(route, hello, reason)

    def _forget_challenger(self, session: Session) -> None:
        if session.challenger is not None:
            self._specs.give_back(session.challenger[1].spec)
            session.challenger = None

    def _refuse(self, route: Route, hello: Hello, reason: str) -> None:
        self._warnings.warn("peer refused: address=%r reason=%s", hello.address, reason)
        refuse = Refuse(self._epoch, hello.source_epoch, PROTOCOL_VERSION, shorten(reason))
        self._control.send(route, encode(refuse))

    def _admit(self, route: Route, hello: Hello) -> None:
        epoch, shared = hello.source_epoch, self._specs.share(hello)
        if shared is None:
            self._refuse(route, hello, NO_ROOM)
            return
        self._remove(epoch)
        now = self._listening()
        self._sessions[epoch] = Session(route, hello.address, now, shared.spec)
        self._of_route.add(route, epoch)
        self._of_address.add(hello.address, epoch)
        self._timers.set(epoch, now + self._step)
        offers = {transport.name: transport.invite(epoch) for transport in self._transports}
        usable = {name: offer for name, offer in offers.items() if offer is not None}
        lease = min(self._config.lease_seconds, self._config.transfer_timeout_seconds)
        terms = (self._spec, usable, self._config.checksum, self._largest_landing, lease)
        self._say(route, Welcome(self._epoch, epoch, hello.version, *terms))

    def _refusal(self, hello: Hello) -> str:
        """Return why a peer cannot have a session, or ""."""
        # Sessions that ended with something still open have timers, and may keep connections.
        num_peers, most = len(self._timers), most_peers(MAX_SESSIONS)
        if num_peers >= most and hello.source_epoch not in self._sessions:
            ended = f"{num_peers - len(self)} of them ended with something still open"
            return f"{most} peers are here already, {ended}"
        if not OLDEST_VERSION <= hello.version <= PROTOCOL_VERSION:
            return f"protocol version: {PROTOCOL_VERSION} here, {hello.version} there"
        try:
            PeerAddress(hello.address).check()
        except PeerUnreachable as error:
            return str(error)
        return "; ".join(obstacles(self._spec, hello.spec))

    def _lose(self, epoch: int, error: PeerLost) -> None:
        self._remove(epoch)
        for_each(self.listeners, lambda listener: listener.session_lost(epoch, error))
        self._forget(epoch)

    def _forget(self, epoch: int) -> None:
        """Drop the data connections of a sender whose session has ended. Those whose end has to
        prove that nothing is written any more stay until nothing of the sender is open."""
        is_open = self._is_used(epoch)
        for transport in self._transports:
            transport.forget(epoch, may_write=is_open)
        if is_open:
            self._timers.set(epoch, self._listening() + self._step)
        else:
            self._timers.cancel(epoch)

    def _remove(self, epoch: int) -> None:
        session = self._sessions.pop(epoch, None)
        if session is not None:
            self._forget_challenger(session)
            self._specs.give_back(session.spec)
            self._of_route.discard(session.route, epoch)
            self._of_address.discard(session.address, epoch)
            self._timers.cancel(epoch)

    def _end(self, epoch: int, error: PeerLost) -> None:
        self._lose(epoch, error)
        for_each(self.listeners, lambda listener: listener.session_over(epoch, error))


def _restarted(session: Session) -> PeerRestarted:
    return PeerRestarted(f"sender {session.address} was restarted")
