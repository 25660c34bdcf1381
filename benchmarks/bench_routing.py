"""What it is worth to know where blocks really are: sessions of several turns over eight prefill
instances, in virtual time, by the proxy's own router, prefix tree and block index.

Instances are modelled: a prompt's blocks are kept, the least recently used is forgotten, and new
tokens take their time one prompt after the other. Events come some milliseconds late, as the step
ends. The rows `cost` are measured in real time.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from benchmarks.harness import Row, arguments, record
from p2p_engine.wire.messages import PROTOCOL_VERSION, Heartbeat
from proxy.config import ProxyConfig
from proxy.fleet.block_index import PROMISE_SECONDS, BlockIndex, read_events
from proxy.fleet.held_blocks import Sighting
from proxy.fleet.instances import Instance, Role
from proxy.fleet.registry import Registry
from proxy.openai.prompt import Prompt
from proxy.routing.router import Router

NUM_PREFILL = 8
BLOCK = 16
TOKENS_PER_SECOND = 20_000.0
EVENT_SECONDS = 0.005  # from the end of a step until its events are heard
LOOK_UP_SECONDS = 0.005  # to tokenise a prompt and to look it up, before it is routed
SYSTEM_TOKENS, TURN_TOKENS, MAX_TURNS = 2000, 600, 10
NUM_SYSTEMS, THINK_SECONDS = 24, 20.0
SECONDS = 600.0
# By name: blocks of an instance's cache, and sessions that begin in a second.
LOADS = {
    "roomy": (16_000, 2.5),
    "tight": (4_000, 2.5),
    "tight, few sessions": (4_000, 1.0),
}
CONTENDERS = ("least_loaded", "guess", "events")


class ModelledCache:
    """The blocks of one instance: the least recently used goes first, and of a prompt its end."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def use(self, tokens: list[int]) -> tuple[int, list[dict[str, object]]]:
        """Keep a prompt's whole blocks; return how many tokens were there, and the events."""
        names, name = [], 0
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            name = hash((name, *tokens[end - BLOCK : end]))
            names.append(name)
        num_held = next((n for n, each in enumerate(names) if each not in self._blocks), len(names))
        for each in reversed(names):
            self._blocks[each] = None
            self._blocks.move_to_end(each)
        events: list[dict[str, object]] = []
        gone = [self._blocks.popitem(last=False)[0] for _ in range(self._num_over)]
        if gone:
            events.append({"type": "BlockRemoved", "block_hashes": gone})
        if num_held < len(names):
            events.append({
                "type": "BlockStored", "block_hashes": names[num_held:],
                "parent_block_hash": names[num_held - 1] if num_held else None,
                "token_ids": tokens[num_held * BLOCK : len(names) * BLOCK], "block_size": BLOCK,
            })  # fmt: skip
        return min(num_held * BLOCK, len(tokens) - 1), events

    @property
    def _num_over(self) -> int:
        return max(0, len(self._blocks) - self._num_blocks)


@dataclass(eq=False)
class ModelledPrefill:
    """One instance: its cache, and the prompts that wait."""

    number: int
    instance: Instance
    cache: ModelledCache
    waiting: deque[Callable[[], float]] = field(default_factory=deque)
    is_busy: bool = False


