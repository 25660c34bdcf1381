"""What goes wrong between two simulated instances: a right answer, or that request fails alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from p2p_engine.connector.connector import P2pNcclConnector
from p2p_engine.connector.intent import InvalidParams
from p2p_engine.connector.orders import Party
from p2p_engine.connector.untransferred import Reason
from p2p_engine.wire.bindings import PROMPT_BYTES
from p2p_engine.wire.request_ids import new_transfer_id
from tests import marks
from tests.doubles.instance import BLOCK_SIZE, InstanceDouble, continuation
from tests.doubles.pair import SEND_TYPES, MakePair, Pair, play, prompt_of
from tests.support import SeededRandom, eventually

pytestmark = marks.simulated_vllm

POLICIES = ("recompute", "fail")


def check_outcome(pair: Pair, request_id: str, policy: str, prompt: list[int]) -> None:
    """Recomputed from scratch or from a good prefix, or failed as an error; never wrong."""
    if policy == "fail":
        assert pair.d.finished[request_id] is RequestStatus.FINISHED_ERROR
        assert pair.d.answers[request_id] == []
    else:
        assert pair.d.finished[request_id] is RequestStatus.FINISHED_LENGTH_CAPPED
        assert pair.d.answers[request_id] == continuation(prompt, 4)
        assert pair.d.num_computed_prompt_tokens[request_id] > 1


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_kv_that_never_comes(make_pair: MakePair, policy: str, tp_size: int) -> None:
    """The prefill side was never asked."""
    pair = make_pair(policy=policy, tp_size=tp_size, transfer_timeout_seconds=0.5)
    request_id = pair.ask(prompt_of(100), order="decode first")
    pair.drop_waiting()
    pair.run()
    check_outcome(pair, request_id, policy, prompt_of(100))
    pair.check_at_rest()


@pytest.mark.parametrize("policy", POLICIES)
def test_prefill_aborted_in_its_middle(make_pair: MakePair, policy: str) -> None:
    """Nothing of what had arrived is used: its sender may mean that it is out of date."""
    pair = make_pair(policy=policy, max_tokens_per_step=32)
    request_id = pair.ask(prompt_of(300), order="together")
    for _ in range(4):  # of its ten
        pair.p.step()
    pair.run(lambda: pair.num_loaded_blocks(request_id) >= 4, only=pair.d)
    assert not pair.p.finished
    pair.p.abort(pair.prefill_ids[0])
    pair.run(timeout=10)  # long before the transfer's own deadline
    check_outcome(pair, request_id, policy, prompt_of(300))
    if policy == "recompute":
        assert pair.d.num_computed_prompt_tokens[request_id] == 300
    pair.check_at_rest()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
def test_dead_prefill_instance(make_pair: MakePair, policy: str, send_type: str) -> None:
    pair = make_pair(policy=policy, send_type=send_type, connect_timeout_seconds=0.5)
    pair.p.close()
    request_id = pair.ask(prompt_of(100), order="decode first")
    pair.drop_waiting()
    pair.run(timeout=10)
    check_outcome(pair, request_id, policy, prompt_of(100))


@pytest.mark.parametrize("send_type", ["PUT", "PUT_ASYNC"])
def test_dead_decode_instance_costs_prefill_nothing_else(
    make_pair: MakePair, send_type: str
) -> None:
    pair = make_pair(send_type=send_type, connect_timeout_seconds=0.5)
    pair.d.close()
    pair.ask(prompt_of(100), order="prefill first")
    pair.p.add("0-0000000a", prompt_of(50))
    pair.drop_waiting()
    pair.run(lambda: pair.p.is_idle, timeout=10)
    assert pair.p.answers["0-0000000a"] == continuation(prompt_of(50), 4)


def test_lease_that_ends_before_it_is_wanted(make_pair: MakePair) -> None:
    pair = make_pair(send_type="GET", lease_seconds=0.2, policy="fail")
    request_id = pair.ask(prompt_of(100), order="prefill first")
    pair.run(lambda: pair.p.is_idle)  # the blocks are free again
    pair.ask_waiting()
    pair.run(timeout=10)
    check_outcome(pair, request_id, "fail", prompt_of(100))
    pair.check_at_rest()


@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
def test_one_id_for_two_prompts_never_swaps_them(make_pair: MakePair, send_type: str) -> None:
    """A duplicate or replayed id: each takes its own KV, or none."""
    pair = make_pair(
        send_type=send_type, policy="recompute", transfer_timeout_seconds=2, lease_seconds=2
    )
    transfer_id = pair.new_transfer_id()
    for seed in range(3):
        pair.ask(prompt_of(100, seed), transfer_id=transfer_id)
    pair.run()
    pair.ask(prompt_of(100, 3), transfer_id=transfer_id, order="prefill first")
    pair.run()
    pair.check_answers()
    pair.check_at_rest()


@pytest.mark.parametrize("is_answered", [True, False])
@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
def test_a_second_prompt_under_one_requests_parameters_is_computed_at_once(
    make_pair: MakePair, send_type: str, is_answered: bool
) -> None:
    """vLLM's Responses API asks anew behind each call of a built-in tool. Nobody would send it."""
    pair, prompt = make_pair(send_type=send_type, policy="fail"), prompt_of(100)
    first = pair.ask(prompt, by="params")
    pair.run()
    longer = [*prompt, *pair.d.answers[first], *prompt_of(30, 1)]
    second, params = "resp_5e7c_1-0000002b", pair.d.params_of(first)
    pair.d.add(second, longer, params=params | ({"remote_num_tokens": 100} if is_answered else {}))
    pair.expect(second, longer)
    pair.run()  # for a third of transfer_timeout_seconds, at most
    pair.check_answers()
    pair.check_at_rest()


