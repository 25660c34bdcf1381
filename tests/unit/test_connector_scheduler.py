"""The scheduler half with vLLM's own objects: what each schedule makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from p2p_engine.config import SendMode
from p2p_engine.connector.intent import ThisInstance
from p2p_engine.connector.layer_group import LayerGroup
from p2p_engine.connector.metadata import P2pConnectorMetadata
from p2p_engine.connector.scheduler import SchedulerHalf, _Loading
from p2p_engine.connector.states import num_tokens_before_last
from p2p_engine.connector.stats import P2pConnectorStats
from p2p_engine.connector.untransferred import AGAIN_SECONDS, QUIET_SECONDS, Untransferred
from p2p_engine.connector.weights import Weights
from p2p_engine.wire.bindings import weights_in
from p2p_engine.wire.messages import TransferKey
from tests.doubles.clock import Clock
from tests.vllm.adapters import make_adapter

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

BLOCK_SIZE = 16
SEND = {"do_remote_decode": True, "transfer_id": "t", "remote_host": "d", "remote_port": 2}
LOAD = {"do_remote_prefill": True, "transfer_id": "t", "remote_host": "p", "remote_port": 3}
NOTHING = P2pConnectorMetadata(weights="w")  # orders of a step that has none


def make_group(number: int = 0, window: int = 0) -> LayerGroup:
    spec = FullAttentionSpec(BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return LayerGroup(number, (f"layers.{number}",), spec, window, table=number)


def make_half(**more: Any) -> SchedulerHalf:
    instance = ThisInstance("kv_both", "[::1]:1", SendMode.PUT_ASYNC, has_random_ids=True)
    return SchedulerHalf(instance, Weights("w"), [make_group()], tp_size=2, **more)


@pytest.fixture
def half() -> SchedulerHalf:
    return make_half()


def make_request(params: Any, num_tokens: int = 40, request_id: str = "r", **more: Any) -> Request:
    request = Request(
        request_id=request_id,
        prompt_token_ids=list(range(num_tokens)),
        sampling_params=SamplingParams(max_tokens=8),
        pooling_params=None,
        **more,
    )
    request.kv_transfer_params = params
    return request


def make_output(
    *,
    new: Sequence[tuple[str, list[int], int]] = (),
    cached: Sequence[tuple[str, list[int] | None, int]] = (),
    resumed: Sequence[str] = (),
    preempted: Sequence[str] = (),
    scheduled: dict[str, int] | None = None,
) -> SchedulerOutput:
    """A step's schedule: (id, block ids, tokens computed before it) for each request."""
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = scheduled or {}
    output.preempted_req_ids = set(preempted)
    output.scheduled_new_reqs = [
        NewRequestData(name, [], [], None, None, (block_ids,), num_computed, None)
        for name, block_ids, num_computed in new
    ]
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=[name for name, _, _ in cached],
        resumed_req_ids=set(resumed),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None if ids is None else (ids,) for _, ids, _ in cached],
        num_computed_tokens=[num for _, _, num in cached],
        num_output_tokens=[0 for _ in cached],
    )
    return output


def sends(metadata: P2pConnectorMetadata) -> list[tuple[str, list[int], int]]:
    return [
        (step.party.request_id, step.tables[0].tolist(), step.num_computed_tokens)
        for step in metadata.sends
    ]


def allocated(*block_ids: int) -> Any:
    return SimpleNamespace(get_block_ids=lambda: (list(block_ids),))


def finish(half: SchedulerHalf, request: Request, status: RequestStatus) -> Any:
    request.status = status
    return half.request_finished(request, ([1, 2, 3],))


# Sending


def test_each_step_says_what_it_computes(half: SchedulerHalf) -> None:
    half.on_new_request(make_request(SEND))
    steps = [
        make_output(new=[("r", [7, 8], 16)], scheduled={"r": 10}),  # 16 from the prefix cache
        make_output(cached=[("r", None, 26)], scheduled={"r": 4}),  # fits the blocks that it has
        make_output(cached=[("r", [9, 10], 30)], scheduled={"r": 12}),  # 10, and 2 drafts
        make_output(cached=[("r", None, 41)], scheduled={"r": 1}),  # decoding
    ]
    assert [sends(half.build_metadata(step)) for step in steps] == [
        [("r", [7, 8], 26)],
        [("r", [7, 8], 30)],
        [("r", [7, 8, 9], 40)],  # the answer's blocks are not the prompt's
        [],
    ]


