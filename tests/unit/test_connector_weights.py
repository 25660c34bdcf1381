"""Who says what an instance's weights are called: vLLM's engine core, of which the connector hears
though vLLM has no hook for that."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.engine.core import EngineCore

from p2p_engine.connector.weights import Weights, hear_of_weights
from p2p_engine.wire.bindings import MAX_NAME_BYTES, no_name
from tests import marks

pytestmark = marks.simulated_vllm


class ConnectorDouble:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def weights_labelled(self, label: str) -> None:
        self.told.append(label)

    def weights_changed(self, reset_encoder_cache: Callable[[], object]) -> None:
        assert reset_encoder_cache.__name__ == "reset_encoder_cache"
        self.told.append("changed")


class Executor:
    """Runs a method of the workers; `fails` raises."""

    def collective_rpc(self, method: Any, *_: Any) -> list[str]:
        if method == "update_weights_that_fails":
            raise RuntimeError(method)
        return [str(method)]


@pytest.fixture(autouse=True)
def own_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine core's methods be as before, after a test."""
    for name in ("set_weight_version", "collective_rpc"):
        monkeypatch.setattr(EngineCore, name, getattr(EngineCore, name))


def make_core(connector: object) -> Any:
    core = EngineCore.__new__(EngineCore)
    core.scheduler = SimpleNamespace(get_kv_connector=lambda: connector)  # type: ignore[assignment]
    core.model_executor = Executor()
    return core


def test_a_label_is_told_to_the_connectors_of_its_own_engine_core() -> None:
    hear_of_weights()
    hear_of_weights()
    one, other, inner = ConnectorDouble(), ConnectorDouble(), ConnectorDouble()
    several = SimpleNamespace(_connectors=[object(), inner])
    cores = [make_core(connector) for connector in (one, other, several, None)]
    for core in (cores[0], *cores[2:]):
        core.set_weight_version("step-41")
        assert core.get_weight_version() == "step-41"
    assert (one.told, other.told, inner.told) == (["step-41"], [], ["step-41"])


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("reload_weights", True), ("update_weights", True), ("start_weight_update", True),
        ("get_weights_from_trainer", True), (lambda worker: None, True),
        ("get_model_inspection", False), ("init_weight_transfer_engine", False),
        ("compute_weight_checksums", False),
    ],
)  # fmt: skip
def test_a_worker_method_counts_as_a_reset_unless_it_leaves_weights_alone(
    method: Any, changes: bool
) -> None:
    hear_of_weights()
    connector = ConnectorDouble()
    assert make_core(connector).collective_rpc(method) == [str(method)]
    assert connector.told == (["changed"] if changes else [])


def test_an_update_that_fails_counts_too() -> None:
    hear_of_weights()
    connector = ConnectorDouble()
    with pytest.raises(RuntimeError, match="update_weights_that_fails"):
        make_core(connector).collective_rpc("update_weights_that_fails")
    assert connector.told == ["changed"]


def test_a_core_that_is_being_made_has_nobody_to_tell() -> None:
    hear_of_weights()
    core = make_core(None)
    del core.scheduler
    assert core.collective_rpc("anything") == ["anything"]


def test_a_name_is_the_checkpoints_until_a_label_comes() -> None:
    weights = Weights("checkpoint-0011")
    assert (weights.name, weights.is_known) == ("checkpoint-0011", True)
    assert not weights.label("default")
    assert weights.label("step-41")
    assert not weights.label("step-41")
    assert weights.name == "step-41"
    assert weights.label("default")
    assert weights.name == "checkpoint-0011"


def test_an_unknown_name_equals_no_other_until_a_label_comes() -> None:
    one, other = Weights("c"), Weights("c")
    assert one.reset(is_empty=True)
    assert other.reset(is_empty=True)
    assert one.name != other.name
    assert not one.is_known
    assert one.label("default")
    assert (one.name, one.is_known) == ("c", True)


@pytest.mark.parametrize("keeps", [False, True])
def test_no_label_is_taken_before_the_prefix_cache_is_empty(
    keeps: bool, caplog: pytest.LogCaptureFixture
) -> None:
    weights = Weights("c", reset_keeps_weights=keeps)
    weights.discard()
    for _ in range(2):
        weights.reset(is_empty=False)
        weights.label("step-41")
        assert not weights.is_known
    assert "'step-41' is not taken" in caplog.text
    weights.reset(is_empty=True)
    assert not weights.is_known  # it may have come before the weights
    weights.label("step-41")
    assert weights.name == "step-41"


def test_of_a_checkpoint_without_a_name_a_label_says_the_name() -> None:
    weights = Weights(no_name())
    assert not weights.is_known
    assert not weights.label("default")
    assert not weights.is_known
    assert weights.label("step-41")
    assert weights.is_known


def test_a_label_may_begin_as_no_name_does() -> None:
    weights = Weights("c")
    assert weights.label("unknown-data-7")
    assert (weights.name, weights.is_known) == ("unknown-data-7", True)
    assert weights.reset(is_empty=True)
    assert not weights.is_known


def test_an_empty_label_names_nothing() -> None:
    """A binding without a name is one of an engine that compares none."""
    weights = Weights("c")
    weights.label("step-41")
    assert weights.label("")
    assert not weights.is_known
    assert weights.name.startswith("unknown-")


def test_a_reset_keeps_the_name_where_an_operator_says_so() -> None:
    weights = Weights("c", reset_keeps_weights=True)
    assert not weights.reset(is_empty=True)
    assert not weights.reset(is_empty=False)
    assert not weights.is_stale
    assert (weights.name, weights.is_known) == ("c", True)


@pytest.mark.parametrize("label", ["", "x" * 1000, "é" * 47, "step\n41", "\ud800"])
def test_any_label_becomes_a_name_that_a_binding_has_room_for(label: str) -> None:
    weights = Weights("c")
    weights.label(label)
    assert len(weights.name.encode()) <= MAX_NAME_BYTES
    other = Weights("c")
    other.label(label + "-")
    assert weights.name != other.name


def test_weights_have_changed_by_a_method_or_a_label_and_not_by_a_reset() -> None:
    """Who was started again has its checkpoint's weights, though a trainer pauses it, too."""
    for is_empty in (True, False):
        weights = Weights(no_name())
        weights.reset(is_empty=is_empty)
        weights.label("default")
        assert not weights.have_changed
    labelled, called = Weights("checkpoint-0"), Weights("checkpoint-0")
    labelled.label("step-42")
    called.discard()
    assert labelled.have_changed
    assert called.have_changed
    labelled.label("default")
    assert labelled.have_changed
