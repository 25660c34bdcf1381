"""Caches on a device that only vLLM's copy operations can touch: the host buffer, on both sides."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

from tests import marks
from tests.doubles.device import DeviceDouble
from tests.doubles.instance import (
    BLOCK_SIZE,
    InstanceDouble,
    continuation,
)
from tests.doubles.pair import ORDERS, SEND_TYPES, MakePair, Pair, prompt_of

pytestmark = marks.simulated_vllm

LENGTHS = (1, 15, 16, 17, 63, 64, 65, 100, 300)

SMALL = 20 * 3 * 2 * 16 * 16 * 8 / 2**30  # room for twenty blocks, in GiB


@pytest.fixture
def pair_settings() -> dict[str, Any]:
    return {"num_blocks": 200, "is_on_device": True}


def device_of(instance: InstanceDouble, rank: int = 0) -> DeviceDouble:
    device = instance.ranks[rank].device
    assert device is not None
    return device


def ask_all(pair: Pair, order: str) -> None:
    for length in LENGTHS:
        pair.ask(prompt_of(length), order=order)
    pair.run(timeout=40)
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("send_type", SEND_TYPES)
@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_each_block_is_copied_once(
    make_pair: MakePair, send_type: str, order: str, transports: str
) -> None:
    """Steps of 40 tokens end inside blocks: none is copied before it is full, or twice."""
    pair = make_pair(send_type=send_type, transports=transports, max_tokens_per_step=40)
    ask_all(pair, order)
    num_blocks = sum(-(-length // BLOCK_SIZE) for length in LENGTHS)
    assert len(device_of(pair.p).copied["d2h"]) == num_blocks  # and all answers were right
    assert len(device_of(pair.d).copied["h2d"]) == num_blocks
    assert not device_of(pair.p).copied["h2d"]
    assert not device_of(pair.d).copied["d2h"]


@pytest.mark.parametrize("send_type", SEND_TYPES)
@pytest.mark.parametrize("on_device", ["prefill", "decode"])
def test_one_side_in_host_memory(make_pair: MakePair, send_type: str, on_device: str) -> None:
    sides = {side: {"is_on_device": side == on_device} for side in ("prefill", "decode")}
    pair = make_pair(**sides, send_type=send_type)
    for order in ORDERS:
        ask_all(pair, order)


@pytest.mark.parametrize("layouts", [("LBHNC", "LBHNC"), ("LHBNC", "BLNHC"), ("LBNHC", "LHBNC")])
def test_instances_that_are_not_alike(make_pair: MakePair, layouts: tuple[str, str]) -> None:
    pair = make_pair(
        prefill={"tp_size": 2, "layout": layouts[0]},
        decode={"block_size": 64, "layout": layouts[1]},
    )
    ask_all(pair, "together")


@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_more_than_the_buffer_holds_waits_for_room(make_pair: MakePair, send_type: str) -> None:
    """Twenty host blocks on each side, and prompts of nineteen: they take turns."""
    small = {"num_blocks": 100, "mem_pool_size_gb": SMALL, "max_model_len": 310}
    pair = make_pair(send_type=send_type, **small)
    for seed in range(6):
        pair.ask(prompt_of(300, seed), order="together")
    pair.run(timeout=40)
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


def test_what_waits_for_room_too_long_fails_by_name(
    make_pair: MakePair, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody pulls the first prompt, so that the second one finds no room before its deadline, and
    decode has not asked for that one, either."""
    pair = make_pair(
        send_type="GET", num_blocks=100, policy="recompute", max_model_len=310,
        prefill={"mem_pool_size_gb": SMALL, "transfer_timeout_seconds": 0.5},
    )  # fmt: skip
    pair.ask(prompt_of(300), order="prefill first")
    pair.drop_waiting()
    pair.ask(prompt_of(300, seed=1), order="prefill first")
    pair.run(lambda: "the host buffer was full for too long" in caplog.text, only=pair.p)
    pair.ask_waiting()
    pair.run(lambda: pair.d.is_idle)
    assert pair.d.answers[pair.decode_ids[1]] == continuation(prompt_of(300, seed=1), 4)


