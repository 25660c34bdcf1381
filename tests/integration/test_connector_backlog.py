"""A decode instance whose slots are all taken: what queues there outlives every lease, though vLLM
asks for none of it and no step ends meanwhile. Simulated instances; leases of two seconds."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output.request import StructuredOutputRequest

from tests import marks
from tests.doubles.instance import BLOCK_SIZE, InstanceDouble
from tests.doubles.pair import SEND_TYPES, MakePair, Pair, prompt_of
from tests.support import eventually

pytestmark = marks.simulated_vllm

LEASE_SECONDS = 2.0
NUM_SLOTS, NUM_QUEUED = 2, 6
BUSY = [f"busy-{number}" for number in range(NUM_SLOTS)]


def occupy(pair: Pair) -> None:
    """Give each slot of D a long answer of its own."""
    for name in BUSY:
        pair.d.add(name, prompt_of(10), max_tokens=1900)
    pair.run(until=lambda: len(pair.d.scheduler.running) == NUM_SLOTS)


def wait_behind(pair: Pair, num_leases: float = 1.5) -> None:
    """Let D take so many leases for one step, while P goes on. The first renewal comes after a
    quarter of one, and lasts for one: what is not renewed again has ended by then."""
    pair.take_long_step(num_leases * LEASE_SECONDS)


def free_the_slots(pair: Pair) -> None:
    """End the long answers."""
    for name in BUSY:
        pair.d.abort(name)


def queue(pair: Pair, length: int = 4 * BLOCK_SIZE) -> list[str]:
    """Ask for what D has no slot for; P computes it."""
    names = [pair.ask(prompt_of(length, seed)) for seed in range(NUM_QUEUED)]
    pair.run(until=lambda: set(pair.prefill_ids) <= set(pair.p.finished))
    return names


def kept(pair: Pair) -> list[int]:
    """How many contents each rank of D keeps."""
    return [rank.connector._worker.engine.stats()["kept"] for rank in pair.d.ranks]  # type: ignore[union-attr]


@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_what_queues_behind_long_answers_arrives(make_pair: MakePair, send_type: str) -> None:
    pair = make_pair(
        send_type=send_type, lease_seconds=LEASE_SECONDS, decode={"max_num_seqs": NUM_SLOTS}
    )
    occupy(pair)
    names = queue(pair)
    wait_behind(pair)
    assert not set(names) & set(pair.d.finished)
    free_the_slots(pair)
    pair.run()
    pair.check_answers(num_computed=1)
    assert kept(pair) == [0]
    pair.check_at_rest()


@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
def test_ranks_that_are_not_alike_keep_their_parts(make_pair: MakePair, send_type: str) -> None:
    pair = make_pair(
        send_type=send_type,
        lease_seconds=LEASE_SECONDS,
        prefill={"tp_size": 2},
        decode={"max_num_seqs": NUM_SLOTS, "block_size": 2 * BLOCK_SIZE},
    )
    occupy(pair)
    queue(pair)
    wait_behind(pair)
    free_the_slots(pair)
    pair.run()
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
def test_what_is_aborted_in_the_queue_is_kept_no_longer(
    make_pair: MakePair, send_type: str
) -> None:
    """P is told: it has its blocks back at once, and nothing lies on D."""
    pair = make_pair(send_type=send_type, lease_seconds=20, decode={"max_num_seqs": NUM_SLOTS})
    occupy(pair)
    names = queue(pair)
    eventually(lambda: kept(pair) == [NUM_QUEUED])
    for name in names:
        pair.d.abort(name)
    free_the_slots(pair)
    began_at = time.monotonic()
    pair.run(timeout=15)
    pair.check_finished()
    pair.check_at_rest()
    assert kept(pair) == [0]
    assert time.monotonic() - began_at < 20, "a lease ended it"


@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_what_is_aborted_and_asked_for_again_in_one_step_arrives(
    make_pair: MakePair, send_type: str
) -> None:
    """The client has lost its connection, and asks again under the same name."""
    pair = make_pair(
        send_type=send_type, lease_seconds=LEASE_SECONDS, decode={"max_num_seqs": NUM_SLOTS}
    )
    occupy(pair)
    names = queue(pair)
    eventually(lambda: kept(pair) == [NUM_QUEUED])
    for seed, name in enumerate(names):
        pair.d.abort(name)
        pair.d.add(name, prompt_of(4 * BLOCK_SIZE, seed))
    wait_behind(pair)
    assert kept(pair) == [NUM_QUEUED]
    free_the_slots(pair)
    pair.run()
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


def load_and_queue_again(pair: Pair) -> tuple[str, str]:
    """Ask D only; when it waits for KV, and all its slots are taken, ask it once more for the same.

    Returns both names: of the one that loads, and of the one that queues.
    """
    from vllm.v1.request import RequestStatus

    prompt = prompt_of(4 * BLOCK_SIZE)
    first = pair.ask(prompt, order="decode first")
    loads = RequestStatus.WAITING_FOR_REMOTE_KVS
    pair.run(until=lambda: pair.d._requests[first].status is loads, only=pair.d)
    for name in BUSY:
        pair.d.add(name, prompt_of(10), max_tokens=1900)
    pair.run(until=lambda: len(pair.d.scheduler.running) == NUM_SLOTS, only=pair.d)
    second = f"{first[:-1]}c"
    pair.d.add(second, prompt)
    pair.expect(second, prompt)
    return first, second


def num_open_loads(pair: Pair) -> int:
    """How many requests D's first rank loads."""
    worker = pair.d.ranks[0].connector._worker
    assert worker is not None
    return len(worker._loads[0]._loading)


