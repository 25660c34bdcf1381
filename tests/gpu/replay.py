"""Two worker halves on device memory, driven as vLLM's model runners drive them, without vLLM.

A forward is work in the default stream that has not run when it returns: a kernel that the test
ends, and writes of the pages that it completes. A cache is one allocation in which the layers of a
block lie side by side, so that each layer is a strided view.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from p2p_engine import EngineConfig, P2pNcclEngine, SendMode, TransferKey
from p2p_engine.connector.host_buffer import InPlace
from p2p_engine.connector.layer_group import GroupCache, LayerGroup
from p2p_engine.connector.orders import BlockRange, EndedSend, Load, Party, SendStep, StepOrders
from p2p_engine.connector.worker import StepResults, WorkerHalf
from p2p_engine.gpu.cuda import Cuda
from p2p_engine.memory.paged import PagedCache
from p2p_engine.peers.directory import Directory
from p2p_engine.wire.messages import CacheSpec
from tests.doubles.slow_kernel import SlowKernel
from tests.gpu.recorded import EMPTY_STEPS, FORWARD, HOOKS, LAYERS, STEPS
from tests.support import eventually

BLOCK_SIZE, NUM_LAYERS, NUM_BLOCKS = 16, 3, 24
PAGE_BYTES = 2048
STALE = 255  # what a block holds that nobody has computed
DEFAULT_STREAM = 0
PREEMPTED_AT = 2  # the step in which the preempted one's blocks are somebody else's
BLOCKING = ("wait_for_save", "get_transfer_results")  # with PUT: for what the step has computed


@dataclass
class Forward:
    """Work that a model runner launches: it runs when the kernel before it has ended."""

    opened: threading.Event = field(default_factory=threading.Event)
    pages: list[tuple[int, int]] = field(default_factory=list)  # (block id, value)


class ReplayedRank:
    """One worker of an instance: its cache, its engine, its worker half, its directory."""

    def __init__(self, settings: dict[str, Any], role: str, port: int) -> None:
        self._cuda = Cuda()
        self._cuda.use(0)
        nbytes = NUM_BLOCKS * NUM_LAYERS * PAGE_BYTES
        self._address = self._cuda.allocate(nbytes)
        self._cuda.fill(self._address, STALE, nbytes, DEFAULT_STREAM)
        self._cuda.synchronize(DEFAULT_STREAM)
        spec = CacheSpec(
            identity=b"replayed", block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64,
            layer_cuts=(0, NUM_LAYERS), page_bytes=[PAGE_BYTES] * NUM_LAYERS,
        )  # fmt: skip
        sizes = np.full(NUM_LAYERS, PAGE_BYTES, np.int64)
        starts = self._address + np.arange(NUM_LAYERS, dtype=np.int64) * PAGE_BYTES
        cache = PagedCache(starts, sizes * NUM_LAYERS, sizes, NUM_BLOCKS, spec)
        names = tuple(f"layers.{number}" for number in range(NUM_LAYERS))
        kind: Any = SimpleNamespace(block_size=BLOCK_SIZE)
        group = LayerGroup(0, names, kind)
        config = EngineConfig(**settings)
        self._engine = P2pNcclEngine(config, spec=spec)
        self.half = WorkerHalf(
            self._engine, spec, [GroupCache(group, cache, InPlace())], can_fail_requests=True
        )
        self._directory = Directory(config, [self.half.location], kv_port=port, role=role)
        self.address = self._directory.address
        self.results: list[StepResults] = []
        self._forwards: list[Forward] = []
        self._kernels: list[SlowKernel] = []

    def step(self, order: str, orders: StepOrders, forward: Forward | None = None) -> None:
        """Make one step as a runner does."""
        hooks = STEPS[order] if forward is not None else EMPTY_STEPS[order[:2]]
        for name in hooks:
            if name in (FORWARD, LAYERS):
                assert forward is not None
                self._launch(forward)
            if name in BLOCKING and forward is not None and self._is_put(orders):
                forward.opened.set()
            method, takes_orders = HOOKS.get(name, ("", False))
            if method:
                result = getattr(self.half, method)(*((orders,) if takes_orders else ()))
                self.results += [result] if isinstance(result, StepResults) else []

    def zero(self, block_ids: list[int]) -> None:
        """As vLLM does with new blocks, in its stream."""
        for block_id in block_ids:
            self._write(block_id, 0)

    def page(self, layer: int, block_id: int) -> bytes:
        """What a page holds now."""
        page = np.zeros(PAGE_BYTES, np.uint8)
        source = self._at(block_id) + layer * PAGE_BYTES
        self._cuda.copy(page.ctypes.data, source, PAGE_BYTES, DEFAULT_STREAM)
        self._cuda.synchronize(DEFAULT_STREAM)
        return page.tobytes()

    def run_late(self) -> None:
        """Let what was launched run only when its chunks wait for nothing else."""

        def only_wait_for_it() -> bool:
            states = {
                chunk.state.name for chunk in list(self._engine._parts.sender._chunks.values())
            }
            return bool(states) and not states & {"QUEUED", "OFFERED"}

        if not all(forward.opened.is_set() for forward in self._forwards):
            eventually(only_wait_for_it, timeout=20, what="chunks are granted")
            assert self._engine._parts.gpu is not None
            for _ in range(20):  # its thread has looked at everything again
                self._engine._parts.gpu.device.run(lambda: None, 5.0)
        for forward in self._forwards:
            forward.opened.set()

    def finished(self, kind: str) -> list[str]:
        """Every id that was reported, in order."""
        return [name for result in self.results for name in sorted(getattr(result, kind))]

    def close(self) -> None:
        """End every kernel, close everything."""
        for forward in self._forwards:
            forward.opened.set()
        self._directory.close()
        self.half.close()
        self._cuda.synchronize(DEFAULT_STREAM)
        self._cuda.free(self._address)

    def _is_put(self, orders: StepOrders) -> bool:
        return any(step.party.send_type is SendMode.PUT for step in orders.sends)

    def _launch(self, forward: Forward) -> None:
        self._forwards.append(forward)
        self._kernels.append(SlowKernel(self._cuda, DEFAULT_STREAM, forward.opened.wait))
        for block_id, value in forward.pages:
            self._write(block_id, value)

    def _write(self, block_id: int, value: int) -> None:
        """Each layer's page has a value of its own."""
        for layer in range(NUM_LAYERS):
            page = self._at(block_id) + layer * PAGE_BYTES
            self._cuda.fill(page, value and (value + layer) % 256, PAGE_BYTES, DEFAULT_STREAM)

    def _at(self, block_id: int) -> int:
        return self._address + block_id * NUM_LAYERS * PAGE_BYTES


