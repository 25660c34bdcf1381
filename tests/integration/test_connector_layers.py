"""`layerwise`: what is pushed leaves layer by layer during the forward, and only what a hook
proves. Two simulated instances; decode checks every slot that it reads."""

from __future__ import annotations

import itertools
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.worker import kv_connector_model_runner_mixin as runner

from p2p_engine.connector import compat, layer_hooks
from p2p_engine.connector.layer_hooks import LayerHooks
from p2p_engine.connector.metadata import P2pConnectorMetadata
from p2p_engine.send import shipment
from tests import marks
from tests.doubles.instance import BLOCK_SIZE, NUM_LAYERS
from tests.doubles.pair import ORDERS, MakePair, Pair, play, prompt_of
from tests.support import SeededRandom, eventually, records_of

pytestmark = marks.simulated_vllm

LENGTHS = (1, BLOCK_SIZE, BLOCK_SIZE + 1, 100, 300)


class ForwardFailed(Exception):
    """The model has raised."""


@pytest.fixture(autouse=True)
def every_layer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of these small caches is worth a chunk."""
    monkeypatch.setattr(shipment, "MIN_BYTES_BY_LAYER", 1)


@pytest.fixture
def make(make_pair: MakePair) -> MakePair:
    """Pairs whose prompts fit one step, and leave by layer."""
    return partial(make_pair, layerwise=True, max_tokens_per_step=1024)


def layer_bytes(pair: Pair, num_tokens: int) -> int:
    """The bytes of one layer of a prompt."""
    return -(-num_tokens // BLOCK_SIZE) * pair.block_bytes // NUM_LAYERS


def warm(pair: Pair) -> int:
    """Let P know D; returns what has left since."""
    pair.ask(prompt_of(20, seed=9))
    pair.run()
    return pair.sent_bytes()[0]


def check_nothing_leaves_early(pair: Pair, *, has_hooks: bool = True) -> None:
    """A prompt leaves after its forward, and arrives whole."""
    before, seen = warm(pair), []
    pair.p.has_hooks = has_hooks
    pair.ask(prompt_of(300), order="together")
    pair.p.during_forward = lambda layer: seen.append(pair.sent_bytes()[0])
    pair.run()
    assert seen[:NUM_LAYERS] == [before] * NUM_LAYERS
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_each_layer_leaves_while_the_next_is_computed(make: MakePair, transports: str) -> None:
    pair, seen = make(transports=transports), {}
    before = warm(pair)
    each = layer_bytes(pair, 300)

    def look(layer: int) -> None:
        eventually(lambda: pair.sent_bytes()[0] == before + layer * each)
        seen[layer] = pair.sent_bytes()[0] - before

    pair.ask(prompt_of(300), order="together")
    pair.p.during_forward = look
    pair.run(lambda: len(seen) == NUM_LAYERS)
    pair.p.during_forward = lambda layer: None
    pair.run()
    assert seen == {layer: layer * each for layer in range(NUM_LAYERS)}
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("send_type", ["PUT", "PUT_ASYNC", "GET"])
def test_every_length_arrives_whole(make: MakePair, send_type: str, order: str) -> None:
    for is_async, tokens in itertools.product((False, True), (64, 1024)):
        pair = make(send_type=send_type, is_async=is_async, max_tokens_per_step=tokens)
        for length in LENGTHS:
            pair.ask(prompt_of(length), order=order)
        pair.run()
        pair.check_answers(num_computed=1)
        pair.check_at_rest()


@pytest.mark.parametrize(
    "sides",
    [
        {"prefill": {"tp_size": 2}, "decode": {"block_size": 64}},
        {"prefill": {"pp_size": 2}, "decode": {"tp_size": 2}},
        {"prefill": {"tp_size": 2, "layout": "LBNHC"}, "decode": {"tp_size": 1}},
        {"attention": "latent"},
        {"attention": "sparse"},
        # Three groups want more blocks: a preempted prompt would be computed again.
        {"attention": "mixed", "prefill": {"num_blocks": 400}, "decode": {"num_blocks": 400}},
        {"prefill": {"layerwise": False}},
        {"decode": {"layerwise": False}},
        {"prefill": {"is_on_device": True}},
    ],
    ids=str,
)
def test_instances_of_all_kinds(make: MakePair, sides: dict[str, Any]) -> None:
    pair = make(**sides)
    for length, order in itertools.product(LENGTHS, ORDERS):
        pair.ask(prompt_of(length), order=order)
    pair.run(timeout=40)
    pair.check_answers(num_computed=1)
    pair.check_at_rest()


def test_whole_graphs_leave_after_the_forward(make: MakePair) -> None:
    """They are replayed without hooks."""
    pair = make()
    check_nothing_leaves_early(pair, has_hooks=False)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("send_type", ["PUT", "PUT_ASYNC"])
def test_a_forward_that_raises_is_never_decoded_from(
    make: MakePair, policy: str, layerwise: bool, is_async: bool, send_type: str
) -> None:
    """vLLM finishes the step all the same. D fails the request, or computes it itself."""
    pair = make(policy=policy, layerwise=layerwise, is_async=is_async, send_type=send_type)
    before = warm(pair)
    name = pair.ask(prompt_of(300), order="together")

    def fail(layer: int) -> None:
        if layer == NUM_LAYERS - 1:
            if layerwise:
                eventually(lambda: pair.sent_bytes()[0] > before)
            raise ForwardFailed

    pair.p.during_forward = fail
    with pytest.raises(ForwardFailed):
        pair.run()
    assert pair.sent_bytes()[0] <= before + (NUM_LAYERS - 1) * layer_bytes(pair, 300)
    pair.run(lambda: name in pair.d.finished, only=pair.d)
    if policy == "recompute":
        answer = pair._expected[name][1]
        assert pair.d.answers[name] == answer
        assert pair.d.num_computed_prompt_tokens[name] > 1
    else:
        assert not pair.d.answers[name]


def test_vllm_finishes_a_step_that_has_raised(
    make: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own model runner does, while the exception is handled; a step that is well loses
    nothing, also if it runs while another exception is handled."""
    connector = make().p.ranks[0].connector
    worker = connector._worker
    assert worker is not None
    lost: list[bool] = []
    monkeypatch.setattr(worker, "lose_step", lambda: lost.append(True))
    monkeypatch.setattr(runner, "get_kv_transfer_group", lambda: connector)
    monkeypatch.setattr(runner, "get_forward_context", SimpleNamespace)
    output: Any = SimpleNamespace(
        kv_connector_metadata=P2pConnectorMetadata(),
        has_sync_kv_loads=False,
        finished_req_ids=set(),
    )
    step = runner.KVConnectorModelRunnerMixin._get_kv_connector_output
    try:
        raise KeyError("before the step")
    except KeyError:
        with step(output):
            pass
    assert not lost
    with pytest.raises(ForwardFailed), step(output):
        raise ForwardFailed
    assert lost