@pytest.mark.parametrize("send_type", SEND_TYPES)
@pytest.mark.parametrize("is_first", [True, False])
def test_one_of_two_that_ask_for_the_same_is_aborted_before_it_comes(
    make_pair: MakePair, send_type: str, is_first: bool
) -> None:
    """The one that loads, or the one that queues: the other one has it all from P."""
    pair = make_pair(send_type=send_type, lease_seconds=60, decode={"max_num_seqs": NUM_SLOTS})
    first, second = load_and_queue_again(pair)
    aborted = first if is_first else second
    pair.d.abort(aborted)
    del pair._expected[aborted]
    pair.run(until=lambda: num_open_loads(pair) == (not is_first), only=pair.d)
    pair.ask_waiting()
    pair.run(until=lambda: set(pair.prefill_ids) <= set(pair.p.finished))
    free_the_slots(pair)
    pair.run()
    pair.check_answers(num_computed=1)
    assert kept(pair) == [0]
    pair.check_at_rest()


@pytest.mark.parametrize("send_type", SEND_TYPES)
@pytest.mark.parametrize("order", [1, -1])
def test_both_that_ask_for_the_same_are_aborted_before_it_comes(
    make_pair: MakePair, send_type: str, order: int
) -> None:
    """P is told at once, and nothing of it is taken in."""
    pair = make_pair(send_type=send_type, lease_seconds=60, decode={"max_num_seqs": NUM_SLOTS})
    names = load_and_queue_again(pair)
    for name in names[::order]:
        pair.d.abort(name)
        for _ in range(3):
            pair.d.step()
    free_the_slots(pair)
    pair.run(until=lambda: pair.d.is_idle, only=pair.d)
    pair.ask_waiting()
    began_at = time.monotonic()
    pair.run(timeout=15)
    assert time.monotonic() - began_at < 15, "a lease ended it"
    assert kept(pair) == [0]
    assert pair.landed_bytes() == 0
    pair.check_at_rest()


@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_a_prompt_that_is_aborted_and_sent_again_in_one_step_arrives(
    make_pair: MakePair, send_type: str
) -> None:
    """Prefill has not begun with it: vLLM has nothing to hold back, so the name may come again."""
    pair = make_pair(send_type=send_type)
    pair.ask(prompt_of(4 * BLOCK_SIZE))
    (name,) = pair.prefill_ids
    pair.p.abort(name)
    pair.p.add(name, prompt_of(4 * BLOCK_SIZE), max_tokens=1)
    pair.run()
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


@pytest.mark.parametrize("send_type", SEND_TYPES)
@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_prompt_that_is_sent_again_and_aborted_arrives_as_it_came_first(
    make_pair: MakePair, send_type: str, num_steps: int
) -> None:
    """Decode has not asked for the first one yet: it is held, or lies there."""
    pair = make_pair(send_type=send_type, lease_seconds=20, has_prefix_cache=False)
    prompt = prompt_of(4 * BLOCK_SIZE)
    pair.ask(prompt, order="prefill first")
    (first,) = pair.prefill_ids
    pair.run(until=lambda: first in pair.p.finished, only=pair.p)
    second = f"{first[:-1]}c"
    pair.p.add(second, [*prompt], max_tokens=9)
    for _ in range(num_steps):
        pair.p.step()
    pair.p.abort(second)
    for _ in range(3):
        pair.p.step()
    worker = pair.p.ranks[0].connector._worker
    assert worker is not None
    assert not worker.engine._parts.sender._abandoned
    pair.ask_waiting()
    pair.run()
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


def pause(instance: InstanceDouble, mode: str) -> None:
    """Pause vLLM as its engine core does: "wait" lets what runs go on, "keep" does not."""
    from vllm.v1.core.sched.interface import PauseState

    state = {"wait": PauseState.PAUSED_NEW, "keep": PauseState.PAUSED_ALL}[mode]
    instance.scheduler.set_pause_state(state)


def resume(instance: InstanceDouble) -> None:
    """End the pause."""
    from vllm.v1.core.sched.interface import PauseState

    instance.scheduler.set_pause_state(PauseState.UNPAUSED)