@pytest.mark.parametrize("is_growing", [True, False])
def test_prompts_under_one_clients_id_are_all_loaded(make_pair: MakePair, is_growing: bool) -> None:
    """A gateway gives all calls of a trace one `X-Request-Id`, after which prefill names what it
    holds. Its answers tell them apart."""
    pair = make_pair(send_type="GET", prefill_role="kv_both", decode_role="kv_both")
    asked: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
    for number in range(3):
        length = 100 + 50 * number
        prompt = prompt_of(400)[:length] if is_growing else prompt_of(length, number)
        first, second = (f"chatcmpl-trace-77-{leg}{number:07x}" for leg in "ab")
        pair.p.add(first, prompt, max_tokens=1, params=asked)
        pair.run(lambda name=first: name in pair.p.finished, only=pair.p)  # type: ignore[misc]
        pair.d.add(second, prompt, params=pair.p.params[first])
        pair.expect(second, prompt)
        pair.run()
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
def test_what_was_refused_may_be_asked_for_again(make_pair: MakePair, send_type: str) -> None:
    """Decode's front end had no room. The router sends both legs again, under the same name."""
    pair, transfer_id = make_pair(send_type=send_type, policy="fail"), new_transfer_id()
    prompt = prompt_of(100)
    pair.ask(prompt, by="params", transfer_id=transfer_id, order="prefill first")
    pair.run(lambda: bool(pair.p.finished), only=pair.p)
    pair.drop_waiting()
    pair.d.refuse("refused", pair.p.params[pair.prefill_ids[0]] or {})
    pair.run()
    name = pair.ask(prompt, by="params", transfer_id=transfer_id, order="prefill first")
    pair.run()
    assert pair.d.answers[name] == continuation(prompt, 4)
    assert pair.d.num_computed_prompt_tokens[name] == 1
    pair.check_at_rest()


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
def test_a_request_that_decodes_front_end_refuses_frees_its_kv(
    make_pair: MakePair, send_type: str, tp_size: int
) -> None:
    """vLLM passes on nothing of its prompt."""
    sizes = {"prefill": {"tp_size": tp_size}, "decode": {"tp_size": 3 - tp_size}}
    pair, prompt = make_pair(send_type=send_type, policy="recompute", **sizes), prompt_of(100)
    pair.ask(prompt, by="params", transfer_id="refused", order="prefill first")
    pair.run(lambda: bool(pair.p.finished), only=pair.p)
    pair.drop_waiting()
    eventually(lambda: send_type == "GET" or pair.live_bytes() > 0)
    host, _, port = pair.p.address.rpartition(":")
    params = {"do_remote_prefill": True, "transfer_id": "refused"}
    params |= {"remote_host": host, "remote_port": int(port)}
    pair.d.refuse("refused", params)
    pair.run(timeout=10)  # long before any lease
    pair.check_at_rest()


@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
def test_a_refused_request_takes_nothing_from_another_of_its_name(
    make_pair: MakePair, send_type: str
) -> None:
    pair = make_pair(send_type=send_type, decode={"max_num_seqs": 1})
    pair.d.add("busy", prompt_of(10), max_tokens=1000)
    pair.run(lambda: bool(pair.d.scheduler.running))
    name = pair.ask(prompt_of(100), by="params")
    pair.run(lambda: bool(pair.p.finished))
    pair.d.refuse("refused", pair.d.params_of(name))
    for _ in range(9):
        pair.step()
    pair.d.abort("busy")
    pair.run()
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


