"""200 mixed requests at a time of 8, in every mode and under every kind of pressure: each token is
what a single instance says, nothing is recomputed on decode, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.tiny_model import ensure_tiny_model
from p2p_engine.transfer_config import EXTRA
from tests import marks
from tests.compat.fleet import BOOT_SECONDS, VLLM_ARGS
from tests.compat.workload import Answer, Question, ask_all
from tests.vllm.load import (
    CONCURRENCY,
    ENVIRONMENT,
    check_nothing_held,
    check_transferred,
    decodes,
    landed_bytes,
)
from tests.vllm.observing import by_label

pytestmark = [marks.vllm, marks.slow, pytest.mark.timeout(1800)]


@dataclass(frozen=True)
class MixedLoad:
    """One fleet; `late` are started when half of the requests have been answered."""

    send_type: str = "PUT_ASYNC"
    prefill: int = 1
    decode: int = 1
    late: tuple[MemberRole, ...] = ()
    tp_size: int = 1
    extra: Mapping[str, object] = field(default_factory=dict)
    prefill_args: tuple[str, ...] = ()
    decode_args: tuple[str, ...] = ()
    recomputes: bool = False  # preempted requests compute their prompt again


# The model's KV takes 4 KiB for each token: 8 layers, 4 heads of 64, keys and values, float32.
SMALL_BUFFER = {"kv_buffer_size": "4e6", "mem_pool_size_gb": "0.25"}
# 40 blocks hold 1280 tokens: one or two of the longest requests, and never less than one.
FEW_BLOCKS = ("--num-gpu-blocks-override=40", "--max-model-len=1024")
# Prefill has no answers that grow: it runs short of blocks when prompts advance side by side, and
# are begun before all their blocks are free.
SIDE_BY_SIDE = (
    *("--max-num-batched-tokens=256", "--long-prefill-token-threshold=64"),
    "--no-scheduler-reserve-full-isl",
)
SCENARIOS = {
    "put_async": MixedLoad(),
    "put": MixedLoad("PUT"),
    "get": MixedLoad("GET"),
    "put_async_tcp": MixedLoad(extra={"transports": "tcp"}),
    "get_tcp": MixedLoad("GET", extra={"transports": "tcp"}),
    "chunked": MixedLoad(prefill_args=("--max-num-batched-tokens=256",)),
    "few_prefill_blocks": MixedLoad(prefill_args=(*FEW_BLOCKS, *SIDE_BY_SIDE)),
    "few_decode_blocks": MixedLoad(decode_args=FEW_BLOCKS, recomputes=True),
    "buffer_and_pool": MixedLoad(extra=SMALL_BUFFER),
    "1p3d": MixedLoad(decode=2, late=(MemberRole.DECODE,)),
    "3p1d": MixedLoad(prefill=2, late=(MemberRole.PREFILL,)),
    "tp2": MixedLoad(tp_size=2),
}


@pytest.fixture(params=SCENARIOS)
def running(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[MixedLoad, Fleet]]:
    scenario = SCENARIOS[request.param]
    with _fleet(scenario, tmp_path) as fleet:
        fleet.start_proxy()
        for _ in range(scenario.prefill):
            fleet.start(MemberRole.PREFILL, vllm_args=scenario.prefill_args)
        for _ in range(scenario.decode):
            fleet.start(MemberRole.DECODE, vllm_args=scenario.decode_args)
        fleet.wait_ready(timeout=BOOT_SECONDS)
        yield scenario, fleet


def test_every_token_is_right_and_nothing_is_left(
    running: tuple[MixedLoad, Fleet],
    load: list[Question],
    answers_alone: Callable[[int], list[Answer]],
) -> None:
    scenario, fleet = running
    assert fleet.proxy is not None
    half = len(load) // 2
    answers = ask_all(fleet.proxy.url, load[:half], concurrency=CONCURRENCY)
    for role in scenario.late:
        member = fleet.start(role)
        fleet.wait_ready(member, timeout=BOOT_SECONDS)
    answers += ask_all(fleet.proxy.url, load[half:], concurrency=CONCURRENCY)
    if not scenario.recomputes:
        check_transferred(fleet.instances, load)
    check_nothing_held(fleet.instances)
    _check_pressure(scenario, fleet)
    assert answers == answers_alone(scenario.tp_size)


def _check_pressure(scenario: MixedLoad, fleet: Fleet) -> None:
    """The scenario was what its name says."""
    landed = landed_bytes(decodes(fleet.instances))
    assert landed.total() > 0
    if scenario.extra is SMALL_BUFFER:
        assert landed["buffer"] > 0
        assert landed["pool"] > 0
    if any("override" in arg for arg in (*scenario.prefill_args, *scenario.decode_args)):
        preempted = sum(by_label(m, "vllm:num_preemptions", "")[""] for m in fleet.instances)
        assert preempted > 0
    for member in fleet.instances if scenario.late else ():
        assert by_label(member, "vllm:prompt_tokens", "")[""] > 0, f"{member.name} served nothing"


def _fleet(scenario: MixedLoad, log_dir: Path) -> Fleet:
    return Fleet(
        ensure_tiny_model(),
        tp_size=scenario.tp_size,
        send_type=scenario.send_type,
        vllm_args=VLLM_ARGS,
        transfer_config={EXTRA: dict(scenario.extra)},
        env=ENVIRONMENT,
        log_dir=log_dir,
        planned_instances=2,
    )
