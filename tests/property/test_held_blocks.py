"""The proxy's picture of a cache against the cache: vLLM's own manager plays requests that come,
share prefixes, are cut short and are evicted, and its own events are followed."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_events import KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request, RequestStatus

from proxy.fleet.block_index import BlockIndex, read_events
from tests import marks
from tests.property.block_play import make_cache, make_manager, make_request

pytestmark = marks.simulated_vllm

BLOCK, NUM_BLOCKS, STEPS = 4, 40, 400
HERE = 1  # the instance
ADAPTERS = {name: LoRARequest(name, number, f"/{name}") for number, name in ((1, "x"), (2, "y"))}


@dataclass(frozen=True)
class AskedPrompt:
    """A prompt, and what else its KV is computed under."""

    tokens: tuple[int, ...]
    lora: str = ""
    salt: str = ""


class CachePlay:
    """A cache under random requests, and the picture of it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        cache = make_cache([(BLOCK, 0)], NUM_BLOCKS)
        self.manager = make_manager(cache, has_prefix_cache=True)
        self.manager.block_pool.enable_kv_cache_events = True
        self.index = BlockIndex()
        self.index.begin(HERE)
        self.running: list[Request] = []
        self.seen: set[AskedPrompt] = set()
        self.num_made = 0

    def step(self) -> None:
        """One thing happens; its events are followed."""
        number = self.rng.random()
        if number < 0.5 and len(self.running) < 4:
            self.begin()
        elif number < 0.98:
            self.go_on()
        else:
            self.clear()
        batch = KVEventBatch(ts=time.time(), events=list[Any](self.manager.take_events()))
        batch.data_parallel_rank = 0
        self.index.apply(HERE, read_events(msgspec.msgpack.encode(batch)))

    def begin(self) -> None:
        """A request comes, whose prompt begins like others."""
        asked = AskedPrompt(
            (*[1] * BLOCK * self.rng.randrange(4), *self.rng.choices((1, 2), k=BLOCK * 3)),
            self.rng.choice(["", "", "x", "y"]),
            self.rng.choice(["", "", "x", "pepper"]),
        )
        request = self.made(asked)
        hit, num_hit, *_ = self.manager.get_computed_blocks(request)
        more: dict[str, Any] = {"num_new_computed_tokens": num_hit, "new_computed_blocks": hit}
        num_new = self.rng.randrange(1, len(asked.tokens) - num_hit + 1)
        if self.manager.allocate_slots(request, num_new, **more) is not None:
            request.num_computed_tokens = num_hit + num_new
            self.running.append(request)
            self.seen.add(asked)

    def go_on(self) -> None:
        """A request computes more of its prompt or its answer, or ends."""
        if not self.running:
            return
        request = self.rng.choice(self.running)
        left = request.num_tokens - request.num_computed_tokens
        num_new = self.rng.randrange(1, left + 1) if left else 0
        is_over = self.rng.random() < 0.3 or not num_new
        if is_over or self.manager.allocate_slots(request, num_new) is None:
            request.status = RequestStatus.FINISHED_LENGTH_CAPPED
            self.manager.free(request)
            self.running.remove(request)
            return
        request.num_computed_tokens += num_new
        if request.num_computed_tokens == request.num_tokens:
            request.append_output_token_ids(self.rng.choice((1, 2)))

    def clear(self) -> None:
        """The cache is reset, as after a change of weights."""
        while self.running:
            self.manager.free(self.running.pop())
        assert self.manager.reset_prefix_cache()

    def made(self, asked: AskedPrompt) -> Request:
        """The request that asks for this."""
        self.num_made += 1
        return make_request(
            f"r{self.num_made}", asked.tokens, 64, BLOCK, lora_request=ADAPTERS.get(asked.lora),
            cache_salt=asked.salt or None,
        )  # fmt: skip

    def held(self, asked: AskedPrompt) -> int:
        """How many leading tokens the cache really holds."""
        blocks = self.made(asked).block_hashes
        is_held = [bool(self.manager.block_pool.get_cached_block(each, [0])) for each in blocks]
        return (*is_held, False).index(False) * BLOCK

    def believed(self, asked: AskedPrompt) -> int:
        """How many the picture says."""
        keys = self.index.keys_of(asked.tokens, asked.lora, asked.salt)
        return self.index.match(keys)[HERE]


@pytest.mark.parametrize("round_", range(4))
def test_the_picture_is_what_the_pool_holds(round_: int, rng: random.Random) -> None:
    play = CachePlay(rng)
    num_held = 0
    for _ in range(STEPS):
        play.step()
        cached = play.manager.block_pool.cached_block_hash_to_block
        assert sum(play.index.counts().values()) == len(cached)
        for asked in play.seen:
            assert play.believed(asked) == play.held(asked)
            num_held += play.held(asked) > 0
        play.index.check()
    assert num_held > STEPS  # else nothing was compared
