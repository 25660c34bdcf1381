"""Registry: the instances that are known, and their state.

Pure: heartbeats, probe results and the time come from outside.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import TYPE_CHECKING

from p2p_engine.errors import P2pError, RemoteProtocolError
from p2p_engine.wire.messages import PROTOCOL_VERSION
from proxy.addresses import AllowList, is_address, plain_address
from proxy.fleet.breaker import Breaker
from proxy.fleet.instances import MAX_REPLACED, PAUSED, Identity, Instance, Leg, Role

if TYPE_CHECKING:
    from collections.abc import Callable

    from p2p_engine.wire.messages import Heartbeat

# Announced intervals are clamped to these bounds, so that no instance lives forever.
INTERVAL_BOUNDS_SECONDS = (0.05, 30.0)


class RegistryFull(P2pError):
    """The registry is full; the message states the limit."""


class AddressTaken(RemoteProtocolError):
    """Two live instances claim the same HTTP address; the message names both KV addresses."""


class Registry:
    """All instances by name. Invariant: num_instances <= max_instances."""

    def __init__(
        self,
        *,
        missed_beats: int = 3,
        max_instances: int = 256,
        breaker_failures: int = 5,
        breaker_seconds: float = 30.0,
        allowed: AllowList | None = None,
    ) -> None:
        self._missed_beats = missed_beats
        self._max_instances = max_instances
        self._breaker_failures = breaker_failures
        self._breaker_seconds = breaker_seconds
        self._allowed = allowed or AllowList("")
        # Called when an instance may have room or may have become ready.
        self.on_room: Callable[[], None] = lambda: None
        self._by_name: dict[str, Instance] = {}
        # What an order said of these outlives their registration: the same process may come back.
        self._left: OrderedDict[Identity, Instance] = OrderedDict()
        self._turns = itertools.count(1)

    def observe(self, beat: Heartbeat, now: float) -> tuple[Instance, bool]:
        """Process a heartbeat; return its instance and whether it is a new incarnation.

        Raises:
            RemoteProtocolError: the roles or an address are invalid, or the HTTP address is taken.
            RegistryFull: the instance is new and the registry is full.
        """
        roles = _roles(beat)
        beat.http_address = plain_address(beat.http_address)
        beat.zmq_address = plain_address(beat.zmq_address)
        self._check_address(beat.http_address, is_dialled=True)
        self._check_address(beat.zmq_address, is_dialled=False)
        identity = _identity(beat)
        instance = self._by_name.get(identity.name)
        is_new = instance is None or instance.identity != identity
        if instance is None or is_new:
            instance = self._succeed(instance, identity, now)
        lifetime = instance.lifetime = self._lifetime(beat.interval)
        for role in roles:
            instance.expires[role] = now if beat.leaving else now + lifetime
        instance.last_beat = now
        instance.kv_bytes_per_token = beat.kv_bytes_per_token
        instance.events = beat.events
        instance.has_prefix_cache = beat.has_prefix_cache
        instance.warning = beat.warning
        instance.accept_differences = beat.accept_differences
        instance.weights_changed = beat.weights_changed
        if instance.weights != beat.weights:
            instance.weights = beat.weights
            self.on_room()
        return instance, is_new

    def add(
        self,
        http_address: str,
        roles: list[Role],
        now: float,
        zmq_address: str = "",
        model: str = "",
    ) -> tuple[Instance, bool]:
        """Add an instance by hand, or resume a draining one; return it and whether it is new.

        An instance with heartbeats keeps the roles that it announces. If an instance that was added
        by hand starts to send heartbeats, it expires like any other.

        Raises:
            RemoteProtocolError: an address is invalid or not allowed.
            RegistryFull: the instance is new and the registry is full.
        """
        self._check_address(http_address, is_dialled=True)
        if zmq_address:
            self._check_address(zmq_address, is_dialled=False)
        instance = self._by_name.get(http_address)
        is_new = instance is None
        if instance is None:
            identity = Identity(http_address, zmq_address, PROTOCOL_VERSION, 0, model, 1, "")
            instance = self._add(identity, now)
        if instance.last_beat is None:
            instance.pin(roles)
        instance.drains_until = None
        self.on_room()
        return instance, is_new

    def find(self, name: str) -> Instance | None:
        """Return the instance with this name: "host:port", or "host:port#rank" for a data-parallel
        rank."""
        return self._by_name.get(name)

    def instances(self) -> list[Instance]:
        """Return all registered instances, ready or not."""
        return list(self._by_name.values())

    def announces(self, model: str | None) -> bool:
        """Tell whether any instance announces this model."""
        return any(i.identity.model == model for i in self._by_name.values())

    def is_current(self, instance: Instance) -> bool:
        """Tell whether this incarnation is the registered one of its name."""
        return self._by_name.get(instance.identity.name) is instance

    def excuse(self, seconds: float, now: float) -> None:
        """Extend the expiry of all instances after the proxy itself paused for `seconds`.

        An instance that was alive when the pause began gets `seconds` more, but at most its
        lifetime from now.
        """
        for instance in self._by_name.values():
            for role, expires in instance.expires.items():
                if expires > now - seconds:
                    instance.expires[role] = min(expires + seconds, now + instance.lifetime)

    def sweep(self, now: float) -> None:
        """Remove all instances that have expired or drained."""
        for instance in self.instances():
            self.let_go(instance, now)

    def let_go(self, instance: Instance, now: float) -> None:
        """Remove an instance that has expired, or has drained and sends no heartbeats.

        A draining instance with heartbeats stays, because the next heartbeat would add it again. An
        expired instance with legs in flight stays, so that its counts survive if its heartbeats
        were only delayed.
        """
        is_expired = not instance.is_alive(now) and instance.is_idle
        is_over = is_expired or (instance.last_beat is None and instance.is_drained(now))
        if is_over and self.is_current(instance):
            self._part_with(instance)

    def take_leg(self, instance: Instance, role: Role, num_tokens: int = 1) -> Leg:
        """Count one more leg on an instance, until the leg is released."""
        instance.last_turn = next(self._turns)
        return Leg(instance, role, num_tokens, lambda: self.on_room())

    def _succeed(self, instance: Instance | None, identity: Identity, now: float) -> Instance:
        """Add an incarnation; it replaces `instance`, if there is one.

        Raises:
            AddressTaken: it was replaced before, and its replacement is still alive.
        """
        if instance is None:
            return self._add(identity, now)
        if identity in instance.replaced and instance.is_alive(now):
            raise AddressTaken(
                f"two instances announce {identity.name} as their HTTP server: KV address "
                f"{instance.identity.zmq_address} is taken, {identity.zmq_address} is refused; "
                "set http_host and http_port of each to its own server"
            )
        successor = self._add(identity, now)
        before = [item for item in instance.replaced if item != identity]
        successor.replaced = (instance.identity, *before)[:MAX_REPLACED]
        return successor

    def _check_address(self, address: str, *, is_dialled: bool) -> None:
        if not is_address(address):
            raise RemoteProtocolError(f"{address!r} is not host:port")
        if refusal := self._allowed.refusal(address, is_dialled=is_dialled):
            raise RemoteProtocolError(refusal)

    def _add(self, identity: Identity, now: float) -> Instance:
        others = len(self._by_name) - (identity.name in self._by_name)
        if others >= self._max_instances:
            self.sweep(now)
            others = len(self._by_name) - (identity.name in self._by_name)
        if others >= self._max_instances:
            raise RegistryFull(
                f"{identity.http_address}: {others} instances are registered; "
                f"at most {self._max_instances}"
            )
        if (before := self._by_name.get(identity.name)) is not None:
            self._part_with(before)
        instance = self._left.pop(identity, None)
        if instance is None:
            breakers = {r: Breaker(self._breaker_failures, self._breaker_seconds) for r in Role}
            instance = Instance(identity, breakers=breakers)
        self._by_name[identity.name] = instance
        return instance

    def _part_with(self, instance: Instance) -> None:
        del self._by_name[instance.identity.name]
        if instance.held not in ("", PAUSED):
            self._left[instance.identity] = instance
            if len(self._left) > self._max_instances:
                self._left.popitem(last=False)

    def _lifetime(self, interval: float) -> float:
        low, high = INTERVAL_BOUNDS_SECONDS
        return (self._missed_beats + 1 / 3) * min(max(interval, low), high)


def _roles(beat: Heartbeat) -> list[Role]:
    roles = [role for role in Role if role.value in beat.type]
    if "".join(role.value for role in roles) != beat.type or not roles:
        raise RemoteProtocolError(f"type is {beat.type!r}; allowed: P, D or PD")
    return roles


def _identity(beat: Heartbeat) -> Identity:
    return Identity(
        beat.http_address,
        beat.zmq_address,
        beat.protocol,
        beat.epoch,
        beat.model,
        beat.tp_size,
        beat.send_type,
        beat.dp_rank,
    )
