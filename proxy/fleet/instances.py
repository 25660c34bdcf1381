"""Instance: one vLLM server as the proxy knows it, its roles and its legs in flight."""

from __future__ import annotations

import enum
import math
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from http import HTTPStatus
from typing import TYPE_CHECKING

from p2p_engine.wire.messages import Publisher, understand_each_other
from proxy.fleet.breaker import Breaker

if TYPE_CHECKING:
    from collections.abc import Callable

# An instance that answers so says that it cannot serve, whatever it is asked.
GATEWAY_ERRORS = (
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)
# A ready instance becomes not ready after this many unanswered probes in a row.
PATIENCE = 3
# Why an instance is held for a while; any other reason ends by an order of an operator's alone.
BEING_CHANGED = "its weights are being changed"
PAUSED = "vLLM is paused"  # by whom, and for how long, the proxy does not know
HELD_FOR_A_WHILE = (BEING_CHANGED, PAUSED)
# Earlier incarnations that are remembered for each name.
MAX_REPLACED = 64
# Prefill instances come and go at new addresses; above this many, the counts start again.
MAX_SOURCES = 1024


class Role(enum.Enum):
    """The role of an instance in a request; the value is its letter in a heartbeat."""

    PREFILL = "P"
    DECODE = "D"

    # Members are unique, so identity is enough; dicts with role keys are in the path of every
    # request.
    __hash__ = object.__hash__

    @cached_property
    def label(self) -> str:
        """The role's name in answers, logs and metrics: `prefill` or `decode`."""
        return self.name.lower()


@dataclass(frozen=True)
class Identity:
    """The fields that define an incarnation: if one changes at an address, it is a new instance.

    `zmq_address` and `model` are empty if they are not known.
    """

    http_address: str
    zmq_address: str
    protocol: int | None
    epoch: int
    model: str
    tp_size: int
    send_type: str
    dp_rank: int | None = None  # one of several ranks behind one HTTP address

    @property
    def name(self) -> str:
        """The instance's name: its HTTP address, with "#rank" if several ranks share that
        address."""
        return self.http_address if self.dp_rank is None else f"{self.http_address}#{self.dp_rank}"

    def understands(self, other: Identity) -> bool:
        """Tell whether KV can go between engines of their protocol versions."""
        return understand_each_other(self.protocol, other.protocol)


@dataclass(frozen=True)
class LeftRoles:
    """The roles that an admin left to an instance. Those that it had are `kept`; the others begin
    when its legs of all roles that it lost have ended."""

    roles: frozenset[Role]
    kept: frozenset[Role]


