"""The vLLM connector: the only code of this package that imports vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2p_engine.connector.connector import P2pNcclConnector

__all__ = ["P2pNcclConnector", "register"]

NAME = "P2pNcclConnector"
_MODULE = "p2p_engine.connector.connector"


def register() -> None:
    """Make `"kv_connector": "P2pNcclConnector"` known to vLLM, which calls this in every process.

    Idempotent, and loads nothing but vLLM's registry.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, _MODULE, NAME)


def __getattr__(name: str) -> Any:
    """Load the connector on first use, so that `kv_connector_module_path` works with this name."""
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from p2p_engine.connector.connector import P2pNcclConnector

    return P2pNcclConnector
