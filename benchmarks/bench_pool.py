"""The tensor pool: the cost of a block, the fill of the pool, and its copies beside plain ones.

pairs         nanoseconds of processor time for one alloc + free, from C and from Python
fill          bytes asked for / capacity when the first request of a random mix is refused, beside
              the same mix rounded up to powers of two, as a plain buddy allocator does
store, load   GB/s of 256 MiB in tensors of one size, beside tensor.copy_ and memmove of the same
              bytes between the same two places, by the processor time of the one thread that
              copies; destinations are cold
"""

from __future__ import annotations

import ctypes
import random
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.harness import Row, alternate, arguments, progress, ratio, record, spread
from mempool import Buddy, PoolBlock, TensorMemoryPool

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
ROOT = Path(__file__).parent.parent
BENCH_BUDDY = ROOT / "build" / "bench_buddy"

# name: capacity, min block, live blocks, largest request, pairs
C_PAIRS = {
    "one block in and out": (GIB, 512, 0, 512, 1_000_000),
    "1000 live of 512 B": (GIB, 512, 1000, 512, 1_000_000),
    "1000 live up to 32 KiB": (GIB, 512, 1000, 32 * KIB, 300_000),
    "10000 live up to 2 MiB": (64 * GIB, 512, 10_000, 2 * MIB, 300_000),
}
COPIED_BYTES = 256 * MIB
TENSOR_BYTES = (16 * KIB, 128 * KIB, MIB, 16 * MIB)


def build_bench_buddy() -> None:
    """Compile the C side with the flags of the extension."""
    BENCH_BUDDY.parent.mkdir(exist_ok=True)
    sources = [ROOT / "benchmarks" / "bench_buddy.c"]
    sources += [ROOT / "csrc" / f"{name}.c" for name in ("bitmap", "space", "buddy")]
    flags = ["-std=c11", "-D_GNU_SOURCE", "-DNDEBUG", "-O3", f"-I{ROOT / 'csrc'}"]
    subprocess.run(["cc", *flags, *map(str, sources), "-o", str(BENCH_BUDDY)], check=True)


