"""Describes vLLM's KV cache: its layout in memory, and the facts on which peers must agree.

Strides are read from the tensors, never assumed. A cache that cannot be transferred is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from vllm.distributed.utils import get_pp_indices
from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec, MLAAttentionSpec

from p2p_engine.connector.groups import numbers_in
from p2p_engine.connector.host_buffer import InPlace, make_host_buffer
from p2p_engine.connector.identity import identity_of
from p2p_engine.connector.layer_group import GroupCache, LayerGroup
from p2p_engine.connector.page_shape import inside_of, shape_of
from p2p_engine.connector.states import packing_of
from p2p_engine.errors import ConfigError
from p2p_engine.memory.paged import PagedCache
from p2p_engine.memory.plan import heads_per_rank
from p2p_engine.wire.identity import digest_of
from p2p_engine.wire.messages import CacheSpec

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = logging.getLogger(__name__)


def read_caches(
    vllm_config: VllmConfig,
    groups: Sequence[LayerGroup],
    kv_caches: dict[str, torch.Tensor],
    num_blocks: int,
    rank: int,
    budget_bytes: int = 0,
    accepted: Sequence[str] = (),
) -> tuple[CacheSpec, list[GroupCache]]:
    """Describe this rank's cache to its peers, and where the layers of each group lie.

    A group has no cache where all its layers belong to other pipeline stages. A draft whose layers
    cannot be described is left out. `budget_bytes` are for the host buffers of all groups, where
    they need them. `accepted` are fields of the identity that peers need not share.

    Raises:
        ConfigError: as for read_cache and make_host_buffer; or a layer is in no group.
    """
    _check_grouped(groups, kv_caches)

    def read(group: LayerGroup) -> tuple[CacheSpec, GroupCache | None]:
        layers = {name: kv_caches[name] for name in group.layer_names if name in kv_caches}
        if not layers:
            return read_spec(vllm_config, group, {}, rank, [], accepted), None
        layers = _distinct_layers(layers)
        buffer = make_host_buffer(vllm_config, layers, num_blocks, budget_bytes // len(groups))
        if buffer is not None and group.is_whole:
            raise ConfigError("states are not transferred by way of a host buffer")
        size = num_blocks
        if buffer is not None:
            layers, size = buffer.layers, buffer.num_blocks
        cache = read_cache(vllm_config, group, layers, size, rank, accepted)
        return cache.known_spec, GroupCache(group, cache, buffer or InPlace(), tuple(layers))

    found = [read(group) for group in groups if not group.is_draft]
    try:
        _check_drafts(vllm_config, groups, kv_caches)
        drafts = [read(group) for group in groups if group.is_draft]
        if any(spec.shape is None for spec, _ in drafts):
            raise ConfigError("their heads are shared out unlike the model's, or scattered")
        found += drafts
    except ConfigError as error:
        logger.info("the draft's layers are not transferred: %s", str(error))
    (first, _), *more = found
    spec = msgspec.structs.replace(first, more=tuple(spec for spec, _ in more))
    return spec, [cache for _, cache in found if cache is not None]


def read_cache(
    vllm_config: VllmConfig,
    group: LayerGroup,
    kv_caches: dict[str, torch.Tensor],
    num_blocks: int,
    rank: int,
    accepted: Sequence[str] = (),
) -> PagedCache:
    """Describe a group's cache: where its layers lie, and all that a peer must know of it.

    A backend may cut one of vLLM's blocks into several smaller ones, which then lie side by side.

    Raises:
        ConfigError: the cache is on another device than cpu or cuda, or cannot be read as vLLM's
            blocks.
    """
    layers = _distinct_layers(kv_caches)
    _check_reachable(layers)
    num_pieces = [_num_pieces(name, tensor, num_blocks) for name, tensor in layers.items()]
    strides = [_nbytes(tensor, tensor.stride(0)) for tensor in layers.values()]
    pages = [
        _nbytes(tensor, tensor[0].numel()) * count
        for tensor, count in zip(layers.values(), num_pieces, strict=True)
    ]
    is_dense = all(
        _is_dense(tensor[0]) and (count == 1 or stride * count == page)
        for tensor, count, stride, page in zip(
            layers.values(), num_pieces, strides, pages, strict=True
        )
    )
    described = read_spec(vllm_config, group, layers, rank, pages if is_dense else [], accepted)
    if not is_dense and described.shape is None:
        [name, tensor] = next(iter(layers.items()))
        raise ConfigError(
            f"layer {name}: a block's bytes are scattered (shape {tuple(tensor.shape)}, "
            f"strides {tensor.stride()}); use a layout such as VLLM_KV_CACHE_LAYOUT=LBHNC"
        )
    return PagedCache(
        np.array([tensor.data_ptr() for tensor in layers.values()], np.int64),
        np.array(strides, np.int64) * np.array(num_pieces, np.int64),
        np.array(described.page_bytes, np.int64), num_blocks, described, strides[0],
    )  # fmt: skip


def read_spec(
    vllm_config: VllmConfig,
    group: LayerGroup,
    layers: dict[str, torch.Tensor],
    rank: int,
    page_bytes: list[int],
    accepted: Sequence[str] = (),
) -> CacheSpec:
    """Return the description that a peer needs before a byte moves."""
    model, parallel = _model_of(vllm_config, group), vllm_config.parallel_config
    if not group.is_draft:
        layer_cuts, numbers = _place_layers(vllm_config, list(layers))
    else:
        layer_cuts, numbers = (0, len(layers)), None
    described = CacheSpec(
        identity=digest_of(identity_of(vllm_config, model, accepted)),
        layout=vllm_config.cache_config.get_resolved_kv_cache_layout().name,
        tp_size=parallel.tensor_parallel_size,
        layer_cuts=layer_cuts,
        rank=rank,
        page_bytes=page_bytes,
        layers=numbers,
        window=group.window,
        number=group.number,
        is_draft=group.is_draft,
    )
    if isinstance(group.spec, MambaSpec):
        return msgspec.structs.replace(described, num_kv_heads=1, packing=packing_of(group.spec))
    return _with_content(vllm_config, group, group.spec, layers, described)


def _with_content(
    vllm_config: VllmConfig,
    group: LayerGroup,
    spec: AttentionSpec,
    layers: dict[str, torch.Tensor],
    described: CacheSpec,
) -> CacheSpec:
    """Add what a block of an attention layer holds, and how it is arranged if parts can move."""
    is_mla, model = isinstance(spec, MLAAttentionSpec), _model_of(vllm_config, group)
    known = layers or vllm_config.compilation_config.static_forward_context
    inside = inside_of(vllm_config, spec, known)
    described = msgspec.structs.replace(
        described,
        dtype=f"{spec.dtype}".removeprefix("torch."),
        block_size=spec.block_size,
        num_kv_heads=1 if is_mla else model.get_total_num_kv_heads(),
        head_size=spec.head_size,
        packing=inside.packing,
    )
    if not layers or group.is_whole or spec.num_kv_heads != heads_per_rank(described):
        return described
    shape = shape_of(spec, [*layers.values()], inside)
    return msgspec.structs.replace(described, shape=shape)


def _model_of(vllm_config: VllmConfig, group: LayerGroup) -> ModelConfig:
    speculation = vllm_config.speculative_config
    if group.is_draft and speculation is not None and speculation.draft_model_config is not None:
        return speculation.draft_model_config
    return vllm_config.model_config


def _check_drafts(
    vllm_config: VllmConfig, groups: Sequence[LayerGroup], kv_caches: dict[str, torch.Tensor]
) -> None:
    """Check that this rank has all layers of the draft, in memory of their own."""
    drafts = [group for group in groups if group.is_draft]
    if drafts and vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise ConfigError("only the last of several pipeline stages has them")
    for group in drafts:
        beside = [item for item in groups if item.table == group.table and not item.is_draft]
        places = {_place_of(kv_caches[name]) for item in beside for name in item.layer_names}
        if any(_place_of(kv_caches[name]) in places for name in group.layer_names):
            raise ConfigError("they share the model's KV cache")


def _check_grouped(groups: Sequence[LayerGroup], kv_caches: dict[str, torch.Tensor]) -> None:
    """Check that every cache belongs to a group, or is shared with a layer of a group."""
    grouped = {name for group in groups for name in group.layer_names} & kv_caches.keys()
    places = {_place_of(kv_caches[name]) for name in grouped}
    for name, tensor in kv_caches.items():
        if name not in grouped and _place_of(tensor) not in places:
            raise ConfigError(f"layer {name} is in no group of layers")


def _distinct_layers(kv_caches: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the layers that do not share another layer's cache, in the model's order."""
    by_place: dict[tuple[int, int], tuple[str, torch.Tensor]] = {}
    for name in sorted(kv_caches, key=lambda name: (numbers_in(name), name)):
        by_place.setdefault(_place_of(kv_caches[name]), (name, kv_caches[name]))
    return dict(by_place.values())


