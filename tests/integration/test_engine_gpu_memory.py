"""Engines in what vLLM leaves of a GPU: 92 % are taken before they start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from p2p_engine import P2pNcclEngine, TransferKey
from p2p_engine.config import GPU_TRANSPORTS
from p2p_engine.errors import P2pError, TransportError
from p2p_engine.sizing import device_memory
from tests.doubles.gpu import GpuDouble
from tests.rigs.engines import MIB, assert_idle, engines, settings
from tests.rigs.tensors import random_tensor
from tests.support import SeededRandom, all_given_back, eventually

DOUBLE = GpuDouble()  # before any test looks at the threads that there are
TAKEN_PERCENT = 92
pytestmark = pytest.mark.usefixtures("fork_server", "no_leaks")


@pytest.fixture(autouse=True)
def everything_is_given_back() -> Iterator[None]:
    with all_given_back(DOUBLE):
        yield


def left(nbytes: int) -> dict[str, int]:
    """Faults with which this much is left on the device."""
    return {
        "taken_percent": TAKEN_PERCENT,
        "total_bytes": 100 * -(-nbytes // (100 - TAKEN_PERCENT)),
    }


@pytest.mark.parametrize("transport", GPU_TRANSPORTS)
def test_what_was_computed_before_the_start_is_enough(transport: str, rng: SeededRandom) -> None:
    needed = device_memory(settings(transport, nccl_max_groups=1))
    tensor = random_tensor(rng, 600_000)
    with (
        DOUBLE.fault(**left(2 * needed.at_most)),
        engines(2, transport, nccl_max_groups=1) as (sender, receiver),
    ):
        sender.send_tensor(TransferKey("request"), tensor, receiver.zmq_address).wait(10)
        assert torch.equal(receiver.recv_tensor(TransferKey("request"), timeout=10), tensor)
        assert_idle(sender, receiver)


@pytest.mark.parametrize("transport", GPU_TRANSPORTS)
def test_too_little_to_start_is_an_error_at_start(transport: str) -> None:
    needed = device_memory(settings(transport))
    short = DOUBLE.fault(**left(needed.at_start - 8 * MIB))
    with short, pytest.raises(TransportError, match="cuMemAlloc: out of memory"):
        P2pNcclEngine(settings(transport))


def test_too_little_for_a_group_costs_what_needs_one_and_no_more(rng: SeededRandom) -> None:
    """As soon as there is room, transfers arrive again."""
    needed, tensor = device_memory(settings("nccl")), random_tensor(rng, 1000)
    with (
        DOUBLE.fault(**left(2 * needed.at_start + 8 * MIB)),
        engines(2, "nccl", connect_timeout_seconds=5) as (sender, receiver),
    ):
        first = sender.send_tensor(TransferKey("first"), tensor, receiver.zmq_address)
        with pytest.raises(P2pError):
            first.wait(30)
        DOUBLE["taken_percent"] = 0
        second = TransferKey("second")

        def arrives() -> bool:
            try:
                sender.send_tensor(second, tensor, receiver.zmq_address).wait(10)
            except P2pError:
                return False
            return True

        eventually(arrives, timeout=60)
        assert torch.equal(receiver.recv_tensor(second, timeout=10), tensor)
        assert_idle(sender, receiver)


def test_without_room_for_the_pack_kernel_regions_are_copied_one_by_one(rng: SeededRandom) -> None:
    tensor = random_tensor(rng, 600_000)
    with (
        DOUBLE.fault(**left(21 * MIB)),
        engines(2, "cuda_ipc", kv_buffer_size=2 * MIB) as (sender, receiver),
    ):
        sender.send_tensor(TransferKey("request"), tensor, receiver.zmq_address).wait(10)
        assert torch.equal(receiver.recv_tensor(TransferKey("request"), timeout=10), tensor)
        assert sender._parts.gpu is not None
        assert sender._parts.gpu.device._pack.kernel is None
        assert_idle(sender, receiver)
