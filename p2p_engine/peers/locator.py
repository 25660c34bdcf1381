"""Locator: asks directories to describe their instances, and remembers the answer until a link to
one of the instance's ranks ends. The engine's lock guards everything here."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from p2p_engine.bounded import RateLimitedWarnings, put_newest
from p2p_engine.config import EngineConfig
from p2p_engine.control.plane import ControlPlane
from p2p_engine.control.sockets import Route
from p2p_engine.errors import (
    AuthenticationFailed,
    P2pError,
    PeerRefused,
    PeerUnreachable,
    RemoteProtocolError,
)
from p2p_engine.memory.plan import obstacles
from p2p_engine.peers.link import InstanceAddress, Link
from p2p_engine.peers.listeners import LinkListener
from p2p_engine.wire.identity import Identity, differences, unpack
from p2p_engine.wire.messages import CacheSpec, Location, Lookup, encode

logger = logging.getLogger(__name__)

MAX_REFUSED = 64  # instances of which the reason is remembered, and logged once
REFUSED_SECONDS = 600.0  # for so long a refusal is shown, after the last time that it was met


@dataclass(frozen=True)
class RefusedInstance:
    """Why an instance is refused, until when that is shown, and whether the log has it."""

    text: str
    until: float
    is_logged: bool


@dataclass(eq=False)
class Inquiry:
    """An instance whose directory has not answered. Each of `told` is called with a spec or the
    error."""

    deadline: float
    told: list[Callable[[CacheSpec | P2pError], None]] = field(default_factory=list)
    resend_at: float = 0.0


class Locator(LinkListener):
    """The instances that this engine has asked about."""

    def __init__(
        self,
        config: EngineConfig,
        control: ControlPlane,
        epoch: int,
        spec: CacheSpec | None,
        identity: Identity,
        clock: Callable[[], float],
    ) -> None:
        """`identity` has the fields of which `spec` has the digest."""
        self._config = config
        self._control = control
        self._epoch = epoch
        self._spec = spec
        self._identity = identity
        self._clock = clock
        self._known: dict[InstanceAddress, CacheSpec] = {}
        self._inquiries: dict[InstanceAddress, Inquiry] = {}
        self._refused: dict[InstanceAddress, RefusedInstance] = {}
        # A peer may say something else each time, or there may be more than are remembered.
        self._warnings = RateLimitedWarnings(logger, clock)

    def ask(self, instance: InstanceAddress, told: Callable[[CacheSpec | P2pError], None]) -> None:
        """Call `told` with one rank's spec of an instance, or the error: now if it is known, else
        later. Never blocks.

        Raises:
            PeerUnreachable: the address is not host:port.
        """
        known = self._known.get(instance)
        if known is not None:
            told(known)
            return
        inquiry = self._inquiries.get(instance)
        if inquiry is None:
            instance.check()
            inquiry = Inquiry(self._clock() + self._config.connect_timeout_seconds)
            self._inquiries[instance] = inquiry
            self._repeat(instance, inquiry)
        inquiry.told.append(told)

    def on_location(self, address: str, message: Location) -> None:
        """Take a directory's answer. It may be the answer to a link's question."""
        instance = InstanceAddress(address)
        if instance not in self._inquiries:
            return
        here, there = self._spec, message.spec
        is_other = bool(here and there and here.identity != there.identity)
        found = obstacles(here, there, fields=self._differing_fields(message) if is_other else ())
        if here and there and not found and here.has_ranks and there.has_ranks:
            self._known[instance] = there
            self._refused.pop(instance, None)
            self._answer(instance, there)
        else:
            text = "; ".join(found) or "neither says how its ranks share a model"
            self._note_refused(instance, text)
            self._answer(instance, PeerRefused(f"peer {instance}: {text}"))

    def _note_refused(self, instance: InstanceAddress, text: str) -> None:
        known = self._refused.get(instance)
        is_logged = known is not None and known.is_logged and known.text == text
        is_logged = is_logged or self._warnings.warn(
            "peer %s is refused, and prompts are computed here: %s", instance, text
        )
        refused = RefusedInstance(text, self._clock() + REFUSED_SECONDS, is_logged)
        put_newest(self._refused, instance, refused, MAX_REFUSED)

    def refused_instances(self) -> dict[str, str]:
        """Return the addresses of the instances that are refused, and why. One that nobody has
        asked for in the last REFUSED_SECONDS may be gone, and is left out."""
        now = self._clock()
        return {each.address: it.text for each, it in self._refused.items() if now < it.until}

    def _differing_fields(self, message: Location) -> list[str]:
        try:
            theirs = unpack(message.identity)
            return differences(self._identity, theirs) if theirs else []
        except RemoteProtocolError as error:
            return [str(error)]

    def refused(self, address: str, reason: str) -> None:
        """Note that a directory breaks our handshakes off."""
        instance = InstanceAddress(address)
        if instance in self._inquiries:
            self._answer(instance, AuthenticationFailed(f"peer {instance}: {reason}"))

    def unresolved(self, address: str, error: PeerUnreachable) -> None:
        """Note that the name in a directory's address does not resolve."""
        instance = InstanceAddress(address)
        if instance in self._inquiries:
            self._answer(instance, PeerUnreachable(f"peer {instance}: {error}"))

    def link_closed(self, link: Link) -> None:
        """Forget an instance: when it comes back, it may be another one."""
        self._known.pop(InstanceAddress(link.target.address), None)

    def tick(self, now: float) -> None:
        """Repeat unanswered questions, and end those that are overdue."""
        for instance, inquiry in list(self._inquiries.items()):
            if now >= inquiry.deadline:
                waited = self._config.connect_timeout_seconds
                reason = f"peer {instance} did not answer within {waited:g} s (LOCATING)"
                self._answer(instance, PeerUnreachable(reason))
            elif now >= inquiry.resend_at:
                self._repeat(instance, inquiry)

    def due_at(self, now: float) -> float:
        """Return when the next tick has something to do; 0 means that each tick has."""
        return 0.0 if self._inquiries else math.inf

    def overdue(self, now: float) -> list[str]:
        """Return the names of the directories that should have answered."""
        late = [address for address, item in self._inquiries.items() if now >= item.deadline]
        return [f"answer of the directory {address}" for address in late]

    def close(self, error: P2pError) -> None:
        """Answer all open questions with an error."""
        for instance in list(self._inquiries):
            self._answer(instance, error)

    def _repeat(self, instance: InstanceAddress, inquiry: Inquiry) -> None:
        inquiry.resend_at = self._clock() + self._config.retry_seconds
        self._control.send(Route(instance.address), encode(Lookup(self._epoch, 0, 0)))

    def _answer(self, instance: InstanceAddress, answer: CacheSpec | P2pError) -> None:
        for told in self._inquiries.pop(instance).told:
            told(answer)
