"""Groups: layers that share a block table. What vLLM has made of the model's layers, and which of a
group's blocks a request needs; what cannot be moved is refused by name.

The layers of a draft, with which vLLM speculates, are a group of their own, whatever their table:
peers may lack them, and no token depends on them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from p2p_engine.connector import compat
from p2p_engine.connector.layer_group import LayerGroup
from p2p_engine.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

logger = logging.getLogger(__name__)

SUPPORTED = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)
DRAFT_PREFIXES = {"draft_model", "mtp", "eagle_layers"}  # where vLLM does not go on counting
PLAIN_QUANTISATION = ("NONE", "FP8_PER_TENSOR")  # no scales beside the values


def layer_groups(kv_cache_config: KVCacheConfig) -> list[LayerGroup]:
    """Return vLLM's groups, one for each block table, whatever they keep."""
    return [
        _read_group(group, table, tuple(group.layer_names), number=table)
        for table, group in enumerate(kv_cache_config.kv_cache_groups)
    ]


def attention_groups(
    kv_cache_config: KVCacheConfig, is_draft: Callable[[str], bool] = lambda name: False
) -> list[LayerGroup]:
    """Return the groups of all layers, once they are known to be such that can be transferred; last
    come those of a draft, unless these cannot be.

    Raises:
        ConfigError: there is none, or one of a kind that cannot be transferred.
    """
    tables = kv_cache_config.kv_cache_groups
    groups = _split(tables, lambda name: not is_draft(name), first_number=0)
    if not groups:
        raise ConfigError("the model keeps no KV cache")
    if not names_lost_blocks(layer_groups(kv_cache_config)) and not compat.HAS_FAILED_REQUESTS:
        raise ConfigError("several groups of layers, or a sliding window, need vLLM 0.30 or newer")
    try:
        drafts = _split(tables, is_draft, first_number=len(groups))
    except ConfigError as error:
        logger.info("the draft's layers are not transferred: %s", error)
        return groups
    return groups + [replace(group, is_draft=True) for group in drafts]


def numbers_in(name: str) -> tuple[int, ...]:
    """The place of a layer in its model, which vLLM writes into its name."""
    return tuple(int(word) for word in name.split(".") if word.isdecimal())


def is_draft_layer(vllm_config: VllmConfig, name: str) -> bool:
    """Whether a layer is a draft's: vLLM numbers these after the model's own, or adds a prefix."""
    if vllm_config.speculative_config is None:
        return False
    num_layers = vllm_config.model_config.model_arch_config.total_num_hidden_layers
    is_behind = any(number >= num_layers for number in numbers_in(name))
    return is_behind or not DRAFT_PREFIXES.isdisjoint(name.split("."))


def names_lost_blocks(groups: Sequence[LayerGroup]) -> bool:
    """Whether vLLM can go on behind a block that did not arrive.

    It cannot where a block's id is not that of one group's block only, nor where the blocks before
    it are those of a window that ends elsewhere.
    """
    return len(groups) == 1 and not groups[0].window


def _split(
    tables: Sequence[KVCacheGroupSpec], is_wanted: Callable[[str], bool], first_number: int
) -> list[LayerGroup]:
    """The wanted layers of each table that has any; a table of other stages' layers counts."""
    groups: list[LayerGroup] = []
    for table, group in enumerate(tables):
        names = tuple(name for name in group.layer_names if is_wanted(name))
        if names or (not group.layer_names and not first_number):
            for spec in _specs_of(group, names):
                _check_kind(spec)
            groups.append(_read_group(group, table, names, number=first_number + len(groups)))
    return groups


def _read_group(
    group: KVCacheGroupSpec, table: int, names: tuple[str, ...], *, number: int
) -> LayerGroup:
    spec = _specs_of(group, names)[0]
    return LayerGroup(number, names, cast("AttentionSpec", spec), _window_of(spec), table)


def _specs_of(group: KVCacheGroupSpec, names: Sequence[str]) -> list[KVCacheSpec]:
    """What these of a group's layers keep; of all of them, where none of these is known."""
    spec = group.kv_cache_spec
    if not isinstance(spec, UniformTypeKVCacheSpecs):
        return [spec]
    found = [spec.kv_cache_specs[name] for name in names if name in spec.kv_cache_specs]
    return found or [*spec.kv_cache_specs.values()]


def _check_kind(spec: KVCacheSpec) -> None:
    # Exactly these: a subclass may free other blocks, or keep more than K and V.
    if type(spec) not in SUPPORTED:
        raise ConfigError(
            f"a KV cache of kind {type(spec).__name__} is not supported; supported: "
            f"{', '.join(kind.__name__ for kind in SUPPORTED)}"
        )
    quantisation = getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE")
    if quantisation not in PLAIN_QUANTISATION:
        raise ConfigError(
            f"a KV cache that is quantised as {quantisation} has scales of its own, which are "
            f"not transferred; supported: {', '.join(PLAIN_QUANTISATION)}"
        )


def _window_of(spec: object) -> int:
    """Tokens that vLLM keeps for the layers; more than they look at, where a draft needs them."""
    if not isinstance(spec, SlidingWindowSpec):
        return 0
    return spec.sliding_window + spec.extra_retained_tokens
