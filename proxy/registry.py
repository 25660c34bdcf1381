"""Registry: which instances live, which may be used, and what each is doing.

Pure: heartbeats, probe results and the time come from outside.
"""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from p2p_engine.errors import P2pError, RemoteProtocolError
from p2p_engine.request_ids import ProxyId, parse_proxy_id
from proxy.breaker import Breaker

if TYPE_CHECKING:
    from collections.abc import Callable

    from p2p_engine.messages import Heartbeat

# An instance may announce any interval, but not one that makes it immortal.
INTERVAL_BOUNDS_SECONDS = (0.05, 30.0)
# So many probes in a row may go unanswered before an instance that was ready is not any more.
PATIENCE = 3


class Role(enum.Enum):
    """What an instance can do for a request; the value is its letter in a heartbeat."""

    PREFILL = "P"
    DECODE = "D"

    @property
    def label(self) -> str:
        """The role's name in answers, logs and metrics."""
        return self.name.lower()


class RegistryFull(P2pError):
    """No more instances are taken; the message has the limit."""


@dataclass(frozen=True)
class Identity:
    """What makes an incarnation: if any of it changes at an address, that is a new instance."""

    http_address: str
    zmq_address: str
    protocol: int | None
    epoch: int
    model: str
    tp_size: int
    send_type: str


@dataclass(eq=False)
class Instance:
    """One incarnation of one instance. Its counts die with it, never before its last leg ends."""

    identity: Identity
    expires: dict[Role, float] = field(default_factory=dict)
    last_beat: float = 0.0
    # Nobody has seen it ready yet, so its patience is used up from the start.
    missed_probes: int = PATIENCE
    in_flight: dict[Role, int] = field(default_factory=lambda: dict.fromkeys(Role, 0))
    # The estimated tokens of all legs in flight, of either role.
    load: int = 0
    breakers: dict[Role, Breaker] = field(
        default_factory=lambda: {role: Breaker() for role in Role}
    )
    # When it was last chosen, in turns of the registry: breaks ties between equal loads.
    last_turn: int = 0

    @property
    def is_idle(self) -> bool:
        """No leg is in flight."""
        return not any(self.in_flight.values())

    @property
    def is_ready(self) -> bool:
        """Its HTTP server answered 200 and has not failed since."""
        return self.missed_probes < PATIENCE

    def has_role(self, role: Role, now: float) -> bool:
        """Tell whether it announced this role and is not overdue."""
        return now < self.expires.get(role, now)

    def is_alive(self, now: float) -> bool:
        """Tell whether it has any role."""
        return any(self.has_role(role, now) for role in Role)

    def is_routable(self, role: Role, now: float) -> bool:
        """Tell whether a leg of this role may be sent to it: it beats, its server answers, and
        its last legs did not fail."""
        return self.is_ready and self.has_role(role, now) and self.breakers[role].allows(now)

    def record_answer(self, status: int) -> None:
        """Note what its `/health` answered."""
        self.missed_probes = 0 if status == 200 else PATIENCE

    def record_silence(self) -> None:
        """Note a probe that was not answered in time: it may only be busy."""
        self.missed_probes += 1

    def record_unreachable(self) -> None:
        """Note that no connection to it can be made: it is not ready until a probe succeeds."""
        self.missed_probes = PATIENCE


class Leg:
    """One request's use of one instance: counted from the choice until `release`."""

    def __init__(
        self, instance: Instance, role: Role, num_tokens: int, on_release: Callable[[], None]
    ) -> None:
        self.instance = instance
        self.role = role
        self.breaker = instance.breakers[role]
        self._num_tokens = num_tokens
        self._on_release = on_release
        self._decides = self.breaker.begin()
        self._is_released = False
        instance.in_flight[role] += 1
        instance.load += num_tokens

    def release(self) -> None:
        """Stop counting; idempotent."""
        if self._is_released:
            return
        self._is_released = True
        self.instance.in_flight[self.role] -= 1
        self.instance.load -= self._num_tokens
        if self._decides:
            self.breaker.give_up()
        self._on_release()


