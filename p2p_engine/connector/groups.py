"""Groups: layers that share a block table. What vLLM has made of the model's layers, and which of a
group's blocks a request needs; what cannot be moved is refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from p2p_engine.connector import compat
from p2p_engine.connector.host_buffer import Staging
from p2p_engine.errors import ConfigError
from p2p_engine.paged import PagedCache

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

SUPPORTED = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)
PLAIN_QUANTISATION = ("NONE", "FP8_PER_TENSOR")  # no scales beside the values


@dataclass(frozen=True)
class LayerGroup:
    """One group: its layers on this rank, and the `window` of tokens that they look back at.

    A window of 0 is all tokens. With one, vLLM frees the blocks that lie behind it.
    """

    number: int
    layer_names: tuple[str, ...]
    spec: AttentionSpec
    window: int = 0

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.spec.block_size

    def first_block(self, num_tokens: int) -> int:
        """The first block that the last of so many tokens looks at."""
        return max(0, num_tokens - self.window) // self.block_size if self.window else 0

    def num_blocks(self, num_tokens: int) -> int:
        """How many blocks so many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True)
class GroupCache:
    """A group's blocks on this rank: the engine reads and fills `cache`; `staging` lends its blocks
    for vLLM's."""

    group: LayerGroup
    cache: PagedCache
    staging: Staging


def layer_groups(kv_cache_config: KVCacheConfig) -> list[LayerGroup]:
    """Return the groups of all layers, whatever they keep."""
    return [
        _read_group(number, group) for number, group in enumerate(kv_cache_config.kv_cache_groups)
    ]


def attention_groups(kv_cache_config: KVCacheConfig) -> list[LayerGroup]:
    """Return the groups of all layers, once they are known to be such that can be transferred.

    Raises:
        ConfigError: there is none, or one of a kind that cannot be transferred.
    """
    groups = layer_groups(kv_cache_config)
    if not groups:
        raise ConfigError("the model keeps no KV cache")
    for group in kv_cache_config.kv_cache_groups:
        for spec in _specs_of(group):
            _check_kind(spec)
    if not names_lost_blocks(groups) and not compat.HAS_FAILED_REQUESTS:
        raise ConfigError("several groups of layers, or a sliding window, need vLLM 0.30 or newer")
    return groups


def names_lost_blocks(groups: Sequence[LayerGroup]) -> bool:
    """Whether vLLM can go on behind a block that did not arrive.

    It cannot where a block's id is not that of one group's block only, nor where the blocks before
    it are those of a window that ends elsewhere.
    """
    return len(groups) == 1 and not groups[0].window


def _read_group(number: int, group: KVCacheGroupSpec) -> LayerGroup:
    spec = _specs_of(group)[0]
    names = tuple(group.layer_names)
    return LayerGroup(number, names, cast("AttentionSpec", spec), _window_of(spec))


def _specs_of(group: KVCacheGroupSpec) -> list[KVCacheSpec]:
    spec = group.kv_cache_spec
    return [*spec.kv_cache_specs.values()] if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


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
