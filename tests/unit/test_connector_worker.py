"""The worker half against an engine whose every transfer the test ends by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import FullAttentionSpec

from p2p_engine.config import EngineConfig, SendMode
from p2p_engine.connector import loads
from p2p_engine.connector.groups import names_lost_blocks
from p2p_engine.connector.host_buffer import InPlace
from p2p_engine.connector.layer_group import GroupCache, LayerGroup
from p2p_engine.connector.orders import (
    BlockRange,
    EndedSend,
    Load,
    Party,
    SendStep,
    Stash,
    StepOrders,
)
from p2p_engine.connector.worker import WorkerHalf
from p2p_engine.errors import (
    P2pError,
    PeerLost,
    TransferCancelled,
    TransferError,
    TransferRejected,
    TransferTimeout,
)
from p2p_engine.memory.paged import PagedCache, PagedSink, PagedSource
from p2p_engine.peers.link import InstanceAddress
from p2p_engine.transfer import Transfer
from p2p_engine.wire.messages import CacheSpec, Manifest, TransferKey
from tests.gpu.recorded import EARLY_STAGE, EMPTY_STEPS, HOOKS, LOST_STEP, STEPS
from tests.support import records_of

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

BLOCK_SIZE, NUM_BLOCKS, RANK = 16, 64, 1
CACHE = PagedCache(np.array([0x1000]), np.array([BLOCK_SIZE]), np.array([BLOCK_SIZE]), NUM_BLOCKS)

WHOLE = Manifest(0, 7, [BLOCK_SIZE], 100)


@dataclass
class Sent:
    """One call of send or hold."""

    key: TransferKey
    peer: InstanceAddress | None
    source: PagedSource
    binding: bytes
    transfer: Transfer
    ready: bool

    @property
    def blocks(self) -> list[int]:
        return [int(block_id) for block_id in self.source.block_ids]


@dataclass
class EngineDouble:
    """Takes notes; does nothing by itself."""

    config: EngineConfig = field(default_factory=lambda: EngineConfig(transfer_timeout_seconds=0.1))
    sent: list[Sent] = field(default_factory=list)
    received: dict[str, tuple[PagedSink, Transfer, dict[str, Any]]] = field(default_factory=dict)
    abandoned: list[tuple[str, InstanceAddress | None, str]] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)  # of what was sent or held
    ended: list[tuple[int, bool]] = field(default_factory=list)  # generation, whether sent again
    discarded: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    cancelled: list[Transfer] = field(default_factory=list)
    refusal: P2pError | None = None
    on_cancel: Callable[[Transfer], None] = lambda transfer: None
    num_dropped: int = 0
    waits: list[float] = field(default_factory=list)
    on_wait: Callable[[], None] = lambda: None
    is_in_step: bool = False
    has_work: bool = False  # the step

    def step_began(self, *, has_work: bool) -> None:
        self.is_in_step, self.has_work = True, has_work

    def step_ended(self) -> None:
        self.is_in_step = False

    def _transfer(self, key: TransferKey) -> Transfer:
        if self.refusal is not None:
            raise self.refusal
        return Transfer(key, 0, threading.Condition(threading.RLock()), self._cancelled)

    def _cancelled(self, transfer: Transfer, reason: str) -> None:
        self.cancelled.append(transfer)
        self.on_cancel(transfer)

    def send(
        self,
        key: TransferKey,
        peer: InstanceAddress,
        source: PagedSource,
        *,
        binding: bytes,
        ready: bool,
        generation: int,
        by_layer: bool,
    ) -> Transfer:
        assert not by_layer
        self.generations.append(generation)
        self.sent.append(Sent(key, peer, source, binding, self._transfer(key), ready))
        return self.sent[-1].transfer

    def hold(
        self, key: TransferKey, source: PagedSource, *, binding: bytes, generation: int
    ) -> Transfer:
        self.generations.append(generation)
        self.sent.append(Sent(key, None, source, binding, self._transfer(key), ready=True))
        return self.sent[-1].transfer

    def stash(
        self, key: TransferKey, source: PagedSource, *, binding: bytes, **settings: Any
    ) -> Transfer:
        self.sent.append(Sent(key, None, source, binding, self._transfer(key), ready=True))
        return self.sent[-1].transfer

    def mark_ready(self, transfer: Transfer) -> None:
        next(item for item in self.sent if item.transfer is transfer).ready = True

    def abandon(
        self,
        key: TransferKey,
        peer: InstanceAddress | None,
        reason: str,
        *,
        binding: bytes,
        generation: int,
        is_sent_again: bool,
    ) -> None:
        self.ended.append((generation, is_sent_again))
        self.abandoned.append((key.transfer_id, peer, reason))

    def receive(self, key: TransferKey, sink: PagedSink, **settings: Any) -> Transfer:
        transfer = self._transfer(key)
        name = f"{key.transfer_id}/{key.group}" if key.group else key.transfer_id
        self.received[name] = sink, transfer, settings
        return transfer

    def discard(self, key: TransferKey, **settings: Any) -> None:
        self.discarded.append((key.transfer_id, settings))

    def use_weights(self, name: str) -> None:
        pass

    def drop_landed(self) -> None:
        self.num_dropped += 1

    def poll(self) -> None:
        pass

    def wait_for_change(self, timeout: float) -> None:
        self.waits.append(timeout)
        self.on_wait()


def end(transfer: Transfer, error: P2pError | None = None) -> None:
    """End a transfer as the engine would."""
    with transfer._changed:
        transfer.end(error)


def release(transfer: Transfer) -> None:
    """The bytes have left; the outcome is open."""
    with transfer._changed:
        transfer.release()


@pytest.fixture
def engine() -> EngineDouble:
    return EngineDouble()


def group(number: int = 0, window: int = 0) -> LayerGroup:
    spec = FullAttentionSpec(BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return LayerGroup(number, (f"layers.{number}",), spec, window, table=number)


def make_worker(
    engine: EngineDouble, *groups: LayerGroup, can_fail_requests: bool = True
) -> WorkerHalf:
    groups = groups or (group(),)
    made: Any = engine
    caches = [GroupCache(group, CACHE, InPlace()) for group in groups]
    return WorkerHalf(
        made,
        CacheSpec(rank=RANK),
        caches,
        can_fail_requests=can_fail_requests,
        names_lost_blocks=names_lost_blocks(groups),
        linger_seconds=0.5,
    )


@pytest.fixture
def worker(engine: EngineDouble) -> WorkerHalf:
    return make_worker(engine)


def party(
    name: str = "r",
    num_tokens: int = 100,
    mode: SendMode = SendMode.PUT_ASYNC,
    peer: str | None = "h:1",
) -> Party:
    return Party(name, TransferKey(f"t-{name}"), peer, name.encode(), mode, num_tokens)


def step(party: Party, table: np.ndarray[Any, Any], num_computed: int) -> SendStep:
    return SendStep(party, (table,), num_computed)


def blocks(first: int, num: int) -> np.ndarray[Any, Any]:
    return np.arange(first, first + num)


def run(worker: WorkerHalf, **orders: Any) -> Any:
    """One step, its hooks in the model runner's order."""
    metadata = StepOrders(**orders)
    worker.withdraw(metadata)
    worker.start_step(metadata)
    worker.start_loads(metadata)
    worker.finish_step()
    return worker.take_results()


