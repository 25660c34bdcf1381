"""A chat of several turns on real vLLM: nothing is sent twice, and what decode has computed comes
back to prefill."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.members import Member
from p2p_engine.cli.tiny_model import TinyModel, ensure_tiny_model
from p2p_engine.transfer_config import EXTRA
from tests import marks
from tests.compat.fleet import BOOT_SECONDS, VLLM_ARGS
from tests.compat.workload import BLOCK, Question, ask
from tests.vllm.load import ENVIRONMENT
from tests.vllm.observing import by_label, prompt_tokens

pytestmark = [marks.vllm, pytest.mark.timeout(1800)]

NUM_TURNS, NUM_NEW, NUM_ANSWERED = 5, 200, 100
BLOCK_BYTES = BLOCK * TinyModel().kv_bytes_per_token(element_bytes=4)


@pytest.fixture(scope="module", params=["GET", "PUT_ASYNC"])
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """One instance alone, one that prefills, one that decodes."""
    with Fleet(
        ensure_tiny_model(),
        send_type=request.param,
        vllm_args=(*VLLM_ARGS, "--enable-prefix-caching"),
        env=ENVIRONMENT,
        log_dir=tmp_path_factory.mktemp("logs"),
    ) as fleet:
        fleet.start_proxy(arguments=("--decode-policy", "session_affinity"))
        extra = {EXTRA: {"stash_seconds": 120.0}}
        both = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute", **extra}
        fleet.start(MemberRole.SINGLE)
        fleet.start(MemberRole.PREFILL, transfer_config=both)
        fleet.start(MemberRole.DECODE, transfer_config=extra)
        fleet.wait_ready(timeout=BOOT_SECONDS)
        yield fleet


def question(prompt: list[int], **more: Any) -> Question:
    body = {
        "model": str(ensure_tiny_model()), "prompt": prompt, "max_tokens": NUM_ANSWERED,
        "temperature": 0, "ignore_eos": True, "return_token_ids": True, **more,
    }  # fmt: skip
    return Question("/v1/completions", body)


def landed_blocks(member: Member) -> int:
    return sum(by_label(member, "vllm:p2p_landed_bytes", "place").values()) // BLOCK_BYTES


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_only_what_is_new_is_computed_and_moved(
    request: pytest.FixtureRequest, fleet: Fleet, is_stream: bool
) -> None:
    """The proxy counts the tokens of a stream by its events, which may bring several: then some of
    the answer is pushed again."""
    is_counted = not is_stream or "GET" in request.node.callspec.id
    single, prefill, decode = fleet.instances
    assert fleet.proxy is not None
    source = random.Random(f"chat {is_stream}")
    said: list[int] = []
    for turn in range(NUM_TURNS):
        num_known, num_asked = len(said), len(said) - NUM_ANSWERED
        said += [source.randrange(5, 900) for _ in range(NUM_NEW)]
        before = prompt_tokens(prefill), prompt_tokens(decode)
        landed = landed_blocks(prefill), landed_blocks(decode)
        asked = question(said, stream=is_stream)
        answer = ask(fleet.proxy.url, asked, {"X-Session-Id": f"chat {is_stream}"})
        assert answer == ask(single.url, asked)
        by_prefill = prompt_tokens(prefill) - before[0]
        by_decode = prompt_tokens(decode) - before[1]
        assert by_decode["local_compute"] == 0
        whole_blocks = -(-len(said) // BLOCK)
        known_blocks = max(0, num_known - 1) // BLOCK
        if turn:
            assert by_prefill["local_compute"] == len(said) - known_blocks * BLOCK
            # What prefill had computed itself did not come back.
            assert landed_blocks(prefill) - landed[0] <= -(-NUM_ANSWERED // BLOCK) + 1
        arrived = landed_blocks(decode) - landed[1]
        assert arrived >= whole_blocks - known_blocks
        counted_blocks = known_blocks if is_counted else max(0, num_asked) // BLOCK
        assert arrived <= whole_blocks - counted_blocks
        said += answer[0]
