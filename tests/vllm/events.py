"""vLLM's KV events: the setting that lets an instance publish them."""

from __future__ import annotations

import json

from tests.ports import free_port


def events_config() -> str:
    """Let vLLM publish its events at two free ports."""
    return json.dumps({
        "enable_kv_cache_events": True, "endpoint": f"tcp://*:{free_port()}",
        "replay_endpoint": f"tcp://*:{free_port()}",
    })  # fmt: skip
