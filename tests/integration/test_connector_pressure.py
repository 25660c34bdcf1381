"""GET when prefill needs the blocks that it holds: they are spilled, and no lease is waited for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from p2p_engine.connector import compat
from p2p_engine.connector.loads import LoadResults, Loads
from p2p_engine.wire.request_ids import new_transfer_id
from tests import marks
from tests.doubles.instance import (
    BLOCK_SIZE,
    NUM_HEADS,
    NUM_LAYERS,
    SLOT_WIDTH,
    InstanceDouble,
    continuation,
)
from tests.doubles.pair import MakePair, Pair, prompt_of
from tests.support import eventually

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


class LateReports:
    """While `are_late`, the ranks of an instance report no load."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._late: set[object] = set()
        take_results = Loads.take_results

        def unless_late(loads: Loads) -> LoadResults:
            return LoadResults() if loads._engine in self._late else take_results(loads)

        monkeypatch.setattr(Loads, "take_results", unless_late)

    @contextlib.contextmanager
    def of(self, instance: InstanceDouble) -> Iterator[None]:
        workers = [rank.connector._worker for rank in instance.ranks]
        self._late = {worker.engine for worker in workers if worker is not None}
        yield
        self._late = set()


@pytest.fixture
def late_reports(monkeypatch: pytest.MonkeyPatch) -> LateReports:
    return LateReports(monkeypatch)


def is_loading(instance: InstanceDouble, request_id: str) -> bool:
    request = instance.scheduler.requests.get(request_id)
    return request is not None and request.status is RequestStatus.WAITING_FOR_REMOTE_KVS


def test_a_turn_that_was_recalled_finds_blocks_for_its_rest(
    make_pair: MakePair, late_reports: LateReports
) -> None:
    """vLLM gives it those of what is recalled, and asks nothing of us when that has come."""
    pair = make_pair(
        prefill_role="kv_both", policy="recompute", stash_seconds=60.0, prefill={"num_blocks": 60}
    )
    said, first_turn = prompt_of(160), new_transfer_id()
    pair.ask(
        said, by="params", max_tokens=50, transfer_id=first_turn, order="prefill first",
        more={"stash": True},
    )  # fmt: skip
    pair.run()
    said += [*continuation(said, 50), *prompt_of(300, 77)]
    pair.p.evict()
    with late_reports.of(pair.p):
        pair.ask(said, by="params", earlier=first_turn, order="prefill first")
        recalled = pair.prefill_ids[-1]
        pair.run(lambda: is_loading(pair.p, recalled), only=pair.p)
        for seed in range(3):
            pair.ask(prompt_of(230, seed), by="params", order="prefill first")
        others = pair.prefill_ids[-3:]
        pair.run(lambda: all(name in pair.p.finished for name in others), only=pair.p)
    run_prefills(pair)
    pair.ask_waiting()
    pair.run()
    pair.check_answers()


def test_a_loaded_request_finds_a_block_for_its_last_token(
    make_pair: MakePair, late_reports: LateReports
) -> None:
    """With windows, all but the last token are loaded, and that may want a block of its own."""
    pair = make_pair(
        prefill_role="kv_both", decode_role="kv_both", policy="recompute", attention="windows",
        prefill={"num_blocks": 300}, decode={"num_blocks": 31},
    )  # fmt: skip
    with late_reports.of(pair.d):
        loaded = pair.ask(prompt_of(4 * BLOCK_SIZE + 1, 1), by="params", order="prefill first")
        run_prefills(pair)
        pair.ask_waiting()
        pair.run(lambda: is_loading(pair.d, loaded))
        pool, seed = pair.d.scheduler.kv_cache_manager.block_pool, 10
        while free := pool.get_num_free_blocks():  # until what decode itself holds takes all
            seed += 1
            length = min(free, 4) * BLOCK_SIZE
            pair.ask(prompt_of(length, seed), by="params", order="prefill first", swapped=True)
            name = pair.prefill_ids[-1]
            pair.run(lambda name=name: name in pair.d.finished, only=pair.d)  # type: ignore[misc]
    pair.run(lambda: loaded in pair.d.finished)
    pair.ask_waiting()
    pair.run()
    pair.check_answers()
    pair.check_at_rest()


SPECULATION = {
    "num_blocks": 22, "num_speculative_tokens": 3, "max_tokens_per_step": 512, "draft": "",
}  # fmt: skip