def test_resumed_requests_start_over_wherever_they_stand_in_the_schedule(
    half: SchedulerHalf,
) -> None:
    """Version by version they stand behind running ones, or among the new."""
    for name in ("a", "b"):
        half.on_new_request(make_request({**SEND, "transfer_id": name}, request_id=name))
    half.build_metadata(
        make_output(new=[("a", [1, 2, 3], 0), ("b", [4, 5, 6], 0)], scheduled={"a": 40, "b": 40})
    )
    metadata = half.build_metadata(
        make_output(preempted=["b", "stranger"], cached=[("a", [7], 40)], scheduled={"a": 1})
    )
    assert (metadata.preempted, sends(metadata)) == (["b"], [])
    metadata = half.build_metadata(
        make_output(
            cached=[("a", None, 41), ("b", [8, 5, 9], 16)],
            resumed=["b"],
            scheduled={"a": 1, "b": 24},
        )
    )
    assert sends(metadata) == [("b", [8, 5, 9], 40)]
    half.build_metadata(make_output(preempted=["b"]))
    metadata = half.build_metadata(make_output(new=[("b", [1, 2, 3, 4], 44)], scheduled={"b": 1}))
    assert sends(metadata) == [("b", [1, 2, 3], 40)]  # all of it is in the prefix cache


def test_preempted_and_resumed_in_one_step(half: SchedulerHalf) -> None:
    """As a cache reset does."""
    request = make_request(SEND)
    half.on_new_request(request)
    half.build_metadata(make_output(new=[("r", [1, 2, 3], 0)], scheduled={"r": 40}))
    metadata = half.build_metadata(
        make_output(
            preempted=["r"], cached=[("r", [4, 5, 6], 0)], resumed=["r"], scheduled={"r": 40}
        )
    )
    assert (metadata.preempted, sends(metadata)) == (["r"], [("r", [4, 5, 6], 40)])
    assert finish(half, request, RequestStatus.FINISHED_STOPPED)[0] is True


@pytest.mark.parametrize(
    "status",
    [
        RequestStatus.FINISHED_STOPPED,
        RequestStatus.FINISHED_LENGTH_CAPPED,
        RequestStatus.FINISHED_REPETITION,
    ],
)
def test_a_complete_prompt_is_held_and_answered(half: SchedulerHalf, status: RequestStatus) -> None:
    request = make_request(SEND)
    half.on_new_request(request)
    half.build_metadata(make_output(new=[("r", [1, 2, 3], 0)], scheduled={"r": 40}))
    is_held, params = finish(half, request, status)
    assert is_held
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": "t",
        "remote_host": "[::1]",
        "remote_port": 1,
        "remote_handshake_port": 1,
        "remote_notify_port": 1,
        "remote_request_id": "t",  # the one name that NixlConnector has
        "remote_block_ids": [[1, 2, 3]],
        "remote_num_tokens": 40,
        "remote_blocks_expiry_time": None,
        "remote_registration_generation": 0,
        "remote_engine_id": "[::1]:1",
        "tp_size": 2,
        "pp_size": 1,
        "dcp_size": 1,
        "transfer_mode": "push",
        "send_type": "PUT_ASYNC",
        "is_only_choice": True,
        "is_unsalted": True,
        "remote_held_tokens": 0,
    }
    (ended,) = half.build_metadata(make_output()).ended_sends
    assert (ended.party.request_id, ended.failure, ended.is_held) == ("r", None, True)
    assert half.build_metadata(make_output()) == NOTHING


@pytest.mark.parametrize("num_computed", [None, 20, 40])
@pytest.mark.parametrize(
    "status",
    [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR, RequestStatus.FINISHED_IGNORED],
)
def test_a_request_given_up_is_told_to_the_peer(
    half: SchedulerHalf, status: RequestStatus, num_computed: int | None
) -> None:
    request = make_request(SEND)
    half.on_new_request(request)
    if num_computed is not None:
        half.build_metadata(make_output(new=[("r", [1, 2, 3], 0)], scheduled={"r": num_computed}))
    is_held, params = finish(half, request, status)
    assert (is_held, params) == (num_computed is not None, None)
    (ended,) = half.build_metadata(make_output()).ended_sends
    assert status.name in str(ended.failure)
    assert ended.is_held == is_held


def test_a_request_that_ends_while_preempted_has_not_been_sent(half: SchedulerHalf) -> None:
    request = make_request(SEND)
    half.on_new_request(request)
    half.build_metadata(make_output(new=[("r", [1, 2, 3], 0)], scheduled={"r": 40}))
    half.build_metadata(make_output(preempted=["r"]))
    assert finish(half, request, RequestStatus.FINISHED_LENGTH_CAPPED) == (True, None)
    (ended,) = half.build_metadata(make_output()).ended_sends
    assert ended.failure is not None


