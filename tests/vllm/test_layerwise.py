"""Real vLLM with `layerwise`: every token is right for prompts of one step and of several, with
prefix caching and without, and around requests that are preempted or leave."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest

from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.members import Member
from p2p_engine.cli.tiny_model import TinyModel, ensure_tiny_model
from p2p_engine.send.shipment import MIN_BYTES_BY_LAYER
from p2p_engine.transfer_config import EXTRA
from tests import marks
from tests.compat.fleet import BOOT_SECONDS, VLLM_ARGS
from tests.compat.workload import Answer, Question, ask
from tests.support import eventually
from tests.vllm.leaving import (
    leave_decode_while_kv_comes,
    leave_early,
    new_request_id,
    num_requests,
    question_of,
)
from tests.vllm.load import ENVIRONMENT, check_nothing_held, check_transferred
from tests.vllm.observing import by_label

pytestmark = [marks.vllm, marks.slow, pytest.mark.timeout(1800)]

STEP = 600  # tokens of one request; two requests fit a step
ONE_STEP, MANY_STEPS = (520, STEP), (STEP + 1, 1900)
NUM_RANGES = STEP * TinyModel().kv_bytes_per_token(4) // MIN_BYTES_BY_LAYER
# Two prompts of 1,500 tokens advance side by side until the blocks run out. They are of 32 tokens,
# and one of them is vLLM's own.
PREEMPTED, NUM_BLOCKS = 1500, 64
PREFILL_ARGS = (
    f"--max-num-batched-tokens={2 * STEP}", f"--long-prefill-token-threshold={STEP}",
    f"--num-gpu-blocks-override={NUM_BLOCKS}", f"--max-model-len={32 * (NUM_BLOCKS - 1)}",
    "--no-scheduler-reserve-full-isl",
)  # fmt: skip
SETTINGS = {"kv_load_failure_policy": "recompute", EXTRA: {"layerwise": True}}


@dataclass(frozen=True)
class LayerwisePair:
    """One of each, asked directly; prefill without a transfer says what decode must say."""

    prefill: Member
    decode: Member

    def transfer(self, question: Question) -> Answer:
        """Ask prefill, then decode."""
        headers = {"X-Request-Id": new_request_id(self.prefill, self.decode)}
        ask(self.prefill.url, _with(question, max_tokens=1), headers)
        return ask(self.decode.url, question, headers)

    def prompt_messages(self, question: Question) -> int:
        """Transfer a prompt; returns how many messages prefill has sent meanwhile."""
        before = self._messages()
        self.transfer(question)
        check_nothing_held([self.prefill, self.decode])
        ask(self.prefill.url, question_of(3, 1))  # statistics travel with steps
        return self._messages() - before

    def _messages(self) -> int:
        return by_label(self.prefill, "vllm:p2p_messages", "").total()


@pytest.fixture(scope="module", params=[True, False], ids=["caching", "no_caching"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LayerwisePair]:
    caching = "--enable-prefix-caching" if request.param else "--no-enable-prefix-caching"
    fleet = Fleet(
        ensure_tiny_model(),
        vllm_args=(*VLLM_ARGS, caching),
        transfer_config=SETTINGS,
        env=ENVIRONMENT,
        log_dir=tmp_path_factory.mktemp("logs"),
    )
    with fleet:
        prefill = fleet.start(MemberRole.PREFILL, vllm_args=PREFILL_ARGS)
        decode = fleet.start(MemberRole.DECODE)
        fleet.wait_ready(timeout=BOOT_SECONDS)
        yield LayerwisePair(prefill, decode)


def test_prompts_of_one_step_and_of_several(pair: LayerwisePair) -> None:
    """Also if prefill knows the prompt, and sends all of it in one step."""
    asked = []
    for number, length in enumerate((*ONE_STEP, *MANY_STEPS)):
        for is_known in (False, True):
            question = question_of(length, 10 * number + is_known)
            alone = ask(pair.prefill.url, question) if is_known else None
            assert pair.transfer(question) == (alone or ask(pair.prefill.url, question)), length
            asked.append(question)
    check_transferred([pair.prefill, pair.decode], asked)
    check_nothing_held([pair.prefill, pair.decode])


def test_a_step_leaves_in_ranges_of_layers(pair: LayerwisePair) -> None:
    """Of each range, prefill says OFFER and DONE."""
    assert NUM_RANGES > 1
    pair.transfer(question_of(STEP, 50))  # they know each other
    assert pair.prompt_messages(question_of(STEP, 51)) >= 2 * NUM_RANGES


def test_preempted_prompts(pair: LayerwisePair) -> None:
    before = by_label(pair.prefill, "vllm:num_preemptions", "").total()
    questions = [question_of(PREEMPTED, seed) for seed in (60, 61)]
    with ThreadPoolExecutor(1 + len(questions)) as pool:
        first = pool.submit(ask, pair.prefill.url, question_of(1900, 62))
        eventually(lambda: num_requests(pair.prefill) == 1, 30)  # the others wait for its blocks
        answers = list(pool.map(pair.transfer, questions))
        first.result(timeout=120)
    assert by_label(pair.prefill, "vllm:num_preemptions", "").total() > before
    assert answers == [ask(pair.prefill.url, question) for question in questions]
    check_nothing_held([pair.prefill, pair.decode])


def test_clients_that_leave_cost_nobody_a_token(pair: LayerwisePair) -> None:
    question, request_id = question_of(1900, 70), new_request_id(pair.prefill, pair.decode)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, pair.decode.url, question, {"X-Request-Id": request_id})
        connection = leave_early(pair.prefill, question, request_id)
        eventually(lambda: num_requests(pair.prefill) == 1, 30)
        connection.close()
        assert answer.result(timeout=120) == ask(pair.prefill.url, question)
    leave_decode_while_kv_comes(pair.prefill, pair.decode)
    question = question_of(STEP, 71)
    assert pair.transfer(question) == ask(pair.prefill.url, question)
    check_nothing_held([pair.prefill, pair.decode])


def _with(question: Question, **more: Any) -> Question:
    return replace(question, body={**question.body, **more})
