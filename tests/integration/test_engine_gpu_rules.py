"""What CUDA asks of an engine that lives in somebody else's process: the device of each thread, a
graph that another thread captures, host memory that is not registered yet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from p2p_engine import EngineConfig, P2pNcclEngine, TransferKey
from p2p_engine.config import GPU_TRANSPORTS, SendMode
from p2p_engine.errors import TransferCorrupted, TransportError
from p2p_engine.gpu import landing, pins
from p2p_engine.gpu.cuda import Cuda
from p2p_engine.peers.link import PeerAddress
from tests.doubles.gpu import GpuDouble
from tests.rigs.engines import MIB, PagedMemory, assert_idle, engines, settings, start
from tests.rigs.tensors import random_tensor
from tests.support import SeededRandom, eventually

DOUBLE = GpuDouble()  # before any test looks at the threads that there are
pytestmark = pytest.mark.usefixtures("no_leaks")
IDS = [3, 1, 2, 7]
KEY = TransferKey("request")
POOL_ONLY = {"kv_buffer_size": 4096, "mem_pool_size_gb": 64 * MIB / (1 << 30)}


def gpu_settings(transport: str, **changes: object) -> EngineConfig:
    return settings(transport, **{"device": "cuda:0", "nccl_library": DOUBLE.path, **changes})


@pytest.fixture(scope="module")
def two_gpus() -> Iterator[None]:
    """A second device, whose default stream exists and stays."""
    cuda = Cuda()
    with DOUBLE.fault(num_devices=2):
        cuda.use(1)
        cuda.fill(0, 0, 0, 0)
        cuda.synchronize(0)
        cuda.use(0)
        yield


def move(sender: P2pNcclEngine, receiver: P2pNcclEngine, name: str, rng: SeededRandom) -> None:
    ours, theirs, key = PagedMemory(8).fill(rng), PagedMemory(8), TransferKey(name)
    received = receiver.receive(key, theirs.sink(IDS))
    sender.send(key, PeerAddress(receiver.zmq_address), ours.source(IDS)).wait(10)
    received.wait(10)
    assert (theirs.data[:, IDS] == ours.data[:, IDS]).all()


@pytest.mark.parametrize("transport", GPU_TRANSPORTS)
def test_a_callers_thread_may_be_on_another_device(
    transport: str, rng: SeededRandom, two_gpus: None
) -> None:
    config = gpu_settings(transport, device="cuda:1")
    with P2pNcclEngine(config) as sender, P2pNcclEngine(config) as receiver:
        move(sender, receiver, "request", rng)
        assert_idle(sender, receiver)


@pytest.mark.parametrize("transport", GPU_TRANSPORTS)
def test_no_context_is_made_on_a_device_that_is_not_ours(
    transport: str, rng: SeededRandom, two_gpus: None
) -> None:
    """It would take half a gigabyte of another rank's GPU. A thread that has named no device stands
    on device 0 without a context there."""
    config = gpu_settings(transport, device="cuda:1")
    DOUBLE["contexts"] = 0
    with P2pNcclEngine(config) as sender, P2pNcclEngine(config) as receiver:
        in_a_new_thread(lambda: move(sender, receiver, "request", rng))
        assert_idle(sender, receiver)
    assert DOUBLE["contexts"] == 0b10


def in_a_new_thread(call: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  # raised again below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_devices_of_one_process_reach_each_others_memory(rng: SeededRandom, two_gpus: None) -> None:
    """Else a copy goes by way of the host, and a kernel of ours fails for the whole process."""
    staged = DOUBLE["staged_copies"]
    with (
        P2pNcclEngine(gpu_settings("cuda_ipc")) as sender,
        P2pNcclEngine(gpu_settings("cuda_ipc", device="cuda:1")) as receiver,
    ):
        move(sender, receiver, "request", rng)
        assert_idle(sender, receiver)
    assert DOUBLE["staged_copies"] == staged


def test_devices_of_one_process_that_cannot_use_nccl(rng: SeededRandom, two_gpus: None) -> None:
    with (
        DOUBLE.fault(peers_apart=1),
        P2pNcclEngine(gpu_settings("cuda_ipc,nccl")) as sender,
        P2pNcclEngine(gpu_settings("cuda_ipc,nccl", device="cuda:1")) as receiver,
    ):
        move(sender, receiver, "request", rng)
        eventually(lambda: sender.stats()["nccl"]["made"] == 1)
        assert_idle(sender, receiver)


@pytest.mark.parametrize("mode", list(SendMode))
def test_devices_of_one_process_between_which_writes_are_lost_use_nccl(
    mode: SendMode, rng: SeededRandom, two_gpus: None
) -> None:
    changes = {"send_type": mode, "connect_timeout_seconds": 5}
    with (
        DOUBLE.fault(lost_writes=1),
        start(gpu_settings("cuda_ipc,nccl", **changes)) as sender,
        start(gpu_settings("cuda_ipc,nccl", device="cuda:1", **changes)) as receiver,
    ):
        tensor = random_tensor(rng, MIB)
        sender.send_tensor(KEY, tensor, receiver.zmq_address)
        assert torch.equal(receiver.recv_tensor(KEY, sender.zmq_address, timeout=10), tensor)
        eventually(lambda: sender.stats()["nccl"]["made"] == 1)
        assert_idle(sender, receiver)


def test_what_an_older_proof_has_left_proves_nothing(rng: SeededRandom, two_gpus: None) -> None:
    with (
        P2pNcclEngine(gpu_settings("cuda_ipc,nccl")) as sender,
        P2pNcclEngine(gpu_settings("cuda_ipc,nccl", device="cuda:1")) as receiver,
    ):
        move(sender, receiver, "whole", rng)
        assert sender.stats()["nccl"]["made"] == 0
        with DOUBLE.fault(lost_writes=1):
            (link,) = sender._parts.links.all_ready()
            sender._parts.links.break_channel(link, TransportError("the test says so"))
            eventually(lambda: link.channel is None)
            move(sender, receiver, "lost", rng)
            eventually(lambda: sender.stats()["nccl"]["made"] == 1)
        assert_idle(sender, receiver)


def test_what_is_lost_after_the_proof_only_a_checksum_finds(
    rng: SeededRandom, two_gpus: None
) -> None:
    with (
        DOUBLE.fault(lost_writes=1, lost_after=DOUBLE["peer_copies"] + 1),
        start(gpu_settings("cuda_ipc,nccl", checksum=True)) as sender,
        start(gpu_settings("cuda_ipc,nccl", device="cuda:1")) as receiver,
    ):
        for number in range(2):
            sent = sender.send_tensor(
                TransferKey(f"{number}"), random_tensor(rng, MIB), receiver.zmq_address
            )
            with pytest.raises(TransferCorrupted):
                sent.wait(10)
        assert sender.stats()["nccl"]["made"] == 0
        tensor = random_tensor(rng, MIB)
        sender.send_tensor(KEY, tensor, receiver.zmq_address)
        assert torch.equal(receiver.recv_tensor(KEY, sender.zmq_address, timeout=10), tensor)
        eventually(lambda: sender.stats()["nccl"]["made"] == 1)
        assert_idle(sender, receiver)


@pytest.mark.parametrize("transport", GPU_TRANSPORTS)
def test_a_graph_that_another_thread_captures_stops_nothing(
    transport: str, rng: SeededRandom
) -> None:
    config = gpu_settings(transport)
    with P2pNcclEngine(config) as sender, P2pNcclEngine(config) as receiver:
        with DOUBLE.fault(is_capturing=1):
            for number in range(3):
                move(sender, receiver, f"request-{number}", rng)
        assert_idle(sender, receiver)


def test_what_goes_into_a_peers_pool_waits_until_that_is_registered(rng: SeededRandom) -> None:
    """A copy into memory that is not would hold up the thread that starts it, until it is done."""
    config = gpu_settings("cuda_ipc", kv_buffer_size=40_000)
    with P2pNcclEngine(config) as sender, P2pNcclEngine(config) as receiver:
        ours, theirs = PagedMemory(8).fill(rng), PagedMemory(8)
        peer, keys = PeerAddress(receiver.zmq_address), [TransferKey("buffer"), TransferKey("pool")]
        with DOUBLE.fault(register_hangs=1):
            sender.send(keys[0], peer, ours.source(IDS)).wait(10)
            waiting = sender.send(keys[1], peer, ours.source(IDS))
            eventually(lambda: receiver.stats()["live_bytes_by_place"]["pool"] > 0)
            eventually(lambda: "WRITING" in states(sender))
            assert sender._parts.gpu is not None
            for _ in range(20):  # its thread has looked at everything again
                sender._parts.gpu.device.run(lambda: None, 5.0)
            assert not waiting.released
        waiting.wait(10)
        for key in keys:
            theirs.data[:] = 0
            receiver.receive(key, theirs.sink(IDS)).wait(10)
            assert (theirs.data[:, IDS] == ours.data[:, IDS]).all()
        assert_idle(sender, receiver)


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of 1 MiB; locks of the driver are counted anew."""
    monkeypatch.setattr(pins, "SLICE_BYTES", MIB)
    monkeypatch.setattr(landing, "AHEAD_BYTES", 0)
    DOUBLE["longest_lock_milliseconds"] = 0