@dataclass
class ReplayedPrompt:
    """One request on both sides; its block number i holds value(i) when it is computed."""

    name: str
    num_tokens: int
    ours: list[int]  # block ids on P
    theirs: list[int]  # and on D
    first_value: int

    def value(self, number: int) -> int:
        return self.first_value + number * NUM_LAYERS

    def party(self, send_type: SendMode, peer: str | None) -> Party:
        return Party(self.name, TransferKey(self.name), peer, b"", send_type, self.num_tokens)

    def completed(self, start: int, end: int) -> list[tuple[int, int]]:
        """The pages that tokens [start, end) touch: those that they complete, and the last, which
        more tokens will change."""
        pages = []
        for number in range(start // BLOCK_SIZE, -(-end // BLOCK_SIZE)):
            is_whole = end == self.num_tokens or (number + 1) * BLOCK_SIZE <= end
            pages.append((self.ours[number], self.value(number) if is_whole else STALE))
        return pages


def replay(
    settings: dict[str, Any], order: str, send_type: SendMode, ports: list[int], *, preempts: bool
) -> None:
    """Prefill a prompt in three steps, with another one among them, and load both; with `preempts`,
    its blocks are taken away after the second step, and it is computed again in others."""
    producer, consumer = (
        ReplayedRank(settings, "P", ports[0]),
        ReplayedRank(settings, "D", ports[1]),
    )
    first = ReplayedPrompt(
        "first", 10, [19], [19], 200
    )  # brings the link, the memory that it maps with it
    long = ReplayedPrompt("long", 100, [3, 9, 4, 10, 5, 11, 6], [7, 1, 8, 2, 9, 3, 10], 1)
    short = ReplayedPrompt("short", 20, [0, 1], [20, 21], 100)
    try:
        for prompts in ([first], [long, short]):
            producer.results.clear()
            consumer.results.clear()
            _load(consumer, producer.address, order, send_type, prompts)
            chunks = [(first, 0, 10)]
            if prompts != [first]:
                chunks = [(long, 0, 40), (long, 40, 80), (short, 0, 20), (long, 80, 100)]
            if preempts and prompts != [first]:
                again = ReplayedPrompt("long", 100, [12, 13, 14, 15, 16, 17, 18], long.theirs, 1)
                chunks[2:] = [(short, 0, 20), (again, 0, 60), (again, 60, 100)]
            preempted = long if preempts and prompts != [first] else None
            ends = _prefill(producer, consumer.address, order, send_type, chunks, preempted)
            producer.step(order, StepOrders(ended_sends=ends))
            _finish(producer, consumer, order, [prompt.name for prompt in prompts])
        for prompt in (first, long, short):
            for number, block_id in enumerate(prompt.theirs):
                for layer in range(NUM_LAYERS):
                    expected = bytes([prompt.value(number) + layer]) * PAGE_BYTES
                    assert consumer.page(layer, block_id) == expected, (prompt, number, layer)
    finally:
        producer.close()
        consumer.close()


def _load(
    consumer: ReplayedRank,
    peer: str,
    order: str,
    send_type: SendMode,
    prompts: list[ReplayedPrompt],
) -> None:
    """Order the loads, in a step in which nothing is computed."""
    loads = []
    for prompt in prompts:
        consumer.zero(prompt.theirs)
        blocks = BlockRange(0, np.array(prompt.theirs))
        loads.append(Load(prompt.party(send_type, peer), (blocks,)))
    consumer.step(order, StepOrders(loads=loads))


def _finish(producer: ReplayedRank, consumer: ReplayedRank, order: str, names: list[str]) -> None:
    """Step on until both have reported these, each once."""

    def turn() -> bool:
        producer.step(order, StepOrders())
        consumer.step(order, StepOrders())
        reported = producer.finished("finished_sending"), consumer.finished("finished_recving")
        return all(len(each) >= len(names) for each in reported)

    eventually(turn, timeout=30, what="both are reported by both")
    assert sorted(producer.finished("finished_sending")) == names
    assert sorted(consumer.finished("finished_recving")) == names
    assert not consumer.finished("failed_recving")


def _prefill(
    producer: ReplayedRank,
    peer: str,
    order: str,
    send_type: SendMode,
    chunks: list[tuple[ReplayedPrompt, int, int]],
    preempted: ReplayedPrompt | None,
) -> list[EndedSend]:
    """Launch all steps before the first of them has run; return what has ended. The third one takes
    the blocks of who is preempted."""
    parties = {item.name: item.party(send_type, peer) for item, _, _ in chunks}
    for number, (prompt, start, end) in enumerate(chunks):
        forward, names = Forward(pages=prompt.completed(start, end)), []
        if preempted is not None and number == PREEMPTED_AT:
            names = [preempted.name]
            forward.pages += [(block_id, STALE) for block_id in preempted.ours]
        tables = (np.array(prompt.ours[: -(-end // BLOCK_SIZE)], np.int64),)
        sends = [SendStep(parties[prompt.name], tables, end)]
        producer.step(order, StepOrders(sends=sends, preempted=names), forward)
    producer.run_late()
    return [EndedSend(party, None, is_held=True) for party in parties.values()]
