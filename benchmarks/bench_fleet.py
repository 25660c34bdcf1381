"""Fleets of 2, 20 and 240 instances with tensor parallel size 8, in virtual time (fleet_world.py).

For each size: every instance starts within a second and each prefill instance meets some decode
instances; then prompts go through; then frames are lost, a rack loses its power and comes back, and
a router changes its mind. Rates and times of moved bytes come from the model of the network. Counts
of messages, links and landing memory, and the processor time of our own code, are measured.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np

from benchmarks.fleet_world import (
    FleetInstance,
    FleetParts,
    FleetWorld,
    ModelledNetwork,
    start_directory,
)
from benchmarks.harness import Row, arguments, progress, record
from p2p_engine.config import EngineConfig
from p2p_engine.memory.paged import PagedCache, PagedSink, PagedSource
from p2p_engine.memory.ready_layers import ReadyLayers
from p2p_engine.peers.link import InstanceAddress
from p2p_engine.transfer import Transfer
from p2p_engine.wire.messages import CacheSpec, Heartbeat, TransferKey
from proxy.config import ProxyConfig
from proxy.fleet.registry import Registry
from proxy.openai.prompt import Prompt
from proxy.routing.router import Router

TP_SIZE = 8
NUM_LAYERS, BLOCK_TOKENS, PAGE_BYTES = 32, 16, 16 * 128 * 2 * 2
SIZES = ((1, 1), (8, 12), (96, 144))
RACK_SHARE = 20  # one of so many instances stands in the rack that is lost
MIB = 1 << 20
Pairs: TypeAlias = list[tuple[FleetInstance, FleetInstance]]
QUEUE_SECONDS = 0.05  # from the push until the request has its blocks on decode


def spec_of(rank: int) -> CacheSpec:
    """The cache of a model with eight KV heads, one for each rank."""
    return CacheSpec(
        b"model", dtype="bfloat16", block_size=BLOCK_TOKENS, num_kv_heads=TP_SIZE, head_size=128,
        layout="NHD", tp_size=TP_SIZE, layer_cuts=(0, NUM_LAYERS), rank=rank,
        page_bytes=[PAGE_BYTES] * NUM_LAYERS,
    )  # fmt: skip


def cache_of(spec: CacheSpec) -> PagedCache:
    """Addresses that nobody touches."""
    layers = np.arange(NUM_LAYERS, dtype=np.int64)
    pages = np.full(NUM_LAYERS, PAGE_BYTES, np.int64)
    return PagedCache((1 << 40) + layers * (1 << 32), pages, pages, 1 << 16, spec)


@dataclass(eq=False)
class PlayedPrompt:
    """A prompt on its way: what its ranks send and receive."""

    key: TransferKey
    sends: list[Transfer]
    began_at: float
    receives: list[Transfer] = field(default_factory=list)
    ended_at: float = math.inf

    @property
    def is_over(self) -> bool:
        """Whether all ranks of the decode instance have an answer."""
        return len(self.receives) == len(self.sends) and all(item.done for item in self.receives)

    @property
    def is_right(self) -> bool:
        """Whether all of it arrived."""
        return self.is_over and all(item.error is None for item in self.receives)


class FleetPlay:
    """Instances in a world, their proxy's registry and router, and their prompts."""

    def __init__(
        self,
        num_prefill: int,
        num_decode: int,
        seed: int,
        num_tokens: int,
        num_ranks: int = TP_SIZE,
    ) -> None:
        """`num_ranks` of the eight ranks of each instance take part."""
        self.num_ranks = num_ranks
        self.world = FleetWorld(ModelledNetwork(), seed)
        self.random = random.Random(seed)
        self.num_tokens = num_tokens
        self.config = EngineConfig(kv_buffer_size=1 << 30, mem_pool_size_gb=0.25)
        self.caches = [cache_of(spec_of(rank)) for rank in range(TP_SIZE)]
        self.registry = Registry()
        self.router = Router(ProxyConfig(), self.registry, lambda: self.world.now, self.random)
        self.numbers = iter(range(1 << 30))
        self.most_landing = 0
        names = [("P", n) for n in range(num_prefill)] + [("D", n) for n in range(num_decode)]
        self.instances = {
            f"{role}{n}": FleetInstance(f"{role}{n}", role, f"10.{role == 'D':d}.{n}.1:1")
            for role, n in names
        }

    def start(self, instance: FleetInstance, first_port: int = 2) -> None:
        """Start an instance, or the next one at its place; its ranks have ports from this one
        on."""
        host, receives = instance.directory.removesuffix(":1"), instance.role == "D"
        addresses = [f"{host}:{first_port + rank}" for rank in range(self.num_ranks)]
        instance.ranks = [
            FleetParts(self.world, address, self.config, cache.known_spec, receives=receives)
            for address, cache in zip(addresses, self.caches, strict=False)
        ]
        start_directory(self.world, instance.directory, instance.ranks)

    def of_role(self, role: str) -> list[FleetInstance]:
        """The instances of a role."""
        return [instance for instance in self.instances.values() if instance.role == role]

    def send(
        self, prefill: FleetInstance, decode: FleetInstance, *, is_asked_for: bool = True
    ) -> PlayedPrompt:
        """Compute a prompt, push it, and let decode ask for it when it has blocks."""
        number, num_blocks = next(self.numbers), -(-self.num_tokens // BLOCK_TOKENS)
        key = TransferKey(f"request-{number}")
        blocks = np.arange(num_blocks, dtype=np.int64) * 3
        prompt = PlayedPrompt(key, [], self.world.now)

        def push(rank: int) -> None:
            parts, to = prefill.ranks[rank], InstanceAddress(decode.directory)
            source = PagedSource(self.caches[rank], blocks, 0, self.num_tokens)
            with parts.changed:
                prompt.sends.append(
                    parts.fanout.send(
                        key, to, source, b"", 60.0, ready_layers=ReadyLayers.whole(), generation=1
                    )
                )
            parts.control.stir()

        for rank in range(self.num_ranks):
            self.world.work(lambda rank=rank: push(rank))  # type: ignore[misc]
        later = self.world.now + QUEUE_SECONDS
        if is_asked_for:
            self.world.at(later, lambda: self.receive(prompt, key, blocks, prefill, decode))
        return prompt

    def receive(
        self,
        prompt: PlayedPrompt,
        key: TransferKey,
        blocks: np.ndarray,
        prefill: FleetInstance,
        decode: FleetInstance,
    ) -> None:
        """Load a prompt on every rank."""
        for rank, parts in enumerate(decode.ranks):
            self.most_landing = max(self.most_landing, landing_of(parts))

            def load(rank: int = rank, parts: FleetParts = parts) -> None:
                sink = PagedSink(self.caches[rank], blocks, 0, self.num_tokens)
                with parts.changed:
                    transfer = parts.store.receive(key, sink, b"", 60.0, (), is_named=True)
                    prompt.receives.append(transfer)
                    if not transfer.done:
                        peer = InstanceAddress(prefill.directory)
                        parts.pulls.add(transfer, peer, b"", pull=False)
                parts.control.stir()

            self.world.work(load)

    def settle(self, prompts: list[PlayedPrompt], seconds: float = 120.0) -> float:
        """Run until these prompts are over; returns the virtual seconds that it took."""
        start, deadline = self.world.now, self.world.now + seconds
        while not all(prompt.is_over for prompt in prompts) and self.world.now < deadline:
            self.world.run(min(deadline, self.world.now + 0.02))
        return self.world.now - start

    def close(self) -> None:
        """Give all memory back."""
        for instance in self.instances.values():
            for parts in instance.ranks:
                parts.close()


def landing_of(parts: FleetParts) -> int:
    """The landing memory that is in use on a rank."""
    return sum(parts.store.live_bytes().values())


def rss_bytes() -> int:
    """The memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Meter:
    """What a part of a run has cost."""

    def __init__(self, fleet: FleetPlay) -> None:
        self._fleet = fleet
        world = fleet.world
        self._frames, self._cpu = world.frames.copy(), world.cpu_seconds
        self._bytes, self._start = world.frame_bytes, time.perf_counter()

    def row(self, case: str, prompts: list[PlayedPrompt], **more: object) -> Row:
        """Return frames and processor time, in all and for each prompt and rank."""
        world = self._fleet.world
        frames = world.frames - self._frames
        moved = frames["Offer"], frames["Grant"], frames["Done"], frames["Commit"]
        each = max(1, len(prompts) * self._fleet.num_ranks)
        took = sorted(prompt.ended_at - prompt.began_at for prompt in prompts if prompt.is_over)
        return {
            "case": case,
            "instances": len(self._fleet.instances),
            "prompts": len(prompts),
            "right": sum(prompt.is_right for prompt in prompts),
            "frames": frames.total(),
            "frames_per_rank": round(frames.total() / each, 2),
            "chunk_frames_per_rank": round(sum(moved) / each, 2),
            "frame_bytes_per_rank": round((world.frame_bytes - self._bytes) / each),
            "cpu_ms_per_rank": round(1e3 * (world.cpu_seconds - self._cpu) / each, 3),
            "median_ms": round(1e3 * took[len(took) // 2], 1) if took else None,
            "real_seconds": round(time.perf_counter() - self._start, 1),
            **more,
        }


def note_ends(fleet: FleetPlay, prompts: list[PlayedPrompt]) -> None:
    """Run for a moment, and note which prompts are over."""
    fleet.world.run(fleet.world.now + 0.005)
    for prompt in prompts:
        if prompt.ended_at == math.inf and prompt.is_over:
            prompt.ended_at = fleet.world.now


def watch_ends(
    fleet: FleetPlay, prompts: list[PlayedPrompt], num: int = 0, seconds: float = 120.0
) -> None:
    """Run until the prompts are over, of which there will be `num`, and note when each was."""
    deadline = fleet.world.now + seconds
    while len(prompts) < num and fleet.world.now < deadline:
        note_ends(fleet, prompts)
    while any(prompt.ended_at == math.inf for prompt in prompts) and fleet.world.now < deadline:
        note_ends(fleet, prompts)


def pairs_of(fleet: FleetPlay, each: int) -> list[tuple[FleetInstance, FleetInstance]]:
    """Pairs for so many prompts of each prefill instance, decode in turns."""
    decodes = fleet.of_role("D")
    fleet.random.shuffle(decodes)
    pairs = [(prefill, each_of) for prefill in fleet.of_role("P") for each_of in range(each)]
    return [(prefill, decodes[i % len(decodes)]) for i, (prefill, _) in enumerate(pairs)]


def storm(fleet: FleetPlay, pairs: Pairs, case: str = "storm") -> Row:
    """All instances start, and all prompts come within a second."""
    before = rss_bytes()
    for instance in fleet.instances.values():
        fleet.start(instance)
    bare, meter = rss_bytes(), Meter(fleet)
    prompts: list[PlayedPrompt] = []
    for prefill, decode in pairs:
        when = fleet.world.now + fleet.random.random()
        fleet.world.at(when, lambda p=prefill, d=decode: prompts.append(fleet.send(p, d)))  # type: ignore[misc]
    start = fleet.world.now
    watch_ends(fleet, prompts, len(pairs))
    links = [sum(rank.links.count().values()) for rank in ranks(fleet)]
    num_engines = len(links)
    return meter.row(
        case, prompts, links_per_engine=round(sum(links) / num_engines, 1),
        most_links=max(links),
        kib_per_engine=round((bare - before) / num_engines / 1024),
        storm_seconds=round(fleet.world.now - start, 2),
    )  # fmt: skip


def ranks(fleet: FleetPlay) -> list[FleetParts]:
    """All engines."""
    return [rank for instance in fleet.instances.values() for rank in instance.ranks]


def steady(fleet: FleetPlay, pairs: Pairs, case: str = "steady", loss: float = 0.0) -> Row:
    """The same pairs once more, over links that exist."""
    fleet.world.network = ModelledNetwork(loss=loss)
    fleet.most_landing = 0
    meter = Meter(fleet)
    prompts = [fleet.send(prefill, decode) for prefill, decode in pairs]
    watch_ends(fleet, prompts)
    fleet.world.network = ModelledNetwork()
    return meter.row(case, prompts, most_landing_mib=round(fleet.most_landing / MIB))


def withdraw(parts: FleetParts, key: TransferKey, send: Transfer, to: FleetInstance) -> None:
    """End a send as the connector does for a request that is aborted."""
    send.cancel("another instance")
    with parts.changed:
        parts.fanout.abandon((key, b""), InstanceAddress(to.directory), "another instance", 1)
    parts.control.stir()


def mind_change(fleet: FleetPlay, pairs: Pairs) -> Row:
    """A router withdraws each prompt from the first decode instance for another one."""
    decodes, meter = fleet.of_role("D"), Meter(fleet)
    prompts = []
    for prefill, first in pairs:
        prompt = fleet.send(prefill, first, is_asked_for=False)
        for parts, send in zip(prefill.ranks, prompt.sends, strict=True):
            fleet.world.work(lambda: withdraw(parts, prompt.key, send, first))  # noqa: B023
        second = decodes[(decodes.index(first) + 1) % len(decodes)]
        prompts.append(fleet.send(prefill, second))
    watch_ends(fleet, prompts)
    row = meter.row("router changes its mind", prompts)
    fleet.world.run(fleet.world.now + 2.0)
    row["landing_left"] = sum(landing_of(rank) for rank in ranks(fleet))
    return row


def rack(fleet: FleetPlay, pairs: Pairs) -> list[Row]:
    """Prompts are on their way when a rack of decode instances loses its power; then it returns."""
    decodes = fleet.of_role("D")
    lost = decodes[: max(1, len(decodes) // RACK_SHARE)]
    meter = Meter(fleet)
    prompts = [(fleet.send(*pair), pair[1]) for pair in pairs]
    fleet.world.run(fleet.world.now + 0.0005)
    for instance in lost:
        instance.power_off(fleet.world)
    others = [prompt for prompt, decode in prompts if decode not in lost]
    theirs = [prompt for prompt, decode in prompts if decode in lost]
    start = fleet.world.now
    watch_ends(fleet, others)
    sends = [send for prompt in theirs for send in prompt.sends]
    fleet.world.run(start + 90.0, lambda: all(send.done for send in sends))
    named = {type(send.error).__name__ for send in sends if send.error is not None}
    first = meter.row(
        "rack lost", others, lost=len(lost), lost_sends=len(sends), errors=sorted(named),
        noticed_seconds=round(fleet.world.now - start, 2),
    )  # fmt: skip
    for instance in lost:
        fleet.start(instance)
    back = Meter(fleet)
    again = [fleet.send(fleet.random.choice(fleet.of_role("P")), decode) for decode in lost]
    watch_ends(fleet, again)
    return [first, back.row("rack back", again)]


def proxy_cost(fleet: FleetPlay) -> Row:
    """What a proxy pays for heartbeats and choices in a fleet of this size."""
    beats = [
        Heartbeat(item.role, f"{item.directory}0", item.directory, protocol=7, epoch=1)
        for item in fleet.instances.values()
    ]
    for beat in beats:
        instance, _ = fleet.registry.observe(beat, fleet.world.now)
        instance.record_answer(200)
    beat_us = timed(lambda: [fleet.registry.observe(beat, fleet.world.now) for beat in beats])
    prompt = Prompt(model=None)
    choice_us = timed(lambda: [fleet.router.choose(prompt) for _ in range(50)]) / 50
    return {
        "case": "proxy", "instances": len(beats), "heartbeat_us": round(beat_us / len(beats), 1),
        "heartbeats_percent_of_a_core": round(beat_us / 1e6 / 3.0 * 100, 3),
        "choice_us": round(choice_us, 1),
    }  # fmt: skip


def timed(call: Callable[[], object]) -> float:
    """The microseconds that a call takes, the best of five."""
    took = []
    for _ in range(5):
        start = time.perf_counter()
        call()
        took.append(1e6 * (time.perf_counter() - start))
    return min(took)


def measure(num_prefill: int, num_decode: int, seed: int, each: int, num_tokens: int) -> list[Row]:
    """Every scenario for one size of fleet."""
    fleet = FleetPlay(num_prefill, num_decode, seed, num_tokens)
    try:
        pairs = pairs_of(fleet, each)
        rows = [storm(fleet, pairs), steady(fleet, pairs), steady(fleet, pairs, "1 % lost", 0.01)]
        rows += [mind_change(fleet, pairs)] if num_decode > 1 else []
        rows += rack(fleet, pairs) if num_decode > 1 else []
        return [*rows, proxy_cost(fleet)]
    finally:
        fleet.close()


def meet(num_prefill: int, num_decode: int, seed: int) -> Row:
    """Every prefill instance meets every decode instance within a second: one rank of each, one
    block."""
    fleet = FleetPlay(num_prefill, num_decode, seed, BLOCK_TOKENS, num_ranks=1)
    try:
        everybody = [(prefill, to) for prefill in fleet.of_role("P") for to in fleet.of_role("D")]
        return storm(fleet, everybody, "everybody meets")
    finally:
        fleet.close()


def main() -> None:
    """Measure, print, record."""
    parser = arguments("fleet", "a fleet of 96 x 144 in virtual time", repetitions=1)
    parser.add_argument("--prompts", type=int, default=4, help="of each prefill instance")
    parser.add_argument("--tokens", type=int, default=4096, help="of each prompt")
    parser.add_argument("--most", type=int, default=240, help="instances of the largest fleet")
    options = parser.parse_args()
    rows: list[Row] = []
    for num_prefill, num_decode in SIZES:
        if num_prefill + num_decode <= options.most:
            progress(f"{num_prefill} x {num_decode}")
            size = (num_prefill, num_decode, options.seed, options.prompts, options.tokens)
            rows += measure(*size)
            rows.append(meet(num_prefill, num_decode, options.seed))
    record(rows, options)


if __name__ == "__main__":
    main()
