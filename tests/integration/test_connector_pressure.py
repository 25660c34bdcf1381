"""GET when prefill needs the blocks that it holds: they are spilled, and no lease is waited for."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from p2p_engine.connector import compat
from tests import marks
from tests.doubles.instance import (
    BLOCK_SIZE,
    NUM_HEADS,
    NUM_LAYERS,
    SLOT_WIDTH,
    InstanceDouble,
)
from tests.doubles.pair import MakePair, Pair, prompt_of

pytestmark = marks.simulated_vllm

BLOCK_BYTES = NUM_LAYERS * NUM_HEADS * BLOCK_SIZE * SLOT_WIDTH * 8


@pytest.fixture
def pair_settings() -> dict[str, Any]:
    return {"send_type": "GET", "num_blocks": 200, "prefill": {"num_blocks": 26}}


def engine_stats(instance: InstanceDouble) -> dict[str, Any]:
    worker = instance.ranks[0].connector._worker
    assert worker is not None
    return worker.engine.stats()


def run_prefills(pair: Pair) -> None:
    """Step prefill alone until all that it was asked is answered."""
    names = pair.prefill_ids
    pair.run(lambda: all(name in pair.p.finished for name in names), only=pair.p)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("transports", ["shm", "tcp"])
@pytest.mark.parametrize("length", [100, 250, 380])
def test_prompts_of_many_caches_are_held(
    make_pair: MakePair, tp_size: int, transports: str, length: int
) -> None:
    """Three to eight times what prefill's cache holds, before decode asks for any of it."""
    pair = make_pair(transports=transports, prefill={"tp_size": tp_size})
    for seed in range(12 if length == 100 else 6):
        pair.ask(prompt_of(length, seed), order="prefill first")
    run_prefills(pair)
    assert engine_stats(pair.p)["spilled_bytes"] > 0
    pair.ask_waiting()
    pair.run(timeout=40)
    pair.check_answers(num_computed=1)
    pair.check_at_rest()
    assert engine_stats(pair.p)["live_bytes"] == 0


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take no spill for overdue because this machine is busy."""
    monkeypatch.setattr("p2p_engine.connector.pressure.SPILL_SECONDS", 20.0)


@pytest.mark.usefixtures("patience")
def test_only_as_much_is_spilled_as_is_needed(make_pair: MakePair) -> None:
    """Twenty-five blocks hold three prompts of seven; the fourth needs one of the oldest."""
    pair = make_pair()
    for seed in range(3):
        pair.ask(prompt_of(100, seed), order="prefill first")
    run_prefills(pair)
    assert engine_stats(pair.p)["spilled_bytes"] == 0
    pair.ask(prompt_of(100, seed=3), order="prefill first")
    run_prefills(pair)
    assert engine_stats(pair.p)["spilled_bytes"] == 7 * BLOCK_BYTES
    pair.ask_waiting()
    pair.run()
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


@pytest.mark.usefixtures("patience")
@pytest.mark.skipif(not compat.HAS_FAILED_REQUESTS, reason="vLLM 0.29 preempts without asking")
def test_a_running_request_waits_for_the_spill_instead_of_losing_its_blocks(
    make_pair: MakePair,
) -> None:
    """A long answer of prefill's grows until there is no block left."""
    pair = make_pair()
    pair.ask(prompt_of(100, seed=9), prefill_tokens=200, order="prefill first")
    for seed in range(2):
        pair.ask(prompt_of(100, seed), order="prefill first")
    run_prefills(pair)
    assert engine_stats(pair.p)["spilled_bytes"] > 0
    assert pair.p.num_preemptions == 0
    pair.ask_waiting()
    pair.run()
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


def test_without_room_for_a_spill_the_lease_decides(make_pair: MakePair) -> None:
    """Nobody is stuck: what nobody asks for in time gives way."""
    pair = make_pair(
        policy="recompute",
        prefill={"kv_buffer_size": 0, "mem_pool_size_gb": 0, "lease_seconds": 0.5},
    )
    for seed in range(6):
        pair.ask(prompt_of(100, seed), order="prefill first")
    run_prefills(pair)
    assert engine_stats(pair.p)["spilled_bytes"] == 0
    pair.ask_waiting()
    pair.run()
    pair.check_answers()
    pair.check_at_rest()


def test_a_spill_waits_for_room_in_the_pool(make_pair: MakePair) -> None:
    """The pool has room for two prompts: the third is spilled when one of them was pulled."""
    room = {"kv_buffer_size": 15 * BLOCK_BYTES, "mem_pool_size_gb": 0}
    pair = make_pair(prefill={**room, "lease_seconds": 30})
    for seed in range(6):
        pair.ask(prompt_of(100, seed), order="prefill first")
    pair.run(lambda: engine_stats(pair.p)["spilled_bytes"] == 14 * BLOCK_BYTES, only=pair.p)
    pair.ask_waiting()
    pair.run(timeout=40)
    pair.check_answers(num_computed=1)
    pair.check_at_rest()
