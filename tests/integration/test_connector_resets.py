"""vLLM resets its caches, because the weights are others now, while KV is on its way."""

from __future__ import annotations

import itertools
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from p2p_engine.connector.metadata import P2pConnectorMetadata
from p2p_engine.connector.worker import WorkerHalf
from p2p_engine.engine import P2pNcclEngine
from p2p_engine.peers import stash_notes
from p2p_engine.peers.link import Link
from p2p_engine.send.sender import Sender
from p2p_engine.wire.messages import Grant
from p2p_engine.wire.request_ids import new_transfer_id
from tests import marks
from tests.doubles import instance
from tests.doubles.instance import (
    BLOCK_SIZE,
    NUM_HEADS,
    NUM_LAYERS,
    SLOT_WIDTH,
    continuation,
)
from tests.doubles.pair import SEND_TYPES, MakePair, Pair, prompt_of
from tests.doubles.sleeping import CoreDouble
from tests.support import eventually

pytestmark = marks.simulated_vllm

BLOCK_BYTES = NUM_LAYERS * NUM_HEADS * BLOCK_SIZE * SLOT_WIDTH * 8

ChangeWeights = Callable[[], None]

# Whether vLLM is asked to reset its connector, too, and tells it then.
TELLS = [pytest.param(True, id="told"), pytest.param(False, id="not told")]


