"""Prompts whose KV is many times what decode has room for, before decode asks and while it does."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from tests import marks
from tests.doubles.instance import BLOCK_SIZE, NUM_HEADS, NUM_LAYERS, SLOT_WIDTH
from tests.doubles.pair import ORDERS, SEND_TYPES, MakePair, Pair, prompt_of

pytestmark = marks.simulated_vllm

BLOCK_BYTES = NUM_LAYERS * NUM_HEADS * BLOCK_SIZE * SLOT_WIDTH * 8
ROOM = {"kv_buffer_size": 5 * BLOCK_BYTES, "mem_pool_size_gb": 5 * BLOCK_BYTES / 2**30}
LENGTH = 8 * 10 * BLOCK_SIZE  # eight times as many blocks


@pytest.fixture
def pair_settings() -> dict[str, Any]:
    return {"num_blocks": 200, "max_model_len": 2048, "decode": ROOM}


def check_moved(pair: Pair, num_blocks: int) -> None:
    """Every token is right, all KV has moved, none was computed twice, and nothing is left."""
    pair.check_answers(num_computed=1)
    assert pair.landed_bytes() == num_blocks * pair.block_bytes * len(pair.d.ranks)
    pair.check_at_rest()


@pytest.mark.parametrize(("transports", "max_tokens_per_step"), [("shm", 2048), ("tcp", 256)])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_eight_times_buffer_and_pool(
    make_pair: MakePair, send_type: str, order: str, transports: str, max_tokens_per_step: int
) -> None:
    pair = make_pair(
        send_type=send_type, transports=transports, max_tokens_per_step=max_tokens_per_step
    )
    pair.ask(prompt_of(LENGTH), order=order)
    pair.run(timeout=40)
    check_moved(pair, LENGTH // BLOCK_SIZE)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_a_prompt_that_prefill_has_in_its_cache(
    make_pair: MakePair, send_type: str, order: str
) -> None:
    """All but its last block is sent by its first step."""
    pair = make_pair(send_type=send_type, max_tokens_per_step=256)
    pair.p.add("earlier", prompt_of(LENGTH), max_tokens=1)
    pair.run(lambda: "earlier" in pair.p.finished, timeout=40, only=pair.p)
    pair.ask(prompt_of(LENGTH), order=order)
    pair.run(timeout=40)
    check_moved(pair, LENGTH // BLOCK_SIZE)


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_ranks_that_are_not_alike(
    make_pair: MakePair, send_type: str, prefill: int, decode: int
) -> None:
    pair = make_pair({"tp_size": prefill}, {"tp_size": decode, **ROOM}, send_type=send_type)
    pair.ask(prompt_of(LENGTH), order="prefill first")
    pair.run(timeout=40)
    pair.check_answers(num_computed=1)
    assert pair.landed_bytes() == LENGTH // BLOCK_SIZE * BLOCK_BYTES
    pair.check_at_rest()


def test_put_does_not_hold_the_step_up_for_room(make_pair: MakePair) -> None:
    """Decode is asked when prefill has answered; until then nobody makes room there."""
    pair = make_pair(send_type="PUT", max_tokens_per_step=64)
    names = [pair.ask(prompt_of(400, seed), order="prefill first") for seed in range(3)]
    pair.run(lambda: len(pair.p.finished) == len(names), timeout=20, only=pair.p)
    assert pair.live_bytes() > 0
    pair.ask_waiting()
    pair.run(timeout=40)
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


@pytest.mark.parametrize("length", [LENGTH, LENGTH - 5])
def test_what_is_held_is_spilled_in_pieces_and_pulled(make_pair: MakePair, length: int) -> None:
    """Prefill keeps it in pieces where its own memory has gaps."""
    pair = make_pair(
        send_type="GET",
        prefill={"num_blocks": 100, "chunk_bytes": 3 * BLOCK_BYTES},
    )
    pair.ask(prompt_of(length, seed=1), order="prefill first")
    pair.ask(prompt_of(length, seed=2), order="prefill first")
    pair.run(lambda: len(pair.p.finished) == 2, timeout=40, only=pair.p)
    worker = pair.p.ranks[0].connector._worker
    assert worker is not None
    assert worker.engine.stats()["spilled_bytes"] > 0
    pair.ask_waiting()
    pair.run(timeout=40)
    check_moved(pair, 2 * -(-length // BLOCK_SIZE))


def test_preempted_in_the_middle_of_its_chunks(make_pair: MakePair) -> None:
    """What had left stays; what had not is withdrawn and sent again."""
    room = {"kv_buffer_size": 1 << 24}
    make_pair(decode=room, num_blocks=100, chunk_bytes=2 * BLOCK_BYTES).check_preempted()
