"""Two simulated instances: vLLM's scheduler and our whole connector, engines included."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
)

from p2p_engine.connector import P2pNcclConnector
from tests import marks
from tests.doubles.instance import (
    BLOCK_SIZE,
    WrongKV,
    continuation,
    make_cache_config,
)
from tests.doubles.pair import ORDERS, SEND_TYPES, MakePair, Pair, prompt_of
from tests.doubles.vllm_config import make_config
from tests.support import eventually

pytestmark = marks.simulated_vllm

LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE, 100, 300)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_every_length_arrives_whole(
    make_pair: MakePair, send_type: str, order: str, is_async: bool
) -> None:
    pair = make_pair(send_type=send_type, is_async=is_async)
    for length in LENGTHS:
        pair.ask(prompt_of(length), order=order)
    pair.run()
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


@pytest.mark.parametrize("transports", ["shm", "nixl", "tcp"])
def test_two_ranks_move_each_their_own(make_pair: MakePair, transports: str) -> None:
    pair = make_pair(tp_size=2, transports=transports, num_blocks=200)
    for length, order in itertools.product(LENGTHS, ORDERS):
        pair.ask(prompt_of(length), order=order)
    pair.run()
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


def test_a_scheduler_half_binds_nothing_until_it_has_ranks(model: Path, no_leaks: None) -> None:
    """Many may live in one process, on one port; other connectors' ranks are not ours."""
    config = make_config(model, "kv_both", 14579)
    for _ in range(3):
        connector = P2pNcclConnector(
            config, KVConnectorRole.SCHEDULER, make_cache_config(config, "full", 10)
        )
        connector.set_xfer_handshake_metadata({0: KVConnectorHandshakeMetadata()})
        connector.shutdown()


def test_closed_instances_leave_nothing_behind(no_leaks: None, model: Path) -> None:
    """Also in the middle of transfers."""
    pair = Pair(model, tp_size=2)
    for length, order in itertools.product(LENGTHS, ORDERS):
        pair.ask(prompt_of(length), order=order)
    for _ in range(4):
        pair.step()
    pair.close()
    pair.close()


def test_a_flipped_byte_is_found(make_pair: MakePair) -> None:
    """The control of all these tests: they would see a single wrong slot."""
    pair = make_pair()
    pair.ask(prompt_of(100), order="prefill first")
    pair.run(lambda: pair.p.is_idle)
    pair.ask_waiting()
    pair.run(lambda: bool(pair.d.scheduler.finished_recving_kv_req_ids))
    block_id = pair.d.scheduler.kv_cache_manager.get_block_ids(pair.decode_ids[0])[0][2]
    pair.d.ranks[0].cache[1, block_id, 0, 5, 0] += 1
    with pytest.raises(WrongKV, match="layer 1 positions \\[37\\]"):
        pair.run()


def test_chunks_leave_before_the_prompt_is_computed(make_pair: MakePair) -> None:
    pair = make_pair(max_tokens_per_step=32)
    pair.ask(prompt_of(300), order="together")
    pair.run(lambda: len(pair.p.num_computed_prompt_tokens) > 0)
    for num_chunks in range(1, 9):
        eventually(partial(pair.has_sent, 2 * num_chunks))
        assert not pair.p.finished
        pair.step()
    pair.run()
    pair.check_answers(num_computed=1)


