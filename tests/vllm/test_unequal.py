"""Real instances that are not alike, and models that are not the plain case: each token is what a
single instance of the decode side's tensor parallel size says, nothing is recomputed on decode, and
nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from p2p_engine.cli.commands import EXTRA, Role
from p2p_engine.cli.fleet import Fleet
from tests import marks
from tests.compat.fleet import BOOT_SECONDS, VLLM_ARGS
from tests.compat.workload import Answer, ask_all
from tests.vllm.load import (
    CONCURRENCY,
    ENVIRONMENT,
    check_nothing_held,
    check_transferred,
    decodes,
    questions_for,
)
from tests.vllm.observing import prompt_tokens
from tests.vllm.other_models import ensure_model

pytestmark = [marks.vllm, marks.slow, pytest.mark.timeout(1800)]
NUM_REQUESTS = 100
# vLLM's CPU backend makes the buffer between two stages when it compiles, and only then.
COMPILED = ("--no-enforce-eager", '--compilation-config={"mode": 2, "backend": "eager"}')


@dataclass(frozen=True)
class Member:
    """What is told to one instance."""

    tp_size: int = 1
    block_size: int = 32
    pp_size: int = 1

    @property
    def args(self) -> tuple[str, ...]:
        return (
            f"--tensor-parallel-size={self.tp_size}",
            f"--block-size={self.block_size}",
            f"--pipeline-parallel-size={self.pp_size}",
            *(COMPILED if self.pp_size > 1 else ()),
        )


@dataclass(frozen=True)
class Scenario:
    """One fleet."""

    prefill: Member
    decodes: tuple[Member, ...]
    send_type: str = "PUT_ASYNC"
    transports: str = "shm,tcp"
    model: str = "llama"


SCENARIOS = {
    "tp1_to_tp2": Scenario(Member(), (Member(2),)),
    "tp2_to_tp1": Scenario(Member(2), (Member(),)),
    "tp1_to_tp2_get": Scenario(Member(), (Member(2),), "GET"),
    "tp2_to_tp1_tcp": Scenario(Member(2), (Member(),), transports="tcp"),
    "blocks_32_to_64": Scenario(Member(), (Member(1, 64),)),
    "blocks_64_to_32": Scenario(Member(1, 64), (Member(),)),
    "tp1_blocks_32_to_tp2_blocks_64": Scenario(Member(), (Member(2, 64),)),
    "tp1_to_tp1_and_tp2": Scenario(Member(), (Member(), Member(2))),
    "windows": Scenario(Member(), (Member(),), model="gemma"),
    "stages_to_one": Scenario(Member(pp_size=2), (Member(),)),
}


@pytest.fixture(params=SCENARIOS)
def running(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Scenario, Fleet]]:
    scenario = SCENARIOS[request.param]
    fleet = Fleet(
        ensure_model(scenario.model),
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
    running: tuple[Scenario, Fleet], answers_alone: Callable[[int, str], list[Answer]]
) -> None:
    """Two decode instances share the requests: each answer is that of one of their sizes."""
    scenario, fleet = running
    assert fleet.proxy is not None
    load = questions_for(scenario.model)[:NUM_REQUESTS]
    answers = ask_all(fleet.proxy.url, load, concurrency=CONCURRENCY)
    check_transferred(fleet.instances, load, has_window=scenario.model == "gemma")
    check_nothing_held(fleet.instances)
    for member in decodes(fleet.instances):
        assert prompt_tokens(member)["external_kv_transfer"] > 0, f"{member.name} served nothing"
    sizes = {member.tp_size for member in scenario.decodes}
    for number, answer in enumerate(answers):
        assert answer in [answers_alone(size, scenario.model)[number] for size in sizes], number
