"""Clients that leave and KV that never comes, on real instances: `recompute` answers right."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.members import Member
from p2p_engine.cli.tiny_model import ensure_tiny_model
from p2p_engine.transfer_config import EXTRA
from tests import marks
from tests.compat.fleet import VLLM_ARGS
from tests.compat.workload import Answer, Question, ask
from tests.support import eventually
from tests.vllm.leaving import leave_early, new_request_id, num_requests, question_of
from tests.vllm.observing import holds_nothing, prompt_tokens

BOOT_SECONDS = 600.0
DEADLINE_SECONDS = 20  # of a transfer: what ends long before did not wait for it
SETTINGS = {
    "kv_load_failure_policy": "recompute",
    EXTRA: {"transfer_timeout_seconds": DEADLINE_SECONDS, "lease_seconds": 2},
}

pytestmark = [marks.vllm, marks.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class MemberPair:
    """One of each, asked directly."""

    prefill: Member
    decode: Member

    def new_request_id(self) -> str:
        """An id of the old scheme that names both."""
        return new_request_id(self.prefill, self.decode)


@pytest.fixture(scope="module", params=["PUT_ASYNC", "GET"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MemberPair]:
    fleet = Fleet(
        ensure_tiny_model(),
        send_type=request.param,
        vllm_args=(*VLLM_ARGS, "--max-num-batched-tokens=64"),  # a prefill of many steps
        transfer_config=SETTINGS,
        env={"VLLM_CPU_KVCACHE_SPACE": "1"},
        log_dir=tmp_path_factory.mktemp("logs"),
    )
    with fleet:
        members = [fleet.start(role) for role in (MemberRole.PREFILL, MemberRole.DECODE)]
        fleet.wait_ready(timeout=BOOT_SECONDS)
        yield MemberPair(*members)


def check_serving(pair: MemberPair, seed: int) -> None:
    """Both answer a fresh request with transferred KV, and hold nothing afterwards."""
    question, request_id = question_of(200, seed), pair.new_request_id()
    before = prompt_tokens(pair.decode)
    assert ask_both(pair, question, request_id) == ask(pair.prefill.url, question)
    assert (prompt_tokens(pair.decode) - before)["external_kv_transfer"] == 200
    for member in (pair.prefill, pair.decode):
        eventually(lambda member=member: holds_nothing(member), 10)  # type: ignore[misc]
        assert num_requests(member) == 0


def ask_both(pair: MemberPair, question: Question, request_id: str) -> Answer:
    headers = {"X-Request-Id": request_id}
    ask(pair.prefill.url, Question(question.path, {**question.body, "max_tokens": 1}), headers)
    return ask(pair.decode.url, question, headers)


def test_decode_client_that_leaves_while_its_kv_is_awaited(pair: MemberPair) -> None:
    connection = leave_early(pair.decode, question_of(300, 1), pair.new_request_id())
    eventually(lambda: num_requests(pair.decode) == 1, 30)
    connection.close()
    eventually(lambda: num_requests(pair.decode) == 0, DEADLINE_SECONDS / 2)
    check_serving(pair, 2)


def test_prefill_client_that_leaves_costs_decode_a_recompute_at_once(pair: MemberPair) -> None:
    """Decode is told: it does not wait for the transfer's deadline."""
    question, request_id = question_of(1900, 3), pair.new_request_id()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, pair.decode.url, question, {"X-Request-Id": request_id})
        connection = leave_early(pair.prefill, question, request_id)
        eventually(lambda: num_requests(pair.prefill) == 1, 30)
        connection.close()
        assert answer.result(timeout=DEADLINE_SECONDS - 2) == ask(pair.prefill.url, question)
    check_serving(pair, 4)


def test_kv_that_never_comes_is_computed_after_the_deadline(pair: MemberPair) -> None:
    question = question_of(300, 5)
    before = prompt_tokens(pair.decode)
    answer = ask(pair.decode.url, question, {"X-Request-Id": pair.new_request_id()})
    assert answer == ask(pair.prefill.url, question)
    tokens = prompt_tokens(pair.decode) - before
    assert tokens["external_kv_transfer"] + tokens["local_compute"] == 300
    check_serving(pair, 6)


def test_kv_that_nobody_asks_for_ends_with_its_lease(pair: MemberPair) -> None:
    headers = {"X-Request-Id": pair.new_request_id()}
    ask(pair.prefill.url, question_of(300, 7, max_tokens=1), headers)

    def is_gone() -> bool:
        ask(pair.decode.url, question_of(3, 8))  # statistics travel with steps
        return holds_nothing(pair.decode) and not num_requests(pair.prefill)

    eventually(is_gone, DEADLINE_SECONDS)
    check_serving(pair, 9)
