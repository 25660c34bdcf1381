"""One request's KV, end to end: from a paged cache in one process to a paged cache in another.

The receiver waits from the beginning, and the clock stops when its own loop sees its transfer done.
  computed  the chunks are offered one step ahead; the clock starts when all are marked ready
  send      the bytes are there already; the clock starts at send
  idle      both main threads sleep in wait()
  held      both main threads run Python without a pause and poll every few hundred microseconds, as
            a serving engine's step does; on two cores the loops also take half of the processor
  limit     gather into shared memory, then scatter into a cache, by our native copy on one core
Every request is verified byte for byte. Through the times of each case goes a least-squares line of
time against bytes: its intercept is the fixed overhead where a request is one chunk; where it is
cut into several, scatter overlaps gather, and the intercept is the scatter of the last chunk.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.harness import Row, alternate, arguments, progress, record, spread
from benchmarks.memory import HostCache, Int64s, ordinary_memory, random_memory, scattered
from benchmarks.processes import Remote
from mempool import Arena, copy_now
from p2p_engine import EngineConfig, P2pNcclEngine, Transfer, TransferKey
from p2p_engine.memory.layout import one_region, pair
from p2p_engine.memory.paged import PagedSink, PagedSource
from p2p_engine.peers.link import PeerAddress

NUM_LAYERS, BLOCK_TOKENS = 32, 32
PAGE_BYTES = 4 * BLOCK_TOKENS * 2 * 64 * 2  # KV heads, tokens, K and V, head size, bf16
TOKENS = (32, 1000, 2500, 5000, 10000, 20000)
STEP_SECONDS = 0.03  # between offer and computed: one forward pass
POLL_SECONDS = 0.0003  # of pure Python between two polls of a held loop
SECONDS = 60.0


def blocks_of(num_tokens: int) -> int:
    """How many blocks so many tokens fill; the last one may be ragged."""
    return -(-num_tokens // BLOCK_TOKENS)


def run_loop(engine: P2pNcclEngine, until: Callable[[], bool]) -> None:
    """A main thread that never rests and never blocks."""
    deadline = time.perf_counter() + SECONDS
    while not until() and time.perf_counter() < deadline:
        next_poll = time.perf_counter() + POLL_SECONDS
        while time.perf_counter() < next_poll:
            pass
        engine.poll()


def finish(engine: P2pNcclEngine, transfer: Transfer, *, held: bool) -> float:
    """Wait for a transfer in the way of this case; returns the time when it was seen done."""
    if held:
        run_loop(engine, lambda: transfer.done)
    transfer.wait(SECONDS)
    return time.perf_counter()


class Decode:
    """The receiving process."""

    def __init__(self, transport: str, num_blocks: int, seed: int) -> None:
        torch.set_num_threads(1)
        nbytes = num_blocks * NUM_LAYERS * PAGE_BYTES
        self._mine = HostCache(ordinary_memory(nbytes), NUM_LAYERS, PAGE_BYTES)
        self._its = HostCache(random_memory(nbytes, seed), NUM_LAYERS, PAGE_BYTES)
        self._engine = make_engine(transport, nbytes)

    def address(self) -> str:
        """Where to dial."""
        return self._engine.zmq_address

    def expect(self, number: int, num_tokens: int, block_ids: Int64s) -> None:
        """Start to receive; `finished` must follow."""
        sink = PagedSink(self._mine.paged, block_ids, 0, num_tokens)
        self._transfer = self._engine.receive(request_key(number), sink)

    def finished(self, held: bool) -> float:
        """Wait for the end; returns the time on the clock that all processes share."""
        return finish(self._engine, self._transfer, held=held)

    def verify(self, number: int, block_ids: Int64s, its_ids: Int64s) -> bool:
        """Whether the bytes are the sender's and nothing is left over."""
        self._its.stamp(its_ids, number)
        whole = self._mine.holds(block_ids, self._its, its_ids)
        return whole and self._engine.stats()["live_bytes"] == 0

    def messages(self) -> int:
        """How many messages this side has sent."""
        sent: int = self._engine.stats()["messages_sent"]
        return sent

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()


