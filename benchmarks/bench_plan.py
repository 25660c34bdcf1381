"""The planner: the cost to map unequal caches onto each other, beside the copy of the same bytes.

One rank of a model with 80 layers and 8 KV heads of 128 in bfloat16 sends 10,000 tokens to one rank
of another instance. The plan is everything that both sides compute for it: the regions of the
source, the regions of the destination, and their mapping to a packed landing. The copy gathers the
same bytes once. A plan is timed among others, and alone right after a copy, which has emptied the
processor's caches.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from benchmarks.harness import Row, alternate, arguments, progress, ratio, record, spread
from benchmarks.memory import address_of, ordinary_memory, scattered
from mempool import Mover
from p2p_engine.memory.layout import Int64s, Regions, one_region, packed_pages, pair
from p2p_engine.memory.paged import PagedCache, PagedSink, PagedSource
from p2p_engine.memory.plan import extent_of
from p2p_engine.wire.messages import CacheSpec, PageShape, Plane

NUM_TOKENS = 10_000
IN_A_ROW = 10
NUM_LAYERS, NUM_HEADS, HEAD_BYTES = 80, 8, 256


@dataclass(frozen=True)
class BenchSide:
    """One instance."""

    tp_size: int
    block_size: int = 16
    tokens_first: bool = False


CASES = {
    "TP 8 to 8, page by page": (BenchSide(8), BenchSide(8)),
    "TP 8 to 4": (BenchSide(8), BenchSide(4)),
    "TP 4 to 8": (BenchSide(4), BenchSide(8)),
    "TP 8 to 4, blocks of 16 to 64": (BenchSide(8), BenchSide(4, 64)),
    "TP 8 to 4, blocks of 128 to 64": (BenchSide(8, 128), BenchSide(4, 64)),
    "TP 4 to 8, tokens first to heads first": (BenchSide(4, tokens_first=True), BenchSide(8)),
}


class PlannedRank:
    """Rank 0 of an instance, and a request's blocks in it."""

    def __init__(self, side: BenchSide, seed: int) -> None:
        self.num_blocks = -(-NUM_TOKENS // side.block_size)
        heads = NUM_HEADS // side.tp_size
        page_bytes = heads * side.block_size * 2 * HEAD_BYTES
        self.memory = ordinary_memory(NUM_LAYERS * self.num_blocks * page_bytes)
        token_stride = 2 * HEAD_BYTES * (heads if side.tokens_first else 1)
        head_stride = 2 * HEAD_BYTES * (1 if side.tokens_first else side.block_size)
        planes = (Plane(0, token_stride, HEAD_BYTES), Plane(HEAD_BYTES, token_stride, HEAD_BYTES))
        self.spec = CacheSpec(
            block_size=side.block_size, num_kv_heads=NUM_HEADS, tp_size=side.tp_size,
            layer_cuts=(0, NUM_LAYERS), page_bytes=[page_bytes] * NUM_LAYERS,
            layout="NHD" if side.tokens_first else "HND",
            shape=PageShape(side.block_size, head_stride, planes),
        )  # fmt: skip
        layers = np.arange(NUM_LAYERS, dtype=np.int64) * self.num_blocks * page_bytes
        same = np.full(NUM_LAYERS, page_bytes, np.int64)
        self.paged = PagedCache(
            address_of(self.memory) + layers, same, same, self.num_blocks, self.spec
        )
        self.block_ids: Int64s = scattered(self.num_blocks, self.num_blocks, seed)


class PlannedPair:
    """One source rank, one destination rank, and a packed landing between them."""

    def __init__(self, case: tuple[BenchSide, BenchSide], seed: int) -> None:
        self.source, self.target = PlannedRank(case[0], seed), PlannedRank(case[1], seed + 1)
        assert extent_of(self.source.spec, 0) & extent_of(self.target.spec, 0)
        manifest = self._cut().manifest
        self.nbytes = manifest.nbytes
        self.landing = ordinary_memory(self.nbytes)
        self.regions = self._cut().regions(manifest.first_block, manifest.num_blocks).coalesced()
        self.num_regions = [len(side.lengths) for side in self.plan()]

    def _cut(self) -> PagedSource:
        source = PagedSource(self.source.paged, self.source.block_ids, 0, NUM_TOKENS)
        return source.towards(self.target.spec)

    def plan(self) -> tuple[Regions, Regions]:
        """Compute all that the transfer needs, on both sides."""
        piece = self._cut()
        manifest = piece.manifest
        blocks = manifest.first_block, manifest.num_blocks
        gathered = piece.regions(*blocks).coalesced()
        pair(gathered, one_region(address_of(self.landing), self.nbytes))
        sink = PagedSink(self.target.paged, self.target.block_ids, 0, NUM_TOKENS)
        wanted = sink.wanted(manifest)
        packed = packed_pages(address_of(self.landing), manifest, *wanted)
        scattered_to = sink.regions(manifest, *wanted).coalesced()
        pair(packed, scattered_to)
        return gathered, scattered_to

    def planning_ms(self, count: int = 1) -> float:
        """Processor time of one plan of so many."""
        before = time.thread_time_ns()
        for _ in range(count):
            self.plan()
        return (time.thread_time_ns() - before) / 1e6 / count

    def copying_ms(self, mover: Mover) -> float:
        """Time of one gather of the same bytes."""
        before = time.monotonic_ns()
        landing = one_region(address_of(self.landing), self.nbytes)
        job = mover.copy(*pair(self.regions, landing), tag=None, keep=self)
        if not job.wait(60):
            raise TimeoutError("the copy did not end")
        return (time.monotonic_ns() - before) / 1e6


def measure(name: str, repetitions: int, seed: int) -> Row:
    """Plan and copy in turns."""
    both, mover = PlannedPair(CASES[name], seed), Mover()
    try:
        samples = alternate(
            {
                "copy": lambda: both.copying_ms(mover),
                "first": both.planning_ms,
                "plan": lambda: both.planning_ms(IN_A_ROW),
            },
            repetitions,
        )
    finally:
        mover.close(5.0)
    return {
        "case": name,
        "MiB": both.nbytes >> 20,
        "source_regions": both.num_regions[0],
        "target_regions": both.num_regions[1],
        **spread(samples["plan"], "plan_ms_"),
        **spread(samples["first"], "first_plan_ms_"),
        **spread(samples["copy"], "copy_ms_"),
        "plan_of_copy": ratio(samples["plan"], samples["copy"]),
        "first_plan_of_copy": ratio(samples["first"], samples["copy"]),
    }


def main() -> None:
    """Measure every case."""
    options = arguments("plan", __doc__ or "", repetitions=9).parse_args()
    rows = []
    for name in CASES:
        progress(name)
        rows.append(measure(name, options.repetitions, options.seed))
    record(rows, options)


if __name__ == "__main__":
    main()
