"""On a real GPU: the binding (T0), the pack kernel, the landing memory and the order of streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from p2p_engine import EngineConfig, P2pNcclEngine, TransferKey
from p2p_engine.gpu.cuda import Cuda
from p2p_engine.gpu.device import Device
from p2p_engine.memory.layout import one_region
from p2p_engine.transports.nccl.library import Nccl
from tests import marks
from tests.gpu import checks
from tests.gpu.machine import Machine
from tests.support import SeededRandom, eventually

pytestmark = [marks.gpu, pytest.mark.timeout(300)]
MIB = 1 << 20
gpu: Any = torch.cuda  # whose annotations differ between builds
SLOW_CYCLES = 50_000_000  # some 30 ms of a kernel that does nothing


@pytest.fixture
def device() -> Iterator[Device]:
    gpu.init()
    made = Device(Cuda(), 0)
    yield made
    assert made.close(10)


def test_nccl_sends_to_itself() -> None:
    """T0: the binding, its structure and streams, against the real library."""
    torch.cuda.set_device(0)
    nccl, stream = Nccl(), gpu.Stream()
    comm = nccl.init(nccl.unique_id(), 0, 2, num_ranks=1)
    eventually(lambda: not nccl.is_in_progress(comm), timeout=60)
    source = torch.randint(0, 256, (MIB,), dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    torch.cuda.synchronize()
    nccl.start_group()
    nccl.send(comm, source.data_ptr(), MIB, 0, stream.cuda_stream)
    nccl.recv(comm, target.data_ptr(), MIB, 0, stream.cuda_stream)
    nccl.end_group()
    eventually(lambda: not nccl.is_in_progress(comm), timeout=60)
    stream.synchronize()
    assert torch.equal(source, target)
    nccl.abort(comm)


@pytest.mark.parametrize("alignment", [1, 2, 4, 8, 16, 4096])
def test_the_pack_kernel_copies_any_regions(
    device: Device, rng: SeededRandom, alignment: int
) -> None:
    lengths = rng.numpy.integers(1, 70_000 // alignment + 2, 300) * alignment
    targets = np.cumsum(lengths) - lengths
    total = int(lengths.sum())
    starts = rng.numpy.integers(0, (total - int(lengths.max())) // alignment, 300) * alignment
    source = torch.randint(0, 256, (total,), dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    torch.cuda.synchronize()
    job = device.copy(source.data_ptr() + starts, target.data_ptr() + targets, lengths)
    assert job.wait(30)
    expected = torch.cat(
        [source[a : a + n] for a, n in zip(starts.tolist(), lengths.tolist(), strict=True)]
    )
    assert torch.equal(target, expected)


def test_slow_producers(record_property: Callable[[str, object], None]) -> None:
    figures = checks.race_slow_producers(Machine(), rounds=1000, nbytes=MIB)
    record_property("figures", figures)
    assert figures["stale_bytes"] == 0


def test_a_copy_waits_for_a_slow_kernel(device: Device) -> None:
    """Of torch's, which keeps the multiprocessors busy."""
    source = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    sides = [one_region(tensor.data_ptr(), MIB) for tensor in (source, target)]
    stream = gpu.Stream()
    for number in range(1, 20):
        with torch.cuda.stream(stream):
            gpu._sleep(SLOW_CYCLES)
            source.fill_(number)
        moment = device.record(stream.cuda_stream)
        job = device.copy(sides[0].addresses, sides[1].addresses, sides[0].lengths, after=[moment])
        assert job.wait(30)
        assert bool((target == number).all())


def test_tensors_by_way_of_the_receive_buffer() -> None:
    """Two engines of one process on one GPU."""
    config = EngineConfig(
        device="cuda:0", transports=("cuda_ipc",), kv_buffer_size=64 * MIB, mem_pool_size_gb=0.1
    )
    with P2pNcclEngine(config) as sender, P2pNcclEngine(config) as receiver:
        for number in range(20):
            key = TransferKey(f"request-{number}")
            tensor = torch.randn(1000 + number, 257, device="cuda", dtype=torch.bfloat16)
            sent = sender.send_tensor(key, tensor, receiver.zmq_address)
            received = receiver.recv_tensor(key, sender.zmq_address, timeout=30)
            sent.wait(30)
            assert torch.equal(received, tensor)
        assert receiver.stats()["live_bytes"] == 0
