"""vLLM puts an instance to sleep: blocks lose their memory, and have it again at the wake-up."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import RequestStatus

from p2p_engine.connector import compat
from p2p_engine.errors import ConfigError, TransferTimeout
from p2p_engine.wire.request_ids import new_transfer_id
from tests import marks
from tests.doubles.instance import continuation
from tests.doubles.pair import SEND_TYPES, MakePair, Pair, prompt_of
from tests.doubles.sleeping import ASKS_AGAIN, CoreDouble

pytestmark = marks.simulated_vllm

SOON = 8.0  # seconds: far less than a lease, and than any timeout of a transfer


class Sleepers:
    """A pair, and an engine core of vLLM's for each side."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.p, self.d = CoreDouble(pair.p), CoreDouble(pair.d)

    def cores(self, who: str) -> list[CoreDouble]:
        """Those of prefill, of decode, or of both."""
        return [getattr(self, name) for name in who]

    def put_to_sleep(self, who: str, *, level: int = 1, mode: str = "abort") -> None:
        """vLLM's `sleep`, until it has happened."""
        waits = [core.fall_asleep(level, mode) for core in self.cores(who)]
        self.pair.run(lambda: all(sleeps() for sleeps in waits), timeout=SOON)

    def wake(self, who: str, *, label: str = "") -> None:
        """vLLM's `wake_up`; the trainer may label the weights then."""
        for core in self.cores(who):
            assert core.wake_up() is not False
        if label:
            self.label(label)
        self._tell_workers()

    def label(self, label: str) -> None:
        """vLLM's `set_weight_version`."""
        for core in (self.p, self.d):
            core.set_weight_version(label)
        self._tell_workers()

    def _tell_workers(self) -> None:
        """vLLM's loop asks for work behind each call, and steps."""
        sides = (self.pair.p.connector, self.pair.d.connector)
        self.pair.run(lambda: not any(side.has_pending_push_work() for side in sides))


@pytest.fixture
def make_sleepers(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Sleepers]:
    """A pair whose cores can sleep, as vLLM 0.33. vLLM may ask for a sleep at any time."""
    monkeypatch.setattr(compat, "TELLS_OF_SLEEP", True)

    def make(**settings: Any) -> Sleepers:
        return Sleepers(make_pair(**{"policy": "recompute", **settings}))

    return make


MakeSleepers = Callable[..., Sleepers]


def check_moved(pair: Pair, seed: int) -> None:
    """A new prompt's KV comes from prefill; nothing is left of it."""
    name = pair.ask(prompt_of(300, seed))
    pair.run(timeout=SOON)
    assert pair.d.answers[name] == continuation(prompt_of(300, seed), 4)
    assert pair.d.num_computed_prompt_tokens[name] == 1
    pair.check_at_rest()


def check_computed(pair: Pair, name: str, prompt: list[int]) -> None:
    """Decode has computed the whole prompt itself, and answered right."""
    assert pair.d.answers[name] == continuation(prompt, 4)
    assert pair.d.num_computed_prompt_tokens[name] == len(prompt)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("send_type", SEND_TYPES)
@pytest.mark.parametrize("who", ["p", "d", "pd"])
def test_after_a_wake_up_kv_moves_again(
    make_sleepers: MakeSleepers, who: str, send_type: str, is_async: bool
) -> None:
    both = make_sleepers(send_type=send_type, is_async=is_async)
    check_moved(both.pair, 0)
    for turn in range(1, 3):
        both.put_to_sleep(who, level=turn)
        both.wake(who, label=f"step-{turn}")
        check_moved(both.pair, turn)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_peers_find_an_instance_that_woke_up_at_the_same_addresses(
    make_sleepers: MakeSleepers, tp_size: int
) -> None:
    """vLLM asks for the addresses again; nobody has asked for them before."""
    both = make_sleepers(tp_size=tp_size)
    directory = both.pair.p.connector._directory
    before = [rank.connector.get_handshake_metadata() for rank in both.pair.p.ranks]
    both.put_to_sleep("pd")
    both.wake("pd", label="step-1")
    assert "get_kv_connector_handshake_metadata" in both.p.model_executor.calls
    assert both.pair.p.connector._directory is directory
    after = [rank.connector.get_handshake_metadata() for rank in both.pair.p.ranks]
    assert [item.location for item in after] == [item.location for item in before]  # type: ignore[union-attr]
    check_moved(both.pair, 0)


def test_without_a_label_nothing_moves_and_nothing_waits(make_sleepers: MakeSleepers) -> None:
    """A sleep resets the caches, so the weights may be new."""
    both = make_sleepers()
    both.put_to_sleep("pd", level=2)
    both.wake("pd")
    prompt = prompt_of(300)
    name = both.pair.ask(prompt)
    both.pair.run(timeout=SOON)
    check_computed(both.pair, name, prompt)
    assert both.pair.d.stats["p2p_untransferred_requests"] == {"unknown_weights": 1}


