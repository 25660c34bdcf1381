"""What decode should have is not pushed: prefill holds it until decode has asked, or has it all."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests import marks
from tests.doubles.instance import BLOCK_SIZE, continuation
from tests.doubles.pair import SEND_TYPES, MakePair, Pair, prompt_of
from tests.support import eventually

pytestmark = marks.simulated_vllm

PUSHES = ("PUT", "PUT_ASYNC")
NUM_NEW, ANSWER = 60, 50


class TurnByTurn:
    """Turns of one session; the proxy tells prefill what decode should have, and decode what
    prefill has answered."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.said: list[int] = []

    @property
    def num_present(self) -> int:
        """Of how many tokens decode has the KV: all that was said but the last."""
        return max(0, len(self.said) - 1)

    def prefill(self, num_new: int = NUM_NEW, present: int | None = None) -> str:
        """Ask prefill alone, until it has answered; returns decode's request."""
        present = self.num_present if present is None else present
        self.said += prompt_of(num_new, len(self.said))
        decode_id = self.pair.ask(
            [*self.said], by="params", order="prefill first", max_tokens=ANSWER, present=present
        )
        prefill_id = self.pair.prefill_ids[-1]
        self.pair.run(lambda: prefill_id in self.pair.p.params, only=self.pair.p)
        self.said += continuation(self.said, ANSWER)
        return decode_id

    def decode(self) -> None:
        """Ask decode, until it has answered."""
        self.pair.ask_waiting()
        self.pair.run()

    def turn(self, num_new: int = NUM_NEW, present: int | None = None) -> int:
        """Ask both; returns how many blocks have arrived."""
        before = self.pair.landed_bytes()
        self.prefill(num_new, present)
        self.decode()
        return (self.pair.landed_bytes() - before) // self.pair.block_bytes


def num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def held(pair: Pair) -> int:
    """How many tokens prefill has answered that it holds."""
    found: int = (pair.p.params[pair.prefill_ids[-1]] or {})["remote_held_tokens"]
    return found


def forget(pair: Pair) -> None:
    """Decode evicts all that it has."""
    pair.d.evict()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_nothing_is_sent_twice(make_pair: MakePair, send_type: str, is_async: bool) -> None:
    pair = make_pair(send_type=send_type, is_async=is_async, num_blocks=300)
    chat = TurnByTurn(pair)
    for _ in range(5):
        num_known = chat.num_present // BLOCK_SIZE
        arrived = chat.turn()
        assert arrived == num_blocks(len(chat.said) - ANSWER) - num_known
        assert held(pair) == (0 if send_type == "GET" else num_known * BLOCK_SIZE)
        assert sum(pair.sent_bytes()) == pair.landed_bytes()
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


SHAPES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"tp_size": 2}, {}),
    ({}, {"tp_size": 2}),
    ({"tp_size": 2}, {"tp_size": 2}),
    ({}, {"pp_size": 2}),
    ({"block_size": 32}, {}),
    ({}, {"block_size": 32}),
    ({"attention": "latent", "tp_size": 2}, {"attention": "latent"}),
    ({"layerwise": True}, {}),
    ({"attention": "sparse"}, {"attention": "sparse"}),
]


@pytest.mark.parametrize(("prefill", "decode"), SHAPES, ids=str)
@pytest.mark.parametrize("knows", [True, False], ids=["right", "wrong"])
def test_instances_that_differ(
    make_pair: MakePair, prefill: dict[str, Any], decode: dict[str, Any], knows: bool
) -> None:
    pair = make_pair(num_blocks=300, prefill=prefill, decode=decode)
    chat = TurnByTurn(pair)
    chat.turn(150)
    for _ in range(2):
        if not knows:
            forget(pair)
        before = sum(pair.sent_bytes())
        decode_id = chat.prefill()
        assert held(pair) > 0
        chat.decode()
        assert pair.d.num_computed_prompt_tokens[decode_id] == 1
        sent = sum(pair.sent_bytes()) - before
        whole = num_blocks(len(chat.said) - ANSWER) * pair.block_bytes * len(pair.p.ranks)
        assert (sent < whole / 2) == knows
    pair.check_answers()
    pair.check_at_rest()


