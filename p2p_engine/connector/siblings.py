"""The other children of our MultiConnector: refuses those that conflict with us."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.config import get_current_vllm_config_or_none
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from p2p_engine.errors import ConfigError
from p2p_engine.transfer_config import CLASHING, EXTRA, MULTI, TransferConfig, single_connectors

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.base import KVConnectorBaseType


def siblings(ours: KVTransferConfig) -> dict[str, type[KVConnectorBaseType]]:
    """Return the connectors beside us, when vLLM makes us as a worker's part of a MultiConnector.

    It gives us our own settings alone; the whole is in its current configuration, which workers
    have while they make connectors, and schedulers, which are made after them, do not.
    """
    whole = get_current_vllm_config_or_none()
    transfer = whole.kv_transfer_config if whole is not None else None
    if transfer is None or transfer.kv_connector != MULTI:
        return {}
    whole_config = {"kv_connector": MULTI, EXTRA: transfer.kv_connector_extra_config}
    entries = list(single_connectors(whole_config))
    names = [entry["kv_connector"] for entry in entries]
    if ours.kv_connector in names:
        del entries[names.index(ours.kv_connector)]
    return {entry["kv_connector"]: _class_of(entry) for entry in entries}


def check_siblings(classes: Mapping[str, type[KVConnectorBaseType]]) -> None:
    """Refuse connectors that answer requests with the same keys.

    Raises:
        ConfigError: names the first of them.
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


def _class_of(entry: TransferConfig) -> type[KVConnectorBaseType]:
    return KVConnectorFactory.get_connector_class(KVTransferConfig(**entry))
