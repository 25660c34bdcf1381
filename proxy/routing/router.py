"""Router: chooses a prefill and a decode instance for each request, with one policy per role."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from p2p_engine.errors import ConfigError, P2pError
from proxy.fleet.instances import Instance, Role
from proxy.fleet.registry import Registry
from proxy.routing.policies import POLICIES, num_new_tokens
from proxy.routing.prefix_tree import PrefixTree

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from proxy.config import ProxyConfig
    from proxy.openai.prompt import Prompt

TIDY_SECONDS = 0.2
_AT_LIMIT = "every instance that could serve the request is at its limit"
_BY_LOAD = attrgetter("load", "last_turn")


@dataclass(eq=False)
class InstancePair:
    """The two instances of one request, and the estimated tokens of each leg.

    If `prefill` is None, decode computes the prompt itself.
    """

    prefill: Instance | None
    decode: Instance
    prefill_tokens: int
    decode_tokens: int

    @property
    def is_old_wire(self) -> bool:
        """Tell whether both use the old wire: they read addresses from the request id only."""
        return self.decode.identity.protocol is None


class NoInstance(P2pError):
    """No pair exists; `missing` lists the roles that no instance can take.

    `breaker_seconds`: until the first of the breakers that are in the way is half open; 0 if none
    is.
    """

    def __init__(self, message: str, missing: list[Role], breaker_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.missing = missing
        self.breaker_seconds = breaker_seconds


class Busy(P2pError):
    """All instances that could serve the request are at their limit."""


class Router:
    """Chooses pairs. Only `tidy` awaits; all other methods are quick and run for each request."""

    def __init__(
        self, config: ProxyConfig, registry: Registry, clock: Callable[[], float], rng: Random
    ) -> None:
        """Create both policies.

        Raises:
            ConfigError: a policy's name is unknown.
        """
        self._registry = registry
        self._clock = clock
        self._bypass_tokens = config.bypass_tokens
        self._max_legs = config.max_in_flight_per_instance
        self._tree = PrefixTree[Instance](config.max_prefix_blocks)
        names = {Role.PREFILL: config.prefill_policy, Role.DECODE: config.decode_policy}
        for role, name in names.items():
            if name not in POLICIES:
                allowed = ", ".join(POLICIES)
                raise ConfigError(f"{role.label}_policy is {name!r}; allowed: {allowed}")
        self._policies = {role: POLICIES[names[role]](rng, self._tree) for role in Role}
        self.num_alone = 0  # choices without prefill, because none had decode's weights
        has_readers = any(policy.uses_tree for policy in self._policies.values())
        self._keeps_tree = has_readers or config.bypass_tokens > 0

    def choose(self, prompt: Prompt, excluded: Collection[Instance] = ()) -> InstancePair:
        """Choose a decode instance, and a prefill instance that can send to it.

        Decode is chosen first because it is the longer work. The other order would fail where every
        instance has both roles: one would get all prefills, and its partner all decodes.

        If any instance announces the model, only instances of that model are candidates, plus those
        that were added by hand without a model. If none announces it (a LoRA adapter, an alias),
        all are candidates, because the instances themselves know what they serve.

        Where no pair has equal weights, decode computes the prompt: its engine would refuse the KV.

        Raises:
            NoInstance: no pair exists; names the missing roles.
            Busy: a pair exists, but its instances are at their limit.
        """
        candidates, now = self._candidates(prompt.model, excluded), self._clock()
        prefills, free_prefills = self._able(candidates, Role.PREFILL, now)
        decodes, free_decodes = self._able(candidates, Role.DECODE, now)
        if alone := self._need_no_prefill(free_decodes, prefills, prompt):
            return self._alone(self._choose(Role.DECODE, alone, prompt), prompt)
        if paired := _with_partner(free_decodes, free_prefills):
            decode = self._choose(Role.DECODE, paired, prompt)
            partners = [p for p in free_prefills if are_partners(p, decode)]
            return self._together(self._choose(Role.PREFILL, partners, prompt), decode, prompt)
        if _with_partner(decodes, prefills) or self._need_no_prefill(decodes, prefills, prompt):
            raise Busy(_AT_LIMIT)
        unlike = _with_partner(decodes, prefills, can_pair)
        if not unlike:
            raise _no_instance(candidates, prefills, decodes, now)
        alone = [decode for decode in unlike if decode in free_decodes]
        if not alone:
            raise Busy(_AT_LIMIT)
        self.num_alone += 1
        return self._alone(self._choose(Role.DECODE, alone, prompt), prompt)

    def may_pair_soon(self, model: str | None) -> bool:
        """Tell whether no pair can serve this model now, and one could if vLLM was not paused."""
        candidates, now = self._candidates(model, ()), self._clock()

        def has_pair(*, is_soon: bool) -> bool:
            prefills, decodes = (
                [i for i in candidates if i.is_routable(role, now, is_soon=is_soon)]
                for role in Role
            )
            return any(can_pair(p, d) for p in prefills for d in decodes)

        return not has_pair(is_soon=False) and has_pair(is_soon=True)

    @property
    def weighs_prefixes(self) -> bool:
        """Whether it matters who holds how much of a prompt."""
        return self._keeps_tree

    @property
    def num_prefix_blocks(self) -> int:
        """The number of remembered blocks of prompts."""
        return self._tree.num_blocks

    def choose_any(
        self, model: str | None, excluded: Collection[Instance] = ()
    ) -> tuple[Instance, Role]:
        """Choose the least loaded instance of any role, for a request with a single leg.

        Raises:
            NoInstance: no instance is ready.
        """
        now, candidates = self._clock(), self._candidates(model, excluded)
        able = [(i, role) for role in Role for i in self._able(candidates, role, now)[0]]
        if not able:
            raise NoInstance("no instance is ready", list(Role))
        return min(able, key=lambda place: (place[0].load, place[0].last_turn))

    def is_announced(self, model: str | None) -> bool:
        """Tell whether an instance announces this model: then it is no adapter's name."""
        return self._registry.announces(model)

    def line_of(self, model: str | None) -> str | None:
        """Return the model in whose line a request waits: None if no instance announces it."""
        return model if self._registry.announces(model) else None

    async def tidy(self) -> None:
        """Keep the prefix tree within its bounds, until cancelled."""
        while True:
            await asyncio.sleep(TIDY_SECONDS)
            for _ in self._tree.tidy(self._registry.is_current):
                await asyncio.sleep(0)

    def _candidates(self, model: str | None, excluded: Collection[Instance]) -> list[Instance]:
        instances = self._registry.instances()
        if self._registry.announces(model):
            instances = [i for i in instances if i.identity.model == model or i.may_serve_any]
        return [i for i in instances if i not in excluded] if excluded else instances

    def _able(
        self, candidates: list[Instance], role: Role, now: float
    ) -> tuple[list[Instance], list[Instance]]:
        """Return the instances that can take the role's legs, and those of them with room for
        one."""
        able = [instance for instance in candidates if instance.is_routable(role, now)]
        return able, [instance for instance in able if instance.in_flight[role] < self._max_legs]

    def _choose(self, role: Role, candidates: Sequence[Instance], prompt: Prompt) -> Instance:
        in_order = sorted(candidates, key=_BY_LOAD)
        return self._policies[role].choose(in_order, prompt)

    def _need_no_prefill(
        self, decodes: list[Instance], prefills: list[Instance], prompt: Prompt
    ) -> list[Instance]:
        """Return the decode instances that should compute the rest of the prompt themselves: those
        with the weights of a prefill instance, if there are any."""
        if not self._bypass_tokens and not prompt.needs_whole_prompt:
            return []
        decodes = _with_partner(decodes, prefills) or decodes
        if prompt.needs_whole_prompt:
            return decodes
        held = self._tree.match(prompt.blocks)
        limit = self._bypass_tokens
        return [d for d in decodes if num_new_tokens(prompt, d, held) < limit]

    def _together(self, prefill: Instance, decode: Instance, prompt: Prompt) -> InstancePair:
        held = self._tree.match(prompt.blocks) if self._keeps_tree else {}
        num_new = max(1, num_new_tokens(prompt, prefill, held))
        self._remember(prompt, prefill, decode)
        num_tokens = prompt.num_tokens + prompt.num_output_tokens
        return InstancePair(prefill, decode, num_new, num_tokens)

    def _alone(self, decode: Instance, prompt: Prompt) -> InstancePair:
        self._remember(prompt, decode)
        return InstancePair(None, decode, 0, prompt.num_tokens + prompt.num_output_tokens)

    def _remember(self, prompt: Prompt, *instances: Instance) -> None:
        """Record the instances as holders now, because requests with the same prefix may arrive
        earlier."""
        if self._keeps_tree:
            for instance in instances:
                self._tree.insert(prompt.blocks, instance)