# Loading


def test_all_that_is_not_computed_is_loaded_once(half: SchedulerHalf) -> None:
    request = make_request(LOAD)
    half.on_new_request(request)
    assert half.num_loadable_tokens(request, 16) == 24
    assert half.num_loadable_tokens(request, 16) == 24  # there was no room; vLLM asks again
    half.blocks_allocated(request, allocated(1, 2, 3), 24)
    (load,) = half.build_metadata(make_output()).loads
    assert load.party.key == TransferKey("t")
    assert (load.party.peer, load.party.num_tokens) == ("p:3", 40)
    (wanted,) = load.ranges
    assert (wanted.first_block, wanted.block_ids.tolist()) == (1, [2, 3])
    half.blocks_allocated(request, allocated(1, 2, 3, 4), 0)  # after the load
    assert half.num_loadable_tokens(request, 0) == 0  # failed, or preempted
    assert half.build_metadata(make_output()) == NOTHING


def test_a_load_that_vllm_cuts_short_is_refused(half: SchedulerHalf) -> None:
    request = make_request(LOAD)
    half.on_new_request(request)
    assert half.num_loadable_tokens(request, 16) == 24
    half.blocks_allocated(request, allocated(1, 2), 16)
    (load,) = half.build_metadata(make_output()).loads
    assert load.refusal == "vLLM loads 32 tokens, and 40 can come"
    assert load.ranges[0].block_ids.tolist() == [2]


def test_a_load_that_vllm_declines_is_unwanted(half: SchedulerHalf) -> None:
    request = make_request(LOAD)
    half.on_new_request(request)
    half.blocks_allocated(request, allocated(1, 2, 3), 0)
    (unwanted,) = half.build_metadata(make_output()).unwanted
    assert unwanted.request_id == "r"
    assert half.num_loadable_tokens(request, 0) == 0
    assert finish(half, request, RequestStatus.FINISHED_STOPPED) == (False, None)
    assert half.build_metadata(make_output()) == NOTHING


@pytest.mark.parametrize(("told", "num_loaded"), [(None, 40), (0, 40), (40, 40), (30, 30), (1, 1)])
def test_of_a_prompt_that_goes_on_with_prefills_that_one_is_loaded(
    half: SchedulerHalf, told: int | None, num_loaded: int
) -> None:
    request = make_request({**LOAD, "remote_num_tokens": told})
    half.on_new_request(request)
    assert half.num_loadable_tokens(request, 0) == num_loaded
    (party,) = half.build_metadata(make_output()).kept
    same = make_request(LOAD, num_loaded, "same")
    half.on_new_request(same)
    (other,) = half.build_metadata(make_output()).kept
    assert party.content == other.content
    assert party.num_tokens == other.num_tokens


def test_a_prompt_that_is_shorter_than_prefills_is_computed(half: SchedulerHalf) -> None:
    """Nothing of the transfer is of use: prefill is told so, by its name alone."""
    request = make_request({**LOAD, "remote_num_tokens": 41})
    half.on_new_request(request)
    assert half.num_loadable_tokens(request, 0) == 0
    half.blocks_allocated(request, allocated(1, 2, 3), 0)
    (unwanted,) = half.build_metadata(make_output()).unwanted
    assert unwanted.binding == b""


def test_only_a_responses_first_call_is_loaded(half: SchedulerHalf) -> None:
    """vLLM numbers the calls, and gives all of them the parameters of the request."""
    for number, num_loaded in ((0, 40), (1, 0)):
        request = make_request(LOAD, 40, f"resp_68ab_{number}-1a2b3c4d")
        half.on_new_request(request)
        assert half.num_loadable_tokens(request, 0) == num_loaded
    assert half.untransferred.take_counts() == {"other_prompt": 1}


@pytest.mark.parametrize("state", ["waiting", "open", "reported"])
def test_a_request_that_ends_says_what_becomes_of_its_load(half: SchedulerHalf, state: str) -> None:
    request = make_request(LOAD)
    half.on_new_request(request)
    if state != "waiting":
        half.blocks_allocated(request, allocated(1, 2, 3), 40)
        half.build_metadata(make_output())
    if state == "reported":
        half.workers_reported(KVConnectorOutput(finished_recving={"r", "stranger"}))
    assert finish(half, request, RequestStatus.FINISHED_ABORTED) == (False, None)
    metadata = half.build_metadata(make_output())
    assert [party.request_id for party in metadata.unwanted] == ["r"] * (state == "waiting")
    assert metadata.cancelled_loads == ["r"] * (state == "open")