def test_micro_batches_prove_nothing(make: MakePair) -> None:
    """Their hooks are called in threads of their own, for a part of the tokens each."""
    pair = make()
    before = warm(pair)
    worker = pair.p.ranks[0].connector._worker
    assert worker is not None
    pair.ask(prompt_of(300), order="together")
    seen = []

    def in_thread(layer: int) -> None:
        arguments = (f"layers.{layer}", torch.empty(0), None)
        hook = pair.p.ranks[0].connector.save_kv_layer
        other = threading.Thread(target=hook, args=arguments)
        other.start()
        other.join()
        seen.append(pair.sent_bytes()[0])

    pair.p.during_forward = in_thread  # before the layer of the main thread counts
    pair.run()
    assert seen[:NUM_LAYERS] == [before] * NUM_LAYERS
    pair.check_answers(num_computed=1)


def test_a_layer_that_runs_twice_is_not_trusted(
    make: MakePair, caplog: pytest.LogCaptureFixture
) -> None:
    """Its first bytes may have left. The request fails, and nothing leaves by layer any more."""
    pair = make(policy="recompute")
    before = warm(pair)
    pair.ask(prompt_of(300), order="together")

    def again(layer: int) -> None:
        if layer == 1:
            pair.p.ranks[0].connector.save_kv_layer("layers.0", torch.empty(0), None)

    pair.p.during_forward = again
    pair.run()
    [record] = records_of(layer_hooks.logger, caplog)
    assert "layers.0 ran twice" in record.getMessage()
    pair.check_answers()
    assert pair.sent_bytes()[0] <= before + layer_bytes(pair, 300)
    pair.p.during_forward = lambda layer: None
    pair.ask(prompt_of(300, seed=1), order="together")
    pair.run()
    pair.check_answers()
    pair.check_at_rest()