# Sends


def test_blocks_leave_as_they_fill_and_the_ragged_one_last(
    engine: EngineDouble, worker: WorkerHalf
) -> None:
    table = blocks(10, 7)
    for num_computed in (10, 40, 47, 48, 99, 100):
        run(worker, sends=[step(party(), table, num_computed)])
    assert [item.blocks for item in engine.sent] == [[10, 11], [12], [13, 14, 15], [16]]
    assert [item.source.first_block for item in engine.sent] == [0, 2, 3, 6]
    assert all(item.ready and item.binding == b"r" for item in engine.sent)
    assert {str(item.peer) for item in engine.sent} == {"h:1"}


def test_bytes_may_move_only_after_the_forward(engine: EngineDouble, worker: WorkerHalf) -> None:
    metadata = StepOrders(sends=[step(party(), blocks(0, 7), 64)])
    worker.withdraw(metadata)
    worker.start_step(metadata)
    assert [item.ready for item in engine.sent] == [False]
    worker.finish_step()
    assert [item.ready for item in engine.sent] == [True]


def test_the_engine_knows_how_long_a_step_takes(engine: EngineDouble, worker: WorkerHalf) -> None:
    worker.start_step(StepOrders())
    assert engine.is_in_step
    worker.finish_step()
    worker.start_loads(StepOrders())
    assert engine.is_in_step
    worker.take_results()
    assert not engine.is_in_step


