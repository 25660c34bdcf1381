"""Real vLLM under the name of its NixlConnector: KV moves behind our proxy and behind routers that
take us for NIXL, and a real NIXL's parameters are refused by name."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.members import Member
from p2p_engine.cli.tiny_model import ensure_tiny_model
from p2p_engine.transfer_config import EXTRA, MODULE_PATH, NIXL_NAME
from tests import marks
from tests.compat.fleet import BOOT_SECONDS, VLLM_ARGS
from tests.compat.workload import Answer, Question, ask, mixed_questions
from tests.doubles.routers import TO_DECODE, DynamoNixl, LlmdSidecar, SmgNixl
from tests.vllm.load import ENVIRONMENT, check_nothing_held
from tests.vllm.observing import prompt_tokens
from tests.vllm.pair import TokensSince, changed
from tests.vllm.routed import play, served

SEED = 4300
CONFIG = {
    "kv_connector": NIXL_NAME,
    "kv_connector_module_path": MODULE_PATH,
    "kv_load_failure_policy": "recompute",
    EXTRA: {"kv_lease_duration": 30, "backends": ["UCX"], "transfer_timeout_seconds": 30},
}
OF_NIXL = {
    **TO_DECODE,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": str(uuid.UUID(int=7)),
    "remote_request_id": "cmpl-7-0-1a2b3c4d",
    "remote_host": "127.0.0.1",
    "remote_port": 9,
    "tp_size": 1,
}

pytestmark = [marks.vllm, marks.slow, pytest.mark.timeout(1800)]


@dataclass(frozen=True)
class UnderNixlsName:
    """One prefill and one decode instance behind our proxy."""

    fleet: Fleet
    prefill: Member
    decode: Member

    def alone(self, questions: list[Question]) -> list[Answer]:
        """What prefill says to them when nobody else has a part in it."""
        return [ask(self.prefill.url, question) for question in questions]

    def log(self, member: Member) -> str:
        return member.process.log_path.read_text(errors="replace")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UnderNixlsName]:
    fleet = Fleet(
        ensure_tiny_model(),
        vllm_args=VLLM_ARGS,
        transfer_config=CONFIG,
        env=ENVIRONMENT,
        log_dir=tmp_path_factory.mktemp("logs"),
    )
    with fleet:
        fleet.start_proxy()
        members = [fleet.start(role) for role in (MemberRole.PREFILL, MemberRole.DECODE)]
        fleet.wait_ready(timeout=BOOT_SECONDS)
        yield UnderNixlsName(fleet, *members)


def questions_of(number: int) -> list[Question]:
    """Prompts of one token, of a block and one, and of ten blocks, and a chat."""
    mixed = mixed_questions(str(ensure_tiny_model()), SEED + number)
    return [mixed[0], mixed[3], mixed[6], mixed[-1]]


def check_moved(tokens: TokensSince, questions: list[Question]) -> None:
    assert tokens["external_kv_transfer"] > 0
    assert tokens["local_compute"] == sum(question.num_lone_tokens for question in questions)


def test_kv_moves_behind_our_proxy(servers: UnderNixlsName) -> None:
    questions = questions_of(1)
    tokens, expected = TokensSince(servers.decode), servers.alone(questions)
    assert servers.fleet.proxy is not None
    assert [ask(servers.fleet.proxy.url, question) for question in questions] == expected
    check_moved(tokens, questions)
    check_nothing_held([servers.prefill, servers.decode])


@pytest.mark.parametrize("router", [LlmdSidecar, DynamoNixl, SmgNixl])
def test_kv_moves_behind_routers_that_take_us_for_nixl(
    servers: UnderNixlsName, router: type[LlmdSidecar]
) -> None:
    questions = questions_of(sum(router.__name__.encode()))
    tokens, expected = TokensSince(servers.decode), servers.alone(questions)
    for question, alone in zip(questions, expected, strict=True):
        made = router(served(servers.prefill), served(servers.decode), {})
        answered, told = play(made, question)
        assert answered is not None
        assert answered["transfer_mode"] == "pull"
        assert told == alone
    check_moved(tokens, questions)


def test_decode_computes_what_a_real_nixl_holds_and_says_so(servers: UnderNixlsName) -> None:
    question = questions_of(3)[2]
    before, expected = prompt_tokens(servers.decode), servers.alone([question])
    assert [ask(servers.decode.url, changed(question, kv_transfer_params=OF_NIXL))] == expected
    assert (prompt_tokens(servers.decode) - before)["external_kv_transfer"] == 0
    assert "is an engine of vLLM's NixlConnector" in servers.log(servers.decode)


def test_settings_that_are_nixls_alone_are_named_once(servers: UnderNixlsName) -> None:
    for member in (servers.prefill, servers.decode):
        line = "settings of NixlConnector without effect: backends (see transports)"
        assert servers.log(member).count(line) == 1
