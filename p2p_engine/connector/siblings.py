"""The other children of the MultiConnector that we are in: which of them cannot be beside us."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.config import get_current_vllm_config_or_none
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from p2p_engine.errors import ConfigError

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.base import KVConnectorBaseType

MULTI = "MultiConnector"
# What they answer when a request finishes has keys that ours has too (remote_host and others), and
# then MultiConnector raises in the scheduler. All others, of 0.29 to 0.33, answer with keys of
# their own or with none. Names of classes; what is derived from them counts.
CLASHING = frozenset({"MoRIIOConnector", "NixlBaseConnector", "P2pNcclConnector"})


def siblings(ours: KVTransferConfig) -> dict[str, type[KVConnectorBaseType]]:
    """Return the connectors beside us, when vLLM makes us as a worker's part of a MultiConnector.

    It gives us our own settings alone; the whole is in its current configuration, which workers
    have while they make connectors, and schedulers, which are made after them, do not.
    """
    whole = get_current_vllm_config_or_none()
    transfer = whole.kv_transfer_config if whole is not None else None
    if transfer is None or transfer.kv_connector != MULTI:
        return {}
    children = list(_children(transfer.kv_connector_extra_config))
    names = [child["kv_connector"] for child in children]
    if ours.kv_connector in names:
        del children[names.index(ours.kv_connector)]
    return {child["kv_connector"]: _class_of(child) for child in children}


def check_siblings(classes: Mapping[str, type[KVConnectorBaseType]]) -> None:
    """Refuse those that answer requests with keys of ours.

    Raises:
        ConfigError: names the first.
    """
    for name, sibling in classes.items():
        if CLASHING.intersection(base.__name__ for base in sibling.__mro__):
            raise ConfigError(
                f"{name} beside P2pNcclConnector in a MultiConnector is not supported: "
                "both put their keys into kv_transfer_params, where vLLM allows each key once"
            )


def has_handshake(sibling: type[KVConnectorBaseType]) -> bool:
    """Whether this class returns handshake metadata, of which vLLM passes on one child's only."""
    theirs = getattr(sibling, "get_handshake_metadata", None)
    return theirs is not KVConnectorBase_V1.get_handshake_metadata


def _children(extra: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of all children, those of children that are such connectors too."""
    connectors: Sequence[Mapping[str, Any]] = extra.get("connectors", ())
    for child in connectors:
        if child.get("kv_connector") == MULTI:
            yield from _children(child.get("kv_connector_extra_config", {}))
        else:
            yield child


def _class_of(child: Mapping[str, Any]) -> type[KVConnectorBaseType]:
    return KVConnectorFactory.get_connector_class(KVTransferConfig(**child))