def test_the_engine_knows_which_steps_have_work(engine: EngineDouble, worker: WorkerHalf) -> None:
    """They compute, or vLLM waits for a load: a paused vLLM makes other steps only."""

    def has_work(**orders: Any) -> bool:
        run(worker, **orders)
        return engine.has_work

    assert not has_work()
    assert has_work(computes=True)
    assert has_work(loads=[load()])
    assert has_work(unwanted=[party("queued")])
    end(engine.received["t-r"][1])
    worker.take_results()
    assert not has_work(unwanted=[party("queued")])


def test_put_waits_and_gives_up_at_its_deadline(
    engine: EngineDouble, worker: WorkerHalf, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", logger="p2p_engine")
    put = party(mode=SendMode.PUT)
    metadata = StepOrders(sends=[step(put, blocks(0, 7), 100)])
    worker.start_step(metadata)
    waiting = threading.Thread(target=worker.finish_step)
    waiting.start()
    release(engine.sent[0].transfer)
    waiting.join(10)
    assert not waiting.is_alive()
    run(worker, sends=[step(replace(put, request_id="late"), blocks(0, 7), 100)])
    assert "PUT is not over at its deadline" in caplog.text


def test_get_holds_the_whole_prompt_once(engine: EngineDouble, worker: WorkerHalf) -> None:
    get = party(mode=SendMode.GET)
    for num_computed in (48, 96, 100):
        run(worker, sends=[step(get, blocks(0, 7), num_computed)])
    assert [(item.peer, item.blocks) for item in engine.sent] == [(None, list(range(7)))]


def test_held_blocks_are_reported_once_when_all_have_left(
    engine: EngineDouble, worker: WorkerHalf
) -> None:
    run(worker, sends=[step(party(), blocks(0, 7), 48)])
    run(worker, sends=[step(party(), blocks(0, 7), 100)])
    first, second = (item.transfer for item in engine.sent)
    assert (
        run(worker, ended_sends=[EndedSend(party(), None, is_held=True)]).finished_sending == set()
    )
    release(second)
    assert run(worker).finished_sending == set()
    release(first)
    assert run(worker).finished_sending == {"r"}
    end(first)
    end(second)
    assert run(worker).finished_sending == set()
    assert not engine.abandoned


def test_a_held_request_that_sent_nothing_is_reported_too(worker: WorkerHalf) -> None:
    assert run(worker, ended_sends=[EndedSend(party(), "gone", is_held=True)]).finished_sending == {
        "r"
    }
    assert (
        run(worker, ended_sends=[EndedSend(party(), "gone", is_held=False)]).finished_sending
        == set()
    )


def test_an_aborted_request_is_withdrawn_and_its_peer_told(
    engine: EngineDouble, worker: WorkerHalf
) -> None:
    run(worker, sends=[step(party(), blocks(0, 7), 48)])
    assert (
        run(worker, ended_sends=[EndedSend(party(), "aborted", is_held=True)]).finished_sending
        == set()
    )
    assert engine.cancelled == [engine.sent[0].transfer]
    assert engine.abandoned == [("t-r", InstanceAddress("h:1"), "aborted")]
    end(engine.sent[0].transfer, TransferCancelled("x"))
    assert run(worker).finished_sending == {"r"}


def test_each_request_is_an_attempt_of_its_own(engine: EngineDouble, worker: WorkerHalf) -> None:
    """Both have the same key: a peer that refuses what is left of the first must not refuse the
    second. If the second came before the first had ended, the peer hears only which has."""
    first, second = party("first"), replace(party("first"), request_id="second")
    run(worker, sends=[step(first, blocks(0, 7), 48)])
    run(worker, sends=[step(first, blocks(0, 7), 64), step(second, blocks(0, 7), 48)])
    ended = EndedSend(first, "aborted", is_held=False, is_sent_again=True)
    run(worker, ended_sends=[ended], sends=[step(second, blocks(0, 7), 64)])
    one, same, two, still = engine.generations
    assert one == same < two == still
    assert engine.ended == [(one, True)]


def test_without_an_address_whoever_asks_for_it_is_told(
    engine: EngineDouble, worker: WorkerHalf
) -> None:
    get = party(mode=SendMode.GET, peer=None)
    run(worker, ended_sends=[EndedSend(get, "aborted", is_held=False)])
    assert engine.abandoned == [("t-r", None, "aborted")]


@pytest.mark.parametrize(
    ("error", "is_told"),
    [(TransferTimeout("late"), True), (TransferRejected("no"), False), (PeerLost("gone"), False)],
)
def test_after_a_failed_chunk_nothing_more_leaves(
    engine: EngineDouble, worker: WorkerHalf, error: P2pError, is_told: bool
) -> None:
    """A peer that knows it is not told, but answered if it asks again."""
    run(worker, sends=[step(party(), blocks(0, 7), 48)])
    end(engine.sent[0].transfer, error)
    run(worker, sends=[step(party(), blocks(0, 7), 96)])
    run(worker, sends=[step(party(), blocks(0, 7), 100)])
    assert len(engine.sent) == 1
    assert [peer is not None for _, peer, _ in engine.abandoned] == [is_told]
    assert run(worker, ended_sends=[EndedSend(party(), None, is_held=True)]).finished_sending == {
        "r"
    }
    assert [peer is not None for _, peer, _ in engine.abandoned] == [is_told]


def test_preempted_blocks_are_withdrawn_before_the_step_and_sent_again(
    engine: EngineDouble, worker: WorkerHalf
) -> None:
    for num_computed in (32, 64, 96):
        run(worker, sends=[step(party(), blocks(0, 7), num_computed)])
    first, second, third = (item.transfer for item in engine.sent)
    end(first)
    release(third)  # left, but not all before it did
    engine.on_cancel = lambda transfer: end(transfer, TransferCancelled("preempted"))
    worker.withdraw(StepOrders(preempted=["r"]))
    assert engine.cancelled == [second]
    assert second.released
    run(worker, sends=[step(party(), blocks(20, 7), 100)])
    assert engine.sent[-1].blocks == list(range(22, 27))
    assert not engine.abandoned


def test_blocks_that_cannot_be_withdrawn_in_time_are_given_up(
    engine: EngineDouble, worker: WorkerHalf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be torn: nobody must take them for the request's KV."""
    monkeypatch.setattr("p2p_engine.connector.sends.WITHDRAW_SECONDS", 0.01)
    run(worker, sends=[step(party(), blocks(0, 7), 48)])
    worker.withdraw(StepOrders(preempted=["r"]))
    assert [name for name, _, _ in engine.abandoned] == ["t-r"]
    run(worker, sends=[step(party(), blocks(0, 7), 100)])
    assert len(engine.sent) == 1


def test_a_refused_send_costs_that_request_only(engine: EngineDouble, worker: WorkerHalf) -> None:
    engine.refusal = TransferError("held already")
    for mode in (SendMode.GET, SendMode.PUT_ASYNC):
        refused = party(mode.value, mode=mode)
        run(worker, sends=[step(refused, blocks(0, 7), 100)])
        ended = EndedSend(refused, None, is_held=True)
        assert run(worker, ended_sends=[ended]).finished_sending == {mode.value}


def test_a_prompt_that_is_held_for_another_request_is_not_abandoned(
    engine: EngineDouble, worker: WorkerHalf
) -> None:
    """It was sent twice: decode waits for the first, and must not be told that it will not come."""
    run(worker, sends=[step(party("first", mode=SendMode.GET), blocks(0, 7), 100)])
    engine.refusal = TransferError("held already")
    second = party("second", mode=SendMode.GET)
    run(worker, sends=[step(second, blocks(10, 7), 100)])
    ended = EndedSend(second, None, is_held=True)
    assert run(worker, ended_sends=[ended]).finished_sending == {"second"}
    assert not engine.abandoned
    assert not engine.cancelled


# Loads


def load(name: str = "r", first_block: int = 0, num_tokens: int = 100) -> Load:
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    wanted = BlockRange(first_block, blocks(30 + first_block, num_blocks - first_block))
    return Load(party(name, num_tokens), (wanted,))


def test_a_step_that_computes_nothing_waits_for_what_ends_meanwhile(
    engine: EngineDouble, worker: WorkerHalf
) -> None:
    run(worker, loads=[load()])
    _, transfer, _ = engine.received["t-r"]
    for num_waits in (0, 1, 2):  # the tokens of the step before wait for the first one
        assert worker.take_results(is_empty=True).finished_recving == set()
        assert engine.waits == [0.5] * num_waits
    engine.on_wait = lambda: end(transfer)
    assert worker.take_results(is_empty=True).finished_recving == {"r"}
    assert worker.take_results(is_empty=True).finished_recving == set()  # nothing is awaited now
    assert engine.waits == [0.5] * 3


def test_what_is_held_or_stashed_is_awaited_as_well(
    engine: EngineDouble, worker: WorkerHalf
) -> None:
    table = blocks(0, 7)
    held = EndedSend(party("held", mode=SendMode.GET), None, is_held=True)
    stash = Stash(party("stashed"), (table,), marks={}, seconds=9.0)
    run(worker, sends=[step(held.party, table, 100)])
    worker.take_results(is_empty=True)  # of a send whose request goes on, vLLM awaits nothing
    for orders, name in (({"ended_sends": [held]}, "held"), ({"stashes": [stash]}, "stashed")):
        run(worker, **orders)
        worker.take_results(is_empty=True)
        assert not engine.waits
        worker.take_results(is_empty=True)
        assert engine.waits.pop() == 0.5
        end(engine.sent[-1].transfer)
        assert worker.take_results(is_empty=True).finished_sending == {name}


def test_a_step_that_has_something_to_report_does_not_wait(
    engine: EngineDouble, worker: WorkerHalf
) -> None:
    worker.take_results(is_empty=True)
    run(worker, loads=[load(), load("other")])
    end(engine.received["t-r"][1])
    worker.take_results(is_empty=True)
    end(engine.received["t-other"][1])
    assert worker.take_results(is_empty=True).finished_recving == {"other"}
    assert not engine.waits


def test_a_load_is_reported_once_when_it_is_done(engine: EngineDouble, worker: WorkerHalf) -> None:
    assert run(worker, loads=[load(first_block=2)]).finished_recving == set()
    _, transfer, settings = engine.received["t-r"]
    assert settings == {
        "binding": b"r", "peer": InstanceAddress("h:1"), "pull": False, "has_held": False,
        "is_promised": False,
    }  # fmt: skip
    release(transfer)
    assert run(worker).finished_recving == set()
    end(transfer)
    results = run(worker)
    assert (results.finished_recving, results.failed_recving) == ({"r"}, set())
    assert not results.invalid_block_ids
    assert run(worker).finished_recving == set()


def test_the_log_names_the_error_of_a_failed_load(
    engine: EngineDouble, worker: WorkerHalf, caplog: pytest.LogCaptureFixture
) -> None:
    run(worker, loads=[load()])
    end(engine.received["t-r"][1], TransferTimeout("late"))
    run(worker)
    (record,) = records_of(loads.logger, caplog)
    assert record.getMessage() == "load failed: request=r error=TransferTimeout: late"


@pytest.mark.parametrize("first_block", [0, 2])
@pytest.mark.parametrize("landed", [(), (2, 3), (0, 3)])
@pytest.mark.parametrize("can_fail_requests", [True, False])
def test_a_failed_load_names_what_is_missing(
    engine: EngineDouble, first_block: int, landed: tuple[int, ...], can_fail_requests: bool
) -> None:
    """A good prefix survives; without one the request fails as a whole, where vLLM knows that."""
    worker = make_worker(engine, can_fail_requests=can_fail_requests)
    run(worker, loads=[load(first_block=first_block)])
    sink, transfer, _ = engine.received["t-r"]
    for block in landed:
        if block >= first_block:
            sink.landed(WHOLE, block, 1)
    end(transfer, TransferTimeout("late"))
    results = run(worker)
    assert results.finished_recving == {"r"}
    if can_fail_requests and first_block == 0 and 0 not in landed:
        assert (results.failed_recving, results.invalid_block_ids) == ({"r"}, set())
    else:
        missing = {30 + block for block in range(first_block, 7) if block not in landed}
        assert (results.failed_recving, results.invalid_block_ids) == (set(), missing)


def test_a_load_that_failed_with_all_blocks_in_place_is_not_trusted(
    engine: EngineDouble, worker: WorkerHalf
) -> None:
    run(worker, loads=[load()])
    sink, transfer, _ = engine.received["t-r"]
    sink.landed(WHOLE, 0, 7)
    end(transfer, TransferRejected("torn"))
    assert run(worker).failed_recving == {"r"}


def test_a_refused_load_fails_at_once(engine: EngineDouble, worker: WorkerHalf) -> None:
    engine.refusal = TransferError("being received already")
    results = run(worker, loads=[load()])
    assert (results.finished_recving, results.failed_recving) == ({"r"}, {"r"})


def test_a_cancelled_load_is_reported_only_when_nothing_can_land_any_more(
    engine: EngineDouble, worker: WorkerHalf
) -> None:
    run(worker, loads=[load()])
    _, transfer, _ = engine.received["t-r"]
    assert run(worker, cancelled_loads=["r"]).finished_recving == set()
    assert engine.cancelled == [transfer]
    assert run(worker).finished_recving == set()
    end(transfer, TransferCancelled("x"))
    results = run(worker)
    assert (results.finished_recving, results.failed_recving) == ({"r"}, set())
    assert not results.invalid_block_ids


def test_ordered_and_cancelled_in_one_step(engine: EngineDouble, worker: WorkerHalf) -> None:
    """vLLM 0.33 may tell of a load when its request has ended already."""
    engine.on_cancel = lambda transfer: end(transfer, TransferCancelled("x"))
    assert run(worker, loads=[load()], cancelled_loads=["r"]).finished_recving == {"r"}


def test_a_cancellation_that_crosses_the_report_is_ignored(
    engine: EngineDouble, worker: WorkerHalf
) -> None:
    run(worker, loads=[load()])
    end(engine.received["t-r"][1])
    assert run(worker).finished_recving == {"r"}
    assert run(worker, cancelled_loads=["r", "never-heard-of"]).finished_recving == set()


def test_unwanted_and_reset(engine: EngineDouble, worker: WorkerHalf) -> None:
    unwanted = [party("a", mode=SendMode.GET), party("b", peer=None)]
    run(worker, unwanted=unwanted, is_reset=True)
    assert engine.discarded == [
        ("t-a", {"binding": b"a", "peer": InstanceAddress("h:1"), "pull": True}),
        ("t-b", {"binding": b"b", "peer": None, "pull": False}),
    ]
    assert engine.num_dropped == 1


def test_after_a_reset_nothing_that_is_held_leaves(
    engine: EngineDouble, worker: WorkerHalf
) -> None:
    """Nor what one holds that is still computed: vLLM computes it again from its beginning."""
    engine.on_cancel = lambda transfer: end(transfer, TransferCancelled("x"))
    steps = [SendStep(party(name, mode=SendMode.GET), (blocks(10, 7),), 100) for name in "ab"]
    run(worker, sends=steps)
    run(worker, ended_sends=[EndedSend(party("a"), None, is_held=True)])
    results = run(worker, is_reset=True)
    assert engine.cancelled == [item.transfer for item in engine.sent]
    assert results.finished_sending == {"a"}


# Steps that are lost


RUNS = [*STEPS.values(), *EMPTY_STEPS.values(), EARLY_STAGE]


@pytest.mark.parametrize(("calls", "is_lost"), [*((run, False) for run in RUNS), (LOST_STEP, True)])
def test_a_step_that_vllm_has_not_finished_when_the_next_one_begins_is_lost(
    engine: EngineDouble, worker: WorkerHalf, calls: tuple[str, ...], is_lost: bool
) -> None:
    """And so is all that is computed later."""
    first = StepOrders(1, sends=[step(party(), blocks(0, 7), 64)])
    for name in calls:
        method, takes_orders = HOOKS.get(name, ("", False))
        if method:
            getattr(worker, method)(*([first] if takes_orders else []))
    sends = [step(party(), blocks(0, 7), 100), step(party("other"), blocks(10, 7), 100)]
    worker.start_step(StepOrders(2, sends=sends))
    told = [name for name, _, _ in engine.abandoned]
    assert told == (["t-r", "t-other"] if is_lost else [])


def test_a_step_whose_orders_never_came_is_lost(engine: EngineDouble, worker: WorkerHalf) -> None:
    """What has finished before is complete."""
    run(worker, number=1, sends=[step(party("whole"), blocks(0, 7), 100)])
    run(worker, number=2, ended_sends=[EndedSend(party("whole"), None, is_held=True)])
    run(worker, number=4, sends=[step(party(), blocks(10, 7), 100)])
    assert [name for name, _, _ in engine.abandoned] == ["t-r"]
    assert [item.transfer.done for item in engine.sent] == [False]


def test_a_load_that_is_refused_is_reported_as_not_loaded(
    engine: EngineDouble, worker: WorkerHalf
) -> None:
    refused = Load(party(), (BlockRange(0, blocks(30, 7)),), "too short")
    results = run(worker, loads=[refused])
    assert (results.finished_recving, results.failed_recving) == ({"r"}, {"r"})
    assert not engine.received
    assert [name for name, _ in engine.discarded] == ["t-r"]


# Several groups


@pytest.fixture
def two_groups(engine: EngineDouble) -> WorkerHalf:
    """All tokens in group 0, a window of 40 in group 1."""
    return make_worker(engine, group(0), group(1, window=40))


def load_both(name: str = "r") -> Load:
    ranges = (BlockRange(0, blocks(30, 7)), BlockRange(3, blocks(50, 4)))
    return Load(party(name), ranges)


def test_of_a_window_only_its_blocks_leave(engine: EngineDouble, two_groups: WorkerHalf) -> None:
    tables = blocks(10, 7), blocks(30, 7)
    for num_computed in (40, 48, 64, 100):
        run(two_groups, sends=[SendStep(party(), tables, num_computed)])
    sent = [(item.key.group, item.source.first_block, item.blocks) for item in engine.sent]
    assert sent == [
        (0, 0, [10, 11]), (0, 2, [12]), (0, 3, [13]), (1, 3, [33]),
        (0, 4, [14, 15, 16]), (1, 4, [34, 35, 36]),
    ]  # fmt: skip


def test_of_a_window_only_its_blocks_are_held(engine: EngineDouble, two_groups: WorkerHalf) -> None:
    step = SendStep(party(mode=SendMode.GET), (blocks(10, 7), blocks(30, 7)), 100)
    run(two_groups, sends=[step])
    held = [(item.key.group, item.source.first_block, item.blocks) for item in engine.sent]
    assert held == [(0, 0, list(range(10, 17))), (1, 3, [33, 34, 35, 36])]


def test_a_block_that_vllm_has_dropped_is_never_sent(
    engine: EngineDouble, two_groups: WorkerHalf
) -> None:
    """Resumed with more in the prefix cache than its prompt, a request lacks its window."""
    window = blocks(30, 7)
    window[3] = 0
    run(two_groups, sends=[SendStep(party(), (blocks(10, 7), window), 100)])
    assert [item.key.group for item in engine.sent] == [0]
    assert [reason for _, _, reason in engine.abandoned] == [
        "preempted, and resumed behind the window of its prompt"
    ]


def test_a_request_has_been_sent_when_each_group_has(
    engine: EngineDouble, two_groups: WorkerHalf
) -> None:
    run(two_groups, sends=[SendStep(party(), (blocks(10, 7), blocks(30, 7)), 100)])
    run(two_groups, ended_sends=[EndedSend(party(), None, is_held=True)])
    first, second = (item.transfer for item in engine.sent)
    end(second)
    assert run(two_groups).finished_sending == set()
    end(first)
    assert run(two_groups).finished_sending == {"r"}
    assert run(two_groups).finished_sending == set()


def test_a_request_has_been_loaded_when_each_group_has(
    engine: EngineDouble, two_groups: WorkerHalf
) -> None:
    run(two_groups, loads=[load_both()])
    end(engine.received["t-r/1"][1])
    assert run(two_groups).finished_recving == set()
    end(engine.received["t-r"][1])
    results = run(two_groups)
    assert (results.finished_recving, results.failed_recving) == ({"r"}, set())


@pytest.mark.parametrize("failing", ["t-r", "t-r/1"])
def test_what_fails_in_one_group_is_cancelled_in_the_others_and_fails(
    engine: EngineDouble, two_groups: WorkerHalf, failing: str
) -> None:
    """It is reported when nothing is written any more, and no blocks are named: those before a
    lost one may lie behind the window."""
    run(two_groups, loads=[load_both()])
    [other] = {"t-r", "t-r/1"} - {failing}
    end(engine.received[failing][1], PeerLost("gone"))
    assert run(two_groups).finished_recving == set()
    transfer = engine.received[other][1]
    assert engine.cancelled == [transfer]
    end(transfer, TransferCancelled("it was asked to"))
    results = run(two_groups)
    assert (results.finished_recving, results.failed_recving) == ({"r"}, {"r"})
    assert not results.invalid_block_ids


def test_discarding_and_failing_concern_every_group(
    engine: EngineDouble, two_groups: WorkerHalf
) -> None:
    run(two_groups, unwanted=[party()])
    assert len(engine.discarded) == 2
    run(two_groups, ended_sends=[EndedSend(party(), "aborted", is_held=False)])
    assert len(engine.abandoned) == 2


# Drafts


@pytest.fixture
def drafting(engine: EngineDouble) -> WorkerHalf:
    """A model's layers, and those of a draft, which share the one table."""
    return make_worker(engine, group(), replace(group(1), table=0, is_draft=True))


def test_a_drafts_blocks_leave_when_it_has_computed_them(
    engine: EngineDouble, drafting: WorkerHalf
) -> None:
    """vLLM drafts after the report; a step without a forward finished by none, before 0.31."""
    for lets_go in (
        drafting.finish_step,
        lambda: drafting.start_step(StepOrders()),
    ):
        engine.sent.clear()
        metadata = StepOrders(sends=[step(party(), blocks(0, 7), 100)])
        drafting.start_step(metadata)
        drafting.start_loads(metadata)
        drafting.take_results()
        assert [(item.key.group, item.ready) for item in engine.sent] == [(0, True), (1, False)]
        lets_go()
        assert [item.ready for item in engine.sent] == [True, True]
        run(drafting, ended_sends=[EndedSend(party(), None, is_held=False)])


def test_what_is_lost_of_a_draft_fails_nothing(engine: EngineDouble, drafting: WorkerHalf) -> None:
    run(drafting, loads=[Load(party(), (BlockRange(0, blocks(30, 7)),))])
    end(engine.received["t-r/1"][1], PeerLost("gone"))
    assert not engine.cancelled
    assert run(drafting).finished_recving == set()
    end(engine.received["t-r"][1])
    results = run(drafting)
    assert (results.finished_recving, results.failed_recving) == ({"r"}, set())
    assert not results.invalid_block_ids


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["load", "cancel", "send", "end", "release", "done", "fail", "preempt"]),
        st.integers(0, 4),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=200)
