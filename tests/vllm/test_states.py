"""A real model with states of Mamba2 beside attention: every token is what prefill says without a
transfer, in each send mode, around every block's edge, for prompts of several steps, and after
prefill was killed while it sent. With prefix caching, vLLM 0.32's Mamba2 raises on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.members import Member
from p2p_engine.transfer_config import EXTRA
from p2p_engine.wire.request_ids import new_transfer_id
from tests import marks
from tests.compat.fleet import BOOT_SECONDS, VLLM_ARGS
from tests.compat.workload import Answer, Question, ask
from tests.support import eventually
from tests.vllm.leaving import num_requests, question_of
from tests.vllm.load import ENVIRONMENT, check_nothing_held, landed_bytes
from tests.vllm.observing import prompt_tokens
from tests.vllm.other_models import ensure_model

pytestmark = [marks.vllm, marks.slow, pytest.mark.timeout(1800)]

STEP, LONG = 256, 1900
# Blocks are of 32 tokens, or of what a state's page makes of them: a multiple.
EDGES = (1, 2, 3, 31, 32, 33, 34, 63, 64, 65, 66, 95, 96, 97, 98, 127, 128, 129, 130, 192, 193, 194)
STEPS = (STEP - 1, STEP, STEP + 1, STEP + 2, 2 * STEP + 1, 900, LONG)
SEND_TYPES = ("PUT_ASYNC", "PUT", "GET")
SETTINGS = {"kv_load_failure_policy": "recompute", EXTRA: {"peer_timeout_seconds": 3.0}}


@dataclass(frozen=True)
class StatePair:
    """One of each, asked directly."""

    fleet: Fleet
    prefill: Member
    decode: Member
    model: str

    def question(self, length: int, seed: int = 0, **more: Any) -> Question:
        return question_of(length, 1000 * seed + length, model=self.model, **more)

    def alone(self, question: Question) -> Answer:
        return ask(self.prefill.url, question)

    def ask_prefill(self, question: Question, transfer_id: str, send_type: str) -> None:
        params = {"do_remote_decode": True, **_other(self.decode, transfer_id, send_type)}
        ask(self.prefill.url, _with(question, params, max_tokens=1))

    def ask_decode(self, question: Question, transfer_id: str, send_type: str) -> Answer:
        params = {"do_remote_prefill": True, **_other(self.prefill, transfer_id, send_type)}
        return ask(self.decode.url, _with(question, params))

    def transfer(self, question: Question, send_type: str = "PUT_ASYNC") -> Answer:
        """Ask prefill, then decode."""
        transfer_id = new_transfer_id()
        self.ask_prefill(question, transfer_id, send_type)
        return self.ask_decode(question, transfer_id, send_type)

    @property
    def both(self) -> list[Member]:
        return [self.prefill, self.decode]


def _other(member: Member, transfer_id: str, send_type: str) -> dict[str, Any]:
    assert member.plan is not None
    host, port = member.plan.host, member.plan.kv_port
    return {"transfer_id": transfer_id, "send_type": send_type, "remote_host": host,
            "remote_port": port}  # fmt: skip


def _with(question: Question, params: dict[str, Any], **more: Any) -> Question:
    body = {**question.body, **more, "kv_transfer_params": params}
    return Question(question.path, body)


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[StatePair]:
    folder = ensure_model("granite")
    fleet = Fleet(
        folder,
        vllm_args=(*VLLM_ARGS, "--no-enable-prefix-caching", f"--max-num-batched-tokens={STEP}"),
        transfer_config=SETTINGS,
        env=ENVIRONMENT,
        log_dir=tmp_path_factory.mktemp("logs"),
    )
    with fleet:
        prefill, decode = (fleet.start(role) for role in (MemberRole.PREFILL, MemberRole.DECODE))
        fleet.wait_ready(timeout=BOOT_SECONDS)
        yield StatePair(fleet, prefill, decode, str(folder))


@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_every_length(pair: StatePair, send_type: str) -> None:
    """Decode computes each prompt's last token alone, and takes all others."""
    seed = SEND_TYPES.index(send_type)
    before = prompt_tokens(pair.decode)["local_compute"]
    questions = [pair.question(length, seed) for length in (*EDGES, *STEPS)]
    answers = [pair.transfer(question, send_type) for question in questions]
    wrong = [
        len(question.body["prompt"])
        for question, answer in zip(questions, answers, strict=True)
        if answer != pair.alone(question)
    ]
    assert wrong == []
    assert prompt_tokens(pair.decode)["local_compute"] - before == len(questions)
    check_nothing_held(pair.both)


def test_several_at_a_time(pair: StatePair) -> None:
    questions = [pair.question(40 + 37 * number, 7) for number in range(24)]
    modes = [SEND_TYPES[number % 3] for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(pair.transfer, questions, modes))
    assert answers == [pair.alone(question) for question in questions]
    check_nothing_held(pair.both)


def test_prompts_that_are_alike(pair: StatePair) -> None:
    """Nobody has cached it: each prompt comes whole, also the second time."""
    first = pair.question(700, 8).body["prompt"]
    for number, length in enumerate((64, 65, 127, 128, 129, 300, 512, 513, 514)):
        own = pair.question(1 + 29 * number, 9).body["prompt"]
        for prompt in ([*first[:length], *own], [*first[:length], *own]):
            question = Question("/v1/completions", {**pair.question(1).body, "prompt": prompt})
            assert pair.transfer(question, SEND_TYPES[number % 3]) == pair.alone(question), length
    check_nothing_held(pair.both)


def test_prefill_is_killed_while_it_sends(pair: StatePair) -> None:
    """Attention's blocks have arrived, the state has not: decode computes it all. The last test of
    a pair."""
    question, transfer_id = pair.question(LONG, 11), new_transfer_id()
    expected = pair.alone(question)
    before = landed_bytes(pair.both).total()
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(pair.ask_decode, question, transfer_id, "PUT_ASYNC")
        eventually(lambda: num_requests(pair.decode) == 1, 30)
        pool.submit(pair.ask_prefill, question, transfer_id, "PUT_ASYNC")
        eventually(lambda: landed_bytes([pair.decode]).total() > before, 30)
        pair.fleet.kill(pair.prefill)
        assert answer.result(timeout=120) == expected
    check_nothing_held([pair.decode])