@pytest.mark.parametrize(("level", "moves"), [(1, True), (2, False)])
def test_only_a_sleep_that_keeps_the_weights_keeps_their_name(
    make_sleepers: MakeSleepers, level: int, moves: bool
) -> None:
    """`reset_keeps_weights` is said of resets; level 2 throws the weights away."""
    both = make_sleepers(reset_keeps_weights=True)
    both.put_to_sleep("pd", level=level)
    both.wake("pd")
    name = both.pair.ask(prompt_of(300))
    both.pair.run(timeout=SOON)
    num_computed = 1 if moves else 300
    assert both.pair.d.num_computed_prompt_tokens[name] == num_computed
    both.label("step-1")
    check_moved(both.pair, 1)
    both.put_to_sleep("pd")  # that the name was lost once does not count for the next one
    both.wake("pd")
    check_moved(both.pair, 2)


@pytest.mark.parametrize("send_type", SEND_TYPES)
@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_prefill_sleeps_in_the_middle_of_a_prompt(
    make_sleepers: MakeSleepers, send_type: str, mode: str
) -> None:
    both = make_sleepers(send_type=send_type)
    pair, prompt = both.pair, prompt_of(300)
    name = pair.ask(prompt)
    for _ in range(3):
        pair.step()
    assert not pair.p.finished
    both.put_to_sleep("p", mode=mode)
    pair.run(lambda: name in pair.d.finished, timeout=SOON, only=pair.d)
    check_computed(pair, name, prompt)
    both.wake("p", label="step-1")
    pair.run(timeout=SOON)
    pair.check_at_rest()
    check_moved(pair, 1)