def _place_of(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset())


def _check_reachable(layers: dict[str, torch.Tensor]) -> None:
    for tensor in layers.values():
        if tensor.device.type not in ("cpu", "cuda"):
            raise ConfigError(
                f"the KV cache is on {tensor.device}; supported: cpu, cuda, and any other device "
                'with "kv_buffer_device": "cpu" beside "kv_connector"'
            )


def _num_pieces(name: str, tensor: torch.Tensor, num_blocks: int) -> int:
    count, rest = divmod(tensor.shape[0], num_blocks)
    if rest or not count:
        raise ConfigError(
            f"layer {name}: {tensor.shape[0]} blocks cannot be read as {num_blocks} blocks"
        )
    return count


def _place_layers(
    vllm_config: VllmConfig, names: list[str]
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """The first layer of each pipeline stage and the end; and which layers these are, if not all.

    Without pipeline stages, layers whose names do not tell their place are counted.
    """
    num_stages = vllm_config.parallel_config.pipeline_parallel_size
    total = vllm_config.model_config.model_arch_config.total_num_hidden_layers
    numbers = [numbers_in(name) for name in names]
    is_known = all(len(found) == 1 and found[0] < total for found in numbers)
    if not is_known or len(set(numbers)) < len(numbers):
        if num_stages > 1:
            raise ConfigError(f"pipeline stages do not tell where layers {names} are")
        return (0, len(names)), None
    cuts = 0, *(get_pp_indices(total, stage, num_stages)[1] for stage in range(num_stages))
    placed = tuple(number for [number] in numbers)
    return cuts, None if placed == tuple(range(total)) else placed


def _nbytes(tensor: torch.Tensor, num_elements: int) -> int:
    return num_elements * tensor.element_size()


def _is_dense(page: torch.Tensor) -> bool:
    """Tell whether the elements are contiguous, in any order."""
    span = 1 + sum(
        (size - 1) * stride for size, stride in zip(page.shape, page.stride(), strict=True)
    )
    return span == page.numel()