def after_other_weights(tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    """The values of these positions, computed with other weights than the doubles' first ones."""
    values, running = np.empty(len(tokens), np.int64), 12345
    for position, token in enumerate(tokens):
        values[position] = running = zlib.crc32(token.to_bytes(4, "little"), running)
    return values


@pytest.fixture
def change_weights(monkeypatch: pytest.MonkeyPatch) -> ChangeWeights:
    """Let every position have another value from then on, on both sides."""
    return lambda: monkeypatch.setattr(instance, "expected_values", after_other_weights)


def change_prefills_weights(pair: Pair) -> None:
    """Let prefill alone compute and expect other values from then on."""
    step = pair.p.step

    def step_with_them() -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(instance, "expected_values", after_other_weights)
            return step()

    pair.p.step = step_with_them  # type: ignore[method-assign]


def check_answer(pair: Pair, request_id: str, prompt: list[int]) -> None:
    """Decode has all of it, or nothing; the double raises if it reads a mixture of old and new."""
    if pair.d.finished[request_id] is RequestStatus.FINISHED_ERROR:
        assert pair.d.answers[request_id] == []
    else:
        assert pair.d.answers[request_id] == continuation(prompt, 4)
        assert pair.d.num_computed_prompt_tokens[request_id] in (1, len(prompt))


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("send_type", SEND_TYPES)
@pytest.mark.parametrize(
    ("layerwise", "tells"), [(False, True), (True, True), (False, False)],
    ids=["told", "by layer", "not told"],
)  # fmt: skip
def test_what_has_left_is_not_joined_to_what_is_computed_anew(
    make_pair: MakePair,
    change_weights: ChangeWeights,
    send_type: str,
    is_async: bool,
    policy: str,
    layerwise: bool,
    tells: bool,
) -> None:
    pair = make_pair(send_type=send_type, is_async=is_async, policy=policy, layerwise=layerwise)
    prompt = prompt_of(300)
    request_id = pair.ask(prompt, order="together")
    for _ in range(3):
        pair.step()
    if send_type != "GET":
        pair.run(lambda: pair.num_loaded_blocks(request_id) > 0, only=pair.d)
    assert not pair.p.finished
    change_weights()
    reset = pair.p.scheduler.reset_prefix_cache
    assert reset(reset_running_requests=True, reset_connector=tells)
    pair.run(timeout=20)
    check_answer(pair, request_id, prompt)
    pair.check_at_rest()


@pytest.mark.parametrize("tells", TELLS)
@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_what_a_preempted_request_has_sent_is_not_joined_either(
    make_pair: MakePair, change_weights: ChangeWeights, send_type: str, tells: bool
) -> None:
    """vLLM resets without more words, because nothing else runs."""
    pair = make_pair(send_type=send_type, policy="recompute", prefill={"num_blocks": 24})
    pair.p.scheduler.scheduler_reserve_full_isl = False
    pair.p.add("other", prompt_of(100, 8), max_tokens=20)
    pair.p.step()
    pair.p.step()
    prompt = prompt_of(300)
    request_id = pair.ask(prompt, order="together")
    pair.run(lambda: pair.p.num_preemptions > 0)
    pair.p.abort("other")
    change_weights()
    assert pair.p.scheduler.reset_prefix_cache(reset_connector=tells)
    pair.run(timeout=20)
    check_answer(pair, request_id, prompt)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("send_type", ["PUT", "PUT_ASYNC"])
def test_a_chunk_that_had_left_in_part_counts_as_begun(
    make_pair: MakePair, change_weights: ChangeWeights, send_type: str, tp_size: int
) -> None:
    """vLLM has taken its blocks back, on each rank at another point."""
    room = {"kv_buffer_size": 7 * BLOCK_BYTES, "mem_pool_size_gb": 0}
    pair = make_pair(
        send_type=send_type, policy="recompute", chunk_bytes=2 * BLOCK_BYTES,
        tp_size=tp_size, max_tokens_per_step=512, decode=room,
    )  # fmt: skip
    prompt = prompt_of(300)
    request_id = pair.ask(prompt, prefill_tokens=20, order="prefill first")
    for _ in range(3):  # in the first, vLLM computes the whole prompt
        pair.p.step()
    eventually(lambda: all(sent >= 2 * BLOCK_BYTES for sent in pair.sent_bytes()))
    assert not pair.p.finished
    change_weights()
    assert pair.p.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    for _ in range(3):
        pair.p.step()
    pair.ask_waiting()
    pair.run(timeout=20)
    check_answer(pair, request_id, prompt)
    pair.check_at_rest()


def test_what_was_spilled_is_given_up_too(
    make_pair: MakePair, change_weights: ChangeWeights
) -> None:
    """vLLM has got its blocks back, and calls it finished."""
    pair = make_pair(send_type="GET", policy="recompute", prefill={"num_blocks": 26})
    prompts = [prompt_of(100, seed) for seed in range(6)]
    names = [pair.ask(prompt, order="prefill first") for prompt in prompts]
    prefills = pair.prefill_ids
    pair.run(lambda: all(name in pair.p.finished for name in prefills), only=pair.p)
    change_weights()
    pair.p.scheduler.reset_prefix_cache(reset_connector=True)
    for _ in range(3):
        pair.p.step()
    pair.ask_waiting()
    pair.run(timeout=20)
    for name, prompt in zip(names, prompts, strict=True):
        assert pair.d.answers[name] == continuation(prompt, 4)
        assert pair.d.num_computed_prompt_tokens[name] == len(prompt)
    pair.check_at_rest()


@pytest.mark.parametrize("tells", TELLS)
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("place", ["landed on decode", "spilled on prefill"])
def test_what_waits_for_decode_is_dropped_when_both_are_reset(
    make_pair: MakePair, change_weights: ChangeWeights, place: str, tp_size: int, tells: bool
) -> None:
    """Nothing runs, and vLLM has got all of its blocks back."""
    pair = make_pair(
        send_type="GET" if place == "spilled on prefill" else "PUT_ASYNC",
        policy="recompute", tp_size=tp_size,
    )  # fmt: skip
    prompt = prompt_of(300)
    request_id = pair.ask(prompt, order="prefill first")
    first = pair.prefill_ids[-1]
    pair.run(lambda: first in pair.p.finished, only=pair.p)
    pair.p.connector._planner._pressure.want()  # as when another prompt lacks blocks
    pair.run(lambda: pair.p.is_idle, only=pair.p)
    change_weights()
    for side in (pair.p, pair.d):
        assert side.scheduler.reset_prefix_cache(reset_connector=tells)
        side.step()
    pair.ask_waiting()
    pair.run(timeout=20)
    assert pair.d.answers[request_id] == continuation(prompt, 4)
    assert pair.d.num_computed_prompt_tokens[request_id] == len(prompt)
    pair.check_at_rest()


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("send_type", ["PUT", "PUT_ASYNC"])
@pytest.mark.parametrize("asks", ["before the reset", "after it"])
def test_an_attempt_that_was_given_up_is_not_joined_to_one_after_the_reset(
    make_pair: MakePair,
    change_weights: ChangeWeights,
    send_type: str,
    tp_size: int,
    asks: str,
) -> None:
    """A client leaves prefill, and asks it again under the same transfer id. Decode goes on."""
    pair = make_pair(
        send_type=send_type, policy="recompute", tp_size=tp_size, prefill={"max_num_seqs": 1}
    )
    prompt, transfer_id = prompt_of(300), new_transfer_id()
    request_id = pair.ask(prompt, transfer_id=transfer_id, by="params")
    first = pair.prefill_ids[-1]
    for _ in range(3):
        pair.step()
    pair.run(lambda: pair.num_loaded_blocks(request_id) > 0, only=pair.d)
    assert first not in pair.p.finished

    def ask_again() -> None:
        pair.ask(prompt, transfer_id=transfer_id, by="params", order="prefill first")
        pair.drop_waiting()

    told_late: list[Callable[[], None]] = []
    with pytest.MonkeyPatch.context() as patch:
        if asks == "before the reset":
            ask_again()
        else:
            abandon = P2pNcclEngine.abandon
            patch.setattr(
                P2pNcclEngine,
                "abandon",
                lambda *args, **kwargs: told_late.append(partial(abandon, *args, **kwargs)),
            )
        pair.p.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        pair.p.abort(first)
        reset = pair.p.scheduler.reset_prefix_cache
        pair.run(lambda: reset(reset_connector=True), only=pair.p)
        change_weights()
        pair.p.scheduler.set_pause_state(PauseState.UNPAUSED)
        if asks == "after it":
            ask_again()
            pair.p.step()
    for tell in told_late:
        tell()
    pair.run(timeout=20)
    check_answer(pair, request_id, prompt)
    pair.check_at_rest()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_hold_that_has_not_begun_is_not_joined_to_what_was_pulled_of_an_earlier_one(
    make_pair: MakePair,
    change_weights: ChangeWeights,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    tp_size: int,
) -> None:
    """Prefill is asked twice, and its first client leaves. The second prompt is computed in part
    when vLLM resets its caches, and decode has pulled a part of the first."""
    honest, granted, limits = Sender.on_grant, Counter[Sender](), [3]

    def on_grant(self: Sender, link: Link, message: Grant) -> None:
        granted[self] += 1
        if granted[self] <= limits[-1]:
            honest(self, link, message)

    monkeypatch.setattr(Sender, "on_grant", on_grant)
    pair = make_pair(
        send_type="GET", policy=policy, chunk_bytes=2 * BLOCK_BYTES, tp_size=tp_size,
        prefill={"has_prefix_cache": False},
    )  # fmt: skip
    prompt, transfer_id = prompt_of(300), new_transfer_id()
    request_id = pair.ask(prompt, transfer_id=transfer_id, by="params", prefill_tokens=200)
    first = pair.prefill_ids[-1]
    pair.run(lambda: pair.num_loaded_blocks(request_id) > 0)
    assert first not in pair.p.finished
    pair.ask(prompt, transfer_id=transfer_id, by="params", order="prefill first")
    pair.drop_waiting()
    second = pair.p.scheduler.requests[pair.prefill_ids[-1]]
    pair.p.step()
    pair.p.abort(first)
    pair.p.step()
    pair.p.step()
    assert 0 < second.num_computed_tokens < len(prompt)
    change_weights()
    assert pair.p.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    limits.append(1 << 30)
    pair.run(timeout=20)
    check_answer(pair, request_id, prompt)


@pytest.mark.parametrize("reset_connector", [True, False])
def test_what_a_reset_preempts_and_a_client_aborts_is_withdrawn_before_its_blocks_are_reused(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, reset_connector: bool
) -> None:
    honest, withdrawn = WorkerHalf.withdraw, list[str]()

    def withdraw(self: WorkerHalf, metadata: P2pConnectorMetadata) -> None:
        withdrawn.extend(metadata.preempted)
        honest(self, metadata)

    monkeypatch.setattr(WorkerHalf, "withdraw", withdraw)
    pair = make_pair(
        send_type="PUT_ASYNC", policy="recompute",
        prefill={"num_blocks": 30, "max_tokens_per_step": 512},
        decode={"kv_buffer_size": 0, "mem_pool_size_gb": 0},
    )  # fmt: skip
    pair.ask(prompt_of(300), order="prefill first", prefill_tokens=20)
    name = pair.prefill_ids[-1]
    for _ in range(3):
        pair.p.step()
    assert pair.p.scheduler.reset_prefix_cache(
        reset_running_requests=True, reset_connector=reset_connector
    )
    pair.p.abort(name)
    pair.p.add("other", prompt_of(400, 5), max_tokens=1)
    pair.p.step()
    assert withdrawn == [name]
    pair.drop_waiting()
    pair.run()
    pair.check_at_rest()


def test_what_nobody_claimed_is_not_joined_to_what_is_sent_after_a_reset(
    make_pair: MakePair, change_weights: ChangeWeights
) -> None:
    """The leases of its chunks end one after the other. When those of the first have ended, the
    prompt is asked for again under its transfer id."""
    pair = make_pair(send_type="PUT_ASYNC", policy="recompute", decode={"lease_seconds": 2.0})
    prompt, transfer_id = prompt_of(300), new_transfer_id()
    pair.ask(prompt, transfer_id=transfer_id, by="params", order="prefill first")
    first = pair.prefill_ids[-1]
    for _ in range(3):
        pair.p.step()
    landed_at = time.monotonic()
    eventually(lambda: time.monotonic() > landed_at + 1.2)  # of 2 s
    pair.run(lambda: first in pair.p.finished and pair.p.is_idle, only=pair.p)
    pair.drop_waiting()
    (sends,) = pair.p.ranks[0].connector._worker._sends  # type: ignore[union-attr]
    pair.run(lambda: not sends.take_released() and not sends._trailing, only=pair.p)
    change_weights()
    assert pair.p.scheduler.reset_prefix_cache(reset_connector=True)
    pair.p.step()
    whole = pair.live_bytes()
    pair.run(lambda: pair.live_bytes() < whole)
    request_id = pair.ask(prompt, transfer_id=transfer_id, by="params", order="prefill first")
    second = pair.prefill_ids[-1]
    pair.run(lambda: second in pair.p.finished, only=pair.p)
    pair.ask_waiting()
    pair.run(timeout=20)
    check_answer(pair, request_id, prompt)


@pytest.mark.parametrize("label", ["step-41", "default"])
@pytest.mark.parametrize("relabelled", ["prefill", "decode", "both"])
@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_what_is_under_way_when_the_weights_are_named_anew_is_computed_by_decode(
    make_pair: MakePair, change_weights: ChangeWeights, send_type: str, relabelled: str, label: str
) -> None:
    """Also if both have the new name at once, or if it is the one that they had: what was computed
    before it is not joined to what is computed behind it. vLLM cannot reset its caches while it
    loads, so decode's workers run a method."""
    pair = make_pair(send_type=send_type, policy="recompute")
    prompt = prompt_of(300)
    request_id = pair.ask(prompt, order="together")
    for _ in range(3):
        pair.step()
    if send_type != "GET":
        pair.run(lambda: pair.num_loaded_blocks(request_id) > 0, only=pair.d)
    assert not pair.p.finished
    if relabelled != "decode":
        change_weights()
        assert pair.p.scheduler.reset_prefix_cache(reset_running_requests=True)
        pair.p.connector.weights_labelled(label)
    if relabelled != "prefill":
        pair.d.connector.weights_changed()
        pair.d.connector.weights_labelled(label)
    pair.run(lambda: request_id in pair.d.finished, timeout=20)
    assert pair.d.answers[request_id] == continuation(prompt, 4)
    assert pair.d.num_computed_prompt_tokens[request_id] == len(prompt)


@pytest.mark.parametrize("is_prefilled", [False, True])
@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_what_waits_when_both_are_named_anew_is_computed_by_decode(
    make_pair: MakePair, send_type: str, is_prefilled: bool
) -> None:
    """Before a deadline passes: neither side waits for what was bound to the old name."""
    pair = make_pair(
        send_type=send_type, policy="recompute", lease_seconds=60.0, transfer_timeout_seconds=60.0
    )
    both = (pair.p, pair.d)
    for side in both[is_prefilled:]:
        side.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    prompt, steps = prompt_of(100), itertools.count()
    name = pair.ask(prompt, order="together")
    if is_prefilled:
        pair.run(lambda: pair.prefill_ids[-1] in pair.p.finished)
    pair.run(lambda: next(steps) > 50)  # what they say to each other has arrived
    for side in both:
        side.connector.weights_labelled("step-41")
    pair.run(lambda: next(steps) > 100)
    for side in both:
        side.scheduler.set_pause_state(PauseState.UNPAUSED)
    pair.run(lambda: name in pair.d.finished, timeout=20)
    pair.check_answers()
    assert pair.d.num_computed_prompt_tokens[name] == len(prompt)


@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_what_was_computed_under_two_names_is_not_stashed(
    make_pair: MakePair, send_type: str
) -> None:
    """Decode answers on while its weights change; vLLM allows that."""
    pair = make_pair(
        send_type=send_type, policy="recompute", prefill_role="kv_both", stash_seconds=60.0,
        num_blocks=300,
    )  # fmt: skip
    prompt, first = prompt_of(160), new_transfer_id()
    name = pair.ask(prompt, by="params", max_tokens=60, transfer_id=first, more={"stash": True})
    pair.run(lambda: len(pair.d.answers[name]) > 10)
    for side in (pair.p, pair.d):
        side.connector.weights_changed()
        side.connector.weights_labelled("step-42")
    assert name not in pair.d.finished
    pair.run()
    pair.p.evict()
    said = prompt + continuation(prompt, 60) + prompt_of(60, 3)
    name = pair.ask(said, by="params", transfer_id=new_transfer_id(), earlier=first)
    # With GET, prefill goes on holding it: decode's label was not taken while it answered.
    pair.run(lambda: pair.prefill_ids[-1] in pair.p.finished and name in pair.d.finished)
    assert pair.p.num_computed_prompt_tokens[pair.prefill_ids[-1]] == len(said)


@pytest.mark.parametrize("stage", ["waits for blocks", "loads"])
@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_a_turn_that_recalls_kv_while_prefill_gets_other_weights_is_computed_by_decode(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, send_type: str, stage: str
) -> None:
    """Its workers know nothing of it yet, and decode still has the earlier turn's weights."""
    honest, silent = Sender.on_grant, list[bool]()

    def on_grant(self: Sender, link: Link, message: Grant) -> None:
        if not silent:
            honest(self, link, message)

    monkeypatch.setattr(Sender, "on_grant", on_grant)
    monkeypatch.setattr(stash_notes, "RECALL_SECONDS", 20.0)  # however busy the machine is
    pair = make_pair(
        send_type=send_type, policy="recompute", prefill_role="kv_both", stash_seconds=60.0,
        transfer_timeout_seconds=60.0, prefill={"num_blocks": 60}, decode={"num_blocks": 300},
    )  # fmt: skip
    prompt, first = prompt_of(160), new_transfer_id()
    pair.ask(prompt, by="params", max_tokens=50, transfer_id=first, more={"stash": True})
    pair.run()
    pair.p.evict()
    if stage == "waits for blocks":
        pair.p.add("other", prompt_of(52 * BLOCK_SIZE, 9), max_tokens=1000)
        pair.p.step()
    silent.append(True)  # the load lasts until the weights are others
    said = prompt + continuation(prompt, 50) + prompt_of(60, 3)
    name = pair.ask(
        said, by="params", transfer_id=new_transfer_id(), earlier=first, order="prefill first"
    )
    second, half = pair.prefill_ids[-1], pair.p.connector._planner
    is_open = stage == "loads"
    pair.run(
        lambda: second in half._loading and half._loading[second].is_open is is_open, only=pair.p
    )
    change_prefills_weights(pair)
    if stage == "waits for blocks":
        pair.p.abort("other")
        assert pair.p.scheduler.reset_prefix_cache()
    CoreDouble(pair.p).collective_rpc("reload_weights")
    CoreDouble(pair.p).set_weight_version("step-2")
    silent.clear()
    pair.run(lambda: second in pair.p.finished, only=pair.p)
    pair.ask_waiting()
    pair.run(lambda: name in pair.d.finished, timeout=20)
    assert pair.d.answers[name] == continuation(said, 4)
    assert pair.d.num_computed_prompt_tokens[name] > 60  # decode has the earlier turn itself


@pytest.mark.parametrize("tries", ["no reset", "a reset in vain"])
@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_a_label_makes_no_kv_of_the_weights_before_it_good(
    make_pair: MakePair, change_weights: ChangeWeights, send_type: str, tries: str
) -> None:
    """Both have it in vLLM's prefix cache, and nobody has emptied that: a trainer has not asked, or
    blocks were in use. The doubles fail if anybody reads such KV."""
    pair = make_pair(send_type=send_type, policy="recompute")
    prompt = prompt_of(100)
    for side in (pair.p, pair.d):
        side.add("before", prompt, max_tokens=2)
    pair.run(lambda: "before" in pair.p.finished and "before" in pair.d.finished)
    for side in (pair.p, pair.d):
        pool = side.scheduler.kv_cache_manager.block_pool
        held = pool.get_new_blocks(1) if tries != "no reset" else []
        change_weights()
        CoreDouble(side).collective_rpc("take_weights")
        assert not held or not side.scheduler.reset_prefix_cache()
        pool.free_blocks(held)
    pair.step()
    for side in (pair.p, pair.d):
        CoreDouble(side).set_weight_version("step-42")
    pair.step()
    name = pair.ask(prompt)
    pair.run(lambda: name in pair.d.finished, timeout=20)
    check_answer(pair, name, prompt)
    assert pair.d.num_computed_prompt_tokens[name] == 1
