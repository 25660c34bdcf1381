"""Instance: one vLLM server as the proxy knows it, its roles, and the legs that it runs."""

from __future__ import annotations

import enum
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proxy.fleet.breaker import Breaker

if TYPE_CHECKING:
    from collections.abc import Callable

# So many probes in a row may go unanswered before an instance that was ready is not any more.
PATIENCE = 3
# So many that had a name before are remembered.
MAX_REPLACED = 64
# Instances come and go at other addresses; what came from so many is not remembered any more.
MAX_SOURCES = 1024


class Role(enum.Enum):
    """What an instance can do for a request; the value is its letter in a heartbeat."""

    PREFILL = "P"
    DECODE = "D"

    # There is one of each, and they are keys on the way of every request.
    __hash__ = object.__hash__

    @property
    def label(self) -> str:
        """The role's name in answers, logs and metrics."""
        return self.name.lower()


@dataclass(frozen=True)
class Identity:
    """What makes an incarnation: if any of it changes at an address, that is a new instance.

    `zmq_address` and `model` are empty where nobody has told us.
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
        """What it is known by: its HTTP address, and its rank where that has several."""
        return self.http_address if self.dp_rank is None else f"{self.http_address}#{self.dp_rank}"


@dataclass(eq=False)
class Instance:
    """One incarnation of one instance. Its counts die with it, never before its last leg ends."""

    identity: Identity
    expires: dict[Role, float] = field(default_factory=dict)
    # None for one that was added by hand and is not expected to beat.
    last_beat: float | None = None
    # Seconds after its last heartbeat in which it is taken to live.
    lifetime: float = math.inf
    # While it drains it gets nothing new; what still runs there then counts as its own affair.
    drains_until: float | None = None
    # Nobody has seen it ready yet, so its patience is used up from the start.
    missed_probes: int = PATIENCE
    in_flight: dict[Role, int] = field(default_factory=lambda: dict.fromkeys(Role, 0))
    # The estimated tokens of all legs in flight, of either role.
    load: int = 0
    breakers: dict[Role, Breaker] = field(
        default_factory=lambda: {role: Breaker() for role in Role}
    )
    # The events of its streams that clients got: one is about one token.
    num_events: int = 0
    # What its heartbeats say; and, of a decode instance, the bytes of KV that it used, by the
    # prefill instance from which they came.
    kv_bytes_per_token: int = 0
    kv_bytes_from: Counter[str] = field(default_factory=Counter)
    # Who had the name before it, the last first: who beats again lives, and has no right to it.
    replaced: tuple[Identity, ...] = ()
    # When it was last chosen, in turns of the registry: breaks ties between equal loads.
    last_turn: int = 0

    def count_kv(self, prefill: Instance, num_tokens: int) -> None:
        """Count the KV of so many tokens that came from another instance."""
        if len(self.kv_bytes_from) > MAX_SOURCES:
            self.kv_bytes_from.clear()
        nbytes = num_tokens * prefill.kv_bytes_per_token
        self.kv_bytes_from[prefill.identity.name] += nbytes

    @property
    def is_idle(self) -> bool:
        """No leg is in flight."""
        return not any(self.in_flight.values())

    @property
    def may_serve_any(self) -> bool:
        """Somebody added it who knows what model it serves, and did not tell us."""
        return self.last_beat is None and not self.identity.model

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
        """Tell whether a leg of this role may be sent to it: it beats, its server answers, it does
        not drain, and its last legs did not fail."""
        return (
            now < self.expires.get(role, now)
            and self.missed_probes < PATIENCE
            and self.drains_until is None
            and self.breakers[role].allows(now)
        )

    def is_drained(self, now: float) -> bool:
        """Tell whether it was told to drain, and has or should have."""
        return self.drains_until is not None and (self.is_idle or now >= self.drains_until)

    def state(self, now: float) -> str:
        """Return `ready`, `not_ready`, `draining`, `drained` or `gone`."""
        if not self.is_alive(now):
            return "gone"
        if self.drains_until is not None:
            return "drained" if self.is_drained(now) else "draining"
        return "ready" if self.is_ready else "not_ready"

    def pin(self, roles: list[Role]) -> None:
        """Give it roles that no silence takes away: it sends no heartbeats."""
        self.expires = dict.fromkeys(roles, math.inf)

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
