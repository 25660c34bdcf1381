"""Checks at start whether vLLM leaves enough GPU memory for the engine."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from p2p_engine.errors import ConfigError
from p2p_engine.sizing import MIB, Room, device_memory, memory_now

if TYPE_CHECKING:
    from vllm.config import CacheConfig

    from p2p_engine.config import EngineConfig

logger = logging.getLogger(__name__)


def check_room(
    config: EngineConfig,
    cache_config: CacheConfig,
    kv_caches: dict[str, torch.Tensor],
    *,
    receives: bool,
) -> None:
    """Compare the engine's needs with the memory that is left; call it before the engine starts.

    vLLM has allocated its cache by now, and has reserved memory for the graphs that it captures
    later.

    Raises:
        ConfigError: the engine cannot start; the message names vLLM's setting to change.
    """
    needed, (free, total) = device_memory(config, receives=receives), memory_now(config)
    chosen = cache_config.kv_cache_memory_bytes
    utilization = None if chosen else cache_config.gpu_memory_utilization
    cache_bytes = _nbytes(kv_caches)
    reserved = torch.cuda.memory_reserved(config.device_index)  # weights and cache, of vLLM's part
    outside = max(0, total - free - reserved) if reserved >= cache_bytes else 0
    room = Room(total, utilization, chosen or cache_bytes, free, outside)
    left = max(0, room.left_bytes) / MIB
    text = f"GPU memory: the engine takes {needed}, vLLM leaves {left:.0f} MiB"
    if not room.lacking(needed):
        logger.info("%s", text)
    elif needed.at_start > free:
        raise ConfigError(f"{text}: the engine cannot start; {room.advice(needed)}")
    else:
        logger.warning("%s, which may not do for groups; %s", text, room.advice(needed))


def _nbytes(kv_caches: dict[str, torch.Tensor]) -> int:
    """Return the bytes of all caches; several may be in one allocation."""
    storages = (tensor.untyped_storage() for tensor in kv_caches.values())
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
