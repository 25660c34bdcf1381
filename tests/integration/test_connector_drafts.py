"""Drafts: layers of a speculating instance's own, simulated. Peers may have the same, others, or
none; each token is right all the same, nobody waits for what nobody sends, nothing is left over."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from tests import marks
from tests.doubles.instance import NUM_LAYERS
from tests.doubles.pair import ORDERS, SEND_TYPES, MakePair, prompt_of

pytestmark = marks.simulated_vllm

LENGTHS = (1, 15, 16, 17, 64, 100, 300)
ONE_SIDED = {"prefill": ("eagle", ""), "decode": ("", "eagle"), "unlike": ("eagle", "another")}
SIDES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "alike": ({}, {}),
    "ranks": ({"tp_size": 2}, {"tp_size": 1}),
    "replicas": ({"tp_size": 1}, {"tp_size": 4}),
    "blocks": ({"block_size": 16}, {"block_size": 32}),
    "layouts": ({"layout": "LBHNC"}, {"layout": "BLNHC"}),
}


@pytest.fixture
def pair_settings() -> dict[str, Any]:
    """So long that whoever waits for what nobody sends would not end in time."""
    return {"num_blocks": 200, "transfer_timeout_seconds": 300}


@pytest.mark.parametrize("send_type", SEND_TYPES)
@pytest.mark.parametrize("sides", SIDES)
def test_the_same_draft_is_transferred(make_pair: MakePair, sides: str, send_type: str) -> None:
    """Decode speculates as if it had computed the prompt itself."""
    prefill, decode = SIDES[sides]
    pair = make_pair(prefill, decode, draft="eagle", send_type=send_type)
    pair.ask_in_orders(LENGTHS)
    wrong = pair.d.wrong_draft_positions
    assert wrong
    assert not any(wrong.values())


@pytest.mark.parametrize("send_type", SEND_TYPES)
@pytest.mark.parametrize("who", ONE_SIDED)
@pytest.mark.parametrize("sides", SIDES)
def test_a_draft_that_only_one_side_has_is_not_waited_for(
    make_pair: MakePair, sides: str, who: str, send_type: str
) -> None:
    prefill, decode = SIDES[sides]
    drafts = ONE_SIDED[who]
    pair = make_pair(
        {**prefill, "draft": drafts[0]}, {**decode, "draft": drafts[1]}, send_type=send_type
    )
    pair.ask_in_orders(LENGTHS)
    assert any(pair.d.wrong_draft_positions.values()) == bool(drafts[1])


def test_a_draft_that_one_side_lacks_takes_nothing_of_the_wire(make_pair: MakePair) -> None:
    landed = {}
    for drafts in (("", ""), ("eagle", ""), ("", "eagle"), ("eagle", "eagle")):
        pair = make_pair({"draft": drafts[0]}, {"draft": drafts[1]})
        pair.ask(prompt_of(100))
        pair.run()
        landed[drafts] = pair.landed_bytes()
    assert landed["eagle", ""] == landed["", "eagle"] == landed["", ""]
    assert landed["eagle", "eagle"] * NUM_LAYERS == landed["", ""] * (NUM_LAYERS + 1)


def test_decode_that_is_not_told_who_sends_takes_no_draft(make_pair: MakePair) -> None:
    """Nobody could say whether there will be one."""
    pair = make_pair({}, {}, draft="eagle", send_type="PUT_ASYNC")
    pair.ask(prompt_of(100), order="decode first", by="nameless")
    pair.run(timeout=20)
    pair.check_answers(num_computed=1)
    assert any(pair.d.wrong_draft_positions.values())
    pair.check_at_rest()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_draft_that_is_lost_fails_nothing(make_pair: MakePair, policy: str) -> None:
    pair = make_pair({}, {}, draft="eagle", policy=policy)
    request_id = pair.ask(prompt_of(200), order="decode first")
    worker = pair.d.ranks[0].connector._worker
    assert worker is not None
    loads = worker._loads[-1]
    pair.run(lambda: bool(loads._loading), only=pair.d)
    transfer = loads._loading[request_id].transfer
    assert transfer is not None
    transfer.cancel("as if its peer had failed")
    pair.run()
    pair.check_answers(num_computed=1)
    assert pair.d.wrong_draft_positions[request_id] > 0
    pair.check_at_rest()


@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
def test_drafts_by_way_of_host_memory(make_pair: MakePair, send_type: str) -> None:
    pair = make_pair({}, {}, draft="eagle", send_type=send_type, is_on_device=True)
    pair.ask_in_orders(LENGTHS)
    assert not any(pair.d.wrong_draft_positions.values())


@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_placeholders_for_proposals(make_pair: MakePair, send_type: str) -> None:
    """A speculating vLLM that has one token to compute schedules more, as if they were proposed.

    So it is on decode with each prompt, and on prefill with one that is cached but for its end.
    """
    pair = make_pair({}, {}, draft="eagle", num_speculative_tokens=3, send_type=send_type)
    for length in (33, 46, 47, 48, 49):
        for _ in range(2):
            pair.ask(prompt_of(length), order="prefill first")
            pair.run()
    pair.check_answers(num_computed=1)
    pair.check_at_rest()
    assert set(pair.d.num_placeholders.values()) == {3}
    assert set(pair.p.num_placeholders.values()) == {0, 3}


@pytest.mark.parametrize("drafts", [("eagle", "eagle"), *ONE_SIDED.values()])
def test_preemption_with_drafts(make_pair: MakePair, drafts: tuple[str, str]) -> None:
    """So few blocks that requests lose theirs in mid-prompt, in mid-answer and in mid-transfer."""
    pair = make_pair(
        {"draft": drafts[0], "num_blocks": 26}, {"draft": drafts[1], "num_blocks": 26},
        max_tokens_per_step=48, policy="recompute",
    )  # fmt: skip
    pair.check_preempted()


def test_windows_beside_a_draft(make_pair: MakePair) -> None:
    """The draft looks at everything, and has a table of its own."""
    pair = make_pair({}, {}, draft="eagle", attention="windows")
    pair.ask_in_orders(LENGTHS)
    assert pair.d.ranks[0].group_of[: NUM_LAYERS + 1] == [0, 1, 2, 3]
    assert not any(pair.d.wrong_draft_positions.values())


@pytest.mark.parametrize("num_modules", [2, 4])
@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
def test_what_prefill_guessed_is_computed_again(
    make_pair: MakePair, num_modules: int, send_type: str
) -> None:
    """Each further module of an MTP draft has read a token more, at the end guessed ones."""
    pair = make_pair({}, {}, draft="mtp", num_modules=num_modules, send_type=send_type)
    for seed, order in enumerate(ORDERS):
        for length in (15, 16, 17, 64, 65, 66, 100, 300):
            pair.ask(prompt_of(length, seed), order=order)
        pair.run(timeout=40)
    pair.check_answers(num_computed=num_modules)
    pair.check_at_rest()
    wrong = pair.d.wrong_draft_positions
    assert wrong
    assert not any(wrong.values())


@pytest.mark.parametrize("attention", ["windows", "mixed"])
@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
def test_windows_beside_a_draft_of_several_modules(
    make_pair: MakePair, attention: str, send_type: str
) -> None:
    """Each place in a block where the first window that decode computes may begin."""
    pair = make_pair(
        {}, {}, draft="mtp", num_modules=4, attention=attention, send_type=send_type,
        num_blocks=300,
    )  # fmt: skip
    for length in range(96, 112):
        pair.ask(prompt_of(length))
    pair.run(timeout=40)
    pair.check_answers(num_computed=4)
    pair.check_at_rest()


def test_a_prompt_that_the_draft_reads_over_is_not_loaded(make_pair: MakePair) -> None:
    pair = make_pair({}, {}, draft="mtp", num_modules=4)
    lengths = [1, 3, 4]
    for length in lengths:
        pair.ask(prompt_of(length))
    pair.run()
    pair.check_answers()
    pair.check_at_rest()  # what was pushed before decode refused it may have landed
    assert sorted(pair.d.num_computed_prompt_tokens.values()) == lengths
