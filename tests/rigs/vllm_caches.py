"""Caches as vLLM lays them out, its specs of them, and as much of its configuration as is read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from transformers import PreTrainedConfig
from vllm.config import (
    AttentionConfig,
    CacheConfig,
    KernelConfig,
    LoadConfig,
    MambaConfig,
    ModelConfig,
    VllmConfig,
)
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from p2p_engine.connector.cache_spec import read_cache, read_caches
from p2p_engine.connector.layer_group import GroupCache, LayerGroup
from p2p_engine.memory.paged import PagedCache
from p2p_engine.wire.messages import CacheSpec

T = TypeVar("T")
LAYERS, BLOCKS, HEADS, TOKENS, WIDTH = 3, 10, 2, 16, 8
DEPTH = 8  # of a head, where keys and values are described apart
NAMES = [f"layers.{index}" for index in range(LAYERS)]
FULL: dict[str, Any] = {"block_size": TOKENS, "num_kv_heads": HEADS, "dtype": torch.float32}
SPEC = FullAttentionSpec(head_size=WIDTH // 2, **FULL)
WINDOW = SlidingWindowSpec(head_size=WIDTH // 2, sliding_window=64, **FULL)
CHUNKED = ChunkedLocalAttentionSpec(head_size=WIDTH, attention_chunk_size=64, **FULL)
SHAPE = dict(zip("LBHNC", (LAYERS, BLOCKS, HEADS, TOKENS, WIDTH), strict=True))
MLA = MLAAttentionSpec(
    block_size=TOKENS, num_kv_heads=1, head_size=3 * DEPTH, dtype=torch.bfloat16, max_tp_shards=1
)


@dataclass(frozen=True, kw_only=True)
class FutureSpec(FullAttentionSpec):
    """What a later release may do to the spec."""

    swizzle: str = "none"


FUTURE = FutureSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=DEPTH, dtype=torch.bfloat16)


def caches_of(layout: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One allocation in this order, and each layer's view of it: [blocks, heads, tokens, width]."""
    size = [SHAPE[axis] for axis in layout]
    backing = torch.arange(torch.Size(size).numel(), dtype=torch.float32).reshape(size)
    views = backing.permute([layout.index(axis) for axis in "LBHNC"])
    return backing, dict(zip(NAMES, views, strict=True))


def read(views: dict[str, torch.Tensor], num_blocks: int = BLOCKS, **changes: Any) -> PagedCache:
    """Describe one group of all layers."""
    spec = replace(SPEC, block_size=TOKENS * BLOCKS // num_blocks)
    return read_cache(vllm_config(**changes), group_of(spec), views, num_blocks, 0)


def group_of(spec: AttentionSpec) -> LayerGroup:
    """A group of all layers."""
    return LayerGroup(0, tuple(NAMES), spec)


def config_of(*specs: Any) -> KVCacheConfig:
    """A table of all layers for each spec."""
    groups = [KVCacheGroupSpec(NAMES, spec) for spec in specs]
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


def read_all(
    views: dict[str, torch.Tensor], *layer_names: list[str], rank: int = 0, **changes: Any
) -> tuple[CacheSpec, list[GroupCache]]:
    """Describe groups of these layers: the first looks at all tokens, the others at a window."""
    found = [
        LayerGroup(number, tuple(names), WINDOW if number else SPEC, 64 if number else 0, number)
        for number, names in enumerate(layer_names)
    ]
    return read_caches(vllm_config(**changes), found, views, BLOCKS, rank)


def blank(kind: type[T], **values: Any) -> T:
    """An object of vLLM's with its defaults and these values, which vLLM has not looked at."""
    made = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def hf_config_of(name: str) -> PreTrainedConfig:
    """A model's own configuration, which differs by the model's name."""
    made = PreTrainedConfig()
    made.named = name
    return made


def vllm_config(
    *,
    isa: str = "",
    model: str = "m",
    layout: str = "LBHNC",
    tp_size: int = 1,
    cache_dtype: str = "auto",
    num_kv_heads: int = HEADS,
    num_layers: int = LAYERS,
    pp_size: int = 1,
    draft: dict[str, Any] | None = None,
) -> Any:
    """What `read_spec` looks at."""
    resolved = SimpleNamespace(name=layout)
    layers = {name: SimpleNamespace(isa=isa) for name in NAMES}
    return blank(
        VllmConfig,
        kv_transfer_config=SimpleNamespace(kv_buffer_device="cuda"),
        attention_config=AttentionConfig(),
        mamba_config=MambaConfig(),
        kernel_config=KernelConfig(),
        lora_config=None,
        load_config=LoadConfig(),
        model_config=blank(
            ModelConfig,
            hf_config=hf_config_of(model),
            hf_text_config=None,
            hf_overrides={},
            get_total_num_kv_heads=lambda: num_kv_heads,
            model_arch_config=SimpleNamespace(total_num_hidden_layers=num_layers),
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp_size, pipeline_parallel_size=pp_size
        ),
        cache_config=blank(
            CacheConfig, cache_dtype=cache_dtype, get_resolved_kv_cache_layout=lambda: resolved
        ),
        compilation_config=SimpleNamespace(static_forward_context=layers),
        speculative_config=_speculation(draft) if draft else None,
    )


def _speculation(draft: dict[str, Any]) -> Any:
    model = blank(
        ModelConfig,
        hf_config=hf_config_of(draft["model"]),
        hf_text_config=None,
        hf_overrides={},
        get_total_num_kv_heads=lambda: draft["num_kv_heads"],
    )
    return SimpleNamespace(draft_model_config=model)