@pytest.mark.parametrize("send_type", PUSHES)
def test_what_decode_has_evicted_is_pulled(make_pair: MakePair, send_type: str) -> None:
    pair = make_pair(send_type=send_type, num_blocks=300)
    chat = TurnByTurn(pair)
    chat.turn(200)
    forget(pair)
    assert chat.turn() == num_blocks(len(chat.said) - ANSWER)  # each block once
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


@pytest.mark.parametrize("send_type", PUSHES)
def test_what_decode_evicts_after_prefill_has_answered_is_pulled(
    make_pair: MakePair, send_type: str
) -> None:
    pair = make_pair(send_type=send_type, num_blocks=300)
    chat = TurnByTurn(pair)
    chat.turn(200)
    chat.prefill()
    forget(pair)
    chat.decode()
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


@pytest.mark.parametrize("error", [-100, -1, 1, 40, 10**6])
def test_a_belief_that_is_not_quite_right(make_pair: MakePair, error: int) -> None:
    """Too low, and blocks come again; too high, and what is lacking is pulled."""
    pair = make_pair(num_blocks=300)
    chat = TurnByTurn(pair)
    chat.turn(200)
    num_known = chat.num_present
    arrived = chat.turn(100, present=num_known + error)
    whole = num_blocks(len(chat.said) - ANSWER)
    assert arrived == whole - (num_known + min(error, 0)) // BLOCK_SIZE
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


def test_another_prompt_than_before(make_pair: MakePair) -> None:
    """The client has edited what was said: the belief is about other tokens."""
    pair = make_pair(num_blocks=300)
    chat = TurnByTurn(pair)
    chat.turn(200)
    chat.said[100] += 1
    assert chat.turn() == num_blocks(len(chat.said) - ANSWER) - 100 // BLOCK_SIZE
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


def test_a_hold_ends_when_decode_has_it_all(make_pair: MakePair) -> None:
    """Not with its lease: prefill's blocks are vLLM's again."""
    pair = make_pair(num_blocks=300, lease_seconds=600.0)
    chat = TurnByTurn(pair)
    chat.turn(200)
    chat.prefill()
    engine = pair.p.ranks[0].connector._worker.engine  # type: ignore[union-attr]
    assert engine.stats()["open_transfers"] >= 1
    chat.decode()
    pair.check_at_rest()


def test_decode_dies_before_it_asks(make_pair: MakePair) -> None:
    pair = make_pair(num_blocks=300, lease_seconds=1.0, peer_timeout_seconds=1.0)
    chat = TurnByTurn(pair)
    chat.turn(200)
    chat.prefill()
    pair.drop_waiting()
    for rank in pair.d.ranks:
        rank.connector.shutdown()
    pair.run(lambda: pair.p.is_idle, only=pair.p)
    worker = pair.p.ranks[0].connector._worker
    assert worker is not None
    eventually(lambda: worker.engine.stats()["open_transfers"] == 0)


def _close(pair: Pair) -> None:
    for rank in pair.p.ranks:
        rank.connector.shutdown()


def _reset(pair: Pair) -> None:
    """The weights have changed: nothing that is held or has landed is of use."""
    pair.p.scheduler.reset_prefix_cache(reset_connector=True)
    pair.p.step()


@pytest.mark.parametrize("loss", [_close, _reset])
@pytest.mark.parametrize("knows", [True, False], ids=["right", "wrong"])
def test_prefill_loses_what_it_holds(
    make_pair: MakePair, loss: Callable[[Pair], None], knows: bool
) -> None:
    """What decode lacks, it computes."""
    pair = make_pair(
        num_blocks=300, policy="recompute", connect_timeout_seconds=0.5, peer_timeout_seconds=1.0
    )
    chat = TurnByTurn(pair)
    chat.turn(200)
    before, num_held = pair.landed_bytes(), chat.num_present // BLOCK_SIZE
    decode_id = chat.prefill()
    num_pushed = num_blocks(len(chat.said) - ANSWER) - num_held
    eventually(lambda: pair.landed_bytes() - before == num_pushed * pair.block_bytes)
    if not knows:
        forget(pair)
    loss(pair)
    pair.ask_waiting()
    pair.run(lambda: decode_id in pair.d.finished)
    pair.check_answers()
    assert (pair.d.num_computed_prompt_tokens[decode_id] > BLOCK_SIZE) != knows or loss is _reset


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("num_steps", range(5))
def test_a_turn_that_is_aborted_leaves_nothing(
    make_pair: MakePair, leg: str, num_steps: int
) -> None:
    pair = make_pair(num_blocks=300, lease_seconds=1.0)
    chat = TurnByTurn(pair)
    chat.turn(200)
    if leg == "prefill":
        pair.ask([*chat.said, *prompt_of(NUM_NEW)], by="params", order="prefill first",
                 present=chat.num_present)  # fmt: skip
        for _ in range(num_steps):
            pair.p.step()
        pair.p.abort(pair.prefill_ids[-1])
        pair.drop_waiting()
    else:
        forget(pair)
        decode_id = chat.prefill()
        pair.ask_waiting()
        for _ in range(num_steps):
            pair.d.step()
        pair.d.abort(decode_id)
    pair.run()
    pair.check_finished()
    pair.check_at_rest()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