class RoutingPlay:
    """Sessions, instances and a router, until the time is over."""

    def __init__(self, contender: str, num_blocks: int, rate: float, seed: int) -> None:
        self.now = 0.0
        self._rng, self._rate = random.Random(seed), rate
        self._has_events = contender == "events"
        policy = "least_loaded" if contender == "least_loaded" else "prefix_aware"
        registry = self._registry = Registry(max_instances=64)
        config = ProxyConfig(prefill_policy=policy)
        self._router = Router(config, registry, lambda: self.now, random.Random(seed))
        self._index = BlockIndex()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._systems = [self._text(SYSTEM_TOKENS) for _ in range(NUM_SYSTEMS)]
        self._prefills: dict[Instance, ModelledPrefill] = {}
        for number in range(NUM_PREFILL + 1):
            role = Role.DECODE if number == NUM_PREFILL else Role.PREFILL
            beat = Heartbeat(role.value, f"h:{1000 + number}", f"h:{2000 + number}",
                             protocol=PROTOCOL_VERSION, interval=30.0)  # fmt: skip
            instance, _ = registry.observe(beat, 0.0)
            instance.pin([role])
            instance.record_answer(200)
            if role is Role.PREFILL:
                made = ModelledPrefill(number, instance, ModelledCache(num_blocks))
                self._prefills[instance] = made
                self._index.begin(number)
        self.first_tokens: list[float] = []
        self.num_hit = self.num_asked = 0

    def run(self) -> Row:
        """Play, and return what clients saw."""
        self._at(self._rng.expovariate(self._rate), self._begin_session)
        if self._has_events:
            self._at(PROMISE_SECONDS, self._age)
        while self._agenda and self._agenda[0][0] < SECONDS:
            self.now, _, happen = heapq.heappop(self._agenda)
            happen()
        times = sorted(self.first_tokens)
        return {
            "prompts": len(times),
            "hit_percent": round(100 * self.num_hit / self.num_asked, 1),
            "first_token_ms": round(1000 * statistics.mean(times), 1),
            "p50_ms": round(1000 * times[len(times) // 2], 1),
            "p99_ms": round(1000 * times[len(times) * 99 // 100], 1),
        }

    def _at(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now + seconds, next(self._order), happen))

    def _age(self) -> None:
        self._index.age()
        self._at(PROMISE_SECONDS, self._age)

    def _text(self, num_tokens: int) -> list[int]:
        return [self._rng.randrange(1 << 17) for _ in range(num_tokens)]

    def _begin_session(self) -> None:
        self._at(self._rng.expovariate(self._rate), self._begin_session)
        popular = min(int(self._rng.paretovariate(0.9)) - 1, NUM_SYSTEMS - 1)
        self._turn(self._systems[popular], self._rng.randrange(1, MAX_TURNS + 1))

    def _turn(self, before: list[int], num_left: int) -> None:
        tokens, began = [*before, *self._text(TURN_TOKENS // 2)], self.now
        self._at(LOOK_UP_SECONDS * self._has_events, lambda: self._route(tokens, began, num_left))

    def _route(self, tokens: list[int], began: float, num_left: int) -> None:
        prompt = Prompt(text=np.array(tokens, np.uint32).tobytes(), num_output_tokens=1)
        keys = self._index.keys_of(tokens, "", "")
        if self._has_events:
            found = self._index.match(keys)
            held = {item.instance: found[item.number] for item in self._prefills.values()}
            prompt.sighting = Sighting(0, len(tokens), held)
        pair = self._router.choose(prompt)
        assert pair.prefill is not None
        chosen = self._prefills[pair.prefill]
        if self._has_events:
            self._index.promise(chosen.number, keys)
        leg = self._registry.take_leg(pair.prefill, Role.PREFILL, pair.prefill_tokens)

        def compute() -> float:
            num_hit, events = chosen.cache.use(tokens)
            self.num_hit += num_hit
            self.num_asked += len(tokens)
            seconds = (len(tokens) - num_hit) / TOKENS_PER_SECOND
            self._at(seconds, lambda: end(events))
            return seconds

        def end(events: list[dict[str, object]]) -> None:
            leg.release()
            self.first_tokens.append(self.now - began)
            if self._has_events and events:
                self._at(EVENT_SECONDS, lambda: self._hear(chosen, events))
            if num_left > 1:
                grown = [*tokens, *self._text(TURN_TOKENS // 2)]
                pause = self._rng.expovariate(1 / THINK_SECONDS)
                self._at(pause, lambda: self._turn(grown, num_left - 1))
            self._next(chosen)

        chosen.waiting.append(compute)
        if not chosen.is_busy:
            self._next(chosen)

    def _next(self, prefill: ModelledPrefill) -> None:
        prefill.is_busy = bool(prefill.waiting)
        if prefill.waiting:
            prefill.waiting.popleft()()

    def _hear(self, prefill: ModelledPrefill, events: list[dict[str, object]]) -> None:
        payload = msgspec.msgpack.encode([self.now, events, 0])
        self._index.apply(prefill.number, read_events(payload))


def costs(num_instances: int, num_tokens: int, rng: random.Random) -> Row:
    """Measure a batch of events and a look-up, in the process that does both."""
    index, tokens = BlockIndex(), [rng.randrange(1 << 17) for _ in range(num_tokens)]
    _, events = ModelledCache(1 << 30).use(tokens)
    payload = msgspec.msgpack.encode([0.0, events, 0])
    began = time.perf_counter()
    for number in range(num_instances):
        index.begin(number)
        index.apply(number, read_events(payload))
    heard = time.perf_counter()
    rounds = 10
    for _ in range(rounds):
        index.match(index.keys_of(tokens, "", ""))
    ended = time.perf_counter()
    return {
        "instances": num_instances,
        "prompt_tokens": num_tokens,
        "batch_bytes": len(payload),
        "batch_ms": round(1000 * (heard - began) / num_instances, 2),
        "look_up_ms": round(1000 * (ended - heard) / rounds, 2),
    }


def main() -> None:
    """Play every load with every contender."""
    options = arguments("routing", __doc__, repetitions=3).parse_args()
    rows: list[Row] = []
    for load, (num_blocks, rate) in LOADS.items():
        for contender, turn in itertools.product(CONTENDERS, range(options.repetitions)):
            play = RoutingPlay(contender, num_blocks, rate, options.seed + turn)
            rows.append(
                {"case": load, "policy": contender, "seed": options.seed + turn, **play.run()}
            )
    rng = random.Random(options.seed)
    rows += [{"case": "cost", **costs(*sizes, rng)} for sizes in ((16, 8_000), (240, 100_000))]
    record(rows, options)


if __name__ == "__main__":
    main()
