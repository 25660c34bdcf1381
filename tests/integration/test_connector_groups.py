"""Models and instances that are not the plain case, simulated: latent attention, windows, several
groups of layers, pipeline stages. vLLM makes the groups; our whole connector moves their blocks."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

from tests import marks
from tests.doubles.instance import WINDOW
from tests.doubles.pair import SEND_TYPES, MakePair, Pair, prompt_of

pytestmark = marks.simulated_vllm

# Around a block of 16, around the window of 40, and where the window begins at a block's edge.
LENGTHS = (1, 2, 15, 16, 17, 39, 40, 41, 55, 56, 57, 63, 64, 71, 100, 300)


@pytest.fixture
def pair_settings() -> dict[str, Any]:
    return {"num_blocks": 200}


@pytest.mark.parametrize("attention", ["mixed", "windows"])
@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_windows(make_pair: MakePair, attention: str, send_type: str) -> None:
    make_pair(attention=attention, send_type=send_type).ask_in_orders(LENGTHS)


@pytest.mark.parametrize("transports", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("is_async", "send_type"), [(False, "PUT_ASYNC"), (True, "PUT_ASYNC"), (False, "GET")]
)
def test_windows_of_unlike_instances(
    make_pair: MakePair, transports: str, is_async: bool, send_type: str
) -> None:
    sides = {"tp_size": 4}, {"layout": "LBNHC"}  # 4 ranks have 2 heads: replicas
    settings = {"attention": "mixed", "transports": transports, "send_type": send_type}
    for prefill, decode in (sides, sides[::-1]):
        make_pair(prefill, decode, is_async=is_async, **settings).ask_in_orders(
            LENGTHS, ["together"]
        )


@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
@pytest.mark.parametrize("attention", ["mixed", "windows"])
def test_what_prefill_finds_in_its_cache_is_sent_too(
    make_pair: MakePair, attention: str, send_type: str
) -> None:
    """Its table then has nothing behind the window of what it found."""
    pair = make_pair(attention=attention, send_type=send_type, decode={"has_prefix_cache": False})
    first = prompt_of(160)
    more = [[*first, *prompt_of(count, count)] for count in (1, 15, 16, 50)]
    for prompt in (first, first, *more):
        pair.ask(prompt)
        pair.run()
    assert sum(pair.p.num_computed_prompt_tokens.values()) < 2 * 160  # of six prompts' 1042
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
@pytest.mark.parametrize("attention", ["mixed", "windows"])
def test_windows_by_way_of_host_memory(make_pair: MakePair, attention: str, send_type: str) -> None:
    """Each group has a host buffer of its own."""
    make_pair(attention=attention, send_type=send_type, is_on_device=True).ask_in_orders(LENGTHS)


@pytest.mark.parametrize("more", [8, 24, 40, 60])
def test_only_what_a_window_shows_and_decode_lacks_is_sent(make_pair: MakePair, more: int) -> None:
    """A prompt, then one that goes on from it: its prefix, with the window at its end, is there."""
    pair = make_pair(attention="mixed")
    layer_bytes, first = pair.block_bytes // 3, prompt_of(160)
    pair.ask(first)
    pair.run()
    in_window = 10 - (160 - WINDOW) // 16
    assert pair.landed_bytes() == (10 + 2 * in_window) * layer_bytes
    landed, num_tokens = pair.landed_bytes(), 160 + more
    pair.ask([*first, *prompt_of(more, seed=1)], order="decode first")
    pair.run()
    pair.check_answers(num_computed=1)
    end = -(-(num_tokens - 1) // 16)
    in_window = end - max(10, (num_tokens - WINDOW) // 16)
    assert pair.landed_bytes() - landed == (end - 10 + 2 * in_window) * layer_bytes
    pair.check_at_rest()


@pytest.mark.parametrize("attention", ["mixed", "windows"])
@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
def test_preemption_with_windows(make_pair: MakePair, attention: str, send_type: str) -> None:
    """So few blocks that requests lose theirs in mid-prompt, in mid-answer and in mid-transfer."""
    pair = make_pair(
        {"num_blocks": 40}, {"num_blocks": 40}, attention=attention, send_type=send_type,
        max_tokens_per_step=48, policy="recompute",
    )  # fmt: skip
    for seed in range(16):
        pair.ask(prompt_of(100 + 8 * seed, seed), max_tokens=60)
    pair.run(timeout=60)
    pair.check_answers()
    assert pair.d.num_preemptions > 0
    pair.check_at_rest()


@pytest.mark.parametrize("attention", ["mixed", "windows"])
@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
def test_prefill_preempted_in_mid_answer(
    make_pair: MakePair, attention: str, send_type: str
) -> None:
    """What resumes behind its prompt's window is not sent, and decode computes it."""
    pair = make_pair(
        {"num_blocks": 40 if attention == "mixed" else 16}, {"num_blocks": 900},
        attention=attention, send_type=send_type, max_tokens_per_step=48, policy="recompute",
    )  # fmt: skip
    for seed in range(16):
        pair.ask(prompt_of(100 + 8 * seed, seed), prefill_tokens=30)
    pair.run(timeout=60)
    pair.check_answers()
    assert pair.p.num_preemptions > 0
    pair.check_at_rest()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("attention", ["mixed", "windows"])
