"""No block is in flight that vLLM counts as free: its own scheduler, for every window, block size,
prompt length and fate of a request that we can think of."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from p2p_engine.config import SendMode
from p2p_engine.connector import compat
from p2p_engine.connector.groups import layer_groups
from p2p_engine.connector.intent import ThisInstance
from p2p_engine.connector.scheduler import SchedulerHalf
from p2p_engine.connector.weights import Weights
from tests import marks
from tests.doubles.vllm_config import write_model_config
from tests.property.block_play import STATE, Play, Watch, make_cache, make_manager, make_request

pytestmark = [
    *marks.simulated_vllm,
    pytest.mark.skipif(not compat.HAS_FAILED_REQUESTS, reason="vLLM 0.29 is refused windows"),
]

WINDOWS = (1, 2, 7, 16, 17, 40, 128, 512, 1024, 2047)
MOST_BLOCKS = 200  # of a prompt: at most 12,800 tokens


def lengths_of(window: int, block_size: int, rng: random.Random) -> Iterator[int]:
    """All where a block or the window begins or ends, for some blocks, and one that is any."""
    longest = MOST_BLOCKS * block_size
    borders = {
        window + blocks * block_size + offset
        for blocks in (0, 1, rng.randrange(2, 60))
        for offset in (-2, -1, 0, 1, block_size // 2)
    }
    yield from sorted(length for length in borders if 0 < length <= longest)
    yield rng.randrange(1, longest)


class OnePrompt:
    """One prompt at a time through vLLM's cache manager, chunk by chunk, to its end."""

    def __init__(
        self, groups: Sequence[tuple[int, int]], mode: SendMode, *, has_prefix_cache: bool
    ) -> None:
        cache = make_cache(groups, num_blocks=(MOST_BLOCKS + 40) * len(groups))
        self.manager = make_manager(cache, has_prefix_cache=has_prefix_cache)
        self._pool = self.manager.block_pool
        instance = ThisInstance("kv_producer", "[::1]:1", mode, has_random_ids=True)
        self._half = SchedulerHalf(instance, Weights("w"), layer_groups(cache), tp_size=1)
        self._half.bind_pool(self._pool)
        self._watch = Watch(self._pool, layer_groups(cache), mode)
        self._hash_block_size = min(size for size, _ in groups)

    def play(self, prompt: Sequence[int], chunk: int, num_answer: int = 1) -> None:
        """Compute a prompt, and all but the last token of its answer; then it ends and is sent."""
        request = make_request("r", prompt, num_answer, self._hash_block_size)
        self._half.on_new_request(request)
        hit, num_hit, *_ = self.manager.get_computed_blocks(request)
        ends = [*range(num_hit + chunk, len(prompt), chunk), len(prompt)]
        ends += range(len(prompt) + 1, len(prompt) + num_answer)
        for end in ends:
            first = request.num_computed_tokens or num_hit
            new = {"num_new_computed_tokens": num_hit, "new_computed_blocks": hit}
            more: dict[str, Any] = {} if request.num_computed_tokens else new
            blocks = self.manager.allocate_slots(request, end - first, **more)
            assert blocks is not None
            self._step(request.num_computed_tokens, first, end, blocks.get_block_ids())
            request.num_computed_tokens = end
            if end >= len(prompt):
                request.append_output_token_ids(7)
        self._end(request)

    def _step(self, known: int, first: int, end: int, added: Any) -> None:
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = {"r": end - first}
        if known:
            output.scheduled_cached_reqs = CachedRequestData(
                req_ids=["r"], resumed_req_ids=set(), new_token_ids=[], all_token_ids={},
                new_block_ids=[added], num_computed_tokens=[first], num_output_tokens=[0],
            )  # fmt: skip
        else:
            tables = self.manager.get_block_ids("r")
            output.scheduled_new_reqs = [
                NewRequestData("r", [], [], None, None, tables, first, None)
            ]
        metadata = self._half.build_metadata(output)
        self._watch.withdraw(metadata)
        self._watch.start(metadata.sends)

    def _end(self, request: Any) -> None:
        """What vLLM's scheduler does when a request has ended, and until its sending has."""
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        num_tokens = request.num_computed_tokens
        self.manager.remove_skipped_blocks(
            request_id="r",
            processed_computed_tokens=num_tokens,
            num_prompt_tokens=request.num_prompt_tokens,
        )
        is_held, _ = self._half.request_finished(request, self.manager.get_block_ids("r"))
        assert is_held
        self._take_all_that_is_free()
        self._watch.forget("r")
        self._half.workers_reported(KVConnectorOutput(finished_sending={"r"}))
        self._half.build_metadata(SchedulerOutput.make_empty())
        self.manager.free(request)
        assert self._pool.get_num_free_blocks() == self._pool.num_gpu_blocks - 1
        assert not self._half._pins

    def _take_all_that_is_free(self) -> None:
        others = self._pool.get_new_blocks(self._pool.get_num_free_blocks())
        self._watch.check()
        self._pool.free_blocks(others)


