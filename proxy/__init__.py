"""HTTP router for prefill and decode instances: one event loop, no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from proxy.app import create_app
    from proxy.config import ProxyConfig

__all__ = ["ProxyConfig", "create_app"]

_MODULES = {"ProxyConfig": "proxy.config", "create_app": "proxy.app"}


def __getattr__(name: str) -> Any:
    """Load a public name on first use, so that a parser process starts quickly and stays small."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