def test_a_failure_in_one_group_is_the_requests(
    make_pair: MakePair, attention: str, policy: str
) -> None:
    """vLLM could not go on behind a good prefix: the request fails, or is computed anew."""
    pair = make_pair(attention=attention, policy=policy)
    request_id = pair.ask(prompt_of(200), order="decode first")
    pair.run(lambda: bool(pair.d.ranks[0].connector._worker._loads[-1]._loading))  # type: ignore[union-attr]
    worker = pair.d.ranks[0].connector._worker
    assert worker is not None
    loading = worker._loads[-1]._loading[request_id]
    assert loading.transfer is not None
    loading.transfer.cancel("as if its peer had failed")
    pair.run(
        lambda: pair.d.is_idle or request_id in pair.d.finished or not pair.d.scheduler.requests
    )
    pair.drop_waiting()
    pair.run()
    if policy == "fail":
        assert pair.d.finished[request_id] is RequestStatus.FINISHED_ERROR
    else:
        pair.check_answers(num_computed=200)
    pair.check_at_rest()


def run_until(pair: Pair, request_id: str) -> None:
    """Step prefill alone until it has answered a request."""
    pair.run(lambda: request_id in pair.p.finished, only=pair.p)


@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
@pytest.mark.parametrize("prefill_tokens", [1, 2, 100])
def test_no_block_of_a_window_is_reused_while_it_is_sent(
    make_pair: MakePair, send_type: str, prefill_tokens: int
) -> None:
    """Where the window of the token after the prompt begins at a block's edge, vLLM is through with
    the block before it, which D needs; with an answer behind it, with the whole window."""
    pair = make_pair(
        attention="mixed", send_type=send_type,
        prefill={"has_prefix_cache": False, "num_blocks": 60},
    )  # fmt: skip
    for length in (55, 71, 60):
        pair.ask(prompt_of(length), prefill_tokens=prefill_tokens, order="prefill first")
        run_until(pair, pair.prefill_ids[-1])
        other = f"other-{length}"  # takes what is free, and writes there
        pair.p.add(other, prompt_of(300, length))
        run_until(pair, other)
        pair.ask_waiting()
        pair.run()
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


# Latent attention: every rank keeps the same


@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 2), (4, 2), (2, 4)], ids=str)
def test_latent_attention_is_sent_once_to_each_rank(
    make_pair: MakePair, sizes: tuple[int, int], send_type: str
) -> None:
    """Not once from each rank that has it, and in turns where several have it."""
    pair = make_pair(
        {"tp_size": sizes[0]}, {"tp_size": sizes[1]}, attention="latent", send_type=send_type
    )
    pair.ask(prompt_of(100))
    pair.run()
    pair.check_answers(num_computed=1)
    prompt_bytes = 7 * pair.block_bytes
    assert pair.landed_bytes() == sizes[1] * prompt_bytes
    num_served = [len(range(rank, sizes[1], sizes[0])) for rank in range(sizes[0])]
    assert pair.sent_bytes() == [count * prompt_bytes for count in num_served]
    pair.ask_in_orders(LENGTHS)


# Pipeline stages


STAGES = [(1, 2), (2, 1), (2, 2), (2, 3), (3, 2), (1, 3)]  # cuts of three layers


@pytest.mark.parametrize("send_type", SEND_TYPES)
@pytest.mark.parametrize("stages", STAGES, ids=str)
def test_pipeline_stages(make_pair: MakePair, stages: tuple[int, int], send_type: str) -> None:
    make_pair({"pp_size": stages[0]}, {"pp_size": stages[1]}, send_type=send_type).ask_in_orders(
        LENGTHS
    )


@pytest.mark.parametrize("attention", ["mixed", "latent"])
@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_stages_ranks_and_groups_at_once(
    make_pair: MakePair, attention: str, transports: str
) -> None:
    """Some stages have no layer of some groups."""
    sides = {"pp_size": 2, "tp_size": 2}, {"pp_size": 3, "layout": "LBNHC"}
    for prefill, decode in (sides, sides[::-1]):
        for send_type in ("PUT_ASYNC", "GET"):
            pair = make_pair(
                prefill, decode, attention=attention, transports=transports, send_type=send_type
            )
            pair.ask_in_orders(LENGTHS, ["together"])


def test_preemption_with_stages(make_pair: MakePair) -> None:
    pair = make_pair(
        {"pp_size": 2, "num_blocks": 26}, {"pp_size": 3, "num_blocks": 26},
        max_tokens_per_step=48, policy="recompute",
    )  # fmt: skip
    pair.check_preempted()
