"""Real instances that are not alike, and models that are not the plain case: each token is what a
single instance of the decode side's tensor parallel size says, nothing is recomputed on decode, and
nothing is left behind."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.members import Member
from p2p_engine.transfer_config import EXTRA
from tests import marks
from tests.compat.fleet import BOOT_SECONDS, VLLM_ARGS
from tests.compat.workload import Answer, Question, ask, ask_all
from tests.vllm.load import (
    CONCURRENCY,
    ENVIRONMENT,
    check_nothing_held,
    check_transferred,
    decodes,
    questions_for,
)
from tests.vllm.observing import by_label, prompt_tokens
from tests.vllm.other_models import PHI_ORIGINAL, ensure_model
from tests.vllm.pair import SEND_TYPES, DirectPair, TokensSince

pytestmark = [marks.vllm, marks.slow, pytest.mark.timeout(1800)]
NUM_REQUESTS = 100
ROOT = Path(__file__).parents[2]
DEVICE = "tests.vllm.device_connector"
FEW_BLOCKS = 26  # 800 tokens, and the longest prompt has 700
# vLLM's CPU backend makes the buffer between two stages when it compiles, and only then.
COMPILED = ("--no-enforce-eager", '--compilation-config={"mode": 2, "backend": "eager"}')


@dataclass(frozen=True)
class MemberShape:
    """What is told to one instance."""

    tp_size: int = 1
    block_size: int = 32
    pp_size: int = 1
    dp_size: int = 1  # behind one HTTP address
    num_blocks: int = 0
    draft: str = ""

    @property
    def args(self) -> tuple[str, ...]:
        return (
            f"--tensor-parallel-size={self.tp_size}",
            f"--block-size={self.block_size}",
            f"--pipeline-parallel-size={self.pp_size}",
            *(COMPILED if self.pp_size > 1 else ()),
            *([f"--data-parallel-size={self.dp_size}"] if self.dp_size > 1 else []),
            *(_blocks(self.num_blocks) if self.num_blocks else ()),
            *([f"--speculative-config={_speculation(self.draft)}"] if self.draft else []),
        )


def _blocks(number: int) -> tuple[str, str]:
    """Not more than these; vLLM wants enough for one request of the greatest length."""
    return f"--num-gpu-blocks-override={number}", "--max-model-len=768"


def _speculation(draft: str) -> str:
    """The tiny Llama may be its own draft: with all of its KV it proposes what is right."""
    method = {"llama": "draft_model", "eagle": "eagle"}[draft]
    model = str(ensure_model(draft))
    return json.dumps({"method": method, "model": model, "num_speculative_tokens": 3})


@dataclass(frozen=True)
class Scenario:
    """One fleet."""

    prefill: MemberShape
    decodes: tuple[MemberShape, ...]
    send_type: str = "PUT_ASYNC"
    transports: str = "shm,tcp"
    model: str = "llama"
    is_on_device: bool = False

    @property
    def has_draft(self) -> bool:
        return any(member.draft for member in (self.prefill, *self.decodes))

    @property
    def transfer_config(self) -> dict[str, Any]:
        device = {"kv_connector_module_path": DEVICE, "kv_buffer_device": "cpu"}
        extra = {EXTRA: {"transports": self.transports}}
        return extra | device if self.is_on_device else extra


SCENARIOS = {
    "tp1_to_tp2": Scenario(MemberShape(), (MemberShape(2),)),
    "tp2_to_tp1": Scenario(MemberShape(2), (MemberShape(),)),
    "tp1_to_tp2_get": Scenario(MemberShape(), (MemberShape(2),), "GET"),
    "tp2_to_tp1_tcp": Scenario(MemberShape(2), (MemberShape(),), transports="tcp"),
    "blocks_32_to_64": Scenario(MemberShape(), (MemberShape(1, 64),)),
    "blocks_64_to_32": Scenario(MemberShape(1, 64), (MemberShape(),)),
    "tp1_blocks_32_to_tp2_blocks_64": Scenario(MemberShape(), (MemberShape(2, 64),)),
    "tp1_to_tp1_and_tp2": Scenario(MemberShape(), (MemberShape(), MemberShape(2))),
    "windows": Scenario(MemberShape(), (MemberShape(),), model="gemma"),
    "windows_tp1_to_tp2": Scenario(MemberShape(), (MemberShape(2),), model="gemma"),
    "windows_tp2_to_tp1": Scenario(MemberShape(2), (MemberShape(),), model="gemma"),
    "stages_to_one": Scenario(MemberShape(pp_size=2), (MemberShape(),)),
    "one_to_stages": Scenario(MemberShape(), (MemberShape(pp_size=2),)),
    "ranks_behind_one_address": Scenario(MemberShape(dp_size=2), (MemberShape(dp_size=2),)),
    "draft_on_both": Scenario(MemberShape(draft="llama"), (MemberShape(draft="llama"),)),
    "draft_on_both_tp1_to_tp2": Scenario(
        MemberShape(draft="llama"), (MemberShape(2, draft="llama"),)
    ),
    "draft_on_decode": Scenario(MemberShape(), (MemberShape(draft="llama"),)),
    "draft_on_prefill_get": Scenario(MemberShape(draft="llama"), (MemberShape(),), "GET"),
    "eagle_on_both_get": Scenario(MemberShape(draft="eagle"), (MemberShape(draft="eagle"),), "GET"),
    "eagle_on_decode": Scenario(MemberShape(), (MemberShape(draft="eagle"),)),
    "host_buffer": Scenario(MemberShape(), (MemberShape(),), is_on_device=True),
    "host_buffer_get": Scenario(MemberShape(2), (MemberShape(1, 64),), "GET", is_on_device=True),
    "few_blocks_on_prefill_get": Scenario(
        MemberShape(num_blocks=FEW_BLOCKS), (MemberShape(),), "GET"
    ),
}


@pytest.fixture(params=SCENARIOS)
def running(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Scenario, Fleet]]:
    scenario = SCENARIOS[request.param]
    fleet = Fleet(
        ensure_model(scenario.model),
        send_type=scenario.send_type,
        vllm_args=VLLM_ARGS,
        transfer_config=scenario.transfer_config,
        env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        log_dir=tmp_path,
    )
    with fleet:
        fleet.start_proxy()
        fleet.start(MemberRole.PREFILL, vllm_args=scenario.prefill.args)
        for member in scenario.decodes:
            fleet.start(MemberRole.DECODE, vllm_args=member.args)
        fleet.wait_ready(timeout=BOOT_SECONDS)
        yield scenario, fleet


def test_every_token_is_right_and_nothing_is_left(
    running: tuple[Scenario, Fleet], answers_alone: Callable[[int, str], list[Answer]]
) -> None:
    """Two decode instances share the requests: each answer is that of one of their sizes."""
    scenario, fleet = running
    assert fleet.proxy is not None
    asked = [
        (number, question)
        for number, question in enumerate(questions_for(scenario.model)[:NUM_REQUESTS])
        # With a draft, vLLM's CPU runner ends when a request is cut to its likeliest tokens.
        if not (scenario.has_draft and "top_k" in question.body)
    ]
    load = [question for _, question in asked]
    answers = ask_all(fleet.proxy.url, load, concurrency=CONCURRENCY)
    check_transferred(fleet.instances, load, has_window=scenario.model == "gemma")
    check_nothing_held(fleet.instances)
    for member in decodes(fleet.instances):
        assert prompt_tokens(member)["external_kv_transfer"] > 0, f"{member.name} served nothing"
    for plan, member in zip((scenario.prefill, *scenario.decodes), fleet.instances, strict=True):
        served = +by_label(member, "vllm:prompt_tokens", "engine")
        assert len(served) == plan.dp_size, f"ranks of {member.name} that served: {served}"
    if scenario.prefill.num_blocks:
        assert sum(sum(by_label(m, "vllm:p2p_spilled_bytes", "").values()) for m in fleet.instances)
    if scenario.is_on_device:
        logs = [member.process.log_path.read_text() for member in fleet.instances]
        assert all("host buffer: blocks=" in log for log in logs)
    check_accepted(scenario, fleet)
    sizes = {member.tp_size for member in scenario.decodes}
    for (number, _), answer in zip(asked, answers, strict=True):
        assert answer in [answers_alone(size, scenario.model)[number] for size in sizes], number


@pytest.fixture(scope="module")
def longrope(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, list[Member]]]:
    """Two that prefill and one that decodes: the first has another length, and other factors."""
    with Fleet(
        ensure_model("phi"),
        vllm_args=(*VLLM_ARGS, "--served-model-name=tiny"),
        transfer_config={
            "kv_load_failure_policy": "recompute", EXTRA: {"transfer_timeout_seconds": 600.0},
        },
        env=ENVIRONMENT,
        log_dir=tmp_path_factory.mktemp("longrope"),
    ) as fleet:  # fmt: skip
        lengths = PHI_ORIGINAL, 4 * PHI_ORIGINAL
        members = [
            *(fleet.start(MemberRole.PREFILL, vllm_args=[f"--max-model-len={n}"]) for n in lengths),
            fleet.start(MemberRole.DECODE, vllm_args=["--no-enable-prefix-caching"]),
        ]
        fleet.wait_ready(timeout=BOOT_SECONDS)
        yield fleet, members


@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_keys_that_are_turned_otherwise_are_refused_and_computed_at_once(
    longrope: tuple[Fleet, list[Member]], send_type: str
) -> None:
    """Nobody waits for the deadline of a transfer, which is longer than the client's."""
    fleet, [other, alike, decode] = longrope
    body = {"model": "tiny", "prompt": [*range(5, 205)], "max_tokens": 12, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True}  # fmt: skip
    question = Question("/v1/completions", body)
    expected = ask(decode.url, question)
    for prefill, num_loaded in ((other, 0), (alike, 200)):
        tokens = TokensSince(decode)
        assert DirectPair(fleet, prefill, decode).transfer(question, send_type) == expected
        assert tokens["external_kv_transfer"] == num_loaded
    said = decode.process.log_path.read_text()
    assert re.search(r'model: .*rope_factors="long".* here, .*rope_factors="short".* there', said)
    check_nothing_held([other, alike, decode])


def check_accepted(scenario: Scenario, fleet: Fleet) -> None:
    """With its KV, the tiny Llama proposes of itself what is right; without it, hardly ever.

    vLLM begins after a transfer with placeholders, and counts them as proposed: of an answer of
    twelve tokens they are a quarter.
    """
    for plan, member in zip(scenario.decodes, decodes(fleet.instances), strict=True):
        proposed, accepted = (
            sum(by_label(member, f"vllm:spec_decode_num_{what}_tokens", "").values())
            for what in ("draft", "accepted")
        )
        assert bool(proposed) == bool(plan.draft)
        if plan.draft == "llama":
            is_good = accepted > 0.5 * proposed
            assert is_good == bool(scenario.prefill.draft), f"{accepted} of {proposed} accepted"
        if plan.draft == scenario.prefill.draft:
            outcomes = by_label(member, "vllm:p2p_transfers", "outcome")
            assert all(name.endswith(" ok") for name in outcomes), outcomes
