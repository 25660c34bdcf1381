"""The connector's hooks, in the recorded orders of vLLM's runners, ask of the worker half what the
replay without vLLM asks of it; whole graphs may be replayed, because nothing depends on layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch

from p2p_engine.connector import P2pNcclConnector
from p2p_engine.connector.metadata import P2pConnectorMetadata
from p2p_engine.connector.worker import StepResults
from tests.gpu.recorded import EMPTY_STEPS, FORWARD, HOOKS, LAYERS, STEPS

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own
LAYER_HOOKS = ("wait_for_layer_load", "save_kv_layer")


class HalfDouble:
    """Notes what is called."""

    def __init__(self) -> None:
        self.layers = SimpleNamespace(is_open=False)
        self.calls: list[tuple[str, bool]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: object, is_empty: bool = False) -> StepResults:
            assert arguments in ((), (ORDERS,))
            self.calls.append((name, bool(arguments)))
            return StepResults()

        return call


ORDERS = P2pConnectorMetadata()
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "handle_preemptions": (ORDERS,),
    "bind_connector_metadata": (ORDERS,),
    "start_load_kv": (None,),
    "wait_for_layer_load": ("layers.0",),
    "save_kv_layer": ("layers.0", torch.zeros(1), None),
    "get_transfer_results": (set(),),
}


def asked_by(steps: tuple[str, ...]) -> list[tuple[str, bool]]:
    connector: Any = object.__new__(P2pNcclConnector)
    connector._worker, connector._scheduler, connector._reporter = HalfDouble(), None, None
    connector._invalid_block_ids, connector._connector_metadata = set(), None
    connector._handled = None
    for name in steps:
        for hook in LAYER_HOOKS if name == LAYERS else () if name == FORWARD else (name,):
            getattr(connector, hook, lambda: None)(*ARGUMENTS.get(hook, ()))
    asked: list[tuple[str, bool]] = connector._worker.calls
    return asked


@pytest.mark.parametrize("steps", [*STEPS.values(), *EMPTY_STEPS.values()])
def test_hooks_ask_what_the_replay_asks(steps: tuple[str, ...]) -> None:
    assert asked_by(steps) == [HOOKS[name] for name in steps if name in HOOKS]


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_whole_graphs_may_be_replayed(runner: str) -> None:
    """What a full graph leaves out asks nothing of the worker half: piecewise is not required."""
    pieces, whole = asked_by(STEPS[f"{runner} piecewise"]), asked_by(STEPS[f"{runner} full"])
    assert P2pNcclConnector.requires_piecewise_for_cudagraph({}) is (pieces != whole)
    assert pieces == whole
