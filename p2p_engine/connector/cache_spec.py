"""Reads where vLLM's KV cache lies and what peers must agree on, from what vLLM has resolved.

Strides are read, never assumed; what cannot be moved page by page is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from p2p_engine.errors import ConfigError
from p2p_engine.layout import PagedCache
from p2p_engine.messages import CacheSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def attention_spec(kv_cache_config: KVCacheConfig) -> FullAttentionSpec:
    """Return the one kind of cache that all layers have.

    Raises:
        ConfigError: there are several groups, or one of a kind that is not full attention.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise ConfigError(f"models with several KV cache groups are not supported: {kinds}")
    group = groups[0].kv_cache_spec
    specs = [group]
    if isinstance(group, UniformTypeKVCacheSpecs):
        specs = list(group.kv_cache_specs.values())
    for spec in specs:
        # Exactly these: a subclass may free blocks behind a window, or keep more than K and V.
        if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
            raise ConfigError(
                f"a KV cache of kind {type(spec).__name__} is not supported; sliding windows work "
                "with --disable-hybrid-kv-cache-manager"
            )
    return cast("FullAttentionSpec", specs[0])


def read_cache(kv_caches: dict[str, torch.Tensor], num_blocks: int) -> PagedCache:
    """Describe the layers' tensors, blocks first, as pages of vLLM's blocks.

    A backend may cut one of vLLM's blocks into several smaller ones, which then lie side by side.

    Raises:
        ConfigError: the cache is not on the CPU, or a block's bytes do not lie together.
    """
    addresses, strides, pages = [], [], []
    for name, tensor in kv_caches.items():
        if tensor.data_ptr() in addresses:  # layers that share one cache
            continue
        if tensor.device.type != "cpu":
            raise ConfigError(f"the KV cache is on {tensor.device}; supported: cpu")
        page_bytes = tensor[0].numel() * tensor.element_size()
        stride_bytes = tensor.stride(0) * tensor.element_size()
        num_parts, rest = divmod(tensor.shape[0], num_blocks)
        if rest or not num_parts or (num_parts > 1 and stride_bytes != page_bytes):
            raise ConfigError(
                f"layer {name}: {tensor.shape[0]} blocks of stride {stride_bytes} bytes cannot be "
                f"read as {num_blocks} blocks"
            )
        if not _is_dense(tensor[0]):
            raise ConfigError(
                f"layer {name}: a block's bytes are scattered (shape {tuple(tensor.shape)}, "
                f"strides {tensor.stride()}); use a layout such as VLLM_KV_CACHE_LAYOUT=LBHNC"
            )
        addresses.append(tensor.data_ptr())
        strides.append(stride_bytes * num_parts)
        pages.append(page_bytes * num_parts)
    return PagedCache(
        np.array(addresses, np.int64), np.array(strides, np.int64), np.array(pages, np.int64),
        num_blocks,
    )  # fmt: skip


def read_spec(
    vllm_config: VllmConfig, spec: FullAttentionSpec, cache: PagedCache, layers: Iterable[str]
) -> CacheSpec:
    """Say what two instances must have in common before a byte moves."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    return CacheSpec(
        model=model.model,
        revision=model.revision or "",
        dtype=f"{spec.dtype}".removeprefix("torch."),
        block_size=spec.block_size,
        num_layers=len(cache.page_bytes),
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        layout=vllm_config.cache_config.get_resolved_kv_cache_layout().name,
        packing=_packing(vllm_config, layers),
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        page_bytes=cache.page_bytes.tolist(),
    )


def _packing(vllm_config: VllmConfig, layers: Iterable[str]) -> str:
    """How the bytes inside a block are arranged, as far as shape and dtype do not say it.

    The CPU backend packs keys by instruction set, so that two unlike machines differ.
    """
    context = vllm_config.compilation_config.static_forward_context
    kinds = {str(getattr(context.get(name), "isa", "")) for name in layers}
    kinds |= {vllm_config.cache_config.cache_dtype}
    return f"{current_platform.device_type} {' '.join(sorted(kinds - {''}))}"


def _is_dense(page: torch.Tensor) -> bool:
    """Whether the elements lie side by side, in whatever order."""
    span = 1 + sum(
        (size - 1) * stride for size, stride in zip(page.shape, page.stride(), strict=True)
    )
    return span == page.numel()
