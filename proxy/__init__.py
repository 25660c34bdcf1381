"""HTTP router for prefill and decode instances: one event loop, no threads, no torch."""

from proxy.app import create_app
from proxy.config import ProxyConfig

__all__ = ["ProxyConfig", "create_app"]
