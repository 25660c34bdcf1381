"""Layers of a cache, on a device or as handles without memory, for a host buffer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

BLOCKS = 12
BLOCK_BYTES = 2 * 2 * (2 * 4 * 6 * 2) + 8 * 4


def layers_on(device: str) -> dict[str, torch.Tensor]:
    """Two layers of heads, one seen as tokens first, whose backend has cut each block in two; and
    one of latents."""
    first = torch.rand(2 * BLOCKS, 2, 4, 6).to(torch.float16)
    second = torch.rand(2 * BLOCKS, 4, 2, 6).to(torch.float16).transpose(1, 2)
    latent = torch.rand(BLOCKS, 4, 2)
    caches = {"a": first, "b": second, "c": latent}
    return {name: tensor.to(device) for name, tensor in caches.items()}


def buffer_config(kv_buffer_device: str, max_model_len: int = 24) -> Any:
    """What `make_host_buffer` reads of vLLM's configuration."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_buffer_device=kv_buffer_device),
        model_config=SimpleNamespace(max_model_len=max_model_len),
        cache_config=SimpleNamespace(block_size=8),
    )


def handles() -> dict[str, torch.Tensor]:
    """Layers on a device whose memory cannot be touched at all."""
    return {name: tensor.to("meta") for name, tensor in layers_on("cpu").items()}
