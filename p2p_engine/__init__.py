"""Point-to-point KV-cache transfer between prefill and decode instances."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2p_engine.config import EngineConfig, SendMode
    from p2p_engine.engine import P2pNcclEngine
    from p2p_engine.transfer import Transfer
    from p2p_engine.wire.messages import TransferKey

__all__ = ["EngineConfig", "P2pNcclEngine", "SendMode", "Transfer", "TransferKey"]

_MODULES = {
    "EngineConfig": "p2p_engine.config",
    "P2pNcclEngine": "p2p_engine.engine",
    "SendMode": "p2p_engine.config",
    "Transfer": "p2p_engine.transfer",
    "TransferKey": "p2p_engine.wire.messages",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use, so that the proxy can import messages without torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