@pytest.mark.parametrize("block_size", [1, 3, 16, 32, 64])
@pytest.mark.parametrize("mode", [SendMode.PUT_ASYNC, SendMode.GET])
def test_every_window_block_size_and_length(
    block_size: int, mode: SendMode, rng: random.Random
) -> None:
    for window in WINDOWS:
        groups = [[(block_size, window)], [(block_size, 0), (block_size, window)]]
        played = OnePrompt(rng.choice(groups), mode, has_prefix_cache=False)
        for length in lengths_of(window, block_size, rng):
            chunk = rng.choice([5 * block_size + 1, 64 * block_size, 1 << 16])
            played.play(range(length), chunk, num_answer=1)
            played.play(range(length), chunk, num_answer=rng.choice([2, 20]))


# The whole scheduler: several requests at a time, and what becomes of them


GROUPS = {
    "windows": [(16, 40)],
    "full and windows": [(16, 0), (16, 40), (16, 100)],
    "groups of unlike blocks": [(32, 0), (16, 40)],
    "no window": [(16, 0)],
    "full and states": [(16, 0), (16, STATE)],
    "windows and states": [(16, 0), (16, 40), (16, STATE)],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_config(tmp_path_factory.mktemp("model"))


def play(
    made: Play, rng: random.Random, answers: Sequence[int] = (1, 1, 2, 30), longest: int = 500
) -> None:
    """Let requests come, share prefixes, grow long, be aborted, and be reported late."""
    prefix, waiting = [rng.randrange(2, 900) for _ in range(longest)], []
    for number in range(40):
        length = rng.choice([rng.randrange(1, 60), 55, 71, 16, rng.randrange(60, longest)])
        shared = prefix[: rng.choice([0, length // 2, length - 1])]
        prompt = [*shared, *(rng.randrange(2, 900) for _ in range(length))][:length]
        waiting.append((f"r{number}", prompt, rng.choice(answers)))
    names = [name for name, _, _ in waiting]
    for turn in range(20_000):
        if waiting and rng.random() < 0.4:
            made.add(*waiting.pop(0))
        if rng.random() < 0.02:
            made.abort(rng.choice(names))
        made.step(may_report=turn % 50 > 20 or not waiting)
        if not waiting and made.is_idle:
            break
    made.check_whole()


@pytest.mark.parametrize("has_prefix_cache", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mode", [SendMode.PUT_ASYNC, SendMode.GET])
@pytest.mark.parametrize("groups", GROUPS)
def test_requests_of_every_fate(
    model: Path,
    rng: random.Random,
    groups: str,
    mode: SendMode,
    depth: int,
    has_prefix_cache: bool,
) -> None:
    made = Play(model, rng, GROUPS[groups], mode, depth=depth, has_prefix_cache=has_prefix_cache)
    play(made, rng)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_speculative_tokens", [0, 3])
def test_requests_that_lose_their_blocks(
    model: Path, rng: random.Random, depth: int, num_speculative_tokens: int
) -> None:
    """So few blocks that some are preempted in mid-prompt and in mid-answer."""
    made = Play(
        model, rng, GROUPS["full and windows"], num_blocks=70, depth=depth,
        num_speculative_tokens=num_speculative_tokens,
    )  # fmt: skip
    play(made, rng, answers=(1, 100), longest=140)
    assert made.num_preemptions > 0


@pytest.mark.parametrize("has_prefix_cache", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_speculative_tokens", [0, 3, 20])
@pytest.mark.parametrize("groups", GROUPS)
def test_no_request_waits_for_more_blocks_than_are_made_room_for(
    model: Path,
    rng: random.Random,
    groups: str,
    depth: int,
    num_speculative_tokens: int,
    has_prefix_cache: bool,
) -> None:
    """Whenever vLLM refuses to start one, the scheduler half wants more blocks than are free."""
    if num_speculative_tokens and any(window == STATE for _, window in GROUPS[groups]):
        pytest.skip("a start with both is refused")
    # A group of states holds few blocks of a request, however long: with 16, a play now and then
    # found room for all.
    num_blocks = sum(4 if window == STATE else 16 for _, window in GROUPS[groups])
    made = Play(
        model, rng, GROUPS[groups], SendMode.GET, num_blocks=num_blocks, depth=depth,
        num_speculative_tokens=num_speculative_tokens, has_prefix_cache=has_prefix_cache,
    )  # fmt: skip
    play(made, rng, longest=140)
    assert made.wants.num_refused > 0