def make_engine(transport: str, nbytes: int) -> P2pNcclEngine:
    """An engine with room for any request; it pings rarely, so that messages can be counted."""
    return P2pNcclEngine(
        EngineConfig(
            transports=(transport,), kv_buffer_size=2 * nbytes, mem_pool_size_gb=0,
            peer_timeout_seconds=600, retry_seconds=5,
        )
    )  # fmt: skip


def request_key(number: int) -> TransferKey:
    """The key of one request."""
    return TransferKey(f"request-{number}")


class RequestBench:
    """The prefill process, and the limit."""

    def __init__(self, transport: str, chunk_tokens: int, seed: int) -> None:
        torch.set_num_threads(1)
        self.num_blocks = blocks_of(max(TOKENS))
        self.chunk_blocks = blocks_of(chunk_tokens)
        nbytes = self.num_blocks * NUM_LAYERS * PAGE_BYTES
        self.cache = HostCache(random_memory(nbytes, seed), NUM_LAYERS, PAGE_BYTES)
        self.other = HostCache(ordinary_memory(nbytes), NUM_LAYERS, PAGE_BYTES)
        self.shared = Arena(nbytes)
        self.decode = Remote(Decode, transport, self.num_blocks, seed)
        self.peer = PeerAddress(self.decode.ask("address"))
        self.engine = make_engine(transport, nbytes)
        self.numbers = itertools.count(1)
        self.messages: list[int] = []

    def blocks(self, num_tokens: int, number: int) -> tuple[Int64s, Int64s]:
        """Blocks of both caches in random order."""
        count, out_of = blocks_of(num_tokens), self.num_blocks
        return scattered(count, out_of, 2 * number), scattered(count, out_of, 2 * number + 1)

    def request(self, num_tokens: int, *, held: bool, ahead: bool) -> float:
        """Move one request and verify it; returns the seconds.

        `ahead`: it is offered one step before it is computed, and the clock runs from computed;
        else it is computed already, and the clock runs from send.
        """
        number = next(self.numbers)
        block_ids, its_ids = self.blocks(num_tokens, number)
        self.cache.stamp(block_ids, number)
        before = self.num_messages()
        self.decode.ask("expect", number, num_tokens, its_ids)
        self.decode.tell("finished", held)
        started_at = self.send(number, num_tokens, block_ids, held=held, ahead=ahead)
        seconds: float = self.decode.answer() - started_at
        self.messages.append(self.num_messages() - before)
        if not self.decode.ask("verify", number, its_ids, block_ids):
            raise RuntimeError("the bytes that arrived are not those that were sent")
        return seconds

    def send(
        self, number: int, num_tokens: int, block_ids: Int64s, *, held: bool, ahead: bool
    ) -> float:
        """Send all chunks and wait for their COMMITs; returns when the clock starts."""
        key, step = request_key(number), self.chunk_blocks
        sources = [
            PagedSource(self.cache.paged, block_ids[first : first + step], first, num_tokens)
            for first in range(0, len(block_ids), step)
        ]
        started_at = time.perf_counter()
        transfers = [self.engine.send(key, self.peer, item, ready=not ahead) for item in sources]
        if ahead:
            self.compute(held=held)
            started_at = time.perf_counter()
            for transfer in transfers:
                self.engine.mark_ready(transfer)
        for transfer in transfers:
            finish(self.engine, transfer, held=held)
        return started_at

    def compute(self, *, held: bool) -> None:
        """Let the time of one step go by."""
        end = time.perf_counter() + STEP_SECONDS
        if held:
            run_loop(self.engine, lambda: time.perf_counter() >= end)
        else:
            time.sleep(STEP_SECONDS)

    def limit(self, num_tokens: int) -> float:
        """Gather a request into shared memory and scatter it, by native copies on this thread."""
        block_ids, its_ids = self.blocks(num_tokens, next(self.numbers))
        source, destination = self.cache.paged.pages(block_ids), self.other.paged.pages(its_ids)
        packed = one_region(self.shared.address, source.nbytes)
        gather, scatter = pair(source, packed), pair(packed, destination)
        start = time.perf_counter()
        copy_now(*gather)
        copy_now(*scatter)
        return time.perf_counter() - start

    def num_messages(self) -> int:
        """How many messages both sides have sent."""
        sent: int = self.engine.stats()["messages_sent"] + self.decode.ask("messages")
        return sent

    def close(self) -> None:
        """End the processes and engines."""
        self.engine.close()
        self.decode.close()


