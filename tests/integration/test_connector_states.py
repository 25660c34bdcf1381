"""Models that keep a state beside KV, simulated: each step reads the state before it, so a state
after the wrong number of tokens is found at once. vLLM makes the groups and the tables."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

from p2p_engine.connector.states import end_before_last_token
from tests import marks
from tests.doubles.instance import BLOCK_SIZE, continuation
from tests.doubles.pair import ORDERS, SEND_TYPES, MakePair, prompt_of
from tests.property.block_play import make_request

pytestmark = marks.simulated_vllm

# Around a block of 16, around a step of 64 tokens, and of several steps.
LENGTHS = (1, 3, 15, 16, 17, 18, 31, 32, 33, 34, 63, 64, 65, 66, 129, 300)
MODELS = ("states", "states and windows", "states only")
# vLLM lays them out as Mamba2's. Kimi Linear has the last: delta nets (KDA) beside latents.
OTHER_KINDS = (
    "states of Mamba1", "states of short convolutions", "states of delta nets",
    "states of delta nets and latents",
)  # fmt: skip


@pytest.fixture
def pair_settings() -> dict[str, Any]:
    return {"num_blocks": 200}


@pytest.mark.parametrize(
    ("attention", "has_prefix_cache"),
    [*((name, True) for name in MODELS), ("states", False), ("states and windows", False)],
)
@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_states(
    make_pair: MakePair, attention: str, send_type: str, has_prefix_cache: bool
) -> None:
    make_pair(
        attention=attention, send_type=send_type, has_prefix_cache=has_prefix_cache
    ).ask_in_orders(LENGTHS)


@pytest.mark.parametrize("has_prefix_cache", [True, False])
@pytest.mark.parametrize("attention", OTHER_KINDS)
def test_other_kinds_of_states(make_pair: MakePair, attention: str, has_prefix_cache: bool) -> None:
    make_pair(attention=attention, has_prefix_cache=has_prefix_cache).ask_in_orders(LENGTHS)


@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_a_prompt_of_two_tokens_is_computed_where_it_is_decoded(
    make_pair: MakePair, send_type: str
) -> None:
    """vLLM would take the one token that is left of it for a decode step."""
    pair = make_pair(attention="states", send_type=send_type)
    for order in ORDERS:
        pair.ask(prompt_of(2), order=order)
        pair.run()
    pair.check_answers(num_computed=2)
    pair.check_finished()
    pair.check_at_rest()


@pytest.mark.parametrize("transports", ["shm", "tcp"])
@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
def test_states_of_steps_that_run_ahead(
    make_pair: MakePair, transports: str, send_type: str
) -> None:
    """vLLM's asynchronous scheduler must not go on from the prompt's end on prefill."""
    pair = make_pair(attention="states", send_type=send_type, is_async=True, transports=transports)
    pair.ask_in_orders(LENGTHS, ["together", "prefill first"])


@pytest.mark.parametrize("has_prefix_cache", [(True, False), (False, True)])
@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
def test_only_one_side_caches_states(
    make_pair: MakePair, send_type: str, has_prefix_cache: tuple[bool, bool]
) -> None:
    """Then their blocks of states are not of one size, which is nobody's business but vLLM's."""
    prefill, decode = ({"has_prefix_cache": flag} for flag in has_prefix_cache)
    make_pair(prefill, decode, attention="states", send_type=send_type).ask_in_orders(
        LENGTHS, ["together"]
    )


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"pp_size": 3}])
def test_states_of_several_ranks(make_pair: MakePair, sizes: dict[str, int]) -> None:
    make_pair(attention="states", **sizes).ask_in_orders(LENGTHS, ["together"])


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [({"tp_size": 2}, "tp_size: 2 here, 1 there"), ({"pp_size": 3}, "layer_cuts"),
     ({"block_size": 32}, "block_size: 32 here, 16 there")],
)  # fmt: skip
def test_unlike_instances_refuse_each_other(
    make_pair: MakePair, caplog: pytest.LogCaptureFixture, sizes: dict[str, int], reason: str
) -> None:
    pair = make_pair(sizes, attention="states", policy="recompute")
    pair.ask(prompt_of(100))
    pair.run()
    pair.check_answers(num_computed=100)
    assert reason in caplog.text
    pair.check_at_rest()


@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_a_known_beginning(make_pair: MakePair, send_type: str) -> None:
    """Each side may find it in its cache: the rest is taken, and the state whatever is cached."""
    pair, first = make_pair(attention="states", send_type=send_type), prompt_of(160)
    for shared in (16, 32, 100, 112, 159, 160):
        for more in (0, 1, 2, 15, 16, 17, 50):
            pair.ask([*first[:shared], *prompt_of(more, shared)])
            pair.run()
    assert sum(pair.p.num_computed_prompt_tokens.values()) < 6 * 7 * 80
    pair.check_answers()
    pair.check_at_rest()


@pytest.mark.parametrize("has_prefix_cache", [True, False])
@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
@pytest.mark.parametrize("is_async", [True, False])
def test_preempted_requests(
    make_pair: MakePair, send_type: str, has_prefix_cache: bool, is_async: bool
) -> None:
    pair = make_pair(
        {"num_blocks": 40}, {"num_blocks": 40}, attention="states", send_type=send_type,
        max_tokens_per_step=48, policy="recompute", has_prefix_cache=has_prefix_cache,
        is_async=is_async,
    )  # fmt: skip
    for seed in range(16):
        pair.ask(prompt_of(100 + 8 * seed, seed), max_tokens=60)
    pair.run(timeout=60)
    pair.check_answers()
    assert pair.d.num_preemptions > 0
    pair.check_at_rest()


def test_layer_by_layer(make_pair: MakePair) -> None:
    """Of states vLLM does not tell while the forward runs."""
    make_pair(attention="states", layerwise=True).ask_in_orders(LENGTHS, ["together"])


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_without_the_state_nothing_is_used(make_pair: MakePair, policy: str) -> None:
    """Prefill leaves in mid-prompt, when many blocks of attention have arrived."""
    pair = make_pair(attention="states", policy=policy)
    request_id = pair.ask(prompt_of(300), order="together")
    for _ in range(3):  # of the five that the prompt takes
        pair.p.step()
    pair.run(until=lambda: pair.landed_bytes() > 0, only=pair.d)
    pair.p.abort(pair.prefill_ids[0])
    pair.run()
    if policy == "recompute":
        pair.check_answers(num_computed=300)
    else:
        assert pair.d.finished[request_id] is RequestStatus.FINISHED_ERROR
    pair.check_at_rest()


def test_what_cannot_be_cut_is_computed_on_prefill_alone(make_pair: MakePair) -> None:
    pair = make_pair(attention="states", send_type="GET", policy="recompute")
    pair.ask(prompt_of(50), prefill_tokens=9)
    [request] = pair.p.scheduler.requests.values()
    pair.run()
    assert (request.num_prompt_tokens, request.max_tokens) == (49, 1)
    sampled: list[dict[str, Any]] = [{"min_tokens": 2}, {"prompt_logprobs": 1}]
    for more in sampled:
        params = {"do_remote_decode": True, "transfer_id": f"t{more}"}
        request = pair.p.add(f"r{more}", prompt_of(50), params=params, **more)
        assert request.num_prompt_tokens == 50
        pair.run()
        assert pair.p.params[request.request_id] is None
        assert pair.p.answers[request.request_id] == continuation(prompt_of(50), 4)
    pair.check_at_rest()


def test_the_cut_leaves_alone_what_the_choices_of_a_request_share() -> None:
    request = make_request("r", prompt_of(40), 5, BLOCK_SIZE)
    shared = request.prompt_token_ids
    assert shared is not None
    end_before_last_token(request)
    assert (request.num_prompt_tokens, len(shared)) == (39, 40)
