"""Choice of one prefill and one decode instance for a request; pure."""

from __future__ import annotations

from dataclasses import dataclass

from p2p_engine.errors import P2pError
from proxy.registry import Instance, Role


@dataclass(frozen=True)
class Pair:
    """The two instances of one request."""

    prefill: Instance
    decode: Instance

    @property
    def is_old_wire(self) -> bool:
        """They know no `kv_transfer_params`: only the request id tells them of each other."""
        return self.prefill.identity.protocol is None


class NoInstance(P2pError):
    """No pair can be made; `missing` are the roles that nobody can take."""

    def __init__(self, message: str, missing: list[Role]) -> None:
        super().__init__(message)
        self.missing = missing


def choose_pair(instances: list[Instance], model: str | None, now: float) -> Pair:
    """Choose the least loaded decode instance that has a partner, and its least loaded partner.

    Decode comes first because it is the longer work: where every instance has both roles, the
    other order would prefill on one for ever and pile up all decodes on its partner.

    A model that some instance announces restricts the choice to its instances. One that none
    announces (a LoRA adapter, an alias) does not: the instances themselves know what they serve.

    Raises:
        NoInstance: says which role is missing.
    """
    if any(instance.identity.model == model for instance in instances):
        instances = [instance for instance in instances if instance.identity.model == model]
    prefills = _routable(instances, Role.PREFILL, now)
    decodes = _routable(instances, Role.DECODE, now)
    for decode in decodes:
        for prefill in prefills:
            if are_partners(prefill, decode):
                return Pair(prefill, decode)
    raise _no_instance(prefills, decodes)


def are_partners(prefill: Instance, decode: Instance) -> bool:
    """Tell whether KV can go from one to the other: same wire, same model, not itself."""
    return (
        prefill is not decode
        and prefill.identity.protocol == decode.identity.protocol
        and prefill.identity.model == decode.identity.model
    )


def _routable(instances: list[Instance], role: Role, now: float) -> list[Instance]:
    """Return those that may take a leg of this role: least loaded first, then longest unused."""
    able = (instance for instance in instances if instance.is_routable(role, now))
    return sorted(able, key=lambda instance: (instance.load, instance.last_turn))


def _no_instance(prefills: list[Instance], decodes: list[Instance]) -> NoInstance:
    candidates = ((Role.PREFILL, prefills), (Role.DECODE, decodes))
    missing = [role for role, instances in candidates if not instances]
    if missing:
        names = " and no ".join(role.label for role in missing)
        return NoInstance(f"no {names} instance is ready", missing)
    if len({*prefills, *decodes}) == 1:
        return NoInstance("no decode instance is ready beside the prefill one", [Role.DECODE])
    return NoInstance(
        "no prefill and decode instance that belong together (protocol, model) are ready",
        list(Role),
    )
