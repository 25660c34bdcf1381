"""Real vLLM: a prompt whose KV is more than eight times buffer plus pool, in every mode, also when
prefill has it in its prefix cache and so sends all of it after one step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
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
from tests.vllm.leaving import new_request_id
from tests.vllm.load import ENVIRONMENT, check_nothing_held, check_transferred, landed_bytes

pytestmark = [marks.vllm, marks.slow, pytest.mark.timeout(1800)]

LENGTH = 60 * BLOCK
PROMPT_BYTES = LENGTH * TinyModel().kv_bytes_per_token(4)
ROOM = PROMPT_BYTES // 17  # for buffer and for pool
MODES = ("PUT_ASYNC", "PUT", "GET")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Member, Member]]:
    room = {"kv_buffer_size": ROOM, "mem_pool_size_gb": ROOM / 2**30}
    fleet = Fleet(
        ensure_tiny_model(),
        vllm_args=VLLM_ARGS,
        transfer_config={EXTRA: room},
        env=ENVIRONMENT,
        log_dir=tmp_path,
    )
    with fleet:
        prefill, decode = [fleet.start(role) for role in (MemberRole.PREFILL, MemberRole.DECODE)]
        fleet.wait_ready(timeout=BOOT_SECONDS)
        yield prefill, decode


def test_eight_times_buffer_and_pool(pair: tuple[Member, Member]) -> None:
    """Prefill's own answer, without a transfer, is what decode must say."""
    prefill, decode = pair
    source = random.Random(14)
    asked = []
    for mode in MODES:
        for is_cached in (False, True):
            question = _question([source.randrange(5, 900) for _ in range(LENGTH)])
            alone = ask(prefill.url, question) if is_cached else None
            headers = {"X-Request-Id": new_request_id(prefill, decode)}
            sends: dict[str, Any] = {"do_remote_decode": True, "send_type": mode}
            ask(prefill.url, _with(question, max_tokens=1, kv_transfer_params=sends), headers)
            loads: dict[str, Any] = {"do_remote_prefill": True, "send_type": mode}
            answer = ask(decode.url, _with(question, kv_transfer_params=loads), headers)
            assert answer == (alone or ask(prefill.url, question)), (mode, is_cached)
            asked.append(question)
            assert sum(landed_bytes([decode]).values()) == len(asked) * PROMPT_BYTES
    check_transferred(pair, asked)
    check_nothing_held(pair)


def _question(prompt: list[int]) -> Question:
    body = {
        "model": str(ensure_tiny_model()), "prompt": prompt, "max_tokens": 12, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    return Question("/v1/completions", body)


def _with(question: Question, **more: Any) -> Question:
    return replace(question, body={**question.body, **more})