@dataclass(eq=False)
class Instance:
    """One incarnation of an instance. Its counts last until it is removed and its last leg has
    ended."""

    identity: Identity
    expires: dict[Role, float] = field(default_factory=dict)
    # None if it was added by hand and sends no heartbeats.
    last_beat: float | None = None
    # Seconds after its last heartbeat at which it expires.
    lifetime: float = math.inf
    # When its drain ends; it gets no new legs, and legs that outlast the drain are not waited for.
    drains_until: float | None = None
    # None: it takes all the roles that it announces.
    left_roles: LeftRoles | None = None
    # Starts at the limit: a new instance is not ready until a probe succeeds.
    missed_probes: int = PATIENCE
    in_flight: dict[Role, int] = field(default_factory=lambda: dict.fromkeys(Role, 0))
    # The estimated tokens of all legs in flight, of either role.
    load: int = 0
    breakers: dict[Role, Breaker] = field(
        default_factory=lambda: {role: Breaker() for role in Role}
    )
    # Stream events from it that clients received; an event is about one token.
    num_events: int = 0
    # `kv_bytes_per_token` is from its heartbeats. `kv_bytes_from` counts the bytes of KV that it
    # used as a decode instance, by the name of the prefill instance.
    kv_bytes_per_token: int = 0
    kv_bytes_from: Counter[str] = field(default_factory=Counter)
    # Where it publishes its KV events, if it does.
    events: Publisher | None = None
    has_prefix_cache: bool = False
    warning: str = ""  # what it says is wrong with it
    accept_differences: str = ""  # the fields in which its peers may differ
    weights: str = ""  # what its weights are called; "": it does not say
    weights_changed: bool = False  # they may be others than at its start
    # Why it gets no legs though it is ready; and whether vLLM tells if it is paused
    # (VLLM_SERVER_DEV_MODE). None: nobody knows yet.
    held: str = ""
    has_doors: bool | None = None
    # Earlier incarnations of its name, newest first. If one sends a heartbeat while this one is
    # alive, it is refused.
    replaced: tuple[Identity, ...] = ()
    # The registry's sequence number of its last leg; breaks ties between equal loads.
    last_turn: int = 0

    def count_kv(self, prefill: Instance, num_tokens: int) -> None:
        """Count the KV of `num_tokens` tokens that came from `prefill`."""
        if len(self.kv_bytes_from) > MAX_SOURCES:
            self.kv_bytes_from.clear()
        nbytes = num_tokens * prefill.kv_bytes_per_token
        self.kv_bytes_from[prefill.identity.name] += nbytes

    @property
    def is_idle(self) -> bool:
        """Tell whether no leg is in flight."""
        return not any(self.in_flight.values())

    @property
    def may_serve_any(self) -> bool:
        """Tell whether it was added by hand without a model; its user knows which models it
        serves."""
        return self.last_beat is None and not self.identity.model

    @property
    def is_ready(self) -> bool:
        """Tell whether its last `/health` answer was 200 and it has not failed since."""
        return self.missed_probes < PATIENCE

    def has_role(self, role: Role, now: float) -> bool:
        """Tell whether it announced this role and has not expired."""
        return now < self.expires.get(role, now)

    def takes(self, role: Role) -> bool:
        """Tell whether an admin has left it this role, and it has ended what it did in others."""
        given = self.left_roles
        if given is None or role in given.kept:
            return True
        if role not in given.roles:
            return False
        return not any(num for lost, num in self.in_flight.items() if lost not in given.roles)

    def labels(self, now: float) -> list[str]:
        """Return the names of the roles in which it gets legs."""
        return [role.label for role in Role if self.has_role(role, now) and self.takes(role)]

    def assign(self, roles: list[Role]) -> None:
        """Leave it these roles only: from now on it gets no new legs of others."""
        kept = frozenset(role for role in roles if self.takes(role))
        self.left_roles = LeftRoles(frozenset(roles), kept)

    def is_alive(self, now: float) -> bool:
        """Tell whether any of its roles has not expired."""
        return any(self.has_role(role, now) for role in Role)

    def is_routable(self, role: Role, now: float, *, is_soon: bool = False) -> bool:
        """Tell whether a leg of this role may be sent to it; with `is_soon`, now or soon.

        It must be alive, ready, not draining and not held (but for a while), it must take the role,
        and its breaker must allow the leg.
        """
        return (
            now < self.expires.get(role, now)
            and (self.left_roles is None or self.takes(role))
            and self.missed_probes < PATIENCE
            and self.drains_until is None
            and (not self.held or (is_soon and self.held in HELD_FOR_A_WHILE))
            and self.breakers[role].allows(now)
        )

    def is_drained(self, now: float) -> bool:
        """Tell whether it was told to drain, and is idle or out of time."""
        return self.drains_until is not None and (self.is_idle or now >= self.drains_until)

    def state(self, now: float) -> str:
        """Return `ready`, `paused`, `not_ready`, `draining`, `drained` or `gone`."""
        if not self.is_alive(now):
            return "gone"
        if self.drains_until is not None:
            return "drained" if self.is_drained(now) else "draining"
        if not self.is_ready:
            return "not_ready"
        return "paused" if self.held else "ready"

    def pin(self, roles: list[Role]) -> None:
        """Give it roles that never expire, because it sends no heartbeats."""
        self.expires = dict.fromkeys(roles, math.inf)

    def record_answer(self, status: int) -> None:
        """Record the status of a `/health` answer."""
        self.missed_probes = 0 if status == 200 else PATIENCE

    def record_silence(self) -> None:
        """Record a probe that timed out; the instance may only be busy."""
        self.missed_probes += 1

    def is_to_blame_for(self, answered: int) -> bool:
        """Tell whether a failed leg counts for the breaker; `answered` is the status, 0 for none.

        An answer of 500 or 501 may be due to the request: if it counted, one client could shut an
        instance for all. A 500 counts if the last probe of the instance failed, too.
        """
        if answered == HTTPStatus.INTERNAL_SERVER_ERROR:
            return self.missed_probes > 0
        return answered < HTTPStatus.INTERNAL_SERVER_ERROR or answered in GATEWAY_ERRORS

    def record_unreachable(self) -> None:
        """Record a failed connection: the instance is not ready until a probe succeeds."""
        self.missed_probes = PATIENCE


class Leg:
    """One request's use of one instance, counted from the choice until `release`."""

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
        """Stop counting the leg; idempotent."""
        if self._is_released:
            return
        self._is_released = True
        self.instance.in_flight[self.role] -= 1
        self.instance.load -= self._num_tokens
        if self._decides:
            self.breaker.give_up()
        self._on_release()