def c_pair(case: Sequence[int], seed: int) -> float:
    """Nanoseconds per pair in C."""
    command = [str(BENCH_BUDDY), *map(str, case), str(seed)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def python_pair(pair: Callable[[], object], count: int = 100_000) -> float:
    """Nanoseconds per call of pair."""
    before = time.thread_time_ns()
    for _ in range(count):
        pair()
    return (time.thread_time_ns() - before) / count


def pair_rows(repetitions: int, seed: int) -> list[Row]:
    """Measure alloc + free from C and from Python."""
    buddy, pool = Buddy(GIB, 512), TensorMemoryPool(GIB)
    contenders: dict[str, Callable[[], float]] = {
        f"C, {name}": lambda case=case: c_pair(case, seed)  # type: ignore[misc]
        for name, case in C_PAIRS.items()
    }
    contenders["Python, Buddy"] = lambda: python_pair(lambda: buddy.free(buddy.alloc(1000)))
    contenders["Python, TensorMemoryPool"] = lambda: python_pair(
        lambda: pool.free(pool.allocate(1000)), 20_000
    )
    samples = alternate(contenders, repetitions)
    return [
        {"what": "pair", "case": name, "unit": "ns", **spread(samples[name], digits=1)}
        for name in samples
    ]


def fill(seed: int, rounded: Callable[[int], int]) -> float:
    """Let a random mix of sizes grow and shrink until one request is refused."""
    choose = random.Random(seed)
    buddy = Buddy(256 * MIB, 512)
    live: list[tuple[int, int]] = []
    try:
        while True:
            nbytes = int(2 ** choose.uniform(9, 21))
            live.append((buddy.alloc(rounded(nbytes)), nbytes))
            if choose.random() < 0.4:
                buddy.free(live.pop(choose.randrange(len(live)))[0])
    except MemoryError:
        return sum(nbytes for _, nbytes in live) / buddy.stats()["capacity_bytes"]


def fill_rows(repetitions: int, seed: int) -> list[Row]:
    """Measure how full an arena gets; each repetition is another mix."""
    rows: list[Row] = []
    mixes = range(seed, seed + repetitions)
    for case, rounded in (
        ("to min_block", lambda nbytes: nbytes),
        ("to powers of two", lambda nbytes: 1 << (nbytes - 1).bit_length()),
    ):
        rows.append(
            {
                "what": "fill",
                "case": f"rounded {case}",
                "unit": "of capacity",
                **spread(fill(mix, rounded) for mix in mixes),
            }
        )
    return rows


class Copies:
    """The same bytes into and out of a pool, in tensors of one size, three ways."""

    def __init__(self, tensor_bytes: int) -> None:
        self.count = COPIED_BYTES // tensor_bytes
        self.tensors = _pieces(
            torch.randint(0, 256, (COPIED_BYTES,), dtype=torch.uint8), self.count
        )
        self.pool = TensorMemoryPool(COPIED_BYTES)
        self.blocks: list[PoolBlock] = self._store_all()
        self.views = [self.pool.view(block) for block in self.blocks]

    def _store_all(self) -> list[PoolBlock]:
        return [self.pool.store_tensor(tensor) for tensor in self.tensors]

    def _free_all(self) -> None:
        for block in self.blocks:
            self.pool.free(block)

    def store(self) -> float:
        """store_tensor, after all was freed: the blocks come back in the same places."""
        self._free_all()
        before = time.thread_time()
        self.blocks = self._store_all()
        return _rate(before)

    def load(self) -> float:
        """load_tensor into tensors that exist."""
        before = time.thread_time()
        for block, tensor in zip(self.blocks, self.tensors, strict=True):
            self.pool.load_tensor(block, out=tensor)
        return _rate(before)

    def copy(self, *, into_pool: bool) -> float:
        """tensor.copy_."""
        before = time.thread_time()
        for inside, outside in zip(self.views, self.tensors, strict=True):
            inside.copy_(outside) if into_pool else outside.copy_(inside)
        return _rate(before)

    def memmove(self, *, into_pool: bool) -> float:
        """C's own."""
        before = time.thread_time()
        for inside, outside in zip(self.views, self.tensors, strict=True):
            to, source = (inside, outside) if into_pool else (outside, inside)
            ctypes.memmove(to.data_ptr(), source.data_ptr(), to.nbytes)
        return _rate(before)


def _pieces(memory: torch.Tensor, count: int) -> list[torch.Tensor]:
    return list(memory.view(count, -1).unbind())


def _rate(before: float) -> float:
    return COPIED_BYTES / (time.thread_time() - before) / 1e9


def copy_rows(tensor_bytes: int, repetitions: int) -> list[Row]:
    """Measure store and load of tensors of this size beside plain copies."""
    copies = Copies(tensor_bytes)
    rows: list[Row] = []
    for what, ours, into_pool in (("store", copies.store, True), ("load", copies.load, False)):
        samples = alternate(
            {
                "pool": ours,
                "copy_": lambda into=into_pool: copies.copy(into_pool=into),  # type: ignore[misc]
                "memmove": lambda into=into_pool: copies.memmove(into_pool=into),  # type: ignore[misc]
            },
            repetitions,
        )
        for case, values in samples.items():
            rows.append(
                {
                    "what": what,
                    "case": f"{case}, {tensor_bytes // KIB} KiB",
                    "unit": "GB/s",
                    **spread(values),
                    "pool is": ratio(samples["pool"], values),
                }
            )
    return rows


def main() -> None:
    """Measure everything and record it."""
    options = arguments("pool", __doc__ or "", repetitions=7).parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    build_bench_buddy()
    progress("alloc + free")
    rows = pair_rows(options.repetitions, options.seed)
    progress("fill")
    rows += fill_rows(options.repetitions, options.seed)
    for tensor_bytes in TENSOR_BYTES:
        progress(f"tensors of {tensor_bytes // KIB} KiB")
        rows += copy_rows(tensor_bytes, options.repetitions)
    record(rows, options)


if __name__ == "__main__":
    main()
