"""LoRA adapters on real vLLM: each says what it says on one instance alone, from KV that was sent;
no adapter takes the KV of another one or of the base model, in each send mode.

They are asked one by one: on a CPU, vLLM 0.32 gives a request for the base model the last adapter
if both are in one step (`vllm.lora.ops.torch_ops` reads -1, which is none, as the last of them)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.tiny_model import ensure_tiny_model
from p2p_engine.transfer_config import EXTRA
from p2p_engine.wire.request_ids import new_transfer_id
from tests import marks
from tests.compat.fleet import BOOT_SECONDS, VLLM_ARGS
from tests.compat.workload import BLOCK, Question, ask
from tests.vllm.adapters import RANK, make_adapter
from tests.vllm.load import ENVIRONMENT, check_nothing_held
from tests.vllm.pair import SEND_TYPES, DirectTrio, TokensSince

pytestmark = [marks.vllm, marks.slow, pytest.mark.timeout(1800)]

BASE, ADA, BOB = "tiny", "ada", "bob"
MODELS = (BASE, ADA, BOB)
LENGTH, NUM_ANSWERED = 10 * BLOCK + 7, 2 * BLOCK
SETTINGS = {
    "kv_load_failure_policy": "recompute",
    EXTRA: {"stash_seconds": 120.0, "transfer_timeout_seconds": 8.0},
}


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DirectTrio]:
    folder = tmp_path_factory.mktemp("adapters")
    adapters = [
        f"{name}={make_adapter(folder / name, seed)}" for seed, name in enumerate(MODELS[1:])
    ]
    with Fleet(
        ensure_tiny_model(),
        vllm_args=(
            *VLLM_ARGS, f"--served-model-name={BASE}", "--enable-prefix-caching", "--enable-lora",
            "--max-loras=2", f"--max-lora-rank={RANK}", "--lora-modules", *adapters,
        ),
        transfer_config=SETTINGS,
        env=ENVIRONMENT,
        log_dir=tmp_path_factory.mktemp("logs"),
    ) as fleet:  # fmt: skip
        fleet.start_proxy(arguments=("--decode-policy=session_affinity",))
        single = fleet.start(MemberRole.SINGLE)
        prefill = fleet.start(MemberRole.PREFILL, transfer_config={"kv_role": "kv_both"})
        decode = fleet.start(MemberRole.DECODE)
        fleet.wait_ready(timeout=BOOT_SECONDS)
        yield DirectTrio(fleet, prefill, decode, single)


def question(model: str, prompt: list[int], **more: Any) -> Question:
    body = {
        "model": model, "prompt": prompt, "max_tokens": NUM_ANSWERED, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True, **more,
    }  # fmt: skip
    return Question("/v1/completions", body)


def prompt_of(seed: str, length: int = LENGTH) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(5, 900) for _ in range(length)]


@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_each_adapter_has_its_own_kv_of_one_prompt(trio: DirectTrio, send_type: str) -> None:
    """Both sides cache prefixes. The first time, nothing of the others' is found there."""
    asked = [question(model, prompt_of(send_type)) for model in MODELS]
    expected = [trio.alone(each) for each in asked]
    assert len({tuple(answer[0]) for answer in expected}) == len(MODELS)
    for is_known in (False, True):
        for each, answer in zip(asked, expected, strict=True):
            by_prefill, by_decode = TokensSince(trio.prefill), TokensSince(trio.decode)
            assert trio.transfer(each, send_type) == answer
            assert by_decode["local_compute"] == 0
            if is_known:
                assert by_decode["local_cache_hit"] >= LENGTH // BLOCK * BLOCK
            else:
                assert by_decode["external_kv_transfer"] == LENGTH
                assert by_prefill["local_compute"] == LENGTH
    check_nothing_held(trio.both)


@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_kv_of_another_adapter_is_not_taken(trio: DirectTrio, send_type: str) -> None:
    """Prefill is asked for one adapter and decode for another one, under one name: decode computes
    its own."""
    for one, other in ((ADA, BOB), (ADA, BASE), (BASE, ADA)):
        prompt = prompt_of(f"{send_type} {one} {other}")
        transfer_id = new_transfer_id()
        by_decode = TokensSince(trio.decode)
        trio.ask_prefill(question(one, prompt), transfer_id, send_type)
        answer = trio.ask_decode(question(other, prompt), transfer_id, send_type)
        assert answer == trio.alone(question(other, prompt))
        assert by_decode["external_kv_transfer"] == 0
        assert by_decode["local_compute"] == LENGTH


def test_a_session_that_changes_its_adapter(trio: DirectTrio) -> None:
    """What decode has kept of a turn, and what the proxy believes of it, is that adapter's."""
    session, prompt = {"X-Session-Id": "changes"}, prompt_of("changes")
    for model, is_followed in ((ADA, True), (BOB, False), (BASE, False), (BASE, True)):
        by_prefill, by_decode = TokensSince(trio.prefill), TokensSince(trio.decode)
        answer = ask(trio.proxy_url, question(model, prompt), session)
        assert answer == trio.alone(question(model, prompt))
        assert by_decode["local_compute"] == 0
        was_here = len(prompt) > LENGTH and is_followed
        assert (by_prefill["external_kv_transfer"] > 0) == was_here
        assert (by_decode["local_cache_hit"] > 0) == was_here
        if not was_here:
            assert by_prefill["local_compute"] == len(prompt)
            assert by_decode["external_kv_transfer"] == len(prompt)
        prompt = [*prompt, *answer[0], *prompt_of(f"changes {len(prompt)}", 40)]
