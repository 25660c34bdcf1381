"""Paged caches: where the blocks of a request lie on one rank, whole or cut into parts for an
unlike peer, and which blocks have arrived. Pure: numpy arrays of addresses; nothing here moves a
byte."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from p2p_engine.bounded import BoundedMap
from p2p_engine.errors import LocalProtocolError, PeerRefused, RemoteProtocolError
from p2p_engine.memory.layout import ALL_LAYERS, Int64s, Regions, equal_lengths
from p2p_engine.memory.plan import Extent, counterpart, extent_of, layers_within, part_between
from p2p_engine.wire.messages import CacheSpec, Manifest, PageShape, Part

Bits = npt.NDArray[np.bool_]
MAX_PEERS = 256  # for which a cache remembers the parts


@dataclass(frozen=True)
class Cut:
    """The geometry of a part in one cache, independent of addresses."""

    layers: slice
    num_per_block: int  # blocks of the part in one of ours
    page_bytes: list[int]  # of one block of the part, by layer
    num_heads: int  # over all layers
    offsets: Int64s  # of its rows in a page: [block of the part, row]
    lengths: Int64s  # of its rows


@dataclass(frozen=True)
class PagedCache:
    """One rank's cache: block b of layer l is page_bytes[l] bytes at layer_addresses[l] + b *
    block_strides[l]; all three are int64[num_layers].

    Blocks can be cut only if there is a `spec`. A backend may split a block into several smaller
    ones; these lie `piece_stride` bytes apart, and the spec's shape is theirs.
    """

    layer_addresses: Int64s
    block_strides: Int64s
    page_bytes: Int64s
    num_blocks: int
    spec: CacheSpec | None = None
    piece_stride: int = 0
    _cuts: BoundedMap[Part, Cut] = field(default_factory=lambda: BoundedMap(MAX_PEERS), repr=False)
    _parts: BoundedMap[int, tuple[CacheSpec, Part | None]] = field(
        default_factory=lambda: BoundedMap(MAX_PEERS), repr=False
    )  # by the id of the peer's spec, which is kept so that the id stays unique

    def pages(self, block_ids: Int64s, layers: slice = ALL_LAYERS) -> Regions:
        """Return the pages of these blocks in these layers, layer-major.

        Raises:
            LocalProtocolError: a block id is not in the cache.
        """
        self._check(block_ids)
        pages = self.page_bytes[layers]
        if len(pages) and (pages == pages[0]).all():
            inside = np.zeros((1, 1), np.int64)
            return self._in_layers(layers, block_ids, inside, pages[:1])
        firsts, strides = self.layer_addresses[layers], self.block_strides[layers]
        addresses = firsts[:, None] + strides[:, None] * block_ids
        lengths = np.broadcast_to(pages[:, None], addresses.shape)
        return Regions(addresses.ravel(), lengths.ravel()).coalesced()

    def cut(
        self, part: Part, block_ids: Int64s, first: int, num: int, layers: slice = ALL_LAYERS
    ) -> Regions:
        """Return the blocks [first, first + num) of a part, counted from the start of
        block_ids[0], in these of the part's layers."""
        cut = self.cut_of(part)
        within = range(cut.layers.start, cut.layers.stop)[layers]
        rows = slice(within.start, within.stop)
        if cut.num_per_block == len(cut.offsets) == 1:
            blocks = block_ids[first : first + num]
            self._check(blocks)
            return self._in_layers(rows, blocks, cut.offsets, cut.lengths)
        blocks, places = np.divmod(np.arange(first, first + num), cut.num_per_block)
        self._check(block_ids[blocks])
        pieces, phases = np.divmod(places, len(cut.offsets))
        inside = cut.offsets[phases] + (pieces * self.piece_stride)[:, None]
        return self._in_layers(rows, block_ids[blocks], inside, cut.lengths)

    def _in_layers(
        self, layers: slice, block_ids: Int64s, inside: Int64s, lengths: Int64s
    ) -> Regions:
        """Return the same rows of blocks in several layers: `inside` [block or 1, row], lengths
        [row]."""
        firsts, strides = self.layer_addresses[layers], self.block_strides[layers]
        each = int(lengths[0]) if len(lengths) == 1 else 0
        num = len(block_ids)
        lengths = equal_lengths(each, num) if each else np.tile(lengths, num)
        if (strides == strides[0]).all():  # then all layers have the same pattern
            starts = strides[0] * block_ids[:, None] + inside
            one = Regions(starts.ravel(), lengths, each=each)
            return Regions.repeated(one.coalesced(), firsts)
        starts = strides[:, None, None] * block_ids[:, None] + inside
        addresses = firsts[:, None] + starts.reshape(len(strides), -1)
        return Regions(addresses.ravel(), np.tile(lengths, len(strides))).coalesced()

    def cut_of(self, part: Part) -> Cut:
        """Return the geometry of a part here; cached. A peer's part must have been checked."""
        known = self._cuts.get(part)
        if known is None:
            known = self._make_cut(part)
            self._cuts.put(part, known)
        return known

    def _make_cut(self, part: Part) -> Cut:
        spec, shape, extent = self.known_spec, self._shape, self.extent
        first = len(layers_within(spec, replace(extent, end_layer=part.first_layer)))
        num_layers = len(layers_within(spec, _of(part)))
        tokens = min(part.block_size, shape.num_tokens)
        row_bytes = sum(num * nbytes for num, nbytes in shape.rows)
        return Cut(
            slice(first, first + num_layers),
            spec.block_size // part.block_size,
            [tokens * part.num_heads * row_bytes] * num_layers,
            num_layers * part.num_heads,
            *_rows_in_order(shape, part, part.first_head - extent.first_head),
        )

    def part_for(self, peer: CacheSpec) -> Part | None:
        """Return the part that goes to a peer; None: everything, page by page.

        Raises:
            PeerRefused: nothing goes there, or it cannot be mapped.
        """
        known = self._parts.get(id(peer))
        if known is None:
            theirs = counterpart(self.known_spec, peer)
            if theirs is None:
                raise PeerRefused("the peer has no such layers")
            known = peer, part_between(self.known_spec, theirs)
            self._parts.put(id(peer), known)
        return known[1]

    def check_part(self, part: Part) -> None:
        """Check that a peer's part can be stored here.

        Raises:
            RemoteProtocolError: it cannot; says why.
        """
        shape, extent = self._shape, self.extent
        given = _of(part)
        if not given or given & extent != given:
            raise RemoteProtocolError(f"the peer sends {given}, of which we have {extent}")
        if part.shape.rows != shape.rows:
            raise RemoteProtocolError(f"the peer's rows are {part.shape.rows}, ours {shape.rows}")
        is_whole = part.block_size == self.known_spec.block_size
        for tokens in (shape.num_tokens, part.shape.num_tokens):
            if tokens % part.block_size and not (tokens == 1 and is_whole):
                raise RemoteProtocolError(f"blocks of {tokens} are not cut by {part.block_size}")

    @property
    def known_spec(self) -> CacheSpec:
        """Return the spec of a cache that can be cut.

        Raises:
            RemoteProtocolError: the cache cannot be cut.
        """
        if self.spec is None:
            raise RemoteProtocolError("a part came for a cache that cannot be cut")
        return self.spec

    @cached_property
    def extent(self) -> Extent:
        """Return the layers and heads of this rank."""
        return extent_of(self.known_spec, self.known_spec.rank)

    @property
    def _shape(self) -> PageShape:
        if self.known_spec.shape is None:
            raise RemoteProtocolError("a part came for a cache whose blocks can only move whole")
        return self.known_spec.shape

    @cached_property
    def num_heads(self) -> int:
        """Return how many heads are kept here, over all layers."""
        num_layers = len(layers_within(self.known_spec, self.extent))
        return num_layers * (self.extent.end_head - self.extent.first_head)

    def _check(self, block_ids: Int64s) -> None:
        if len(block_ids) and not 0 <= block_ids.min() <= block_ids.max() < self.num_blocks:
            raise LocalProtocolError(f"block ids outside 0 to {self.num_blocks - 1}: {block_ids}")


