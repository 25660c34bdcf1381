"""Layouts against a naive model that walks layers, blocks and bytes one after the other."""

from __future__ import annotations

import ctypes

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from p2p_engine.errors import LocalProtocolError, RemoteProtocolError
from p2p_engine.memory.layout import Regions, packed_pages, pair
from p2p_engine.memory.paged import PagedCache, PagedSink, PagedSource
from p2p_engine.wire.messages import Manifest

NUM_BLOCKS = 6
quick = settings(max_examples=150, deadline=None)


class LayoutModel:
    """A cache of layers with gaps, backwards strides and pages of unequal size."""

    def __init__(self, pages: list[int], gaps: list[int], backwards: list[bool], seed: int) -> None:
        self.pages = pages
        self.strides = [page + gap for page, gap in zip(pages, gaps, strict=True)]
        spans = [stride * NUM_BLOCKS for stride in self.strides]
        rng = np.random.default_rng(seed)
        self.memory = rng.integers(0, 256, sum(spans) + 1, np.uint8)
        starts = np.cumsum([0, *spans[:-1]])
        self.first = [
            int(start) + (stride * (NUM_BLOCKS - 1) if back else 0)
            for start, stride, back in zip(starts, self.strides, backwards, strict=True)
        ]
        self.strides = [
            -stride if back else stride
            for stride, back in zip(self.strides, backwards, strict=True)
        ]

    def cache(self) -> PagedCache:
        """Describe it."""
        base = self.memory.ctypes.data
        return PagedCache(
            np.array(self.first, np.int64) + base,
            np.array(self.strides, np.int64),
            np.array(self.pages, np.int64),
            NUM_BLOCKS,
        )

    def stream(self, ids: list[int]) -> bytes:
        """What these blocks are on the wire."""
        return b"".join(
            self.memory[first + block * stride :][:page].tobytes()
            for first, stride, page in zip(self.first, self.strides, self.pages, strict=True)
            for block in ids
        )


@st.composite
def models(draw: st.DrawFn) -> LayoutModel:
    count = draw(st.integers(1, 4))
    several = {"min_size": count, "max_size": count}
    return LayoutModel(
        draw(st.lists(st.integers(0, 9), **several)),  # type: ignore[arg-type]
        draw(st.lists(st.sampled_from([0, 0, 3]), **several)),  # type: ignore[arg-type]
        draw(st.lists(st.booleans(), **several)),  # type: ignore[arg-type]
        draw(st.integers(0, 1 << 32)),
    )


ids_of_blocks = st.permutations(range(NUM_BLOCKS)).flatmap(
    lambda ids: st.integers(0, NUM_BLOCKS).map(lambda n: list(ids)[:n])
)


def read(regions: Regions) -> bytes:
    pieces = zip(regions.addresses.tolist(), regions.lengths.tolist(), strict=True)
    return b"".join(ctypes.string_at(address, length) for address, length in pieces)


def copy(source: Regions, destination: Regions) -> None:
    for start, end, length in zip(*pair(source, destination), strict=True):
        ctypes.memmove(int(end), int(start), int(length))


@quick
@given(models(), ids_of_blocks)
def test_pages_are_the_stream(model: LayoutModel, ids: list[int]) -> None:
    regions = model.cache().pages(np.array(ids, np.int64))
    assert read(regions) == model.stream(ids)
    assert regions.nbytes == len(model.stream(ids))


@quick
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=12))
def test_coalesced_is_the_same_bytes_in_fewer_pieces(pieces: list[tuple[int, int]]) -> None:
    memory = np.arange(64, dtype=np.uint8)
    starts, lengths = (np.array(column, np.int64) for column in zip(*pieces, strict=True)) if (
        pieces
    ) else (np.zeros(0, np.int64), np.zeros(0, np.int64))  # fmt: skip
    regions = Regions(memory.ctypes.data + starts, lengths)
    joined = regions.coalesced()
    assert read(joined) == read(regions)
    assert (joined.lengths > 0).all()
    assert not (joined.addresses[1:] == (joined.addresses + joined.lengths)[:-1]).any()