def are_partners(prefill: Instance, decode: Instance) -> bool:
    """Tell whether two that `can_pair` have the same weights. An instance that does not say what
    its weights are called matches any."""
    ours, theirs = prefill.weights, decode.weights
    return can_pair(prefill, decode) and (ours == theirs or not (ours and theirs))


def can_pair(prefill: Instance, decode: Instance) -> bool:
    """Tell whether KV can go from one to the other: they understand each other, have the same model
    and are not the same instance.

    An instance that was added by hand without a model matches any model.
    """
    ours, theirs = prefill.identity, decode.identity
    return (
        prefill is not decode
        and ours.understands(theirs)
        and (ours.model == theirs.model or not (ours.model and theirs.model))
    )


def _with_partner(
    decodes: list[Instance],
    prefills: list[Instance],
    are_partners: Callable[[Instance, Instance], bool] = are_partners,
) -> list[Instance]:
    return [d for d in decodes if any(are_partners(p, d) for p in prefills)]


def _breaker_seconds(instances: list[Instance], roles: list[Role], now: float) -> float:
    waits = [i.breakers[role].seconds_open(now) for i in instances for role in roles]
    return min(filter(None, waits), default=0.0)


def _no_instance(
    candidates: list[Instance], prefills: list[Instance], decodes: list[Instance], now: float
) -> NoInstance:
    """Return the error that names what is missing, and when its breakers close."""
    able = ((Role.PREFILL, prefills), (Role.DECODE, decodes))
    missing = [role for role, instances in able if not instances]
    if missing:
        names = " and no ".join(role.label for role in missing)
        message = f"no {names} instance is ready"
    elif len({*prefills, *decodes}) == 1:
        missing = [Role.DECODE]
        message = "only one instance is ready, so no decode instance is left for it"
    else:
        missing = list(Role)
        message = "no ready prefill and decode instance match in protocol and model"
    error = NoInstance(message, missing)
    error.breaker_seconds = _breaker_seconds(candidates, missing, now)
    return error