@pytest.mark.parametrize("shared", [BLOCK_SIZE, 5 * BLOCK_SIZE + 3, 112, 120])
@pytest.mark.parametrize("order", ORDERS)
def test_decode_side_prefix_hits_are_not_sent_again(
    make_pair: MakePair, shared: int, order: str
) -> None:
    pair = make_pair()
    first = prompt_of(120)
    pair.ask(first, order=order)
    pair.run()
    landed = pair.landed_bytes()
    pair.ask([*first[:shared], *prompt_of(120 - shared, seed=1)], order="decode first")
    pair.run()
    pair.check_answers(num_computed=1)
    num_wanted = -(-120 // BLOCK_SIZE) - min(shared, 119) // BLOCK_SIZE
    assert pair.landed_bytes() - landed == num_wanted * pair.block_bytes
    pair.check_at_rest()


def test_prefill_side_prefix_hits_are_sent(make_pair: MakePair) -> None:
    pair = make_pair()
    prompt = prompt_of(120)
    pair.p.add("warm", prompt, max_tokens=1)
    pair.run()
    pair.ask(prompt)
    pair.ask(prompt[:100])
    pair.run()
    assert pair.p.num_computed_prompt_tokens[pair.prefill_ids[0]] < 32
    pair.check_answers(num_computed=1)


def test_several_prompts_and_children_of_one_request(make_pair: MakePair) -> None:
    """Each index is a transfer of its own; the same child prompt may come from the prefix cache."""
    pair = make_pair()
    transfer_id = pair.new_transfer_id()
    for index, child in itertools.product(range(3), range(3)):
        prompt = prompt_of(50 + 20 * index, seed=index)
        pair.ask(prompt, transfer_id=transfer_id, index=index, child=child)
    pair.run()
    pair.check_answers()
    pair.check_at_rest()


def test_prefill_side_that_goes_on_decoding(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.ask(prompt_of(70), prefill_tokens=12)
    pair.run()
    pair.check_answers(num_computed=1)
    assert pair.p.answers[pair.prefill_ids[0]] == continuation(prompt_of(70), 12)
    pair.check_at_rest()


@pytest.mark.parametrize("num_prompts", [12])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_preemption_on_either_side(
    make_pair: MakePair, send_type: str, is_async: bool, num_prompts: int
) -> None:
    """So few blocks that requests lose theirs in mid-prompt, in mid-answer and in mid-transfer."""
    pair = make_pair(send_type=send_type, is_async=is_async, num_blocks=26, max_tokens_per_step=48)
    for seed in range(num_prompts):
        pair.ask(prompt_of(100 + 8 * seed, seed), prefill_tokens=30, max_tokens=60)
    pair.run(timeout=40)
    pair.check_answers()
    assert pair.p.num_preemptions > 0
    assert pair.d.num_preemptions > 0
    assert (pair.p.num_preemptions_in_flight > 0) is is_async
    pair.check_at_rest()


def test_both_roles_in_one_instance(make_pair: MakePair) -> None:
    """Each compares the addresses in the id with its own."""
    pair = make_pair(prefill_role="kv_both", decode_role="kv_both")
    for length in LENGTHS:
        pair.ask(prompt_of(length))
        pair.ask(prompt_of(length, seed=1), swapped=True)
    pair.run()
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
@pytest.mark.parametrize("order", ORDERS)
def test_parameters_say_what_an_id_does_not(
    make_pair: MakePair, order: str, send_type: str
) -> None:
    pair = make_pair(send_type=send_type, prefill_role="kv_both", decode_role="kv_both")
    for length in LENGTHS:
        pair.ask(prompt_of(length), order=order, by="params")
    pair.run()
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


def test_the_response_of_the_prefill_leg_is_enough(make_pair: MakePair) -> None:
    """NixlConnector's flow: the prefill side is told nothing, and answers where its KV is."""
    pair = make_pair()
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    for name, length in (("one", 100), ("two", 33)):
        pair.p.add(f"cmpl-{name}-0-0000000a", prompt_of(length), max_tokens=1, params=params)
    pair.run(lambda: len(pair.p.finished) == 2)
    for name, length in (("one", 100), ("two", 33)):
        answered = pair.p.params[f"cmpl-{name}-0-0000000a"]
        decode_id = f"cmpl-{name}-0-0000000b"
        pair.d.add(decode_id, prompt_of(length), params=answered)
        pair.expect(decode_id, prompt_of(length))
    pair.run()
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
@pytest.mark.parametrize("by", ["id", "params"])
def test_data_parallel_ranks_are_instances_with_addresses_of_their_own(
    make_pair: MakePair, by: str, send_type: str
) -> None:
    """Rank r is at kv_port + r, on either side, and says so itself in prefill's answer."""
    pair = make_pair(send_type=send_type, prefill={"dp_rank": 3}, decode={"dp_rank": 1})
    for side, dp_rank in ((pair.p, 3), (pair.d, 1)):
        transfer = side.config.kv_transfer_config
        assert transfer is not None
        assert side.address == f"127.0.0.1:{transfer.kv_port + dp_rank}"
    for order in ORDERS:
        pair.ask(prompt_of(100), order=order, by=by)
        pair.run()
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    pair.p.add("cmpl-told-0-0000000a", prompt_of(60), max_tokens=1, params=params)
    pair.run(lambda: "cmpl-told-0-0000000a" in pair.p.finished)
    answered = pair.p.params["cmpl-told-0-0000000a"]
    assert answered is not None
    assert f"{answered['remote_host']}:{answered['remote_port']}" == pair.p.address
    pair.d.add("cmpl-told-0-0000000b", prompt_of(60), params=answered)
    pair.expect("cmpl-told-0-0000000b", prompt_of(60))
    pair.run()
    pair.check_answers()
    pair.check_at_rest()


def test_requests_without_transfer_data_are_computed_where_they_are(make_pair: MakePair) -> None:
    pair = make_pair()
    for instance in (pair.p, pair.d):
        instance.add("0-0000000a", prompt_of(100))
    pair.run()
    for instance in (pair.p, pair.d):
        assert instance.answers["0-0000000a"] == continuation(prompt_of(100), 4)
        assert instance.num_computed_prompt_tokens["0-0000000a"] == 100
    pair.check_at_rest()


def test_cache_reset_forgets_what_has_landed(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.ask(prompt_of(100), order="prefill first")
    pair.run(lambda: pair.p.is_idle and pair.live_bytes() > 0)
    pair.d.scheduler.reset_prefix_cache(reset_connector=True)
    pair.d.add("0-0000000a", prompt_of(3))
    pair.run(lambda: pair.live_bytes() == 0)
