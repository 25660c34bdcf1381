"""Real instances that are not alike: each token is what a single instance of the decode side's
tensor parallel size says, nothing is recomputed on decode, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from p2p_engine.cli.commands import EXTRA, Role
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.tiny_model import ensure_tiny_model
from tests import marks
from tests.compat.fleet import BOOT_SECONDS, VLLM_ARGS
from tests.compat.workload import Answer, Question, ask_all
from tests.vllm.load import (
    CONCURRENCY,
    ENVIRONMENT,
    check_nothing_held,
    check_transferred,
    decodes,
)
from tests.vllm.observing import prompt_tokens

pytestmark = [marks.vllm, marks.slow, pytest.mark.timeout(1800)]
NUM_REQUESTS = 100


@dataclass(frozen=True)
class Member:
    """What is told to one instance."""

    tp_size: int = 1
    block_size: int = 32

    @property
    def args(self) -> tuple[str, ...]:
        return f"--tensor-parallel-size={self.tp_size}", f"--block-size={self.block_size}"


@dataclass(frozen=True)
class Scenario:
    """One fleet."""

    prefill: Member
    decodes: tuple[Member, ...]
    send_type: str = "PUT_ASYNC"
    transports: str = "shm,tcp"


SCENARIOS = {
    "tp1_to_tp2": Scenario(Member(), (Member(2),)),
    "tp2_to_tp1": Scenario(Member(2), (Member(),)),
    "tp1_to_tp2_get": Scenario(Member(), (Member(2),), "GET"),
    "tp2_to_tp1_tcp": Scenario(Member(2), (Member(),), transports="tcp"),
    "blocks_32_to_64": Scenario(Member(), (Member(1, 64),)),
    "blocks_64_to_32": Scenario(Member(1, 64), (Member(),)),
    "tp1_blocks_32_to_tp2_blocks_64": Scenario(Member(), (Member(2, 64),)),
    "tp1_to_tp1_and_tp2": Scenario(Member(), (Member(), Member(2))),
}


@pytest.fixture(params=SCENARIOS)
def running(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Scenario, Fleet]]:
    scenario = SCENARIOS[request.param]
    fleet = Fleet(
        ensure_tiny_model(),
        send_type=scenario.send_type,
        vllm_args=VLLM_ARGS,
        transfer_config={EXTRA: {"transports": scenario.transports}},
        env=ENVIRONMENT,
        log_dir=tmp_path,
    )
    with fleet:
        fleet.start_proxy()
        fleet.start(Role.PREFILL, vllm_args=scenario.prefill.args)
        for member in scenario.decodes:
            fleet.start(Role.DECODE, vllm_args=member.args)
        fleet.wait_ready(timeout=BOOT_SECONDS)
        yield scenario, fleet


def test_every_token_is_right_and_nothing_is_left(
    running: tuple[Scenario, Fleet],
    load: list[Question],
    answers_alone: Callable[[int], list[Answer]],
) -> None:
    """Two decode instances share the requests: each answer is that of one of their sizes."""
    scenario, fleet = running
    assert fleet.proxy is not None
    answers = ask_all(fleet.proxy.url, load[:NUM_REQUESTS], concurrency=CONCURRENCY)
    check_transferred(fleet.instances, load[:NUM_REQUESTS])
    check_nothing_held(fleet.instances)
    for member in decodes(fleet.instances):
        assert prompt_tokens(member)["external_kv_transfer"] > 0, f"{member.name} served nothing"
    sizes = {member.tp_size for member in scenario.decodes}
    for number, answer in enumerate(answers):
        assert answer in [answers_alone(size)[number] for size in sizes], number