def test_what_lands_while_vllm_is_paused_is_kept(make_pair: MakePair) -> None:
    pair = make_pair(send_type="PUT_ASYNC", lease_seconds=LEASE_SECONDS)
    if not hasattr(pair.d.connector, "has_pending_push_work"):
        pytest.skip("this release does not ask the connector whether to step")
    pause(pair.d, "keep")
    queue(pair)
    pair.run(until=lambda: pair.d.is_idle)
    wait_behind(pair)
    resume(pair.d)
    pair.run()
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


@pytest.mark.parametrize("mode", ["wait", "keep"])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
def test_what_queues_on_a_paused_decode_holds_up_no_pause_of_prefill(
    make_pair: MakePair, send_type: str, policy: str, mode: str
) -> None:
    """P holds it, or D has no room for it. After the pause it ends at once, with an answer or by
    name."""
    room = {} if send_type == "GET" else {"kv_buffer_size": 0, "mem_pool_size_gb": 0}
    pair = make_pair(
        send_type=send_type,
        policy=policy,
        lease_seconds=LEASE_SECONDS,
        transfer_timeout_seconds=LEASE_SECONDS,
        decode={"max_num_seqs": NUM_SLOTS, **room},
    )
    occupy(pair)
    names = queue(pair)
    pause(pair.d, mode)
    free_the_slots(pair)
    pause(pair.p, mode)
    pair.run(until=lambda: pair.p.is_idle, timeout=10 * LEASE_SECONDS)
    resume(pair.p)
    resume(pair.d)
    pair.run(timeout=LEASE_SECONDS)
    assert {pair.d.finished[name].name for name in names} == {
        "FINISHED_ERROR" if policy == "fail" else "FINISHED_LENGTH_CAPPED"
    }
    pair.check_finished()
    pair.check_at_rest()


@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
def test_a_grammar_that_compiles_alone_loses_no_kv(make_pair: MakePair, send_type: str) -> None:
    """Nothing runs on decode meanwhile. P holds the KV, or D has no room for it."""
    room = {} if send_type == "GET" else {"kv_buffer_size": 0, "mem_pool_size_gb": 0}
    pair = make_pair(send_type=send_type, lease_seconds=LEASE_SECONDS, decode=room)
    name = pair.ask(prompt_of(4 * BLOCK_SIZE), order="prefill first")
    pair.run(lambda: set(pair.prefill_ids) <= set(pair.p.finished), only=pair.p)
    pair.ask_waiting()
    request, compiling = pair.d.scheduler.requests[name], Future[Any]()
    request.structured_output_request = StructuredOutputRequest(
        StructuredOutputsParams(regex="x"), compiling
    )
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    compiled_at = time.monotonic() + 1.5 * LEASE_SECONDS
    pair.run(until=lambda: time.monotonic() >= compiled_at)
    request.structured_output_request, request.status = None, RequestStatus.WAITING
    pair.run()
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


def test_two_that_wait_for_each_other_end_their_pauses(make_pair: MakePair) -> None:
    """Each steps for what it holds for the other, and has work that it does not begin."""
    pair = make_pair(
        send_type="GET",
        policy="recompute",
        lease_seconds=LEASE_SECONDS,
        prefill_role="kv_both",
        decode_role="kv_both",
    )
    for seed in range(NUM_QUEUED):
        pair.ask(prompt_of(4 * BLOCK_SIZE, seed), swapped=bool(seed % 2), order="prefill first")
    pair.run(until=lambda: set(pair.prefill_ids) <= {*pair.p.finished, *pair.d.finished})
    pause(pair.p, "keep")
    pause(pair.d, "keep")
    pair.ask_waiting()
    pair.run(timeout=10 * LEASE_SECONDS)
    resume(pair.p)
    resume(pair.d)
    pair.run()
    pair.check_answers()
    pair.check_at_rest()


def test_the_head_of_the_queue_finds_room_beside_what_waits(make_pair: MakePair) -> None:
    """D has blocks for one request at a time, and landing memory for three. Those that were sent
    first are asked for last, so that the head's KV meets an arena that is full of the others'."""
    pair = make_pair(
        send_type="PUT_ASYNC",
        transports="shm",
        transfer_timeout_seconds=5,
        lease_seconds=5,
        decode={"num_blocks": 26, "kv_buffer_size": 800_000, "mem_pool_size_gb": 0},
    )
    for seed in range(NUM_QUEUED):
        pair.ask(prompt_of(20 * BLOCK_SIZE, seed), order="prefill first")
    pair.run(until=lambda: set(pair.prefill_ids) <= set(pair.p.finished))
    pair._waiting.reverse()
    pair.ask_waiting()
    pair.run(timeout=60)
    pair.check_answers(num_computed=1)
    pair.check_at_rest()
