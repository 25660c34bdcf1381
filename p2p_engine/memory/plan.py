"""Plan: which rank sends which layers and heads to which rank, for any two instances. Pure.

A rank has a range of the model's layers and a range of its KV heads. Ranks with the same ranges
(more ranks than heads; MLA) are replicas: exactly one of them serves a destination. Everything
before `counterpart` is about one group of layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from p2p_engine.errors import P2pError, PeerRefused
from p2p_engine.wire.messages import MAX_RANKS, CacheSpec, Part, TransferKey

SAME = ("dtype", "num_kv_heads", "head_size", "packing", "window")


@dataclass(frozen=True)
class Extent:
    """Layers and heads of the model, as half-open ranges."""

    first_layer: int
    end_layer: int
    first_head: int
    end_head: int

    def __and__(self, other: Extent) -> Extent:
        """Return the intersection."""
        return Extent(
            max(self.first_layer, other.first_layer),
            min(self.end_layer, other.end_layer),
            max(self.first_head, other.first_head),
            min(self.end_head, other.end_head),
        )

    def __bool__(self) -> bool:
        """Whether the extent is not empty."""
        return self.first_layer < self.end_layer and self.first_head < self.end_head


def extent_of(spec: CacheSpec, rank: int) -> Extent:
    """Return the layers and heads of a rank, as vLLM partitions a model."""
    stage, tp_rank = divmod(rank, spec.tp_size)
    first = tp_rank // num_replicas(spec) * heads_per_rank(spec)
    first_layer, end_layer = spec.layer_cuts[stage : stage + 2]
    return Extent(first_layer, end_layer, first, first + heads_per_rank(spec))


def layers_within(spec: CacheSpec, extent: Extent) -> tuple[int, ...]:
    """Return the layers of an extent that keep a cache in this group, on the spec's own rank."""
    if spec.layers is None:
        both = extent & extent_of(spec, spec.rank)
        return tuple(range(both.first_layer, both.end_layer))
    return tuple(layer for layer in spec.layers if extent.first_layer <= layer < extent.end_layer)


