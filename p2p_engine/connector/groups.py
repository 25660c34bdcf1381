"""Groups: sets of equal layers that share a block table.

A layer that cannot be transferred is refused by name. vLLM may use one table for layers with
different contents, such as DeepSeek-V3.2's latents and its indexer's keys; each kind is a group of
its own. The layers of a draft model are separate groups, too: peers may lack them, and no token
depends on them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from p2p_engine.connector import compat
from p2p_engine.connector.layer_group import LayerGroup
from p2p_engine.connector.spec_fields import check_fields, kind_of
from p2p_engine.errors import ConfigError
from p2p_engine.wire.messages import MAX_GROUPS

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

logger = logging.getLogger(__name__)

SUPPORTED = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, MambaSpec)
DRAFT_PREFIXES = {"draft_model", "mtp", "eagle_layers"}  # where vLLM does not go on counting


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
        raise ConfigError(
            "several groups of layers, a sliding window, or a state, need vLLM 0.30 or newer"
        )
    # Where vLLM zeroes new blocks, it leaves those out that we fill: no part of one may stay stale.
    if getattr(kv_cache_config, "needs_kv_cache_zeroing", any(item.is_state for item in groups)):
        groups = [replace(group, is_whole=True) for group in groups]
    try:
        drafts = _split(tables, is_draft, first_number=len(groups))
    except ConfigError as error:
        logger.info("the draft's layers are not transferred: %s", str(error))
        return groups
    return groups + [replace(group, is_draft=True) for group in drafts]


def numbers_in(name: str) -> tuple[int, ...]:
    """Return the numbers in a layer's name, by which vLLM states its place in the model."""
    return tuple(int(word) for word in name.split(".") if word.isdecimal())


def is_draft_layer(vllm_config: VllmConfig, name: str) -> bool:
    """Tell whether a layer is a draft's: vLLM numbers these after the model's, or adds a prefix."""
    if vllm_config.speculative_config is None:
        return False
    num_layers = vllm_config.model_config.model_arch_config.total_num_hidden_layers
    is_behind = any(number >= num_layers for number in numbers_in(name))
    return is_behind or not DRAFT_PREFIXES.isdisjoint(name.split("."))


def names_lost_blocks(groups: Sequence[LayerGroup]) -> bool:
    """Tell whether vLLM can continue after a block that did not arrive.

    It cannot if a block id may belong to several groups, if the blocks before it are those of a
    window that ends elsewhere, or if there is one state, of all tokens.
    """
    return len(groups) == 1 and not groups[0].window and not groups[0].is_state


def can_name_lost_blocks(kv_cache_config: KVCacheConfig, groups: Sequence[LayerGroup]) -> bool:
    """Whether vLLM takes the ids of lost blocks: it raises if there is a second table, also where
    only a draft has that."""
    own = [group for group in groups if not group.is_draft]
    return names_lost_blocks(layer_groups(kv_cache_config)) and names_lost_blocks(own)


def _split(
    tables: Sequence[KVCacheGroupSpec], is_wanted: Callable[[str], bool], first_number: int
) -> list[LayerGroup]:
    """The wanted layers of each table that has any, by kind; a table of other stages' layers
    counts."""
    groups: list[LayerGroup] = []
    for table, group in enumerate(tables):
        names = tuple(name for name in group.layer_names if is_wanted(name))
        if not names and (group.layer_names or first_number):
            continue
        check_fields(group)
        for kind in _kinds(group, names):
            groups.append(_read_group(group, table, kind, number=first_number + len(groups)))
            _check_kind(groups[-1].spec)
    if first_number + len(groups) > MAX_GROUPS:
        raise ConfigError(f"{first_number + len(groups)} groups of layers; at most {MAX_GROUPS}")
    return groups


def _kinds(group: KVCacheGroupSpec, names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return these layers of a table, divided into sets of equal layers."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for name in names:
        found.setdefault(kind_of(_spec_of(group, name)), []).append(name)
    return [tuple(found[kind]) for kind in sorted(found)] or [()]


def _spec_of(group: KVCacheGroupSpec, name: str) -> KVCacheSpec:
    """Return the spec of a layer of a table; of an unknown layer, the spec of the first one."""
    spec = group.kv_cache_spec
    if not isinstance(spec, UniformTypeKVCacheSpecs):
        return spec
    check_fields(spec)
    known = spec.kv_cache_specs
    return known[name] if name in known else next(iter(known.values()))


def _read_group(
    group: KVCacheGroupSpec, table: int, names: tuple[str, ...], *, number: int
) -> LayerGroup:
    spec = _spec_of(group, names[0] if names else "")
    return LayerGroup(
        number, names, cast("AttentionSpec | MambaSpec", spec), _window_of(spec), table,
        is_state=isinstance(spec, MambaSpec),
    )  # fmt: skip


def _check_kind(spec: KVCacheSpec) -> None:
    # Exactly these: a subclass may free other blocks, or keep more than K and V.
    if type(spec) not in SUPPORTED:
        raise ConfigError(
            f"a KV cache of kind {type(spec).__name__} is not supported; supported: "
            f"{', '.join(kind.__name__ for kind in SUPPORTED)}"
        )
    check_fields(spec)


def _window_of(spec: object) -> int:
    """Tokens at the end of a prompt that decode's vLLM makes blocks for, the last one included.

    With a draft of several modules it keeps `extra_retained_tokens` more than the layers look at,
    counted from the first token that it computes itself. That one lies as many before the last.
    """
    if not isinstance(spec, SlidingWindowSpec):
        return 0
    return spec.sliding_window + 2 * spec.extra_retained_tokens