def test_what_vllm_wants_beside_a_prompt_is_found_too(make_pair: MakePair) -> None:
    """With a draft, it also wants slots ahead of the prompt's end."""
    pair = make_pair(policy="recompute", prefill=SPECULATION)
    for seed in range(3):
        pair.ask(prompt_of(4 * BLOCK_SIZE, seed), by="params", order="prefill first")
    run_prefills(pair)
    free = pair.p.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    pair.ask(prompt_of(free * BLOCK_SIZE, 9), by="params", order="prefill first")
    run_prefills(pair)
    pair.ask_waiting()
    pair.run()
    pair.check_answers()
    pair.check_at_rest()


def test_what_vllm_wants_beside_a_prompt_is_found_while_others_run(make_pair: MakePair) -> None:
    pair = make_pair(policy="recompute", prefill={**SPECULATION, "num_blocks": 36})
    for seed in range(3):
        pair.ask(prompt_of(4 * BLOCK_SIZE, seed), by="params", order="prefill first")
    run_prefills(pair)
    pair.p.add("long", prompt_of(BLOCK_SIZE + 1, 8), max_tokens=200)
    pair.p.step()
    free = pair.p.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    pair.ask(prompt_of(free * BLOCK_SIZE, 9), by="params", order="prefill first")
    for _ in range(4):  # in which the other one wants no block
        pair.p.step()
    eventually(lambda: engine_stats(pair.p)["spilled_bytes"])
    run_prefills(pair)
    pair.run(lambda: "long" in pair.p.finished, only=pair.p)
    pair.ask_waiting()
    pair.run()
    pair.check_answers()
    pair.check_at_rest()


@pytest.mark.usefixtures("patience")
def test_nothing_is_spilled_for_a_request_that_lacks_something_else(
    make_pair: MakePair, late_reports: LateReports
) -> None:
    """vLLM is paused when its load is over."""
    pair = make_pair(
        prefill_role="kv_both", decode_role="kv_both", policy="recompute",
        prefill={"num_blocks": 300}, decode={"num_blocks": 300},
    )  # fmt: skip
    with late_reports.of(pair.d):
        loaded = pair.ask(prompt_of(100, 1), by="params", order="prefill first")
        run_prefills(pair)
        pair.ask_waiting()
        pair.run(lambda: is_loading(pair.d, loaded))
        for seed in range(2, 5):
            pair.ask(prompt_of(100, seed), by="params", order="prefill first", swapped=True)
        names = pair.prefill_ids[-3:]
        pair.run(lambda: all(name in pair.d.finished for name in names), only=pair.d)
        pair.d.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    pair.run(lambda: loaded in pair.d.scheduler.finished_recving_kv_req_ids)
    for _ in range(20):
        pair.d.step()
    pair.d.scheduler.set_pause_state(PauseState.UNPAUSED)
    pair.run(lambda: loaded in pair.d.finished)
    assert engine_stats(pair.d)["spilled_bytes"] == 0
    pair.ask_waiting()
    pair.run()
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


@pytest.mark.usefixtures("patience")
def test_what_vllm_reserves_for_loads_in_flight_is_found_too(
    make_pair: MakePair, late_reports: LateReports
) -> None:
    """It starts no load that could take the blocks which an earlier one needs for its rest."""
    pair = make_pair(
        prefill_role="kv_both", decode_role="kv_both", policy="recompute", stash_seconds=60.0,
        prefill={"num_blocks": 60},
    )  # fmt: skip
    said, first_turn = prompt_of(160), new_transfer_id()
    pair.ask(
        said, by="params", max_tokens=50, transfer_id=first_turn, order="prefill first",
        more={"stash": True},
    )  # fmt: skip
    pair.run()
    said += [*continuation(said, 50), *prompt_of(300, 77)]
    pair.p.evict()
    with late_reports.of(pair.p):
        pair.ask(said, by="params", earlier=first_turn, order="prefill first")
        recalled = pair.prefill_ids[-1]
        pair.run(lambda: is_loading(pair.p, recalled), only=pair.p)
        for seed in range(2):
            pair.ask(prompt_of(230, seed), by="params", order="prefill first")
        others = pair.prefill_ids[-2:]
        pair.run(lambda: all(name in pair.p.finished for name in others), only=pair.p)
        waits = pair.ask(prompt_of(150, 99), by="params", order="together", swapped=True)
        pair.run(lambda: is_loading(pair.p, waits), timeout=10)
    pair.run(lambda: waits in pair.p.finished)
    pair.ask_waiting()
    pair.run()
    pair.check_answers()