CASES = {
    "computed, idle": {"held": False, "ahead": True},
    "computed, held": {"held": True, "ahead": True},
    "send, idle": {"held": False, "ahead": False},
    "send, held": {"held": True, "ahead": False},
}


def contenders(bench: RequestBench) -> dict[tuple[str, int], Callable[[], float]]:
    """Every case at every size, and the limit."""
    runs: dict[tuple[str, int], Callable[[], float]] = {}
    for num_tokens in TOKENS:
        runs["limit", num_tokens] = functools.partial(bench.limit, num_tokens)
        for case, how in CASES.items():
            runs[case, num_tokens] = functools.partial(bench.request, num_tokens, **how)
    return runs


def line_through(seconds: dict[tuple[str, int], list[float]], case: str) -> tuple[float, float]:
    """Least squares through the medians: (seconds at no bytes, seconds per byte)."""
    sizes = [blocks_of(num_tokens) * NUM_LAYERS * PAGE_BYTES for num_tokens in TOKENS]
    medians = [statistics.median(seconds[case, num_tokens]) for num_tokens in TOKENS]
    slope, intercept = np.polyfit(sizes, medians, 1)
    return float(intercept), float(slope)


def rows_of(seconds: dict[tuple[str, int], list[float]]) -> list[Row]:
    """The times of each size, then the line through them."""
    rows: list[Row] = []
    for (case, num_tokens), samples in seconds.items():
        over = statistics.median(np.subtract(samples, seconds["limit", num_tokens]))
        row: Row = {"case": case, "tokens": num_tokens}
        row |= spread([value * 1000 for value in samples], "ms_", 2)
        rows.append({**row, "over_limit_ms": round(float(over) * 1000, 2)})
    _, limit = line_through(seconds, "limit")
    for case in ("limit", *CASES):
        intercept, slope = line_through(seconds, case)
        row = {"case": case, "tokens": "line", "intercept_ms": round(intercept * 1000, 2)}
        row |= {"gb_per_s": round(1e-9 / slope, 2), "of_limit": round(limit / slope, 3)}
        rows.append(row)
    return rows


def messages_of(bench: RequestBench) -> Row:
    """How many messages both sides together sent for each chunk."""
    chunks = sum(-(-blocks_of(tokens) // bench.chunk_blocks) for tokens in TOKENS) / len(TOKENS)
    per_chunk = statistics.mean(bench.messages) / chunks
    return {"case": "messages", "tokens": "chunk", "messages": round(per_chunk, 2)}


def main() -> None:
    """Measure, print, record."""
    parser = arguments("request", "one request's KV, end to end", repetitions=7)
    parser.add_argument("--transports", nargs="+", default=["shm", "tcp"])
    parser.add_argument("--chunk-tokens", nargs="+", type=int, default=[max(TOKENS), 2048])
    options = parser.parse_args()
    rows: list[Row] = []
    for transport, chunk_tokens in itertools.product(options.transports, options.chunk_tokens):
        progress(f"{transport}, chunks of at most {chunk_tokens} tokens")
        bench = RequestBench(transport, chunk_tokens, options.seed)
        try:
            seconds = alternate(contenders(bench), options.repetitions)
            made = [*rows_of(seconds), messages_of(bench)]
            rows += [{"transport": transport, "chunk_tokens": chunk_tokens, **row} for row in made]
        finally:
            bench.close()
    record(rows, options)


if __name__ == "__main__":
    main()