def told(metadata: P2pConnectorMetadata) -> tuple[list[str], ...]:
    """Who is to be kept, dropped, discarded."""
    lists = (metadata.kept, metadata.dropped, metadata.unwanted)
    return tuple([party.request_id for party in parties] for parties in lists)


def test_what_is_aborted_and_asked_for_again_in_one_step_is_kept(half: SchedulerHalf) -> None:
    request = make_request(LOAD)
    half.on_new_request(request)
    assert told(half.build_metadata(make_output())) == (["r"], [], [])
    for _ in range(2):
        finish(half, request, RequestStatus.FINISHED_ABORTED)
        half.on_new_request(request)
    assert told(half.build_metadata(make_output())) == (["r"], [], [])
    finish(half, request, RequestStatus.FINISHED_ABORTED)
    assert told(half.build_metadata(make_output())) == ([], ["r"], ["r"])


def test_what_comes_and_is_aborted_in_one_step_is_discarded(half: SchedulerHalf) -> None:
    for request in [make_request(LOAD)] * 2:
        half.on_new_request(request)
        finish(half, request, RequestStatus.FINISHED_ABORTED)
    assert told(half.build_metadata(make_output())) == ([], ["r"], ["r"])


@pytest.mark.parametrize("is_one_step", [True, False])
@pytest.mark.parametrize("state", ["waiting", "open", "reported"])
def test_what_another_request_asks_for_is_not_dropped(
    half: SchedulerHalf, state: str, is_one_step: bool
) -> None:
    """A client has sent its request again before the first one was aborted, or was loaded."""
    first, second = make_request(LOAD), make_request(LOAD, request_id="again")
    half.on_new_request(first)
    if state != "waiting":
        half.blocks_allocated(first, allocated(1, 2, 3), 40)
    half.build_metadata(make_output())
    half.on_new_request(second)
    if not is_one_step:
        assert told(half.build_metadata(make_output())) == (["again"], [], [])
    if state == "reported":
        half.workers_reported(KVConnectorOutput(finished_recving={"r"}))
    finish(half, first, RequestStatus.FINISHED_ABORTED)
    kept, dropped, unwanted = told(half.build_metadata(make_output()))
    assert (kept, dropped, unwanted) == (["again"] * is_one_step, [], [])
    finish(half, second, RequestStatus.FINISHED_ABORTED)
    assert told(half.build_metadata(make_output())) == ([], ["again"], ["again"])


def test_peers_are_not_told_that_a_content_ended_that_is_sent_again(half: SchedulerHalf) -> None:
    request = make_request(SEND)
    half.on_new_request(request)
    finish(half, request, RequestStatus.FINISHED_ABORTED)
    half.on_new_request(request)
    (ended,) = half.build_metadata(make_output()).ended_sends
    assert ended.is_sent_again
    finish(half, request, RequestStatus.FINISHED_ABORTED)
    (ended,) = half.build_metadata(make_output()).ended_sends
    assert not ended.is_sent_again


def test_a_load_told_of_late_is_ordered_and_cancelled_together(half: SchedulerHalf) -> None:
    """0.33 may allocate between two schedules."""
    request = make_request(LOAD)
    half.on_new_request(request)
    half.blocks_allocated(request, allocated(1, 2, 3), 40)
    finish(half, request, RequestStatus.FINISHED_ABORTED)
    metadata = half.build_metadata(make_output())
    assert len(metadata.loads) == 1
    assert metadata.cancelled_loads == ["r"]


def test_what_all_ranks_have_reported_is_not_cancelled(half: SchedulerHalf) -> None:
    """vLLM aborts a request, hears in the same step that its load is over, and takes a new one
    under its id: only that one's load is open."""
    first, second = make_request(LOAD), make_request(LOAD)
    half.on_new_request(first)
    half.blocks_allocated(first, allocated(1, 2, 3), 40)
    half.build_metadata(make_output())
    finish(half, first, RequestStatus.FINISHED_ABORTED)
    half.workers_reported(KVConnectorOutput(finished_recving={"r"}))
    half.on_new_request(second)
    half.blocks_allocated(second, allocated(4, 5, 6), 40)
    metadata = half.build_metadata(make_output())
    assert [load.party.request_id for load in metadata.loads] == ["r"]
    assert metadata.cancelled_loads == []


# Who takes part