def queue_behind_one_answer(make_pair: MakePair, send_type: str, **limits: float) -> Pair:
    """Let three prompts wait for decode's only slot; prefill's host buffer has room for one."""
    prefill = {"transfer_timeout_seconds": 2.0, "lease_seconds": 4.0, "mem_pool_size_gb": SMALL}
    pair = make_pair(
        send_type=send_type, num_blocks=100, max_model_len=310, prefill={**prefill, **limits},
        decode={"max_num_seqs": 1, "lease_seconds": 4.0, "mem_pool_size_gb": 2 * SMALL},
    )  # fmt: skip
    pair.d.add("busy", prompt_of(10), max_tokens=290)
    pair.run(until=lambda: len(pair.d.scheduler.running) == 1)
    for seed in range(3):
        pair.ask(prompt_of(300, seed), order="together")
    pair.d.step()  # its workers hear what to keep
    return pair


def test_what_is_renewed_for_too_long_fails_by_name(
    make_pair: MakePair, caplog: pytest.LogCaptureFixture
) -> None:
    pair = queue_behind_one_answer(make_pair, "GET", max_renewal_seconds=2.0)
    pair.run(lambda: "the host buffer was full for too long" in caplog.text, only=pair.p)


@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
def test_what_waits_for_room_is_not_lost_while_decode_renews_it(
    make_pair: MakePair, send_type: str
) -> None:
    """All of decode's slots are taken for longer than prefill waits by itself, and prefill's host
    buffer holds one prompt of three."""
    pair = queue_behind_one_answer(make_pair, send_type)
    pair.take_long_step(8.0)
    pair.d.abort("busy")
    pair.run(timeout=60)
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_saved_blocks_are_vllms_at_once(make_pair: MakePair, send_type: str) -> None:
    """Nobody asks for the KV: prefill's request is over all the same, its blocks are free."""
    seconds = 0.5 if send_type == "PUT" else 20  # that one waits for the end of what cannot leave
    pair = make_pair(send_type=send_type, prefill={"transfer_timeout_seconds": seconds})
    if send_type != "GET":
        pair.d.close()  # the chunks cannot leave
    pair.ask(prompt_of(300), order="prefill first")
    pair.drop_waiting()
    pair.run(lambda: pair.p.is_idle)
    worker = pair.p.ranks[0].connector._worker
    assert worker is not None
    if send_type != "PUT":  # which waits until they have left, or cannot
        assert worker.engine.stats()["open_transfers"] > 0
    pool = pair.p.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
def test_preemption(make_pair: MakePair, send_type: str) -> None:
    pair = make_pair(send_type=send_type, max_tokens_per_step=48, policy="recompute", num_blocks=26)
    pair.check_preempted()


@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
@pytest.mark.parametrize("side", ["p", "d"])
@pytest.mark.parametrize("num_steps", [1, 4, 8])
def test_aborts(make_pair: MakePair, send_type: str, side: str, num_steps: int) -> None:
    pair = make_pair(send_type=send_type, max_tokens_per_step=40, lease_seconds=1)
    pair.ask(prompt_of(300))
    pair.ask(prompt_of(200, seed=1))
    for _ in range(num_steps):
        pair.step()
    getattr(pair, side).abort((pair.prefill_ids if side == "p" else pair.decode_ids)[0])
    pair.run(timeout=40)
    pair.check_finished()
    pair.check_at_rest()


@pytest.mark.parametrize("send_type", SEND_TYPES)
@pytest.mark.parametrize("side", ["p", "d"])
def test_a_copy_that_fails_is_never_a_wrong_token(
    make_pair: MakePair, send_type: str, side: str, caplog: pytest.LogCaptureFixture
) -> None:
    pair = make_pair(send_type=send_type, max_tokens_per_step=40, policy="recompute")
    device = device_of(getattr(pair, side))
    device.error = RuntimeError("out of streams")
    pair.ask(prompt_of(300))
    pair.run(lambda: "out of streams" in caplog.text)
    device.error = None
    pair.run()
    pair.ask(prompt_of(300, seed=1))
    pair.run()
    pair.check_answers()
    assert pair.d.num_computed_prompt_tokens[pair.decode_ids[0]] == 300
    assert pair.d.num_computed_prompt_tokens[pair.decode_ids[1]] == 1
    pair.check_at_rest()


def test_a_copy_that_fails_fails_its_request_where_vllm_says_so(make_pair: MakePair) -> None:
    pair = make_pair(policy="fail")
    device_of(pair.d).error = RuntimeError("out of streams")
    request_id = pair.ask(prompt_of(100))
    pair.run()
    assert pair.d.finished[request_id] is RequestStatus.FINISHED_ERROR
    pair.check_at_rest()
