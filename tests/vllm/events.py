"""vLLM's KV events: the setting that lets an instance publish them."""

from __future__ import annotations

import json
import socket


def events_config() -> str:
    """Let vLLM publish its events at two free ports."""
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in (one, other)]
    return json.dumps({
        "enable_kv_cache_events": True, "endpoint": f"tcp://*:{ports[0]}",
        "replay_endpoint": f"tcp://*:{ports[1]}",
    })  # fmt: skip
