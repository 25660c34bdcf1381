"""Every field of vLLM's KV cache specs, 0.29 to 0.33: which of them a peer must be told.

A field that decides what a block's bytes mean must be told to the peer, or have the one value that
we can transfer. A field that is not listed here might be such a one, so a cache that has it is
refused. docs/cache.md has the list with the reasons.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from p2p_engine.connector import compat
from p2p_engine.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec

# Fields that the peer is told, and the name in our own description. The order is that of `kind_of`:
# fields that depend on the tensor parallel size or came with a later release are last.
TOLD: Mapping[str, str] = {
    "head_size": "head_size",
    "head_size_v": "shape",
    "dtype": "dtype",
    "kv_quant_mode": "packing",
    "block_size": "block_size",
    "sliding_window": "window",
    "extra_retained_tokens": "window",
    "cache_dtype_str": "packing",
    "num_kv_heads": "num_kv_heads",
    "num_head_slots": "packing",
    "state_content_bytes": "page_bytes",
    "cache_role": "packing",
    "max_tp_shards": "shape",
    "shapes": "packing",
    "dtypes": "packing",
    "mamba_type": "packing",
}
# Fields that only decide where a block is; the strides of its tensor show that.
PLACED = frozenset({"page_size_padded", "alignment", "block_stride_alignment"})
# Fields that decide what vLLM computes and when, but not a block's content.
UNSEEN = frozenset({
    "attention_chunk_size", "non_causal", "non_causal_multi_token_decode", "is_index_group_leader",
    "topk_buffer_width", "storage_block_size", "is_draft", "dcp_sharded",
    "layer_names", "kv_cache_spec", "kv_cache_specs", "is_eagle_group",
    "num_prefill_checkpoint_blocks", "prefill_checkpoint_alignment",
})  # fmt: skip
# Fields of which only these values can be transferred.
ONLY: Mapping[str, tuple[object, ...]] = {
    "tokens_per_state": (1, -1),  # -1: all of them
    "model_version": (None,),
    "host_resident": (False,),
    "enable_kv_transfer": (True,),
    "role": ("default",),
    "mamba_cache_mode": ("none", "align"),
    "num_speculative_blocks": (0,),
    "num_heads": (1,),
    "tp_replicated": (False,),
}
# Kinds of state that are transferred, and the number of parts of each. ReplaySSM adds rings to a
# state, and its place in them is kept elsewhere. Linear attention is not among them: vLLM begins a
# prompt of one token with what its block held before, and prefill's prompts are cut by one.
STATES: Mapping[str, int] = {"MAMBA1": 2, "MAMBA2": 2, "GDN_ATTN": 2, "SHORT_CONV": 1}
PLAIN_QUANTISATION = ("NONE", "FP8_PER_TENSOR")  # no scales beside the values


def check_fields(item: KVCacheSpec | KVCacheGroupSpec) -> None:
    """Check that we know what every field of a spec, or of a group of layers, means.

    Raises:
        ConfigError: a field is not known, or has a value that cannot be transferred.
    """
    for field in dataclasses.fields(item):
        name, value = f"{type(item).__name__}.{field.name}", getattr(item, field.name)
        if field.name not in TOLD.keys() | ONLY.keys() | PLACED | UNSEEN:
            raise ConfigError(
                f"this vLLM's {name} is not known: it may decide what the bytes of a block mean"
            )
        if field.name in ONLY and value not in ONLY[field.name]:
            shown = getattr(value, "value", value)
            raise ConfigError(
                f"a KV cache with {name}={shown!r} is not supported; "
                f"supported: {', '.join(map(repr, ONLY[field.name]))}"
            )
    _check_quantisation(item)
    _check_state(item)


def kind_of(spec: KVCacheSpec) -> tuple[Any, ...]:
    """Return the properties that layers of one table must share to be equal for a peer.

    Kinds sort alike on every rank of every instance, also if an instance lacks some; the longest
    rows come first.
    """
    told = (repr(getattr(spec, name, None)) for name, place in TOLD.items() if place != "window")
    return (-getattr(spec, "head_size", 0), type(spec).__name__, *told)


def _check_quantisation(item: object) -> None:
    quantisation = getattr(getattr(item, "kv_quant_mode", None), "name", "NONE")
    if quantisation not in PLAIN_QUANTISATION:
        raise ConfigError(
            f"a KV cache that is quantised as {quantisation} has scales of its own, which are "
            f"not transferred; supported: {', '.join(PLAIN_QUANTISATION)}"
        )


def _check_state(item: object) -> None:
    told = getattr(item, "mamba_type", None)
    if told is None:
        return
    kind = str(getattr(told, "name", told)).upper()
    if kind not in STATES:
        raise ConfigError(
            f"a state of kind {kind} is not supported; supported: {', '.join(STATES)}"
        )
    if kind == "GDN_ATTN":
        compat.check_delta_nets()
    if (num_parts := len(getattr(item, "shapes", ()))) != STATES[kind]:
        raise ConfigError(
            f"a state of kind {kind} with {num_parts} parts is not supported; "
            f"supported: {STATES[kind]}"
        )
