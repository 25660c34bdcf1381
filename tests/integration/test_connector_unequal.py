"""Two simulated instances that are not alike: vLLM's scheduler and our whole connector."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from tests import marks
from tests.doubles.pair import ORDERS, SEND_TYPES, MakePair, Pair, prompt_of

pytestmark = marks.simulated_vllm

LENGTHS = (1, 15, 16, 17, 63, 64, 65, 100, 300)
SIZES = [(1, 2), (2, 1), (4, 1), (1, 4), (4, 2), (2, 4)]  # 4 ranks have 2 heads: replicas


@pytest.fixture
def pair_settings() -> dict[str, Any]:
    return {"num_blocks": 200}


def ask_all(pair: Pair, order: str) -> None:
    """Prompts of every length, and what must hold of them afterwards."""
    for length in LENGTHS:
        pair.ask(prompt_of(length), order=order)
    pair.run(timeout=40)
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("send_type", SEND_TYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_tensor_parallel_sizes(
    make_pair: MakePair, sizes: tuple[int, int], send_type: str, order: str
) -> None:
    pair = make_pair({"tp_size": sizes[0]}, {"tp_size": sizes[1]}, send_type=send_type)
    ask_all(pair, order)


@pytest.mark.parametrize("transports", ["shm", "tcp"])
@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (64, 16), (32, 64), (48, 32)], ids=str)
@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
def test_block_sizes(
    make_pair: MakePair, sizes: tuple[int, int], send_type: str, transports: str
) -> None:
    for order in ORDERS:
        pair = make_pair(
            {"block_size": sizes[0]}, {"block_size": sizes[1]},
            send_type=send_type, transports=transports,
        )  # fmt: skip
        ask_all(pair, order)


@pytest.mark.parametrize("layouts", [("LBHNC", "LBNHC"), ("BLNHC", "LHBNC"), ("LHBNC", "LHBNC")])
@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_layouts(make_pair: MakePair, layouts: tuple[str, str], transports: str) -> None:
    pair = make_pair({"layout": layouts[0]}, {"layout": layouts[1]}, transports=transports)
    ask_all(pair, "together")


@pytest.mark.parametrize("transports", ["shm", "tcp"])
@pytest.mark.parametrize("is_swapped", [False, True])
def test_everything_at_once(make_pair: MakePair, transports: str, is_swapped: bool) -> None:
    sides = (
        {"tp_size": 1, "block_size": 16, "layout": "LBHNC"},
        {"tp_size": 2, "block_size": 64, "layout": "BLNHC"},
    )
    prefill, decode = reversed(sides) if is_swapped else sides
    for order in ORDERS:
        ask_all(make_pair(prefill, decode, transports=transports), order)


def test_tcp_lands_in_final_blocks(make_pair: MakePair) -> None:
    """Also what is cut: the receiver's own mover writes where it belongs."""
    pair = make_pair({"tp_size": 2, "block_size": 32}, {"block_size": 16}, transports="tcp")
    pair.ask(prompt_of(300), order="decode first")
    pair.run()
    pair.check_answers(num_computed=1)
    assert pair.landed_bytes("blocks") == pair.landed_bytes() > 0


@pytest.mark.parametrize("shared", [16, 64, 100, 112])
@pytest.mark.parametrize("order", ORDERS)
def test_prefix_hits_of_another_block_size(make_pair: MakePair, shared: int, order: str) -> None:
    """What D has is neither sent nor written again, though its edge lies within P's block."""
    pair = make_pair({"block_size": 64}, {"block_size": 16})
    first = prompt_of(120)
    pair.ask(first, order=order)
    pair.run()
    landed = pair.landed_bytes()
    pair.ask([*first[:shared], *prompt_of(120 - shared, seed=1)], order="decode first")
    pair.run()
    pair.check_answers(num_computed=1)
    num_wanted = -(-120 // 16) - min(shared, 119) // 16
    assert pair.landed_bytes() - landed == num_wanted * pair.block_bytes // 4
    pair.check_at_rest()


@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
@pytest.mark.parametrize("is_swapped", [False, True])
def test_preemption(make_pair: MakePair, send_type: str, is_swapped: bool) -> None:
    """So few blocks that requests lose theirs in mid-prompt, in mid-answer and in mid-transfer."""
    sides = (
        {"block_size": 16, "num_blocks": 26},
        {"tp_size": 2, "block_size": 32, "num_blocks": 13},
    )
    prefill, decode = reversed(sides) if is_swapped else sides
    pair = make_pair(
        prefill, decode, send_type=send_type, max_tokens_per_step=48, policy="recompute"
    )
    pair.check_preempted()


def test_chunks_that_end_inside_a_block_of_the_other_side(make_pair: MakePair) -> None:
    """A block counts as there only when the last of its parts has come, from both ranks."""
    pair = make_pair({"tp_size": 2}, {"block_size": 64}, max_tokens_per_step=32, send_type="PUT")
    request_id = pair.ask(prompt_of(250), order="together")
    for computed in range(32, 250, 32):
        pair.p.step()

        def has_just_whole_blocks(num_blocks: int = computed // 64) -> bool:
            return pair.num_loaded_blocks(request_id) >= num_blocks

        pair.run(has_just_whole_blocks, only=pair.d)
        assert pair.num_loaded_blocks(request_id) == computed // 64
    pair.run()
    pair.check_answers(num_computed=1)


SPARSE = [
    ({"tp_size": 1}, {"tp_size": 2}),
    ({"tp_size": 2}, {"tp_size": 1}),
    ({"pp_size": 2}, {"pp_size": 1}),
    ({"pp_size": 1}, {"pp_size": 3}),
    ({"tp_size": 2, "pp_size": 2}, {"tp_size": 1, "pp_size": 3}),
]


@pytest.mark.parametrize("sides", SPARSE, ids=str)
@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
def test_latents_and_indexers_in_one_table(
    make_pair: MakePair, sides: tuple[dict[str, Any], dict[str, Any]], send_type: str
) -> None:
    """As DeepSeek-V3.2: two caches in each layer, both of them the same on all ranks of a stage."""
    pair = make_pair(*sides, attention="sparse", send_type=send_type)
    [table] = {group for rank in pair.p.ranks for group in rank.group_of if group >= 0}
    assert table == 0
    ask_all(pair, "together")


def test_an_indexer_with_blocks_of_another_size_refuses(make_pair: MakePair) -> None:
    """Its scales would be elsewhere; the latents alone would be of no use."""
    pair = make_pair({"block_size": 16}, {"block_size": 32}, attention="sparse", policy="recompute")
    pair.ask(prompt_of(100), order="together")
    pair.run(timeout=40)
    pair.check_answers()
    assert pair.landed_bytes() == 0
