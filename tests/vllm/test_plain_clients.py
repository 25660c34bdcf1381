"""Clients of the old scheme, without a proxy: one `X-Request-Id` on both legs, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.members import Member
from p2p_engine.cli.tiny_model import ensure_tiny_model
from p2p_engine.transfer_config import EXTRA
from tests import marks
from tests.compat.fleet import BOOT_SECONDS, VLLM_ARGS
from tests.compat.workload import Answer, Question, ask
from tests.vllm.leaving import new_request_id
from tests.vllm.load import (
    CONCURRENCY,
    ENVIRONMENT,
    check_nothing_held,
    check_transferred,
    landed_bytes,
)

pytestmark = [marks.vllm, marks.slow, pytest.mark.timeout(1800)]


@dataclass(frozen=True)
class TwoServers:
    """One prefill and one decode instance, asked directly."""

    transport: str
    prefill: Member
    decode: Member

    def ask_in_turn(self, question: Question) -> Answer:
        """Ask prefill for one token, then decode for all."""
        headers = self._headers()
        ask(self.prefill.url, _prefill_leg(question), headers)
        return ask(self.decode.url, question, headers)

    def ask_decode_first(self, question: Question) -> Answer:
        """Ask both at once, decode a little ahead."""
        headers = self._headers()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(ask, self.decode.url, question, headers)
            ask(self.prefill.url, _prefill_leg(question), headers)
            return answer.result()

    def _headers(self) -> dict[str, str]:
        return {"X-Request-Id": new_request_id(self.prefill, self.decode)}


@pytest.fixture(params=["shm", "tcp"])
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TwoServers]:
    fleet = Fleet(
        ensure_tiny_model(),
        vllm_args=VLLM_ARGS,
        transfer_config={EXTRA: {"transports": request.param}},
        env=ENVIRONMENT,
        log_dir=tmp_path,
    )
    with fleet:
        members = [fleet.start(role) for role in (MemberRole.PREFILL, MemberRole.DECODE)]
        fleet.wait_ready(timeout=BOOT_SECONDS)
        yield TwoServers(request.param, *members)


def test_the_header_alone_is_enough(
    servers: TwoServers, load: list[Question], answers_alone: Callable[[], list[Answer]]
) -> None:
    """First some whose legs come at once, decode first, then the others prefill first."""
    members = [servers.prefill, servers.decode]
    answers = _ask(servers.ask_decode_first, load[:20])
    if servers.transport == "tcp":  # over shm everything lands in the shared arena
        assert landed_bytes(members)["blocks"] > 0
    answers += _ask(servers.ask_in_turn, load[20:])
    check_transferred(members, load)
    check_nothing_held(members)
    assert answers == answers_alone()


def _ask(how: Callable[[Question], Answer], questions: list[Question]) -> list[Answer]:
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return list(pool.map(how, questions))


def _prefill_leg(question: Question) -> Question:
    body = {**question.body, "max_tokens": 1, "stream": False}
    return Question(question.path, body, question.num_prompts)