@pytest.mark.parametrize(
    "params", [None, {}, {"do_remote_prefill": "yes"}, {"do_remote_prefill": True}]
)
def test_others_are_left_alone(
    half: SchedulerHalf, params: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", logger="p2p_engine")
    request = make_request(params)
    half.on_new_request(request)
    assert half.num_loadable_tokens(request, 0) == 0
    half.blocks_allocated(request, allocated(1, 2, 3), 0)
    metadata = half.build_metadata(make_output(new=[("r", [1, 2, 3], 0)], scheduled={"r": 40}))
    assert metadata == NOTHING
    assert finish(half, request, RequestStatus.FINISHED_ABORTED) == (False, None)
    assert half.build_metadata(make_output()) == NOTHING
    assert len(set(caplog.messages)) == bool(params)  # a line for each that was malformed
    assert request.kv_transfer_params == params


def test_parameters_that_are_no_map_are_taken_away_from_vllm(half: SchedulerHalf) -> None:
    """`vllm_xargs` can set them to anything, and vLLM asks them for keys."""
    request = make_request("boom")
    half.on_new_request(request)
    assert request.kv_transfer_params is None


def test_parameters_are_never_changed(half: SchedulerHalf) -> None:
    for params in (SEND, LOAD):
        request = make_request(dict(params))
        half.on_new_request(request)
        half.blocks_allocated(request, allocated(1, 2, 3), 24)
        finish(half, request, RequestStatus.FINISHED_STOPPED)
        assert request.kv_transfer_params == params


def test_pooling_and_streamed_prompts_are_computed_locally(half: SchedulerHalf) -> None:
    pooling = Request("p", [1, 2], None, PoolingParams(task="embed"))
    streamed = make_request(LOAD, request_id="s", resumable=True)
    for request in (pooling, streamed):
        request.kv_transfer_params = dict(LOAD)
        half.on_new_request(request)
        assert half.num_loadable_tokens(request, 0) == 0


def test_media_that_have_no_identifiers_are_computed_locally(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They are counted instead: different ones have one name, and equal ones have two."""
    counting = make_half(identifies_media=False)
    for params in (SEND, LOAD):
        request = make_request(params, mm_features=[_feature("renderer0-mm-1-image-0", 3)])
        counting.on_new_request(request)
        assert counting.num_loadable_tokens(request, 0) == 0
        assert finish(counting, request, RequestStatus.FINISHED_STOPPED) == (False, None)
    assert "media have no identifiers" in caplog.text
    text = make_request(LOAD)
    counting.on_new_request(text)
    assert counting.num_loadable_tokens(text, 0) == 40


def test_workers_are_told_whether_a_step_computes(half: SchedulerHalf) -> None:
    output = make_output()
    assert not half.build_metadata(output).computes
    output.total_num_scheduled_tokens = 1
    assert half.build_metadata(output).computes


def test_a_prompt_beside_states_is_cut_where_neither_vllm_nor_the_model_minds() -> None:
    for num_tokens, media, expected in (
        (1, [], 1), (2, [], 2), (3, [], 2), (40, [], 39),
        (40, [_feature("image", 31)], 39), (40, [_feature("image", 32)], 40),
    ):  # fmt: skip
        request = make_request(SEND, num_tokens, mm_features=media)
        assert num_tokens_before_last(request) == expected


def test_the_binding_covers_all_that_decides_the_kv(half: SchedulerHalf, tmp_path: Path) -> None:
    loras = [
        LoRARequest("ada", 1, str(make_adapter(tmp_path / "1", 1))),
        LoRARequest("ada", 2, str(make_adapter(tmp_path / "2", 2))),
        LoRARequest("bob", 3, str(tmp_path / "1")),
    ]
    for lora in loras:
        half.adapter_loaded(lora)
        half._adapters.reset()
    variants = [
        make_request(LOAD),
        make_request(LOAD, num_tokens=41),
        make_request(LOAD, cache_salt="salt"),
        *(make_request(LOAD, lora_request=lora) for lora in loras),
        make_request(LOAD, mm_features=[_feature("image", 3)]),
        make_request(LOAD, mm_features=[_feature("image", 4)]),
        make_request(LOAD, mm_features=[_feature("other", 3)]),
    ]
    variants[1].prompt_token_ids = [*range(39), 99]
    bindings = set()
    for request in [*variants, make_request(LOAD)]:
        half._adapters.reset()  # of one name, before vLLM 0.31
        half.on_new_request(request)
        half.blocks_allocated(request, allocated(1, 2, 3), 40)
        (load,) = half.build_metadata(make_output()).loads
        bindings.add(load.party.binding)
        finish(half, request, RequestStatus.FINISHED_ABORTED)
        half.build_metadata(make_output())
    assert len(bindings) == len(variants)


def _feature(identifier: str, offset: int) -> Any:
    position = SimpleNamespace(offset=offset, length=8)
    return SimpleNamespace(identifier=identifier, mm_position=position)


# Several groups


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(num_gpu_blocks=20, enable_caching=False, hash_block_size=BLOCK_SIZE)


@pytest.fixture
def windowed(pool: BlockPool) -> SchedulerHalf:
    """All tokens in group 0, a window of 20 in group 1."""
    instance = ThisInstance("kv_both", "[::1]:1", SendMode.PUT_ASYNC, has_random_ids=True)
    half = SchedulerHalf(
        instance, Weights("w"), [make_group(), make_group(1, window=20)], tp_size=1
    )
    half.bind_pool(pool)
    return half


def allocated_in(*tables: list[int]) -> Any:
    return SimpleNamespace(get_block_ids=lambda: tables)


@pytest.mark.parametrize(("num_present", "first_blocks"), [(0, (0, 1)), (16, (1, 1)), (32, (2, 2))])
def test_with_a_window_all_but_the_last_token_is_loaded(
    windowed: SchedulerHalf, num_present: int, first_blocks: tuple[int, int]
) -> None:
    """So vLLM makes room for what the last token looks at, and for nothing behind that."""
    request = make_request(LOAD)
    windowed.on_new_request(request)
    num_tokens = windowed.num_loadable_tokens(request, num_present)
    assert num_tokens == 39 - num_present
    windowed.blocks_allocated(request, allocated_in([1, 2, 3], [0, 5, 6]), num_tokens)
    (load,) = windowed.build_metadata(make_output()).loads
    assert tuple(wanted.first_block for wanted in load.ranges) == first_blocks
    assert [wanted.block_ids.tolist() for wanted in load.ranges] == [
        [1, 2, 3][first_blocks[0] :], [0, 5, 6][first_blocks[1] :],
    ]  # fmt: skip


def test_a_prompt_of_which_only_the_last_token_is_missing_loads_nothing(
    windowed: SchedulerHalf,
) -> None:
    request = make_request(LOAD, num_tokens=1)
    windowed.on_new_request(request)
    assert windowed.num_loadable_tokens(request, 0) == 0
    windowed.blocks_allocated(request, allocated_in([1], [2]), 0)
    assert len(windowed.build_metadata(make_output()).unwanted) == 1


def test_each_group_has_a_table_of_its_own(windowed: SchedulerHalf) -> None:
    request = make_request(SEND)
    assert request.sampling_params is not None
    request.max_tokens = 1
    windowed.on_new_request(request)
    first = make_output(scheduled={"r": 20})
    first.scheduled_new_reqs = [NewRequestData("r", [], [], None, None, ([1, 2], [7, 8]), 0, None)]
    (step,) = windowed.build_metadata(first).sends
    assert [table.tolist() for table in step.tables] == [[1, 2], [7, 8]]
    second = make_output(cached=[("r", [3], 20)], scheduled={"r": 20})
    second.scheduled_cached_reqs.new_block_ids = [([3], [9])]
    (step,) = windowed.build_metadata(second).sends
    assert [table.tolist() for table in step.tables] == [[1, 2, 3], [7, 8, 9]]
    third = make_output(cached=[("r", [4], 0)], resumed=["r"], scheduled={"r": 40})
    third.scheduled_cached_reqs.new_block_ids = [([4, 5, 6], [1, 2, 3])]
    (step,) = windowed.build_metadata(third).sends
    assert [table.tolist() for table in step.tables] == [[4, 5, 6], [1, 2, 3]]


def prefill_of_both(num_scheduled: int) -> SchedulerOutput:
    """Of a prompt of 40: three blocks in each group; the window begins in the second."""
    output = make_output(scheduled={"r": num_scheduled})
    tables = [1, 2, 3], [7, 8, 9]
    output.scheduled_new_reqs = [NewRequestData("r", [], [], None, None, tables, 0, None)]
    return output


def pinned(pool: BlockPool) -> dict[int, int]:
    """The references to each block that has any."""
    return {b.block_id: b.ref_cnt for b in pool.blocks if b.ref_cnt > 0 and not b.is_null}


@pytest.mark.parametrize("max_tokens", [1, 8])
def test_windows_are_pinned_from_the_prompts_end_until_all_ranks_have_reported(
    windowed: SchedulerHalf, pool: BlockPool, max_tokens: int
) -> None:
    request = make_request(SEND)
    request.max_tokens = max_tokens
    windowed.on_new_request(request)
    windowed.build_metadata(prefill_of_both(30))
    assert pinned(pool) == {}
    windowed.build_metadata(make_output(cached=[("r", None, 30)], scheduled={"r": 10}))
    assert pinned(pool) == {8: 1, 9: 1}
    windowed.build_metadata(make_output(cached=[("r", None, 40)], scheduled={"r": 1}))
    is_held, _ = finish(windowed, request, RequestStatus.FINISHED_LENGTH_CAPPED)
    assert is_held
    windowed.build_metadata(make_output())
    assert pinned(pool) == {8: 1, 9: 1}
    for _ in range(2):
        windowed.workers_reported(KVConnectorOutput(finished_sending={"r", "stranger"}))
        assert pinned(pool) == {}


def test_a_preempted_request_gives_its_pins_back(windowed: SchedulerHalf, pool: BlockPool) -> None:
    """The workers withdraw what has not left before anybody writes there."""
    windowed.on_new_request(make_request(SEND))
    windowed.build_metadata(prefill_of_both(40))
    assert pinned(pool) == {8: 1, 9: 1}
    assert windowed.build_metadata(make_output(preempted=["r"])).preempted == ["r"]
    assert pinned(pool) == {}
    again = make_output(cached=[("r", [4], 0)], resumed=["r"], scheduled={"r": 40})
    again.scheduled_cached_reqs.new_block_ids = [([4, 5, 6], [0, 2, 3])]
    windowed.build_metadata(again)
    assert pinned(pool) == {2: 1, 3: 1}
    assert pool.null_block.ref_cnt == 0


def test_a_reset_is_told_to_the_workers_once(windowed: SchedulerHalf) -> None:
    windowed.weights_changed()
    assert windowed.has_orders_for_idle_workers()
    assert windowed.build_metadata(make_output()).is_reset
    assert not windowed.has_orders_for_idle_workers()
    assert not windowed.build_metadata(make_output()).is_reset


@pytest.mark.parametrize("is_refused", [True, False])
@pytest.mark.parametrize("is_asked", [True, False])
def test_a_reset_that_vllm_does_not_tell_of_is_found_once(
    windowed: SchedulerHalf, pool: BlockPool, is_asked: bool, is_refused: bool
) -> None:
    """Also one that fails: the weights may be new all the same. It is told by the question for
    work, which vLLM does not ask while a request waits, or by the step."""
    assert not windowed.has_orders_for_idle_workers()
    if is_refused:
        pool.get_new_blocks(1)
    assert pool.reset_prefix_cache() is not is_refused
    if is_asked:
        assert windowed.has_orders_for_idle_workers()
    metadata = windowed.build_metadata(make_output())
    assert metadata.is_reset
    assert metadata.weights.startswith("unknown-")
    assert not windowed.has_orders_for_idle_workers()
    assert not windowed.build_metadata(make_output()).is_reset


def test_only_what_has_nothing_yet_is_named_anew(half: SchedulerHalf) -> None:
    """What has blocks, or an earlier turn's KV, has KV of the weights before. What waits to load
    that has none: it is computed."""
    names = ["waits", "has blocks", "waits to load", "loads", "has loaded"]
    for name in names:
        half.on_new_request(make_request({**SEND, "transfer_id": name}, request_id=name))
    half._sending["has blocks"].has_steps = True
    for name in ("waits to load", "loads"):
        half._loading[name] = _Loading(half._sending[name].party, 16, "")
    half._loading["loads"].is_decided = half._loading["loads"].is_open = True
    half._loaded["has loaded"] = 0
    half.weights_labelled("step-41")
    called = {name: weights_in(half._sending[name].party.binding) for name in names}
    assert [name for name in names if called[name] == "step-41"] == ["waits", "waits to load"]
    assert {called[name] for name in ("has blocks", "loads", "has loaded")} == {"w"}
    assert half._loading["waits to load"].is_decided


# Requests whose KV does not move

UNREADABLE_ID = "cmpl-___prefill_addr_10.0.1.2___decode_addr_10.0.1.3_1-0-1a2b3c4d"
REASONS = {
    "no_id": make_request(None),
    "unusable_id": make_request(None, request_id=UNREADABLE_ID),
    "no_address": make_request({**LOAD, "send_type": "GET", "remote_host": None,
                                "remote_port": None}),
    "invalid_params": make_request({**LOAD, "remote_port": 0}),
    "unsupported": make_request(LOAD, resumable=True),
    "on_purpose": make_request({"do_remote_prefill": False}),
}  # fmt: skip


def moved(**counters: dict[str, float]) -> KVConnectorOutput:
    """The report of a step in which the workers have counted this."""
    return KVConnectorOutput(kv_connector_stats=P2pConnectorStats.of(counters, {}, 0))


def silent_half(clock: Clock, role: str = "kv_consumer") -> tuple[SchedulerHalf, list[str]]:
    """A scheduler half, and what it has told the router."""
    made, told = make_half(), list[str]()
    made.untransferred = Untransferred(role, clock)
    made.untransferred.tell = told.append
    return made, told


# Reasons that are nobody's mistake.
MEANT = ("unsupported", "on_purpose")


@pytest.mark.parametrize("reason", [name for name in REASONS if name not in MEANT])
def test_if_no_kv_moves_for_a_minute_one_warning_says_why(
    reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    silent, told = silent_half(clock)
    for clock.now in (0.0, QUIET_SECONDS - 1, QUIET_SECONDS + 1, QUIET_SECONDS + 2):
        silent.on_new_request(REASONS[reason])
    (line,) = (text for text in caplog.messages if "no KV has moved for 61 s" in text)
    assert told == [line]
    assert silent.untransferred.take_counts() == {reason: 4}
    assert silent.untransferred.take_counts() == {}


@pytest.mark.parametrize("reason", MEANT)
def test_what_is_meant_to_stay_is_counted_without_a_warning(
    reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(0.0)
    silent, told = silent_half(clock)
    for clock.now in (0.0, QUIET_SECONDS + 1):
        silent.on_new_request(REASONS[reason])
    assert not told
    assert not [text for text in caplog.messages if "no KV has moved" in text]
    assert silent.untransferred.take_counts() == {reason: 2}


def test_a_warning_comes_again_for_a_new_reason_or_after_an_hour(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A few transfers between many health checks end the silence again and again."""
    clock = Clock(0.0)
    silent, told = silent_half(clock)

    def be_silent(reason: str) -> None:
        silent.workers_reported(moved(p2p_landed_bytes={"": 1.0}))
        for _ in range(2):
            silent.on_new_request(REASONS[reason])
            clock.now += QUIET_SECONDS

    def num_warnings() -> int:
        return sum("no KV has moved" in text for text in caplog.messages)

    for _ in range(3):
        be_silent("no_id")
        assert num_warnings() == 1
        assert told[-1]  # the router is told each time
    be_silent("no_address")
    assert num_warnings() == 2
    be_silent("no_id")
    assert num_warnings() == 2
    clock.now += AGAIN_SECONDS
    be_silent("no_id")
    assert num_warnings() == 3


def test_what_moves_ends_the_silence(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock(0.0)
    silent, told = silent_half(clock)
    for metric in ("p2p_sent_bytes", "p2p_landed_bytes"):
        silent.on_new_request(REASONS["no_id"])
        clock.now += QUIET_SECONDS - 1
        silent.workers_reported(moved(**{metric: {"": 1.0}}))
        clock.now += 2
        silent.on_new_request(REASONS["no_id"])
        assert not caplog.messages
        silent.workers_reported(moved(**{metric: {"": 1.0}}))
    silent.on_new_request(REASONS["no_id"])
    clock.now += QUIET_SECONDS
    silent.on_new_request(REASONS["no_id"])
    silent.workers_reported(moved(p2p_sent_bytes={"": 1}))
    assert [bool(text) for text in told] == [True, False]


def test_failed_transfers_are_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock(0.0)
    silent, _ = silent_half(clock, "kv_both")
    failed = moved(
        p2p_transfers={"received PeerRefused": 3, "sent ok": 1}, p2p_expired_leases={"": 2}
    )
    silent.workers_reported(failed)
    clock.now = QUIET_SECONDS
    silent.workers_reported(failed)
    (line,) = caplog.messages
    assert "6 transfers received PeerRefused, 4 whose KV nobody asked for" in line


def test_an_instance_of_both_roles_may_be_asked_by_anybody() -> None:
    both, _ = silent_half(Clock(), "kv_both")
    both.on_new_request(REASONS["no_id"])
    assert both.untransferred.take_counts() == {}


def test_a_clients_id_takes_one_short_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    silent, _ = silent_half(Clock())
    evil = "cmpl-\n\x1b[31m" + "x" * 2_000_000
    silent.on_new_request(make_request({**LOAD, "remote_port": 0}, request_id=evil))
    (line,) = caplog.messages
    assert len(line) < 1000
    assert line.isprintable()


def test_what_is_of_no_use_is_logged_once_for_each_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    silent, _ = silent_half(Clock())
    for reason in ("unusable_id", "invalid_params") * 3:
        silent.on_new_request(REASONS[reason])
    assert len(caplog.messages) == 2