def test_abort_while_layers_leave(make: MakePair) -> None:
    """By either side; the other one's request ends, and every block is free again."""
    for side in ("p", "d"):
        pair = make(policy="recompute", transfer_timeout_seconds=5)
        before = warm(pair)
        pair.ask(prompt_of(300), order="together")

        def abort(layer: int, side: str = side, pair: Pair = pair, before: int = before) -> None:
            if layer == 1:
                eventually(lambda: pair.sent_bytes()[0] > before)
                instance = getattr(pair, side)
                names = pair.prefill_ids if side == "p" else pair.decode_ids
                instance.abort(names[-1])

        pair.p.during_forward = abort
        pair.run(timeout=30)
        pair.check_finished()
        pair.check_at_rest()


def test_layers_out_of_order_wait_for_the_end() -> None:
    """A layer counts when all before it do."""
    told: list[int] = []
    sends: Any = type("Sends", (), {
        "layer_names": ("a", "b", "c"), "leaves_by_layer": True,
        "layers_done": staticmethod(told.append),
    })()  # fmt: skip
    hooks = LayerHooks([sends])
    hooks.open()
    for name in ("b", "a", "unknown", "c", "b", "c"):
        hooks.layer_done(name)
    assert told == [1, 2, 3]
    hooks.close()
    assert not hooks.is_open


@pytest.mark.parametrize(
    ("parallel", "speculation", "obstacle"),
    [
        ({}, None, ""),
        ({"enable_dbo": True}, None, "micro-batches"),
        ({"ubatch_size": 2}, None, "micro-batches"),
        ({"use_ubatching": True}, None, "micro-batches"),
        ({}, object(), "speculative decoding"),
    ],
)
def test_settings_that_break_what_a_hook_proves(
    parallel: dict[str, Any], speculation: object, obstacle: str
) -> None:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel), speculative_config=speculation
    )
    assert compat.obstacle_to_layers(config) == obstacle


def test_with_a_draft_all_leaves_after_the_forward(
    make: MakePair, caplog: pytest.LogCaptureFixture
) -> None:
    pair = make(draft="eagle")
    assert "layerwise has no effect with speculative decoding" in caplog.text
    check_nothing_leaves_early(pair)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("send_type", ["PUT", "PUT_ASYNC"])
def test_anything_in_any_order(make: MakePair, rng: SeededRandom, send_type: str) -> None:
    """Random prompts, orders and aborts with few blocks: every request ends once, none is wrong."""
    for _ in range(4):
        pair = make(
            send_type=send_type,
            policy=rng.choice(["fail", "recompute"]),
            is_async=rng.random() < 0.5,
            num_blocks=rng.choice([30, 60, 120]),
            max_tokens_per_step=rng.choice([32, 64, 512]),
            has_prefix_cache=rng.random() < 0.7,
            transports=rng.choice(["shm", "tcp"]),
            transfer_timeout_seconds=3,
            lease_seconds=3,
        )
        play(pair, rng)
        pair.run(timeout=40)
        pair.check_finished()
        pair.check_at_rest()