def _of(part: Part) -> Extent:
    return Extent(
        part.first_layer, part.first_layer + part.num_layers,
        part.first_head, part.first_head + part.num_heads,
    )  # fmt: skip


def _rows_in_order(shape: PageShape, part: Part, first_head: int) -> tuple[Int64s, Int64s]:
    """Return where the rows of a part's block lie in a page, in the order of the source.

    Offsets are [place in the page, row], lengths are [row]. Rows that are adjacent in every place
    are joined.
    """
    tokens = min(part.block_size, shape.num_tokens)
    order = np.argsort(_rows(part.shape, part.num_heads, tokens)[0], kind="stable")
    offsets, lengths, steps = (column[order] for column in _rows(shape, part.num_heads, tokens))
    places = np.arange(shape.num_tokens // tokens)[:, None]
    offsets = offsets + first_head * shape.head_stride + places * tokens * steps
    touches = (offsets[:, 1:] == offsets[:, :-1] + lengths[:-1]).all(axis=0)
    starts = np.flatnonzero(np.r_[True, ~touches])
    return offsets[:, starts], np.add.reduceat(lengths, starts)


def _rows(shape: PageShape, num_heads: int, num_tokens: int) -> tuple[Int64s, Int64s, Int64s]:
    """Return offsets, lengths and steps to the next token of all rows, by plane, head, token,
    row."""
    heads = np.arange(num_heads)[:, None, None] * shape.head_stride
    tokens = np.arange(num_tokens)[:, None]
    offsets = [
        plane.offset
        + heads
        + tokens * plane.token_stride
        + np.arange(plane.num_rows) * plane.row_stride
        for plane in shape.planes
    ]
    sizes = [item.size for item in offsets]
    return (
        np.concatenate([item.ravel() for item in offsets]),
        np.repeat([plane.row_bytes for plane in shape.planes], sizes),
        np.repeat([plane.token_stride for plane in shape.planes], sizes),
    )


@dataclass(frozen=True)
class Beginning:
    """The first blocks of a request, which are the KV of so many tokens."""

    num_blocks: int
    num_tokens: int


@dataclass(frozen=True)
class PagedSource:
    """Blocks [first_block, first_block + len(block_ids)) of a request, read from a paged cache.
    With a `part`, only that part of them."""

    cache: PagedCache
    block_ids: Int64s
    first_block: int
    num_tokens: int
    part: Part | None = None

    @property
    def manifest(self) -> Manifest:
        """Return the geometry of this chunk."""
        part, num_blocks = self.part, len(self.block_ids)
        if part is None:
            page_bytes = self.cache.page_bytes.tolist()
            return Manifest(self.first_block, num_blocks, page_bytes, self.num_tokens)
        cut = self.cache.cut_of(part)
        num_used = -(-self.num_tokens // part.block_size)  # the last block is rarely full
        end = min((self.first_block + num_blocks) * cut.num_per_block, num_used)
        first = self.first_block * cut.num_per_block
        return Manifest(first, end - first, cut.page_bytes, self.num_tokens, part=part)

    @property
    def first_layer(self) -> int:
        """Return the first layer of the cache that goes to the peer."""
        return 0 if self.part is None else int(self.cache.cut_of(self.part).layers.start)

    def regions(self, first_block: int, num_blocks: int, layers: slice = ALL_LAYERS) -> Regions:
        """Return where these blocks of the request lie, in these of the manifest's layers."""
        if self.part is None:
            start = first_block - self.first_block
            return self.cache.pages(self.block_ids[start : start + num_blocks], layers)
        start = first_block - self.first_block * self.cache.cut_of(self.part).num_per_block
        return self.cache.cut(self.part, self.block_ids, start, num_blocks, layers)

    def towards(self, peer: CacheSpec | None) -> PagedSource:
        """Return the source of the bytes that go to a peer.

        Raises:
            PeerRefused: nothing goes there, or it cannot be mapped.
        """
        if self.cache.spec is None or peer is None:
            return self
        return replace(self, part=self.cache.part_for(peer))

    def beginning(self, which: Beginning) -> PagedSource:
        """Return a source of the first blocks alone, as if the request had ended there."""
        block_ids = self.block_ids[: which.num_blocks]
        return replace(self, block_ids=block_ids, num_tokens=which.num_tokens)

    def packed(self, starts: Int64s) -> PagedSource:
        """Return a source of the same blocks copied elsewhere, each block from one of these
        addresses on. It is a small cache of its own: the byte distance to the first copy serves as
        block id."""
        first, pages = int(starts.min()), self.cache.page_bytes
        cache = replace(
            self.cache,
            layer_addresses=first + np.cumsum(pages) - pages,
            block_strides=np.ones_like(pages),
            num_blocks=int(starts.max()) - first + 1,
        )
        return replace(self, cache=cache, block_ids=starts - first)


class PagedSink:
    """The request's blocks from `first_block` on, to be filled in a paged cache.

    `block_ids` are the ids of the request's blocks first_block, first_block + 1, ... Several peers
    may send parts of them. The sink is complete when the parts cover all layers and heads of this
    rank, and every block of each part has arrived.
    """

    def __init__(
        self, cache: PagedCache, block_ids: Int64s, first_block: int, num_tokens: int
    ) -> None:
        self._cache = cache
        self._block_ids = block_ids
        self._first_block = first_block
        self._num_tokens = num_tokens
        self._missing: dict[Part | None, Bits] = {}  # [layer, block]

    def wanted(self, manifest: Manifest) -> tuple[int, int]:
        """Return the smallest range of the chunk that holds all its missing blocks.

        Raises:
            RemoteProtocolError: the peer's pages do not fit ours, or its prompt has another length.
        """
        self._check(manifest)
        missing = self._missing_of(manifest.part)
        start = manifest.first_block - self._first(manifest.part)
        low, high = max(start, 0), max(start + manifest.num_blocks, 0)
        layers = slice(manifest.first_layer, manifest.end_layer)
        found = np.flatnonzero(missing[layers, low:high].any(axis=0))
        if not len(found):
            return manifest.first_block, 0
        first, last = int(found[0]), int(found[-1])
        return self._first(manifest.part) + low + first, last - first + 1

    def missing_blocks(self) -> Int64s:
        """Return the ids of the blocks that are not in place; stable once the transfer is done."""
        blocks = np.full(len(self._block_ids), not self._has_all_parts)
        for part, missing in self._missing.items():
            starts = np.arange(len(blocks)) * self._cuts(part)
            if len(blocks):
                blocks |= np.logical_or.reduceat(missing.any(axis=0), starts)
        missing_ids: Int64s = self._block_ids[blocks]
        return missing_ids

    def regions(self, manifest: Manifest, first_block: int, num_blocks: int) -> Regions:
        """Return where these blocks belong."""
        start = first_block - self._first(manifest.part)
        layers = slice(manifest.first_layer, manifest.end_layer)
        if manifest.part is None:
            return self._cache.pages(self._block_ids[start : start + num_blocks], layers)
        return self._cache.cut(manifest.part, self._block_ids, start, num_blocks, layers)

    def landed(self, manifest: Manifest, first_block: int, num_blocks: int) -> bool:
        """Note that these blocks are in place; returns True if nothing is missing any more."""
        start = first_block - self._first(manifest.part)
        layers = slice(manifest.first_layer, manifest.end_layer)
        self._missing_of(manifest.part)[layers, start : start + num_blocks] = False
        is_whole = not any(missing.any() for missing in self._missing.values())
        return is_whole and self._has_all_parts

    def _check(self, manifest: Manifest) -> None:
        part = manifest.part
        if part is not None:
            self._cache.check_part(part)
        expected = self._page_bytes(part)
        layers = slice(manifest.first_layer, manifest.end_layer)
        is_empty = bool(expected) and not manifest.page_bytes
        if is_empty or manifest.page_bytes != expected[layers]:
            raise RemoteProtocolError("the peer's pages differ from ours in size or number")
        if manifest.num_tokens != self._num_tokens:
            raise RemoteProtocolError(
                f"the peer's prompt has {manifest.num_tokens} tokens, ours {self._num_tokens}"
            )
        for other in self._missing:
            is_new = other != part
            if is_new and (part is None or other is None or part.overlaps(other)):
                raise RemoteProtocolError("two peers send the same layers and heads")

    def _page_bytes(self, part: Part | None) -> list[int]:
        if part is not None:
            return self._cache.cut_of(part).page_bytes
        pages: list[int] = self._cache.page_bytes.tolist()
        return pages

    def _missing_of(self, part: Part | None) -> Bits:
        if part not in self._missing:
            num_blocks = len(self._block_ids)
            if part is not None:
                num_used = -(-self._num_tokens // part.block_size)
                num_blocks = min(num_blocks * self._cuts(part), num_used - self._first(part))
            self._missing[part] = np.ones((len(self._page_bytes(part)), num_blocks), np.bool_)
        return self._missing[part]

    @property
    def _has_all_parts(self) -> bool:
        if None in self._missing:
            return True
        cuts = [self._cache.cut_of(part) for part in self._missing if part is not None]
        given = sum(cut.num_heads for cut in cuts)
        return given > 0 and given == self._cache.num_heads

    def _first(self, part: Part | None) -> int:
        return self._first_block * self._cuts(part)

    def _cuts(self, part: Part | None) -> int:
        return 1 if part is None else self._cache.cut_of(part).num_per_block