@given(EVENTS, st.integers(1, 3))
def test_each_id_is_reported_exactly_once_in_any_order(
    events: list[tuple[str, int]], num_groups: int
) -> None:
    """What vLLM asserts: no unknown id, none twice, none while its blocks may be touched."""
    engine = EngineDouble()
    engine.on_cancel = lambda transfer: None if transfer.released else release(transfer)
    worker = make_worker(engine, *(group(number, 40 * number) for number in range(num_groups)))
    owed_sends, owed_loads = set[str](), set[str]()
    sending, number = set[str](), 0
    for event, which in events:
        orders: dict[str, Any] = {}
        if event == "load":
            number += 1
            ranges = load(f"l{number}").ranges * num_groups
            orders["loads"] = [Load(party(f"l{number}"), ranges)]
            owed_loads.add(f"l{number}")
        elif event == "cancel" and owed_loads:
            orders["cancelled_loads"] = [sorted(owed_loads)[which % len(owed_loads)]]
        elif event == "send":
            number += 1
            sending.add(f"s{number}")
            tables = (blocks(0, 7),) * num_groups
            orders["sends"] = [SendStep(party(f"s{number}"), tables, 20 * (which + 1))]
        elif event == "end" and sending:
            name = sorted(sending)[which % len(sending)]
            sending.remove(name)
            owed_sends.add(name)
            failure = "aborted" if which == 0 else None
            orders["ended_sends"] = [EndedSend(party(name), failure, is_held=True)]
        elif event == "preempt" and sending:
            orders["preempted"] = [sorted(sending)[which % len(sending)]]
        else:
            _finish_some(engine, event, which)
        _collect(run(worker, **orders), engine, owed_sends, owed_loads)
    for transfer in _transfers(engine):
        end(transfer)
    _collect(run(worker), engine, owed_sends, owed_loads)
    assert (owed_sends, owed_loads) == (set(), set())


def _transfers(engine: EngineDouble) -> list[Transfer]:
    received = [transfer for _, transfer, _ in engine.received.values()]
    return [item.transfer for item in engine.sent] + received


def _finish_some(engine: EngineDouble, event: str, which: int) -> None:
    for transfer in _transfers(engine)[which::3]:
        if event == "release":
            release(transfer)
        else:
            end(transfer, TransferTimeout("late") if event == "fail" else None)


def _collect(
    results: Any, engine: EngineDouble, owed_sends: set[str], owed_loads: set[str]
) -> None:
    for transfer in _transfers(engine):
        name = transfer.key.transfer_id.removeprefix("t-")
        assert transfer.released or name not in results.finished_sending
        assert transfer.done or name not in results.finished_recving
    for reported, owed in (
        (results.finished_sending, owed_sends),
        (results.finished_recving, owed_loads),
    ):
        assert reported <= owed
        owed -= reported
    assert results.failed_recving <= results.finished_recving
