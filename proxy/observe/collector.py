"""Whether the proxy sends spans, and where: an option, the environment, and what is installed."""

from __future__ import annotations

import logging
import os

from proxy.observe.traces import Traces

logger = logging.getLogger(__name__)

EXTRA = "p2p-kv-engine[traces]"
PROTOCOL = "http/protobuf"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def make_traces(endpoint: str, share: float, scheme: str) -> Traces:
    """Make what sends spans if an endpoint is given here or in the environment, else what sends
    none. What is missing for it, or wrong, is logged: the proxy serves without spans, too.
    """
    if _value("OTEL_SDK_DISABLED").lower() == "true":
        return Traces(share)
    if not endpoint and not _is_asked_for():
        return Traces(share)
    try:
        from proxy.observe.spans import SpanTraces

        return SpanTraces(endpoint, share, scheme)
    except ImportError as error:
        logger.warning("no spans are sent: %s; they need pip install '%s'", error, EXTRA)
    except Exception as error:  # noqa: BLE001  # OpenTelemetry raises many kinds for variables
        logger.warning(
            "no spans are sent: a variable OTEL_* cannot be: %s", str(error) or repr(error)
        )
    return Traces(share)


def _is_asked_for() -> bool:
    """Tell whether the environment has an endpoint, and spans can go there."""
    if not any(map(_value, _ENDPOINTS)) or _value("OTEL_TRACES_EXPORTER") not in ("", "otlp"):
        return False
    for name in _PROTOCOLS:
        if protocol := _value(name):
            if protocol != PROTOCOL:
                logger.warning("no spans are sent: %s is %s, not %s", name, protocol, PROTOCOL)
            return protocol == PROTOCOL
    return True


def _value(name: str) -> str:
    return os.environ.get(name, "").strip()