@pytest.mark.parametrize("what", ["tokens", "salt", "length", "one more"])
def test_different_content_under_one_id_is_not_taken(make_pair: MakePair, what: str) -> None:
    pair = make_pair(policy="fail", transfer_timeout_seconds=1)
    prompt = prompt_of(100)
    others = {"tokens": [*prompt[:-1], 5], "salt": prompt, "length": prompt[:-1]}
    other = {**others, "one more": [*prompt, 5]}[what]
    request_id = pair.ask(prompt, order="prefill first")
    pair.drop_waiting()
    salt = "another" if what == "salt" else None
    pair.d.add(request_id, other, cache_salt=salt)
    pair.run()
    check_outcome(pair, request_id, "fail", other)


def test_landed_kv_is_dropped_when_nobody_will_load_it(make_pair: MakePair) -> None:
    """vLLM computes the prompt itself where prompt logprobs are asked for."""
    pair = make_pair()
    request_id = pair.ask(prompt_of(100), order="prefill first")
    pair.run(lambda: pair.live_bytes() > 0)
    pair.drop_waiting()
    pair.d.add(request_id, prompt_of(100)).skip_reading_prefix_cache = True
    pair.run()
    pair.check_answers(num_computed=100)
    pair.check_at_rest()


@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
def test_request_that_ends_before_it_is_scheduled_frees_its_kv(
    make_pair: MakePair, send_type: str
) -> None:
    pair = make_pair(send_type=send_type)
    request_id = pair.ask(prompt_of(100), order="prefill first")
    pair.run(lambda: bool(pair.p.finished))
    pair.drop_waiting()
    pair.d.add(request_id, prompt_of(100))
    pair.d.abort(request_id)
    pair.run(timeout=10)  # long before any lease
    pair.check_at_rest()


@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_an_id_that_comes_again_in_the_step_that_reports_its_load(
    make_pair: MakePair, send_type: str
) -> None:
    """vLLM aborts before it accounts a step. What it orders for the new request is not the aborted
    load: nothing of it may count as loaded before it is."""
    pair = make_pair(
        send_type=send_type,
        policy="recompute",
        has_prefix_cache=False,
        transfer_timeout_seconds=2,
    )
    prompt = prompt_of(4 * BLOCK_SIZE)
    name = pair.ask(prompt)

    def abort_when_reported(results: ModelRunnerOutput) -> None:
        report = results.kv_connector_output
        if report is not None and name in (report.finished_recving or ()):
            pair.d.abort(name)

    pair.d.before_accounting = abort_when_reported
    pair.run(until=lambda: name in pair.d.finished)
    pair.d.before_accounting = None
    pair.d.add(name, prompt)
    pair.run()
    pair.check_answers()
    pair.check_at_rest()


def test_no_room_makes_prefill_wait_and_nothing_is_lost(make_pair: MakePair) -> None:
    """A landing store for two prompts, asked to take ten."""
    room = {"kv_buffer_size": 200_000, "mem_pool_size_gb": 200_000 / 2**30}
    pair = make_pair(num_blocks=200, decode=room)
    for seed in range(10):
        pair.ask(prompt_of(100, seed), order="prefill first")
    pair.run(timeout=40)
    pair.check_answers(num_computed=1)
    assert pair.landed_bytes("buffer") > 0
    assert pair.landed_bytes("pool") > 0
    pair.check_at_rest()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_anything_in_any_order(
    make_pair: MakePair, rng: SeededRandom, send_type: str, tp_size: int
) -> None:
    """Random prompts, orders and aborts with few blocks: every request ends once, none is wrong."""
    for _ in range(4):
        pair = make_pair(
            send_type=send_type,
            tp_size=tp_size,
            policy=rng.choice(POLICIES),
            is_async=rng.random() < 0.5,
            num_blocks=rng.choice([30, 60, 120]),
            max_tokens_per_step=rng.choice([32, 64]),
            has_prefix_cache=rng.random() < 0.7,
            transports=rng.choice(["shm", "tcp"]),
            transfer_timeout_seconds=3,
            lease_seconds=3,
        )
        play(pair, rng)
        pair.run(timeout=40)
        pair.check_finished()
        pair.check_at_rest()


def test_a_reset_while_decode_is_idle_takes_nothing_that_comes_later(make_pair: MakePair) -> None:
    """The workers are told at once, not when the next request has its KV here already."""
    pair = make_pair(policy="fail", reset_keeps_weights=True)
    assert pair.d.scheduler.reset_prefix_cache(reset_connector=True)
    pair.run()
    pair.ask(prompt_of(100), order="prefill first")
    pair.run(lambda: pair.landed_bytes() > 0 and pair.p.is_idle, only=pair.p)
    pair.run()
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


class StepLost(Exception):
    """What a model or its runner raises."""


