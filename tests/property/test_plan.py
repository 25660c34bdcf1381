"""Any instance to any other one: every byte of the model's KV arrives once, where it belongs."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import replace
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from p2p_engine.errors import PeerRefused, RemoteProtocolError
from p2p_engine.memory.layout import pair
from p2p_engine.memory.plan import (
    counterpart,
    idle_sources,
    obstacles,
    part_between,
    sources_of,
    targets_of,
    unclaimed,
)
from p2p_engine.wire.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    CacheSpec,
    Hello,
    Manifest,
    PageShape,
    Plane,
    decode,
    encode,
)
from tests.rigs.caches import UNTOUCHED, Array, Model, RankCache, Split

quick = settings(max_examples=200, deadline=None)
LAYOUTS = ("LBHNP", "LBNHP", "LBPHN", "PLBHN", "LPBNH", "BLHNP", "BLNPH", "LHBNP", "BHLNP")


@st.composite
def cuts(draw: st.DrawFn, num_layers: int) -> tuple[int, ...]:
    inner = draw(st.sets(st.integers(1, max(1, num_layers - 1)), max_size=num_layers - 1))
    return (0, *sorted(inner), num_layers)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[Model, Split, Split]:
    is_mla = draw(st.booleans())
    num_heads = 1 if is_mla else draw(st.sampled_from([1, 2, 4]))
    num_layers = draw(st.integers(1, 3))
    kept = draw(st.none() | st.sets(st.integers(0, num_layers - 1), min_size=1))
    layers = None if kept is None else tuple(sorted(kept))
    model = Model(num_layers, num_heads, 2, 1 if is_mla else 2, layers)
    packing = draw(st.sampled_from(["", "", "", "packed", "opaque"]))
    sides = []
    pieces = draw(st.sampled_from([1, 1, 2]))
    for _ in range(2):
        pieces = pieces if packing == "opaque" else draw(st.sampled_from([1, 1, 2]))
        tokens = 4 if packing == "opaque" else draw(st.sampled_from([4, 8, 16, 6]))
        sides.append(Split(
            draw(st.sampled_from([1, 2, 4, 8])), draw(cuts(model.num_layers)),
            tokens, packing or draw(st.sampled_from(LAYOUTS)),
            0 if packing else draw(st.sampled_from([0, 0, 1])),
            1 if packing == "packed" else pieces,
        ))  # fmt: skip
    return model, sides[0], sides[1]


class PlannedTransfer:
    """One prompt from every rank of one side to every rank of the other, chunk by chunk."""

    def __init__(
        self,
        model: Model,
        source: Split,
        target: Split,
        num_tokens: int,
        hit: int,
    ) -> None:
        self.num_tokens, self.hit = num_tokens, hit
        self.sides = source, target
        self.tables = [_table(side, num_tokens) for side in self.sides]
        self.values = model.values(num_tokens + 64)
        self.sources, self.targets = (
            [RankCache(model, side, rank, len(table) + 3) for rank in range(side.num_ranks)]
            for side, table in zip(self.sides, self.tables, strict=True)
        )
        for cache in self.sources:
            end = len(self.tables[0]) * source.block_size
            cache.fill(self.tables[0], self.values[:, :, :end])

    def chunks(self, ends: list[int], *, has_window: bool) -> list[tuple[int, int, Array]]:
        """What every source rank sends: its rank, the first block, the blocks.

        With a window, nothing of what the target does not want either, as far as whole blocks go.
        """
        first, end = 0, len(self.tables[0])
        if has_window:
            first = self.hit * self.sides[1].block_size // self.sides[0].block_size
        edges = sorted({first, end, *(max(first, edge % (end + 1)) for edge in ends)})
        return [
            (rank, first, self.tables[0][first:end])
            for rank in range(len(self.sources))
            for first, end in pairwise(edges)
        ]

    def expected(self, cache: RankCache, end: int) -> Array:
        """What the blocks of the table must hold, with `end` tokens there."""
        side, table = self.sides[1], self.tables[1]
        before = self.hit * side.block_size
        expected = np.full_like(
            cache.of_mine(self.values[:, :, : len(table) * side.block_size]), UNTOUCHED
        )
        expected[:, :, before:end] = cache.of_mine(self.values)[:, :, before:end]
        return expected


def _table(side: Split, num_tokens: int) -> Array:
    count = -(-num_tokens // side.block_size)
    return np.random.default_rng(count).permutation(count + 3)[:count].astype(np.int64)


@quick
@given(
    fleets(), st.integers(1, 40), st.integers(0, 3), st.lists(st.integers(0, 9)), st.booleans(),
    st.randoms(),
)  # fmt: skip
def test_every_byte_arrives_once(
    fleet: tuple[Model, Split, Split],
    num_tokens: int,
    hit: int,
    ends: list[int],
    has_window: bool,
    random: object,
) -> None:
    model, source, target = fleet
    hit = min(hit, (num_tokens - 1) // target.block_size)
    transfer = PlannedTransfer(model, source, target, num_tokens, hit)
    chunks = transfer.chunks(ends, has_window=has_window)
    random.shuffle(chunks)  # type: ignore[attr-defined]
    check_arrival(transfer, chunks)


def check_arrival(transfer: PlannedTransfer, chunks: list[tuple[int, int, Array]]) -> None:
    """Move these chunks to every rank of the target; each byte is written once, and right."""
    (_, target), hit, num_tokens = transfer.sides, transfer.hit, transfer.num_tokens
    for cache in transfer.targets:
        sink = cache.sink(transfer.tables[1][hit:], hit, num_tokens)
        part_size = 1
        is_done = False
        written = np.zeros(cache.memory.nbytes, np.uint8)
        senders = sources_of(transfer.sources[0].spec, cache.spec, cache.rank)
        assert bool(senders) == bool(cache.layers)
        if not senders:
            continue  # all layers of the group are in other stages
        for rank, first, block_ids in chunks:
            if rank not in senders:
                continue
            piece = transfer.sources[rank].source(block_ids, first, num_tokens).towards(cache.spec)
            part_size = piece.part.block_size if piece.part else target.block_size
            manifest = piece.manifest
            assert (
                manifest.nbytes == piece.regions(manifest.first_block, manifest.num_blocks).nbytes
            )
            wanted = sink.wanted(manifest)
            if wanted[1]:
                _move(piece.regions(*wanted), sink.regions(manifest, *wanted), cache, written)
                is_done = sink.landed(manifest, *wanted)
            assert is_done == (not len(sink.missing_blocks()))
        assert is_done
        assert not len(sink.missing_blocks())
        end = -(-num_tokens // part_size) * part_size
        got = cache.token_views(transfer.tables[1])
        assert (got == transfer.expected(cache, end)).all()
        assert written.sum() == (end - hit * target.block_size) * (got[:, :, 0].size) * 2
        assert (written <= 1).all()


@st.composite
def two_kinds(draw: st.DrawFn) -> tuple[tuple[Model, ...], tuple[Split, ...], int]:
    """A model whose layers keep a latent and, all or some of them, an indexer's keys, which are
    cut by nobody; and two instances of one block size."""
    num_layers = draw(st.integers(1, 4))
    kept = draw(st.none() | st.sets(st.integers(0, num_layers - 1), min_size=1))
    layers = None if kept is None else tuple(sorted(kept))
    latent, indexer = (
        Model(num_layers, 1, width, 1, seen) for width, seen in ((5, None), (2, layers))
    )
    block_size = draw(st.sampled_from([4, 8]))
    sides = tuple(
        Split(draw(st.sampled_from([1, 2, 4, 8])), draw(cuts(num_layers)), block_size)
        for _ in range(2)
    )
    return (latent, indexer), sides, draw(st.sampled_from([1, 2]))


@quick
@given(two_kinds(), st.integers(1, 40))
def test_both_kinds_of_one_table_arrive_whatever_the_ranks(
    fleet: tuple[tuple[Model, ...], tuple[Split, ...], int], num_tokens: int
) -> None:
    models, sides, num_pieces = fleet
    transfers = []
    for model, layout, pieces in zip(models, ("LBHNP", "opaque"), (1, num_pieces), strict=True):
        source, target = (replace(side, layout=layout, num_pieces=pieces) for side in sides)
        transfers.append(PlannedTransfer(model, source, target, num_tokens, 0))
    specs = [
        [_of_two_kinds(ranks[0].spec, ranks[1].spec) for ranks in zip(*caches, strict=True)]
        for caches in zip(*((item.sources, item.targets) for item in transfers), strict=True)
    ]
    for here, there in itertools.product(*specs):
        assert obstacles(here, there) == obstacles(there, here) == []
    for transfer in transfers:
        check_arrival(transfer, transfer.chunks([], has_window=False))


def _of_two_kinds(first: CacheSpec, second: CacheSpec) -> CacheSpec:
    return msgspec.structs.replace(first, more=(msgspec.structs.replace(second, number=1),))


def test_a_thousand_layers_of_two_kinds_fit_a_frame() -> None:
    layers = tuple(range(1000))
    spec = msgspec.structs.replace(
        SPEC, layer_cuts=(0, 1000), layers=layers, page_bytes=[1 << 20] * len(layers)
    )
    hello = Hello(1, 1, PROTOCOL_VERSION, "a" * 100, _of_two_kinds(spec, spec), {})
    assert len(encode(hello)) < MAX_FRAME_BYTES // 2
    assert decode(encode(hello)) == hello


def _move(source: object, target: object, cache: RankCache, written: Array) -> None:
    for start, end, length in zip(*pair(source, target), strict=True):  # type: ignore[arg-type]
        ctypes.memmove(int(end), int(start), int(length))
        at = int(end) - cache.memory.ctypes.data
        assert 0 <= at <= cache.memory.nbytes - length
        written[at : at + length] += 1


@pytest.mark.parametrize("block_size", [4, 16, 64])
@pytest.mark.parametrize(("source_size", "target_size"), [(1, 4), (4, 1), (2, 8), (8, 2)])
def test_regions_are_as_many_as_blocks_and_layers(
    source_size: int, target_size: int, block_size: int
) -> None:
    """Heads before tokens: however many tokens a block has. A plan by the token would be right too,
    and slow."""
    model, num_tokens = Model(3, 8, 2), 640
    sides = (
        Split(source_size, (0, 3), block_size),
        Split(target_size, (0, 3), block_size),
    )
    transfer = PlannedTransfer(model, *sides, num_tokens, 0)
    for source, target in itertools.product(transfer.sources, transfer.targets):
        if target.rank not in targets_of(source.spec, source.rank, target.spec):
            continue
        piece = source.source(transfer.tables[0], 0, num_tokens).towards(target.spec)
        sink = target.sink(transfer.tables[1], 0, num_tokens)
        wanted = sink.wanted(piece.manifest)
        assert wanted == (0, num_tokens // block_size)
        for regions in (piece.regions(*wanted), sink.regions(piece.manifest, *wanted)):
            assert len(regions.lengths) <= 3 * num_tokens // block_size
            assert regions.is_joined


@pytest.mark.parametrize("sizes", [(16, 64), (64, 16), (32, 64), (128, 32)])
def test_with_unequal_blocks_the_smaller_ones_stay_whole(sizes: tuple[int, int]) -> None:
    """Their side has a region for each; the other one at most as many for each head."""
    model, num_tokens = Model(3, 4, 2), 640
    sides = [Split(1, (0, 3), size) for size in sizes]
    transfer = PlannedTransfer(model, sides[0], sides[1], num_tokens, 0)
    [source], [target] = transfer.sources, transfer.targets
    piece = source.source(transfer.tables[0], 0, num_tokens).towards(target.spec)
    sink = target.sink(transfer.tables[1], 0, num_tokens)
    wanted = sink.wanted(piece.manifest)
    count = 3 * num_tokens // min(sizes)
    counts = [
        len(regions.lengths)
        for regions in (piece.regions(*wanted), sink.regions(piece.manifest, *wanted))
    ]
    assert sorted(counts)[0] <= count
    assert sorted(counts)[1] <= count * model.num_heads


@quick
@given(fleets())
def test_each_part_has_one_source_and_nobody_is_forgotten(
    fleet: tuple[Model, Split, Split],
) -> None:
    model, source, target = fleet
    givers = [RankCache(model, source, rank, 1).spec for rank in range(source.num_ranks)]
    takers = [RankCache(model, target, rank, 1) for rank in range(target.num_ranks)]
    idle: list[int] = []
    for cache in takers:
        senders = sources_of(givers[0], cache.spec, cache.rank)
        assert all(cache.rank in targets_of(givers[s], s, cache.spec) for s in senders)
        covered = np.zeros((model.num_layers, model.num_heads), np.int64)
        for sender in senders:
            part = part_between(givers[sender], cache.spec)
            if part is None:
                covered[:] += 1
                continue
            covered[part.first_layer :][: part.num_layers, part.first_head :][
                :, : part.num_heads
            ] += 1
        if senders and part_between(givers[senders[0]], cache.spec) is not None:
            assert (cache.of_mine(covered) == 1).all()
        idle += idle_sources(givers[0], cache.spec, cache.rank)
    busy = {r for r in range(source.num_ranks) if targets_of(givers[r], r, takers[0].spec)}
    if model.kept is None:  # else some ranks have nothing, and nobody need mind them
        assert sorted(idle) == sorted(set(range(source.num_ranks)) - busy)


@quick
@given(fleets(), st.tuples(*[st.sampled_from(["", "a", "b"])] * 2))
def test_a_draft_goes_to_those_who_have_it_and_nobody_else_waits_or_holds(
    fleet: tuple[Model, Split, Split], drafts: tuple[str, str]
) -> None:
    model, *sides = fleet
    source, target = (
        [_with_draft(model, side, rank, draft) for rank in range(side.num_ranks)]
        for side, draft in zip(sides, drafts, strict=True)
    )
    is_shared = len(source[0].groups) == len(target[0].groups) == 2 and drafts[0] == drafts[1]
    sent, awaited = set(), set()
    for here, there in itertools.product(source, target):
        assert obstacles(here, there) == obstacles(here.groups[0], there.groups[0])
        assert (counterpart(here.groups[-1], there) is None) == (
            here.groups[-1].is_draft and not is_shared
        )
        for group in here.groups:
            theirs = counterpart(group, there)
            if theirs and there.rank in targets_of(group, here.rank, theirs):
                sent.add((group.number, here.rank, there.rank))
        for group in there.groups:
            theirs = counterpart(group, here)
            if theirs and here.rank in sources_of(theirs, group, there.rank):
                awaited.add((group.number, here.rank, there.rank))
    assert sent == awaited
    minded = [pair for there in target for pair in unclaimed(source[0], there)]
    held = {(group.number, spec.rank) for spec in source for group in spec.groups}
    nobodys = held - {(number, rank) for number, rank, _ in sent}
    assert sorted(minded) == sorted(pair for pair in nobodys if pair[0] == 1 and not is_shared)
    assert is_shared == any(number == 1 for number, *_ in sent)


def _with_draft(model: Model, side: Split, rank: int, draft: str) -> CacheSpec:
    """What a rank says of its cache, with a draft of one layer; not where there are stages."""
    spec = RankCache(model, side, rank, 1).spec
    if not draft or len(side.layer_cuts) > 2:
        return spec
    one = replace(model, num_layers=1, kept=None)
    own = RankCache(one, replace(side, layer_cuts=(0, 1)), rank, 1).spec
    own = msgspec.structs.replace(own, number=1, is_draft=True, identity=draft.encode())
    return msgspec.structs.replace(spec, more=(own,))


SPEC = RankCache(Model(), Split(), 0, 1).spec


def other(**changes: Any) -> CacheSpec:
    return msgspec.structs.replace(SPEC, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"tp_size": 3, "num_kv_heads": 2},
        {"layer_cuts": (0, 2, 1)},
        {"layer_cuts": (1, 2)},
        {"layer_cuts": ()},
        {"num_kv_heads": 0},
        {"rank": 1},
        {"tp_size": 1024, "layer_cuts": (0, 1, 2)},
    ],
)
def test_ranks_that_cannot_share_a_model_are_refused(changes: Any) -> None:
    """What a peer says of itself is not trusted: nobody must wait for heads that nobody has."""
    [reason] = obstacles(SPEC, other(**changes))
    assert "share the model" in reason or "here" in reason


def test_a_rank_that_gets_nothing_is_refused() -> None:
    source = RankCache(Model(), Split(2), 0, 1).spec
    target = RankCache(Model(), Split(2), 1, 1).spec
    with pytest.raises(PeerRefused, match="rank 0 has nothing for rank 1"):
        part_between(source, target)


def part_of(**changes: Any) -> Manifest:
    """A chunk of all of the small model's four heads and layers, changed."""
    target = RankCache(Model(), Split(block_size=8), 0, 9)
    source = RankCache(Model(), Split(block_size=4), 0, 9)
    piece = source.source(np.arange(2), 0, 8).towards(target.spec)
    assert piece.part is not None
    part = msgspec.structs.replace(piece.part, **changes)
    return msgspec.structs.replace(piece.manifest, part=part)


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        (part_of(first_layer=1), "of which we have"),
        (part_of(num_layers=0), "of which we have"),
        (part_of(first_head=2), "of which we have"),
        (part_of(num_heads=1), "pages differ"),
        (part_of(block_size=3), "are not cut by 3"),
        (part_of(block_size=16), "are not cut by 16"),
        (part_of(shape=PageShape(4, 32, (Plane(0, 8, 8),))), "the peer's rows are"),
        (Manifest(0, 1, [1], 8), "pages differ"),
    ],
)  # fmt: skip
def test_a_sink_takes_no_part_that_it_has_no_place_for(manifest: Manifest, reason: str) -> None:
    sink = RankCache(Model(), Split(block_size=8), 0, 9).sink(np.arange(1), 0, 8)
    with pytest.raises(RemoteProtocolError, match=reason):
        sink.wanted(manifest)
    assert sink.missing_blocks().tolist() == [0]


def test_two_parts_of_the_same_heads_are_refused() -> None:
    """The peer came back as another one: what was there is not made whole with what comes."""
    target = RankCache(Model(), Split(block_size=8), 0, 9)
    sink = target.sink(np.arange(1), 0, 8)
    for side, error in (
        (Split(2), None),
        (Split(1), "two peers send the same layers and heads"),
    ):
        source = RankCache(Model(), side, 0, 9)
        piece = source.source(np.arange(2), 0, 8).towards(target.spec)
        if error is None:
            assert sink.wanted(piece.manifest) == (0, 2)
            assert not sink.landed(piece.manifest, 0, 2)
            continue
        with pytest.raises(RemoteProtocolError, match=error):
            sink.wanted(piece.manifest)