def heads_per_rank(spec: CacheSpec) -> int:
    """Return how many KV heads each rank has."""
    return max(1, spec.num_kv_heads // spec.tp_size)


def num_replicas(spec: CacheSpec) -> int:
    """Return how many ranks have the same heads."""
    return max(1, spec.tp_size // spec.num_kv_heads)


def share(source: CacheSpec, source_rank: int, target: CacheSpec, target_rank: int) -> Extent:
    """Return what one rank gives to another; empty if another replica gives it, or no rank does."""
    replicas = num_replicas(source)
    if source_rank % replicas != target_rank % replicas:  # so that the load spreads
        return Extent(0, 0, 0, 0)
    return extent_of(source, source_rank) & extent_of(target, target_rank)


def targets_of(source: CacheSpec, rank: int, target: CacheSpec) -> list[int]:
    """Return the ranks of `target` to which a rank of `source` gives something."""
    return [
        other
        for other in range(target.num_ranks)
        if _may_have(source, rank, share(source, rank, target, other))
    ]


def sources_of(source: CacheSpec, target: CacheSpec, rank: int) -> list[int]:
    """Return the ranks of `source` from which a rank of `target` gets something."""
    return [
        other
        for other in range(source.num_ranks)
        if _may_have(target, rank, share(source, other, target, rank))
    ]


def _may_have(spec: CacheSpec, rank: int, extent: Extent) -> bool:
    """Whether an extent may have a layer of this group; a spec lists layers of its own rank
    only."""
    return bool(extent) and (rank != spec.rank or bool(layers_within(spec, extent)))


def idle_sources(source: CacheSpec, target: CacheSpec, rank: int) -> list[int]:
    """Return ranks of `source` that give nothing to any rank; the ranks of `target` share them
    out."""
    return [
        other
        for other in range(rank, source.num_ranks, target.num_ranks)
        if not targets_of(source, other, target)
    ]


def counterpart(mine: CacheSpec, peer: CacheSpec) -> CacheSpec | None:
    """Return the peer's group that corresponds to one of ours; None if it has none.

    The layers of a draft model correspond only to those of the same draft model. If the peer lacks
    them, they are neither sent nor waited for: vLLM verifies each token that a draft proposes.
    """
    theirs = peer.groups[mine.number] if mine.number < len(peer.groups) else None
    if theirs is None or mine.is_draft != theirs.is_draft:
        return None
    return None if mine.is_draft and _differing_model(mine, theirs) else theirs


def unclaimed(source: CacheSpec, target: CacheSpec) -> list[tuple[int, int]]:
    """Return (group number, rank) for each rank with a group of `source` that `target` lacks. The
    ranks of `target` share them out."""
    return [
        (group.number, rank)
        for group in source.groups
        if counterpart(group, target) is None
        for rank in range(target.rank, group.num_ranks, target.num_ranks)
    ]


def takers(
    mine: CacheSpec | None, key: TransferKey, theirs: CacheSpec | P2pError | None
) -> list[int]:
    """Return the peer's ranks to which this rank gives something of a key; `theirs` is the answer
    of the peer's directory."""
    mine, other = _both_sides(mine, key, theirs)
    return targets_of(mine, mine.rank, other) if mine is not None and other is not None else []


def givers(
    mine: CacheSpec | None, key: TransferKey, theirs: CacheSpec | P2pError | None
) -> list[int]:
    """Return the peer's ranks from which this rank gets something of a key."""
    mine, other = _both_sides(mine, key, theirs)
    return sources_of(other, mine, mine.rank) if mine is not None and other is not None else []


def keepers(
    mine: CacheSpec | None, key: TransferKey, theirs: CacheSpec | P2pError | None
) -> list[tuple[TransferKey, int]]:
    """Return the peer's holds that no rank here pulls, as (key, rank), as far as this rank releases
    them.

    For groups that this rank lacks, the first group that it has takes care.
    """
    group, other = _both_sides(mine, key, theirs)
    if mine is None or group is None or not isinstance(theirs, CacheSpec):
        return []
    idle = idle_sources(other, group, group.rank) if other is not None else []
    found = [(key, rank) for rank in idle]
    own = (item.number for item in mine.groups if item.layers != ())
    if group.number == next(own, None):
        for number, rank in unclaimed(theirs, mine):
            found.append((msgspec.structs.replace(key, group=number), rank))
    return found


def _both_sides(
    mine: CacheSpec | None, key: TransferKey, theirs: CacheSpec | P2pError | None
) -> tuple[CacheSpec | None, CacheSpec | None]:
    """Return a key's group of layers here, and the corresponding one there."""
    if mine is None or not isinstance(theirs, CacheSpec):
        return None, None
    group = mine.group(key.group)
    return group, counterpart(group, theirs)


def part_between(source: CacheSpec, target: CacheSpec) -> Part | None:
    """Return the part that the source's rank sends to the target's; None: everything, page by page.

    Raises:
        PeerRefused: nothing is to be sent, or it cannot be mapped; names the differences.
    """
    both = share(source, source.rank, target, target.rank)
    if not both:
        raise PeerRefused(f"rank {source.rank} has nothing for rank {target.rank} there")
    if both == extent_of(source, source.rank) == extent_of(target, target.rank) and _same_pages(
        source, target
    ):
        return None
    unmapped = _group_obstacles(source, target)
    if unmapped or source.shape is None or target.shape is None:
        raise PeerRefused("; ".join(unmapped))
    return Part(
        both.first_layer,
        both.end_layer - both.first_layer,
        both.first_head,
        both.end_head - both.first_head,
        _common_block_size(source, target),
        source.shape,
    )


def obstacles(
    here: CacheSpec | None, there: CacheSpec | None, *, fields: Sequence[str] = ()
) -> list[str]:
    """Return why nothing can be mapped between two instances, with both values; empty if it can.

    `fields` name what differs in their identities, if that is known; else the digests are named.
    """
    if here is None or there is None:
        described = here is not None, there is not None
        return [_differing("describes a KV cache", *described)] if any(described) else []
    mine, theirs = (sum(not group.is_draft for group in spec.groups) for spec in (here, there))
    if mine != theirs:
        return [_differing("groups of layers", mine, theirs)]
    pairs = [(group, counterpart(group, there)) for group in here.groups]
    found = [_group_obstacles(group, other, fields) for group, other in pairs if other is not None]
    return list(dict.fromkeys(text for texts in found for text in texts))


def _group_obstacles(here: CacheSpec, there: CacheSpec, fields: Sequence[str] = ()) -> list[str]:
    for where, spec in (("there", there), ("here", here)):
        if irregular := _irregularity(spec):
            return [f"the ranks {where} cannot share the model: {irregular}"]
    found = _differing_model(here, there, fields)
    if found or _same_pages(here, there):
        return found
    return _differing_layers(here, there) or _differing_blocks(here, there)


def _differing_model(here: CacheSpec, there: CacheSpec, fields: Sequence[str] = ()) -> list[str]:
    found: list[str] = []
    if here.identity != there.identity:
        digests = here.identity.hex(), there.identity.hex()
        found += fields or [_differing("identity", *digests)]
    found += [
        _differing(name, getattr(here, name), getattr(there, name))
        for name in SAME
        if getattr(here, name) != getattr(there, name)
    ]
    if here.layer_cuts[-1:] != there.layer_cuts[-1:]:
        found.append(_differing("layers", here.layer_cuts[-1:], there.layer_cuts[-1:]))
    return found


def _differing_layers(here: CacheSpec, there: CacheSpec) -> list[str]:
    if not here.has_ranks:
        return []
    both = extent_of(here, here.rank) & extent_of(there, there.rank)
    mine, theirs = layers_within(here, both), layers_within(there, both)
    return [_differing("layers with a cache", mine, theirs)] if mine != theirs else []


def _differing_blocks(here: CacheSpec, there: CacheSpec) -> list[str]:
    if () in (here.layers, there.layers):
        return []  # the layers of this group are on other ranks
    if here.shape is None or there.shape is None:
        return [_unknown_inside(here, there)]
    if here.shape.rows != there.shape.rows:
        return [_differing("rows of a token", here.shape.rows, there.shape.rows)]
    if here.block_size == there.block_size:
        return []
    differing = _differing("block_size", here.block_size, there.block_size)
    if here.window:
        return [f"{differing}: the first block of a window would not be whole"]
    if [spec.shape.num_tokens for spec in (here, there) if spec.shape] == [1, 1]:
        return [f"{differing}: blocks that are packed as {here.packing!r} cannot be cut"]
    return []


def _irregularity(spec: CacheSpec) -> str:
    """Return why the ranks cannot partition layers and heads as vLLM does; "" if they can."""
    cuts, heads = spec.layer_cuts, spec.num_kv_heads
    if not spec.has_ranks:
        is_alone = spec.num_ranks == 1 and not cuts
        return "" if is_alone else f"num_kv_heads {heads}, layer_cuts {cuts}"
    if spec.tp_size % heads and heads % spec.tp_size:
        return f"tp_size {spec.tp_size} and {heads} KV heads, neither a multiple of the other"
    if cuts[0] or not all(first < end for first, end in pairwise(cuts)):
        return f"layer_cuts {cuts} leave layers out"
    if not spec.rank < spec.num_ranks <= MAX_RANKS:
        return f"rank {spec.rank} of {spec.num_ranks}, and at most {MAX_RANKS}"
    return ""


def _same_pages(here: CacheSpec, there: CacheSpec) -> bool:
    """Whether a page has the same bytes on both sides; always true of equal instances."""
    has_pages = bool(here.page_bytes) or here.shape is None
    same_stage = here.rank // here.tp_size == there.rank // there.tp_size
    return (
        has_pages
        and (here.tp_size, here.layer_cuts) == (there.tp_size, there.layer_cuts)
        and (here.block_size, here.layout, here.shape)
        == (there.block_size, there.layout, there.shape)
        and (not same_stage or (here.page_bytes, here.layers) == (there.page_bytes, there.layers))
    )


def _common_block_size(source: CacheSpec, target: CacheSpec) -> int:
    shapes = [spec.shape.num_tokens for spec in (source, target) if spec.shape is not None]
    return source.block_size if shapes == [1, 1] else math.gcd(*shapes)


def _unknown_inside(here: CacheSpec, there: CacheSpec) -> str:
    names = ("tp_size", "layer_cuts", "block_size", "layout", "page_bytes")
    pairs = [(name, getattr(here, name), getattr(there, name)) for name in names]
    [first, *_] = [_differing(*pair) for pair in pairs if pair[1] != pair[2]] or ["layout"]
    return f"{first}: a block of packing {here.packing!r} can only be moved as it is"


def _differing(name: str, mine: object, theirs: object) -> str:
    return f"{name}: {mine!r} here, {theirs!r} there"