def fill_pool(
    sender: P2pNcclEngine, receiver: P2pNcclEngine, rng: SeededRandom, sizes: list[int]
) -> None:
    """Send tensors that nobody awaits into the receiver's pool, then receive them."""
    tensors = [random_tensor(rng, size) for size in sizes]
    for number, tensor in enumerate(tensors):
        key = TransferKey(f"tensor-{number}")
        sender.send_tensor(key, tensor, receiver.zmq_address).wait(10)
    for number, tensor in enumerate(tensors):
        assert torch.equal(
            receiver.recv_tensor(TransferKey(f"tensor-{number}"), timeout=10), tensor
        )


@pytest.mark.parametrize("transport", GPU_TRANSPORTS)
def test_a_pool_is_page_locked_in_slices_and_as_far_as_it_is_used(
    transport: str, rng: SeededRandom, small_slices: None
) -> None:
    """One call for all of it would keep every process of the host waiting."""
    slow = DOUBLE.fault(register_microseconds=5000)
    with slow, engines(2, transport, **POOL_ONLY) as (sender, receiver):
        assert receiver.stats()["pinned_bytes"] == {"pinned": 0, "refused": 0}
        DOUBLE["longest_lock_milliseconds"] = 0  # until now, for the kernel's lists
        fill_pool(sender, receiver, rng, [700_000] * 3)
        pinned = receiver.stats()["pinned_bytes"]["pinned"]
        assert 2 * MIB <= pinned <= 6 * MIB
        assert_idle(sender, receiver)
    assert DOUBLE["longest_lock_milliseconds"] <= 10


