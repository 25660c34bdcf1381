"""A step of decode takes several leases. vLLM reads no requests meanwhile, and still none fails."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.members import Member
from p2p_engine.cli.tiny_model import ensure_tiny_model
from tests import marks
from tests.compat.fleet import BOOT_SECONDS, VLLM_ARGS
from tests.compat.workload import Question, ask, ask_all
from tests.support import eventually
from tests.vllm.load import ENVIRONMENT, check_nothing_held
from tests.vllm.observing import by_label, prompt_tokens
from tests.vllm.stalling_connector import STALL, STALLED

pytestmark = [marks.vllm, pytest.mark.timeout(600)]

LEASE_SECONDS = 2.0
NUM_LATE = 4


def question(number: int) -> Question:
    prompt = [5 + (7 * number + 3 * i) % 900 for i in range(100)]
    body = {
        "model": str(ensure_tiny_model()), "prompt": prompt,
        "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    return Question("/v1/completions", body)


def num_computed(member: Member) -> int:
    return sum(by_label(member, "vllm:request_success", "finished_reason").values())


@pytest.fixture
def stall(tmp_path: Path) -> Path:
    return tmp_path / "stall"


@pytest.fixture
def fleet(tmp_path: Path, stall: Path) -> Iterator[Fleet]:
    with Fleet(
        ensure_tiny_model(),
        send_type="GET",
        vllm_args=VLLM_ARGS,
        env={**ENVIRONMENT, STALL: str(stall)},
        log_dir=tmp_path / "logs",
        transfer_config={"kv_connector_extra_config": {"lease_seconds": LEASE_SECONDS}},
    ) as made:
        made.start_proxy()
        made.start(MemberRole.PREFILL)
        module = "tests.vllm.stalling_connector"
        made.start(MemberRole.DECODE, transfer_config={"kv_connector_module_path": module})
        made.wait_ready(timeout=BOOT_SECONDS)
        yield made


def test_what_comes_during_a_long_step_is_not_lost(fleet: Fleet, stall: Path) -> None:
    assert fleet.proxy is not None
    prefill, decode = fleet.instances
    late = [question(number) for number in range(NUM_LATE)]
    one = partial(ask, fleet.proxy.url, timeout=120)
    with ThreadPoolExecutor(NUM_LATE + 1) as pool:
        one(question(NUM_LATE))  # the two have met
        stall.touch()
        first = pool.submit(one, question(NUM_LATE + 1))
        eventually(stall.with_suffix(STALLED).exists, 60, "a step of decode stands still")
        asked = [pool.submit(one, each) for each in late]
        eventually(lambda: num_computed(prefill) == 2 + NUM_LATE, 60, "prefill holds the late ones")
        ends_at = time.monotonic() + 3 * LEASE_SECONDS
        eventually(lambda: time.monotonic() >= ends_at, 4 * LEASE_SECONDS)
        stall.unlink()
        said = [each.result() for each in (first, *asked)]
    assert not by_label(prefill, "vllm:p2p_expired_leases", "")[""]
    check_nothing_held(fleet.instances)
    assert prompt_tokens(decode)["local_compute"] == 0
    assert said[1:] == ask_all(prefill.url, late, concurrency=1)
