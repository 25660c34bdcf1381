"""Every router's requests, played to one prefill and one decode instance of real vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest

from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.members import Member
from p2p_engine.cli.tiny_model import ensure_tiny_model
from p2p_engine.transfer_config import EXTRA
from tests import marks
from tests.compat.fleet import BOOT_SECONDS, VLLM_ARGS
from tests.compat.workload import Question, ask, mixed_questions
from tests.doubles.routers import (
    AibrixNixl,
    AibrixShfs,
    DynamoNixl,
    Json,
    LlmdCoordinator,
    LlmdMooncake,
    LlmdMoriio,
    LlmdMoriioAtOnce,
    LlmdNextTurn,
    LlmdNixlPush,
    LlmdSidecar,
    ProductionStack,
    RayServeDefault,
    SmgMooncake,
    SmgMoriio,
    SmgMoriioAtOnce,
    SmgNixl,
    SmgUnlabelled,
    VllmRouterAtUrls,
    VllmRouterDiscovery,
)
from tests.support import eventually
from tests.vllm.load import ENVIRONMENT, check_nothing_held
from tests.vllm.observing import by_label, prompt_tokens
from tests.vllm.routed import play, served

# They register with nobody who would answer: a request's id names instances only for those that do.
SETTINGS = {
    "lease_seconds": 10,
    "transfer_timeout_seconds": 30,
    "proxy_ip": "127.0.0.1",
    "proxy_port": 9,
    "http_port": 1,
}
PULL, PUSH = "pull", "push"
TRANSFERRED: dict[type[LlmdSidecar], str] = {
    LlmdSidecar: PULL,
    LlmdCoordinator: PULL,
    LlmdNixlPush: PULL,
    LlmdNextTurn: PULL,
    LlmdMoriio: PUSH,
    LlmdMoriioAtOnce: PUSH,
    VllmRouterAtUrls: PULL,
    VllmRouterDiscovery: PUSH,
    ProductionStack: PULL,
    AibrixShfs: PULL,
    SmgNixl: PULL,
    SmgMoriio: PUSH,
    SmgMoriioAtOnce: PUSH,
    RayServeDefault: PULL,
    DynamoNixl: PULL,
}
NOT_TRANSFERRED = [AibrixNixl, SmgUnlabelled, LlmdMooncake, SmgMooncake]

pytestmark = [marks.vllm, marks.slow, pytest.mark.timeout(1800)]


@dataclass(frozen=True)
class BehindRouters:
    """One prefill and one decode instance that know of no router, and a third that serves alone."""

    single: Member
    prefill: Member
    decode: Member

    def make(self, router: type[LlmdSidecar], memory: Json) -> LlmdSidecar:
        return router(served(self.prefill), served(self.decode), memory)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BehindRouters]:
    fleet = Fleet(
        ensure_tiny_model(),
        vllm_args=VLLM_ARGS,
        transfer_config={EXTRA: SETTINGS},
        env=ENVIRONMENT,
        log_dir=tmp_path_factory.mktemp("logs"),
    )
    roles = (MemberRole.SINGLE, MemberRole.PREFILL, MemberRole.DECODE)
    with fleet:
        members = [fleet.start(role) for role in roles]
        fleet.wait_ready(timeout=BOOT_SECONDS)
        yield BehindRouters(*members)


@pytest.mark.parametrize(("router", "how"), TRANSFERRED.items(), ids=lambda item: str(item))
def test_kv_moves_and_tokens_are_right(
    servers: BehindRouters, router: type[LlmdSidecar], how: str
) -> None:
    questions = _questions(router)
    before, memory = prompt_tokens(servers.decode), dict[str, object]()
    for question in questions:
        answered, tokens = play(servers.make(router, memory), question)
        assert tokens == ask(servers.single.url, question)
        assert answered is not None
        assert answered["transfer_mode"] == how
    moved = prompt_tokens(servers.decode) - before
    assert moved["external_kv_transfer"] > 0
    assert moved["local_compute"] == sum(question.num_lone_tokens for question in questions)
    _check_nothing_open(servers)


@pytest.mark.parametrize("router", NOT_TRANSFERRED)
def test_decode_computes_what_nobody_would_send_to_it(
    servers: BehindRouters, router: type[LlmdSidecar]
) -> None:
    before = prompt_tokens(servers.decode)
    for question in _questions(router):
        _, tokens = play(servers.make(router, {}), question)
        assert tokens == ask(servers.single.url, question)
    moved = prompt_tokens(servers.decode) - before
    assert moved["external_kv_transfer"] == 0
    assert moved["local_compute"] > 300
    if issubclass(router, LlmdMooncake):
        log = servers.decode.process.log_path.read_text(errors="replace")
        assert "remote_bootstrap_addr without remote_host and remote_port" in log
    _check_nothing_open(servers)


def _questions(router: type[LlmdSidecar]) -> list[Question]:
    """Prompts of one token, of a block and one, and of ten blocks, and a chat; no two alike."""
    seed = sum(router.__name__.encode())
    mixed = mixed_questions(str(ensure_tiny_model()), 7000 + seed)
    return [mixed[0], mixed[3], mixed[6], mixed[-1]]


def _check_nothing_open(servers: BehindRouters) -> None:
    """What prefill holds for nobody goes with its lease."""
    members = [servers.prefill, servers.decode]
    check_nothing_held(members)
    for member in members:
        eventually(partial(_has_nothing_open, member), 60, f"{member.name} has nothing open")


def _has_nothing_open(member: Member) -> bool:
    return not by_label(member, "vllm:p2p_open_transfers", "").total()
