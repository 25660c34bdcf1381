"""Whether the proxy sends spans, and where: an option, the environment, and what is installed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from proxy.observe.traces import Traces

logger = logging.getLogger(__name__)

EXTRA = "p2p-kv-engine[traces]"
PROTOCOL = "http/protobuf"
EXPORTER, EXPORTERS = "otlp", "OTEL_TRACES_EXPORTER"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def make_traces(endpoint: str, share: float, scheme: str, is_url: Callable[[str], bool]) -> Traces:
    """Make what sends spans if an endpoint is given here or in the environment, else what sends
    none. What is missing for it, or wrong, is logged: the proxy serves without spans, too.
    `is_url` tells whether an endpoint of the environment can be one.
    """
    if _value("OTEL_SDK_DISABLED").lower() == "true":
        return Traces(share)
    if not endpoint and not _is_asked_for(is_url):
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


def _is_asked_for(is_url: Callable[[str], bool]) -> bool:
    """Tell whether the environment has an endpoint, and spans can go there."""
    endpoint, url = _first(_ENDPOINTS)
    chosen = _value(EXPORTERS)
    if not url or chosen == "none":
        return False
    if chosen and EXPORTER not in [name.strip() for name in chosen.split(",")]:
        return _is_not_sent(EXPORTERS, chosen, EXPORTER)
    if not is_url(url):
        return _is_not_sent(endpoint, url, "http[s]://HOST[:PORT]")
    name, protocol = _first(_PROTOCOLS)
    return protocol in ("", PROTOCOL) or _is_not_sent(name, protocol, PROTOCOL)


def _is_not_sent(name: str, value: str, allowed: str) -> bool:
    logger.warning("no spans are sent: %s is %s, not %s", name, value, allowed)
    return False


def _first(names: tuple[str, ...]) -> tuple[str, str]:
    """Return the first of these variables that says something, and what it says."""
    return next(((name, value) for name in names if (value := _value(name))), ("", ""))


def _value(name: str) -> str:
    return os.environ.get(name, "").strip()