def lose_step(side: InstanceDouble, runner: str) -> None:
    """Let the next step raise: in the forward of this model runner of vLLM's, or before the runner
    gives any orders."""
    is_early, update_states = runner == "before any", side._update_states

    def fail(*args: Any) -> None:
        if is_early:
            update_states(*args)
        raise StepLost

    side.finishes_lost_steps = runner == "V1"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side, "_update_states" if is_early else "during_forward", fail)
        with pytest.raises(StepLost):
            side.step()


@pytest.mark.parametrize("behind", ["its rest", "another prompt", "a prompt that begins alike"])
@pytest.mark.parametrize("runner", ["V1", "V2", "before any"])
@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_nothing_is_decoded_from_a_step_that_was_lost_when_another_one_is_behind_it(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, send_type: str, runner: str, behind: str
) -> None:
    """It is in the workers' queue by then, and vLLM's engine core ends only after it."""
    pair = make_pair(
        send_type=send_type, is_async=True, policy="recompute", transfer_timeout_seconds=2.0
    )
    for rank in pair.p.ranks:  # a model does not know what it reads
        monkeypatch.setattr(rank, "check", lambda *_: None)
    prompt = prompt_of(100 if behind == "its rest" else 50)
    names = [pair.ask(prompt)]
    lose_step(pair.p, runner)
    if behind == "another prompt":
        pair.p.add("other", prompt_of(20, 5), max_tokens=1)
    elif behind == "a prompt that begins alike":
        names.append(pair.ask([*prompt, *prompt_of(10)]))
    pair.p.step()
    pair.run(lambda: all(name in pair.d.finished for name in names), only=pair.d)
    pair.check_answers()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("attention", ["full", "mixed", "states"])
def test_a_load_that_vllm_cuts_short_is_computed(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, attention: str, policy: str
) -> None:
    """It may take fewer tokens than it is told of, for reasons of its own."""
    pair = make_pair(attention=attention, policy=policy)
    answer = P2pNcclConnector.get_num_new_matched_tokens

    def cut(*args: Any) -> tuple[int | None, bool]:
        num_tokens, is_async = answer(*args)
        return (num_tokens and num_tokens - BLOCK_SIZE), is_async

    monkeypatch.setattr(P2pNcclConnector, "get_num_new_matched_tokens", cut)
    prompt = prompt_of(100)
    request_id = pair.ask(prompt)
    pair.run()
    check_outcome(pair, request_id, policy, prompt)
    pair.check_at_rest()


def of_another_prompt(party: Party) -> Party:
    return dataclasses.replace(party, binding=bytes(reversed(party.binding[:PROMPT_BYTES])))


@pytest.mark.parametrize("is_alike", [True, False], ids=["alike", "another name"])
@pytest.mark.parametrize("order", ["together", "prefill first"])
@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_decode_hears_at_once_of_what_prefill_will_not_send(
    make_pair: MakePair,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    send_type: str,
    order: str,
    is_alike: bool,
) -> None:
    """As of a LoRA adapter that was replaced on prefill only; prefill may call its weights as
    decode does, or not."""

    def refuse(request: object) -> None:
        raise InvalidParams("the adapter was replaced", Reason.UNSUPPORTED)

    pair = make_pair(send_type=send_type, policy="recompute")
    planner, reason = pair.p.connector._planner, "the adapter was replaced"
    monkeypatch.setattr(planner, "_refuse_unsupported", refuse)
    if not is_alike:
        party = planner._party
        monkeypatch.setattr(planner, "_party", lambda *given: of_another_prompt(party(*given)))
        named = f"InvalidParams: {reason}"
        reason = f"another content (another prompt, or of other weights) was given up: {named}"
    prompt = prompt_of(100)
    name = pair.ask(prompt, order=order)
    pair.run(timeout=8)
    assert pair.d.answers[name] == continuation(prompt, 4)
    assert pair.d.num_computed_prompt_tokens[name] == len(prompt)
    assert f"load failed: request={name}" in caplog.text
    assert caplog.text.rstrip().endswith(reason)
    pair.check_at_rest()


@pytest.mark.parametrize("order", ["together", "prefill first"])
@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_prefill_hears_at_once_of_what_decode_will_not_load(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, send_type: str, order: str
) -> None:
    """Otherwise, with GET, it would hold the blocks for a lease that is longer than the test."""

    def refuse(request: object) -> None:
        raise InvalidParams("the adapter was replaced", Reason.UNSUPPORTED)

    pair = make_pair(send_type=send_type, policy="recompute", lease_seconds=60.0)
    monkeypatch.setattr(pair.d.connector._planner, "_refuse_unsupported", refuse)
    prompt = prompt_of(100)
    name = pair.ask(prompt, order=order)
    pair.run(timeout=8)
    assert pair.d.num_computed_prompt_tokens[name] == len(prompt)
    pair.check_answers()
    pair.check_at_rest()
