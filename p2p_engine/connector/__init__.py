"""The vLLM connector: the only code of this package that imports vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from p2p_engine.transfer_config import CONNECTOR, NIXL_NAME

if TYPE_CHECKING:
    from p2p_engine.connector.connector import P2pNcclConnector

    NixlConnector = P2pNcclConnector

__all__ = ["NixlConnector", "P2pNcclConnector", "register"]

_MODULE = "p2p_engine.connector.connector"


def register() -> None:
    """Make `"kv_connector": "P2pNcclConnector"` known to vLLM, which calls this in every process.

    Idempotent, and loads nothing but vLLM's registry.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, _MODULE, CONNECTOR)


def __getattr__(name: str) -> Any:
    """Load the connector on first use: `kv_connector_module_path` works with its name, and with
    that of vLLM's NixlConnector."""
    if name not in (CONNECTOR, NIXL_NAME):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from p2p_engine.connector.connector import P2pNcclConnector

    return P2pNcclConnector