@pytest.mark.parametrize("transport", GPU_TRANSPORTS)
def test_more_than_cuda_page_locks_at_once_works(
    transport: str, rng: SeededRandom, small_slices: None
) -> None:
    limited = DOUBLE.fault(register_limit_bytes=MIB)
    with limited, engines(2, transport, **POOL_ONLY) as (sender, receiver):
        fill_pool(sender, receiver, rng, [700_000] * 3)
        assert receiver.stats()["pinned_bytes"]["refused"] == 0


@pytest.mark.parametrize("transport", GPU_TRANSPORTS)
def test_what_cuda_does_not_page_lock_is_used_all_the_same(
    transport: str, rng: SeededRandom, small_slices: None, caplog: pytest.LogCaptureFixture
) -> None:
    full = DOUBLE.fault(register_total_bytes=2 * MIB)
    with full, engines(2, transport, **POOL_ONLY) as (sender, receiver):
        fill_pool(sender, receiver, rng, [700_000] * 6)
        assert receiver.stats()["pinned_bytes"]["refused"] >= MIB
        assert_idle(sender, receiver)
    assert "stay pageable" in caplog.text


@pytest.mark.parametrize("transport", GPU_TRANSPORTS)
def test_a_copy_that_needs_several_slices_is_cut(
    transport: str, rng: SeededRandom, small_slices: None
) -> None:
    """CUDA refuses a copy that begins in one registration and ends in the next."""
    with engines(2, transport, **POOL_ONLY) as (sender, receiver):
        fill_pool(sender, receiver, rng, [5_000_000, 100, 3_000_000])
        assert_idle(sender, receiver)


def states(engine: P2pNcclEngine) -> list[str]:
    return [chunk.state.name for chunk in engine._parts.sender._chunks.values()]
