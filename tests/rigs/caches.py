"""One rank's KV cache over plain memory, in any layout, for tests of how caches are mapped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from p2p_engine.memory.paged import PagedCache, PagedSink, PagedSource
from p2p_engine.memory.plan import extent_of
from p2p_engine.wire.messages import CacheSpec, PageShape, Plane

Array = np.ndarray[Any, Any]
DTYPE = np.dtype(np.int16)
UNTOUCHED = -1


@dataclass(frozen=True)
class Model:
    """A model's KV: what rank, layout and block size leave open."""

    num_layers: int = 2
    num_heads: int = 2
    head_size: int = 2
    num_planes: int = 2  # 1: MLA
    kept: tuple[int, ...] | None = None  # layers that have a cache in this group; None: all

    def values(self, num_tokens: int) -> Array:
        """A value of its own for each [layer, head, token, plane, element]."""
        shape = (self.num_layers, self.num_heads, num_tokens, self.num_planes, self.head_size)
        return np.arange(np.prod(shape), dtype=DTYPE).reshape(shape)


@dataclass(frozen=True)
class Split:
    """How an instance splits and keeps a cache. `layout` orders layers, blocks, heads, tokens and
    planes in memory; "packed" has keys column by column, "opaque" tells nothing of a head's bytes
    in a block."""

    tp_size: int = 1
    layer_cuts: tuple[int, ...] = (0, 2)
    block_size: int = 4
    layout: str = "LBHNP"
    padding: int = 0
    num_pieces: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tp_size * (len(self.layer_cuts) - 1)


class RankCache:
    """The memory of one rank; `views[plane]` is [layer, block, head, token, element]."""

    def __init__(self, model: Model, side: Split, rank: int, num_blocks: int) -> None:
        self.model, self.side, self.rank = model, side, rank
        blank = CacheSpec(
            block_size=side.block_size, num_kv_heads=model.num_heads, head_size=model.head_size,
            layout=side.layout, packing=side.layout if side.layout in ("packed", "opaque") else "",
            tp_size=side.tp_size, layer_cuts=side.layer_cuts, rank=rank,
        )  # fmt: skip
        self.extent = extent_of(blank, rank)
        kept = range(model.num_layers) if model.kept is None else model.kept
        stage = range(self.extent.first_layer, self.extent.end_layer)
        self.layers = [layer for layer in kept if layer in stage]
        num_layers = len(self.layers)
        num_heads = self.extent.end_head - self.extent.first_head
        tokens = side.block_size // side.num_pieces
        sizes = {"L": num_layers, "B": num_blocks * side.num_pieces, "H": num_heads,
                 "N": tokens, "P": model.num_planes}  # fmt: skip
        self.memory, self.views = _allocate(model, side, sizes)
        strides = self.views[0].strides
        is_dense = side.layout.startswith("LB") and not side.padding
        page_bytes = num_heads * side.block_size * model.num_planes * model.head_size * 2
        pages = [page_bytes] * num_layers if is_dense or "L" not in side.layout else []
        shape = self._opaque(tokens, strides) if side.layout == "opaque" else self._shape(tokens)
        layers = tuple(self.layers) if model.kept is not None else None
        changes: dict[str, Any] = {"page_bytes": pages, "shape": shape, "layers": layers}
        self.spec = CacheSpec(**{**{f: getattr(blank, f) for f in blank.__struct_fields__},
                                 **changes})  # fmt: skip
        self.paged = PagedCache(
            self.views[0].ctypes.data + np.arange(num_layers) * strides[0],
            np.full(num_layers, strides[1] * side.num_pieces),
            np.array(pages, np.int64), num_blocks, self.spec, strides[1],
        )  # fmt: skip

    def _shape(self, tokens: int) -> PageShape:
        base, item = self.views[0].ctypes.data, DTYPE.itemsize
        planes = []
        for view in self.views:
            offset, step = view.ctypes.data - base, view.strides[3]
            if view.strides[4] == item:
                planes.append(Plane(offset, step, self.model.head_size * item))
            else:
                planes.append(Plane(offset, step, item, self.model.head_size, view.strides[4]))
        return PageShape(tokens, self.views[0].strides[2], tuple(planes))

    def _opaque(self, tokens: int, strides: tuple[int, ...]) -> PageShape:
        nbytes = tokens * self.model.num_planes * self.model.head_size * DTYPE.itemsize
        pieces = self.side.num_pieces
        plane = Plane(0, 0, nbytes, pieces, strides[1] if pieces > 1 else 0)
        return PageShape(1, strides[2], (plane,))

    def token_views(self, block_ids: Array) -> Array:
        """Copy out [layer, head, token, plane, element] of these blocks, as whoever computes."""
        pieces = (block_ids[:, None] * self.side.num_pieces
                  + np.arange(self.side.num_pieces)).ravel()  # fmt: skip
        planes = np.stack([view[:, pieces] for view in self.views], axis=4)
        shape = planes.shape
        return np.moveaxis(planes, 2, 1).reshape(shape[0], shape[2], -1, *shape[4:])

    def fill(self, block_ids: Array, values: Array) -> None:
        """Compute these blocks: `values` are the whole model's, of as many tokens."""
        mine = self.of_mine(values)
        side = self.side
        tokens = side.block_size // side.num_pieces
        for index in range(mine.shape[2] // tokens):
            block, piece = divmod(index, side.num_pieces)
            place = int(block_ids[block]) * side.num_pieces + piece
            for plane, view in enumerate(self.views):
                view[:, place] = mine[:, :, index * tokens : (index + 1) * tokens, plane]

    def of_mine(self, values: Array) -> Array:
        """Cut this rank's layers and heads out of the model's."""
        return values[self.layers, self.extent.first_head : self.extent.end_head]

    def source(self, block_ids: Array, first: int, num_tokens: int) -> PagedSource:
        """Return these as a request's blocks from `first` on."""
        return PagedSource(self.paged, block_ids, first, num_tokens)

    def sink(self, block_ids: Array, first: int, num_tokens: int) -> PagedSink:
        """Return these as the place of a request's blocks from `first` on."""
        return PagedSink(self.paged, block_ids, first, num_tokens)


def _allocate(model: Model, side: Split, sizes: dict[str, int]) -> tuple[Array, list[Array]]:
    """Memory that nobody has written, and the view of each plane."""
    depth, tokens = model.head_size, sizes["N"]
    if "L" in side.layout:
        size = [sizes[axis] for axis in side.layout]
        memory = np.full((*size, depth + side.padding), UNTOUCHED, DTYPE)
        ordered = memory[..., :depth].transpose([*map(side.layout.index, "PLBHN"), 5])
        return memory, list(ordered)
    slab = tokens * depth  # of one plane
    memory = np.full((*(sizes[axis] for axis in "LBH"), model.num_planes * slab), UNTOUCHED, DTYPE)
    views = []
    for plane in range(model.num_planes):
        piece = memory[..., plane * slab : (plane + 1) * slab]
        if plane == 0:
            views.append(piece.reshape(*piece.shape[:3], depth, tokens).swapaxes(3, 4))
        else:
            views.append(piece.reshape(*piece.shape[:3], tokens, depth))
    for view in views:
        assert np.shares_memory(view, memory) or not memory.size
    return memory, views