class Registry:
    """All instances by HTTP address. num_instances <= max_instances at any time."""

    def __init__(
        self,
        *,
        missed_beats: int = 3,
        max_instances: int = 256,
        breaker_failures: int = 5,
        breaker_seconds: float = 30.0,
    ) -> None:
        self._missed_beats = missed_beats
        self._max_instances = max_instances
        self._breaker_failures = breaker_failures
        self._breaker_seconds = breaker_seconds
        # Called when an instance may have room, or may have become ready.
        self.on_room: Callable[[], None] = lambda: None
        self._by_address: dict[str, Instance] = {}
        self._turns = itertools.count(1)

    def observe(self, beat: Heartbeat, now: float) -> tuple[Instance, bool]:
        """Take in a heartbeat; return its instance and whether it is a new incarnation.

        Raises:
            RemoteProtocolError: a role or an address that cannot be.
            RegistryFull: it would be one instance too many.
        """
        roles = _roles(beat)
        identity = _identity(beat)
        instance = self._by_address.get(identity.http_address)
        is_new = instance is None or instance.identity != identity
        if instance is None or is_new:
            instance = self._add(identity, now)
        lifetime = self._lifetime(beat.interval)
        for role in roles:
            instance.expires[role] = now if beat.leaving else now + lifetime
        instance.last_beat = now
        return instance, is_new

    def instances(self) -> list[Instance]:
        """Return all that are known, ready or not."""
        return list(self._by_address.values())

    def is_current(self, instance: Instance) -> bool:
        """Tell whether this incarnation is still the one at its address."""
        return self._by_address.get(instance.identity.http_address) is instance

    def sweep(self, now: float) -> None:
        """Forget the expired. One with legs in flight stays, so that it keeps its counts if the
        heartbeats were only held up."""
        for address, instance in list(self._by_address.items()):
            if not instance.is_alive(now) and instance.is_idle:
                del self._by_address[address]

    def take_leg(self, instance: Instance, role: Role, num_tokens: int = 1) -> Leg:
        """Count one more leg on an instance, until the leg is released."""
        instance.last_turn = next(self._turns)
        return Leg(instance, role, num_tokens, lambda: self.on_room())

    def _add(self, identity: Identity, now: float) -> Instance:
        self.sweep(now)
        others = len(self._by_address) - (identity.http_address in self._by_address)
        if others >= self._max_instances:
            raise RegistryFull(f"{others} instances are registered; at most {self._max_instances}")
        breakers = {role: Breaker(self._breaker_failures, self._breaker_seconds) for role in Role}
        instance = self._by_address[identity.http_address] = Instance(identity, breakers=breakers)
        return instance

    def _lifetime(self, interval: float) -> float:
        low, high = INTERVAL_BOUNDS_SECONDS
        return (self._missed_beats + 1 / 3) * min(max(interval, low), high)


def _roles(beat: Heartbeat) -> list[Role]:
    roles = [role for role in Role if role.value in beat.type]
    if "".join(role.value for role in roles) != beat.type or not roles:
        raise RemoteProtocolError(f"type is {beat.type!r}; allowed: P, D or PD")
    return roles


def _identity(beat: Heartbeat) -> Identity:
    for address in (beat.http_address, beat.zmq_address):
        if not _is_address(address):
            raise RemoteProtocolError(f"{address!r} is not host:port")
    return Identity(
        beat.http_address,
        beat.zmq_address,
        beat.protocol,
        beat.epoch,
        beat.model,
        beat.tp_size,
        beat.send_type,
    )


def _is_address(address: str) -> bool:
    """Only what comes through a request id unharmed can name an instance."""
    return parse_proxy_id(str(ProxyId(address, address, "0" * 32))) is not None
