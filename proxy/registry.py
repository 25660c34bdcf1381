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

if TYPE_CHECKING:
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
        """Tell whether a leg of this role may be sent to it: it beats and its server answers."""
        return self.is_ready and self.has_role(role, now)

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

    def __init__(self, instance: Instance, role: Role, num_tokens: int) -> None:
        self._instance = instance
        self._role = role
        self._num_tokens = num_tokens
        self._is_released = False
        instance.in_flight[role] += 1
        instance.load += num_tokens

    def release(self) -> None:
        """Stop counting; idempotent."""
        if not self._is_released:
            self._is_released = True
            self._instance.in_flight[self._role] -= 1
            self._instance.load -= self._num_tokens


class Registry:
    """All instances by HTTP address. num_instances <= max_instances at any time."""

    def __init__(self, *, missed_beats: int = 3, max_instances: int = 256) -> None:
        self._missed_beats = missed_beats
        self._max_instances = max_instances
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
        return Leg(instance, role, num_tokens)

    def _add(self, identity: Identity, now: float) -> Instance:
        self.sweep(now)
        others = len(self._by_address) - (identity.http_address in self._by_address)
        if others >= self._max_instances:
            raise RegistryFull(f"{others} instances are registered; at most {self._max_instances}")
        instance = self._by_address[identity.http_address] = Instance(identity)
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