@pytest.mark.parametrize("knows", [True, False], ids=["right", "wrong"])
def test_what_is_held_is_pushed_if_its_blocks_are_needed(
    make_pair: MakePair, knows: bool, num_steps: int
) -> None:
    """As without a belief: prefill cannot wait for decode, which has not asked yet, or just now."""
    pair = make_pair(
        prefill={"num_blocks": 40}, decode={"num_blocks": 300}, lease_seconds=600.0,
        chunk_bytes=4096,
    )  # fmt: skip
    chat = TurnByTurn(pair)
    chat.turn(300)
    if not knows:
        forget(pair)
    chat.prefill()
    if num_steps:
        pair.ask_waiting()
    for _ in range(num_steps):
        pair.d.step()
    late = list(pair._waiting)
    pair.drop_waiting()
    pair.ask(prompt_of(450, seed=5), by="params")
    pair.run()
    for leg in late:
        leg()
    pair.run()
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


@pytest.mark.parametrize("place", [{"child": 1}, {"index": 1}], ids=str)
def test_several_choices_and_prompts(make_pair: MakePair, place: dict[str, Any]) -> None:
    """Prefill's answer speaks of all choices, and of the first prompt only."""
    pair = make_pair(num_blocks=300)
    chat = TurnByTurn(pair)
    chat.turn(200)
    pair.ask([*chat.said, *prompt_of(NUM_NEW)], by="params", order="prefill first",
             present=chat.num_present, **place)  # fmt: skip
    pair.run(lambda: pair.prefill_ids[-1] in pair.p.params, only=pair.p)
    assert (held(pair) > 0) == ("child" in place)
    chat.decode()
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


@pytest.mark.parametrize("attention", ["mixed", "states"])
def test_windows_and_states_are_pushed(make_pair: MakePair, attention: str) -> None:
    pair = make_pair(num_blocks=300, attention=attention)
    chat = TurnByTurn(pair)
    for _ in range(3):
        chat.turn(100)
        assert held(pair) == 0
    pair.check_answers()
    pair.check_at_rest()


@pytest.mark.parametrize("send_type", PUSHES)
@pytest.mark.parametrize("seed", range(6))
def test_anything_may_be_believed(make_pair: MakePair, send_type: str, seed: int) -> None:
    """Several chats, few blocks, beliefs at random: preempted, evicted, aborted, never wrong."""
    rng = random.Random(seed)
    pair = make_pair(
        send_type=send_type, policy="recompute", lease_seconds=2.0, is_async=bool(seed % 2),
        prefill={"num_blocks": 60}, decode={"num_blocks": 60},
    )  # fmt: skip
    chats = [TurnByTurn(pair) for _ in range(3)]
    for _ in range(12):
        chat = rng.choice(chats)
        if len(chat.said) > 400:
            chat.said = []
        present = rng.choice([None, 0, rng.randrange(600)])
        decode_id = chat.prefill(rng.randrange(1, 100), present)
        event = rng.random()
        if event < 0.2:
            pair.d.evict()
        elif event < 0.3:
            pair.p.scheduler.reset_prefix_cache(reset_connector=True)
            if event < 0.25:
                pair.p.connector.weights_labelled("default")  # they are those of the start
        if event < 0.8:
            pair.ask(prompt_of(rng.randrange(50, 300), seed), by="params", prefill_tokens=20)
        pair.ask_waiting()
        for _ in range(rng.randrange(6)):
            pair.step()
        if event > 0.9:
            pair.d.abort(decode_id)
        pair.run(timeout=60)
    pair.check_finished()
    pair.check_at_rest()
