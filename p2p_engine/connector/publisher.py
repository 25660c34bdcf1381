"""Finds where vLLM's scheduler publishes the KV events of its rank (--kv-events-config)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from p2p_engine.wire.messages import Publisher

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

MAX_TOPIC = 512


def find_publisher(config: VllmConfig) -> Publisher | None:
    """Return the ports of this rank's publisher, as vLLM counts them; None if there is none to
    subscribe to: the events are off, or go to an address that vLLM dials or does not tell."""
    events = config.kv_events_config
    if events is None or not events.enable_kv_cache_events or events.publisher != "zmq":
        return None
    from vllm.distributed.kv_events import ZmqEventPublisher

    rank = config.parallel_config.data_parallel_index
    offset = ZmqEventPublisher.offset_endpoint_port
    port = _port_of(offset(events.endpoint, rank))
    binds = "*" in events.endpoint or "::" in events.endpoint  # vLLM's own rule
    if port is None or not binds or len(events.topic) > MAX_TOPIC:
        logger.warning(
            "the proxy does not hear of KV events: endpoint is %r; write tcp://*:PORT, where PORT "
            "is not 0",
            events.endpoint,
        )
        return None
    return Publisher(port, _port_of(offset(events.replay_endpoint, rank)), events.topic)


def _port_of(endpoint: str | None) -> int | None:
    """Return the port of a TCP endpoint; None if it has none, or if vLLM lets the system choose."""
    number = (endpoint or "").rpartition(":")[2]
    is_port = (endpoint or "").startswith("tcp://") and number.isdecimal()
    return int(number) if is_port and 0 < int(number) < 1 << 16 else None