@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_what_waits_for_decode_is_gone_when_prefill_sleeps(
    make_sleepers: MakeSleepers, send_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It was spilled, so vLLM does not wait for it, or it has landed on decode."""
    both = make_sleepers(send_type=send_type)
    pair, prompt = both.pair, prompt_of(300)
    name = pair.ask(prompt, order="prefill first")
    pair.run(lambda: pair.prefill_ids[-1] in pair.p.finished, only=pair.p)
    pair.p.connector._planner._pressure.want()
    (sends,) = pair.p.ranks[0].connector._worker._sends  # type: ignore[union-attr]
    arrives = send_type != "GET"
    pair.run(
        lambda: pair.p.is_idle and not (arrives and (sends.take_released() or sends._trailing)),
        only=pair.p,
    )
    both.put_to_sleep("p")
    caplog.clear()
    began = time.monotonic()
    pair.ask_waiting()
    pair.run(lambda: name in pair.d.finished, timeout=SOON, only=pair.d)
    assert time.monotonic() - began < SOON
    if send_type == "GET":
        check_computed(pair, name, prompt)
        assert "none (asleep) here, named-" in caplog.text
    else:  # it is decode's, and of the weights that decode still has
        assert pair.d.answers[name] == continuation(prompt, 4)
        assert pair.d.num_computed_prompt_tokens[name] == 1
    both.wake("p")
    pair.run(timeout=SOON)
    pair.check_at_rest()


def test_vllm_waits_for_what_is_held_as_long_as_its_lease(make_sleepers: MakeSleepers) -> None:
    """vLLM does not sleep while a connector has blocks of requests that have finished."""
    both = make_sleepers(send_type="GET", lease_seconds=2.0)
    pair = both.pair
    pair.ask(prompt_of(300), order="prefill first")
    pair.run(lambda: pair.prefill_ids[-1] in pair.p.finished, only=pair.p)
    pair.drop_waiting()
    sleeps = both.p.fall_asleep()
    pair.step()
    assert not sleeps()
    pair.run(sleeps, timeout=SOON)
    both.wake("p", label="step-1")
    check_moved(pair, 1)


@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_decode_asks_while_prefill_sleeps(
    make_sleepers: MakeSleepers, send_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM queues prefill's leg until the wake-up; decode hears at once that nothing comes."""
    both = make_sleepers(send_type=send_type)
    pair, prompt = both.pair, prompt_of(300)
    both.put_to_sleep("p")
    name = pair.ask(prompt)
    pair.run(lambda: name in pair.d.finished, timeout=SOON, only=pair.d)
    check_computed(pair, name, prompt)
    assert "none (asleep) here, named-" in caplog.text
    pair.p.abort(pair.prefill_ids[-1])  # vLLM takes a step for that, asleep
    pair.step()
    both.wake("p", label="step-1")
    pair.run(timeout=SOON)
    check_moved(pair, 1)


@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_prefill_sends_while_decode_sleeps(
    make_sleepers: MakeSleepers, send_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    both = make_sleepers(send_type=send_type, reset_keeps_weights=True)
    pair, prompt = both.pair, prompt_of(300)
    both.put_to_sleep("d")
    name = pair.ask(prompt)
    prefill = pair.prefill_ids[-1]
    pair.run(lambda: prefill in pair.p.finished, timeout=SOON, only=pair.p)
    if send_type != "GET":
        pair.run(lambda: pair.p.is_idle, timeout=SOON, only=pair.p)
        assert pair.landed_bytes() == 0
        assert "weights: none (asleep) here, named-" in caplog.text
    both.wake("d")
    pair.run(timeout=SOON)
    assert pair.d.answers[name] == continuation(prompt, 4)
    assert pair.d.num_computed_prompt_tokens[name] == (1 if send_type == "GET" else 300)
    pair.check_at_rest()
    check_moved(pair, 1)


@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_decode_sleeps_while_it_loads(make_sleepers: MakeSleepers, send_type: str) -> None:
    both = make_sleepers(send_type=send_type, chunk_bytes=4096)
    pair = both.pair
    name = pair.ask(prompt_of(300))
    begin_to_load(pair, name, send_type)
    both.put_to_sleep("d")
    assert pair.d.finished[name] is RequestStatus.FINISHED_ABORTED
    pair.run(lambda: pair.p.is_idle, timeout=SOON)
    both.wake("d", label="step-1")
    pair.run(timeout=SOON)
    pair.check_at_rest()
    check_moved(pair, 1)


@pytest.mark.parametrize("side", ["p", "d"])
@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_no_byte_moves_once_memory_is_taken_whatever_is_open(
    make_sleepers: MakeSleepers, send_type: str, side: str
) -> None:
    """vLLM has not drained. What is lost is computed anew."""
    both = make_sleepers(send_type=send_type, chunk_bytes=4096, layerwise=send_type != "GET")
    pair, prompt = both.pair, prompt_of(300)
    name = pair.ask(prompt)
    begin_to_load(pair, name, send_type)
    asleep: CoreDouble = getattr(both, side)
    if not pair.p.finished:  # vLLM takes the blocks back, and no step tells the worker
        pair.p.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    worker: Any = asleep._instance.ranks[0].connector._worker
    if send_type != "GET" and side == "d":  # else all may have arrived, and nobody was told
        assert not all(item.released for item in open_transfers(worker))
    asleep.model_executor.sleep(1)
    assert all(item.released for item in open_transfers(worker))
    other = pair.d if side == "p" else pair.p
    for _ in range(20):
        other.step()
    asleep.model_executor.wake_up(None)  # checks that nobody has written
    pair.run(timeout=SOON)
    check_computed(pair, name, prompt)
    pair.check_at_rest()


def begin_to_load(pair: Pair, name: str, send_type: str) -> None:
    """Step until decode has a part of what prefill pushes; or may pull, all of which may have come
    by then. vLLM on decode has not been told that all is there."""
    for _ in range(3):
        pair.step()
    if send_type == "GET":
        pair.run(lambda: bool(pair.p.finished), only=pair.p)
    else:
        pair.run(lambda: pair.num_loaded_blocks(name) > 0, only=pair.d)


def _note(calls: list[str], name: str, *_: object) -> None:
    calls.append(name)


def open_transfers(worker: Any) -> list[Any]:
    parts = (*worker._loads, *worker._sends, *worker._stashing)
    return [transfer for part in parts for transfer in part.open_transfers()]


def test_a_copy_that_does_not_stop_keeps_vllm_from_taking_memory(
    make_sleepers: MakeSleepers, monkeypatch: pytest.MonkeyPatch
) -> None:
    from p2p_engine.connector import worker as module
    from p2p_engine.transfer import Transfer

    both = make_sleepers(send_type="GET")
    pair = both.pair
    pair.ask(prompt_of(300), order="prefill first")
    pair.run(lambda: pair.prefill_ids[-1] in pair.p.finished, only=pair.p)
    monkeypatch.setattr(Transfer, "cancel", lambda self, reason="": None)
    monkeypatch.setattr(module, "STOP_SECONDS", 0.05)
    with pytest.raises(TransferTimeout, match="a copy does not stop"):
        both.p.model_executor.sleep(1)
    assert not both.p.model_executor.is_sleeping
    monkeypatch.undo()
    name = pair.ask(prompt_of(200, 1))  # no wake-up comes: vLLM believes that nobody sleeps
    pair.run(lambda: name in pair.d.finished, timeout=SOON)
    assert pair.d.num_computed_prompt_tokens[name] == 1
    both.p.model_executor.sleep(1)
    both.p.model_executor.wake_up(None)


@pytest.mark.parametrize(
    "ask",
    [
        lambda core: core.sleep(1), lambda core: core.sleep(level=2, mode="keep"),
        lambda core: core.release_kv_cache_memory(),
        lambda core: core.collective_rpc("sleep", args=(1,)),
    ],
    ids=["sleep", "sleep and discard", "release", "method"],
)  # fmt: skip
def test_older_releases_may_not_take_memory(
    make_sleepers: MakeSleepers, monkeypatch: pytest.MonkeyPatch, ask: Callable[[Any], object]
) -> None:
    """They tell no connector. `enable_cumem_allocator` alone lets them do so."""
    both = make_sleepers()
    monkeypatch.setattr(compat, "TELLS_OF_SLEEP", False)
    with pytest.raises(ConfigError, match=r"only with vLLM 0\.33 or newer"):
        ask(both.p)
    assert both.p.model_executor.calls == []
    assert both.p.scheduler.pause_state is PauseState.UNPAUSED
    both.p.sleep(0)  # a pause
    both.p.resume_scheduler()
    check_moved(both.pair, 1)


def test_a_wake_up_in_parts_takes_part_when_the_caches_are_back(
    make_sleepers: MakeSleepers,
) -> None:
    """As a trainer does: weights, then new values for them, then the caches."""
    both = make_sleepers(send_type="GET")
    pair = both.pair
    both.put_to_sleep("p", level=2)
    assert both.p.wake_up(["weights"]) is not True
    both.label("step-1")
    first = pair.ask(prompt_of(300))
    pair.run(lambda: first in pair.d.finished, timeout=SOON, only=pair.d)
    check_computed(pair, first, prompt_of(300))
    pair.p.abort(pair.prefill_ids[-1])
    both.p.wake_up(["kv_cache"])
    pair.run(timeout=SOON)
    check_moved(pair, 1)


@pytest.mark.parametrize("who", ["p", "d"])
def test_stashes_do_not_outlive_a_sleep(make_sleepers: MakeSleepers, who: str) -> None:
    both = make_sleepers(
        stash_seconds=60.0, prefill_role="kv_both", decode_role="kv_both", num_blocks=300
    )
    pair, prompt, first = both.pair, prompt_of(300), new_transfer_id()
    pair.ask(prompt, by="params", transfer_id=first, order="prefill first", more={"stash": True})
    pair.run()
    (stashing,) = pair.d.ranks[0].connector._worker._stashing  # type: ignore[union-attr]
    assert [transfer.done for _, transfer in stashing._open if transfer is not None] == [False]
    both.put_to_sleep(who)
    both.wake(who, label="step-1")
    pair.check_at_rest()
    longer = [*prompt, *continuation(prompt, 4), *prompt_of(40, 5)]
    name = pair.ask(longer, by="params", earlier=first, more={"stash": False})
    pair.run(timeout=SOON)
    assert pair.d.answers[name] == continuation(longer, 4)
    computed = pair.p.num_computed_prompt_tokens[pair.prefill_ids[-1]]
    assert computed == len(longer) if who == "p" else computed < len(longer)  # its own cache
    pair.check_at_rest()


@pytest.mark.skipif(not ASKS_AGAIN, reason="vLLM calls these hooks since 0.33")
def test_vllm_calls_the_hooks_around_the_time_without_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's own worker, over a backend that notes what is called."""
    import torch
    from vllm.v1.worker import gpu_worker

    calls: list[str] = []

    def noting(*names: str) -> Any:
        return SimpleNamespace(**{name: partial(_note, calls, name) for name in names})

    accelerator = noting("synchronize")
    accelerator.get_memory_info = lambda: (1 << 30, 1 << 31)
    monkeypatch.setattr(torch, "accelerator", accelerator)
    group = noting("unregister_kv_caches", "restore_kv_caches")
    monkeypatch.setattr(gpu_worker, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(gpu_worker, "get_kv_transfer_group", lambda: group)
    worker: Any = object.__new__(gpu_worker.Worker)
    worker.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(enable_nccl_comm_suspend=False)
    )
    worker._sleep_mode_backend = noting("suspend", "resume", "discard")
    worker._sleep_saved_parameters = worker._sleep_saved_buffers = {}
    worker._sleep_saved_draft_buffers = {}
    worker.synchronize_device = lambda: None
    worker.sleep(1)
    worker.wake_up(["weights"])
    worker.wake_up(["kv_cache"])
    worker.discard(("kv_cache",))
    worker.wake_up()
    assert [call for call in calls if call != "synchronize"] == [
        "unregister_kv_caches", "suspend", "resume", "resume", "restore_kv_caches",
        "unregister_kv_caches", "discard", "resume", "restore_kv_caches",
    ]  # fmt: skip
    assert "_set_kv_connector_handshake_metadata" in inspect.getsource(EngineCore.wake_up)