@quick
@given(models(), models(), ids_of_blocks, st.data())
def test_any_cache_to_any_place(
    theirs: LayoutModel, ours: LayoutModel, ids: list[int], data: st.DataObject
) -> None:
    ours = LayoutModel(theirs.pages, [data.draw(st.integers(0, 5)) for _ in theirs.pages],
                 [data.draw(st.booleans()) for _ in theirs.pages], 1)  # fmt: skip
    places = data.draw(st.permutations(range(NUM_BLOCKS)))[: len(ids)]
    before = ours.memory.copy()
    source = theirs.cache().pages(np.array(ids, np.int64))
    destination = ours.cache().pages(np.array(places, np.int64))
    copy(source, destination)
    assert ours.stream(places) == theirs.stream(ids)
    others = [block for block in range(NUM_BLOCKS) if block not in places]
    after, ours.memory = ours.memory, before
    assert ours.stream(others) == LayoutModel.stream(_with(ours, after), others)


def _with(model: LayoutModel, memory: np.ndarray) -> LayoutModel:
    twin = object.__new__(LayoutModel)
    twin.pages, twin.first, twin.strides = model.pages, model.first, model.strides
    twin.memory = memory
    return twin


@quick
@given(models(), ids_of_blocks, st.integers(0, 50), st.data())
def test_packed_chunk_and_back(
    model: LayoutModel, ids: list[int], first: int, data: st.DataObject
) -> None:
    """A part of a chunk that landed packed is the stream of that part."""
    packed = np.frombuffer(bytearray(model.stream(ids)) or bytearray(1), np.uint8)
    manifest = Manifest(first, len(ids), model.pages)
    start = data.draw(st.integers(0, len(ids)))
    count = data.draw(st.integers(0, len(ids) - start))
    regions = packed_pages(packed.ctypes.data, manifest, first + start, count)
    assert read(regions) == model.stream(ids[start : start + count])


def test_pair_of_unequal_sides_is_refused() -> None:
    one = Regions(np.array([100]), np.array([5]))
    with pytest.raises(LocalProtocolError, match="5 bytes"):
        pair(one, Regions(np.array([100]), np.array([6])))


chunks = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=12)


@quick
@given(chunks, st.integers(0, 8), st.integers(1, 8))
def test_sink_covers_what_it_wants_and_nothing_else(
    offered: list[tuple[int, int]], first: int, count: int
) -> None:
    """Against a set: `wanted` is the tightest range around what is missing of the chunk."""
    cache = PagedCache(np.array([0]), np.array([4]), np.array([4]), 100)
    sink = PagedSink(cache, np.arange(50, 50 + count), first, num_tokens=9)
    missing = set(range(first, first + count))
    for start, num in offered:
        wanted = sink.wanted(Manifest(start, num, [4], 9))
        here = missing & set(range(start, start + num))
        assert wanted[1] == (max(here) - min(here) + 1 if here else 0)
        if here:
            assert wanted[0] == min(here)
            assert sink.regions(Manifest(start, num, [4], 9), *wanted).nbytes == 4 * wanted[1]
            missing -= set(range(wanted[0], sum(wanted)))
            assert sink.landed(Manifest(start, num, [4], 9), *wanted) == (not missing)
        assert (sink.missing_blocks() == np.array(sorted(missing)) - first + 50).all()


@pytest.mark.parametrize(
    "manifest", [Manifest(0, 1, [5], 9), Manifest(0, 1, [4, 4], 9), Manifest(0, 1, [4], 8)]
)
def test_sink_refuses_another_geometry(manifest: Manifest) -> None:
    cache = PagedCache(np.array([0]), np.array([4]), np.array([4]), 100)
    with pytest.raises(RemoteProtocolError):
        PagedSink(cache, np.arange(3), 0, num_tokens=9).wanted(manifest)


@pytest.mark.parametrize("ids", [[-1], [6], [0, 6], [1 << 40]])
def test_blocks_that_the_cache_does_not_have_are_refused(ids: list[int]) -> None:
    cache = LayoutModel([4], [0], [False], 0).cache()
    with pytest.raises(LocalProtocolError, match="block ids"):
        cache.pages(np.array(ids, np.int64))


@quick
@given(models(), ids_of_blocks, st.integers(0, 9), st.data())
def test_source_reads_any_part(
    model: LayoutModel, ids: list[int], first: int, data: st.DataObject
) -> None:
    source = PagedSource(model.cache(), np.array(ids, np.int64), first, num_tokens=3)
    manifest = source.manifest
    assert (manifest.first_block, manifest.num_blocks, manifest.num_tokens) == (first, len(ids), 3)
    start = data.draw(st.integers(0, len(ids)))
    count = data.draw(st.integers(0, len(ids) - start))
    assert read(source.regions(first + start, count)) == model.stream(ids[start : start + count])
