"""Engines whose caches are on a GPU, on the stand-in for one: PUT and GET over NCCL and CUDA IPC,
overflow into the pool, slow producers, peers that are killed. In one process and in two."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator

import pytest

from p2p_engine import EngineConfig, P2pNcclEngine, TransferKey
from p2p_engine.config import GPU_TRANSPORTS
from p2p_engine.cuda import Cuda
from p2p_engine.errors import ConfigError, PeerRefused, TransferRejected, TransportError
from p2p_engine.peers import PeerAddress
from p2p_engine.transports.nccl.memory import estimated_bytes
from tests.engines import PagedMemory, assert_idle, settings
from tests.gpu_double import GpuDouble
from tests.support import SeededRandom, eventually

DOUBLE = GpuDouble()  # before any test looks at the threads that there are
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def double() -> Iterator[GpuDouble]:
    made = DOUBLE
    gc.collect()
    before = made.held()
    for name in ("wrong_threads", "size_mismatches"):
        made[name] = 0
    yield made
    gc.collect()
    eventually(lambda: made.held() == before, what=f"{made.held()} is not {before}")
    assert (made["wrong_threads"], made["size_mismatches"]) == (0, 0)


def gpu_settings(double: GpuDouble, transport: str = "nccl", **changes: object) -> EngineConfig:
    """Return settings of an engine on the stand-in."""
    return settings(
        transport,
        **{"device": "cuda:0", "nccl_library": double.path, "cudart_library": double.path,
           **changes},
    )  # fmt: skip


@pytest.fixture(params=GPU_TRANSPORTS)
def duo(request: pytest.FixtureRequest, double: GpuDouble) -> Iterator[list[P2pNcclEngine]]:
    config = gpu_settings(double, request.param)
    with P2pNcclEngine(config) as sender, P2pNcclEngine(config) as receiver:
        yield [sender, receiver]


KEY = TransferKey("request")
IDS = [3, 1, 2, 7]


def test_blocks_are_put(duo: list[P2pNcclEngine], rng: SeededRandom) -> None:
    sender, receiver = duo
    ours, theirs = PagedMemory(8).fill(rng), PagedMemory(8)
    sent = sender.send(KEY, PeerAddress(receiver.zmq_address), ours.source(IDS))
    received = receiver.receive(KEY, theirs.sink([0, 5, 6, 4]))
    received.wait(10)
    sent.wait(10)
    assert (theirs.data[:, [0, 5, 6, 4]] == ours.data[:, IDS]).all()
    assert not theirs.data[:, [1, 2, 3, 7]].any()
    assert_idle(sender, receiver)


def test_blocks_are_pulled(duo: list[P2pNcclEngine], rng: SeededRandom) -> None:
    sender, receiver = duo
    ours, theirs = PagedMemory(8).fill(rng), PagedMemory(8)
    held = sender.hold(KEY, ours.source(IDS))
    received = receiver.receive(
        KEY, theirs.sink(IDS), peer=PeerAddress(sender.zmq_address), pull=True
    )
    received.wait(10)
    held.wait(10)
    assert (theirs.data[:, IDS] == ours.data[:, IDS]).all()
    assert_idle(sender, receiver)


def test_held_blocks_can_be_spilled(double: GpuDouble, rng: SeededRandom) -> None:
    config = gpu_settings(double)
    with P2pNcclEngine(config) as sender, P2pNcclEngine(config) as receiver:
        ours, theirs = PagedMemory(8).fill(rng), PagedMemory(8)
        expected = ours.data.copy()
        held = sender.hold(KEY, ours.source(IDS))
        assert sender.spill(held)
        assert held.wait_released(10)
        assert sender.stats()["live_bytes_by_place"]["pool"] > 0
        ours.data[:] = 0
        peer = PeerAddress(sender.zmq_address)
        receiver.receive(KEY, theirs.sink(IDS), peer=peer, pull=True).wait(10)
        assert (theirs.data[:, IDS] == expected[:, IDS]).all()
        assert_idle(sender, receiver)


def test_many_at_once_in_both_directions(duo: list[P2pNcclEngine], rng: SeededRandom) -> None:
    open_transfers = []
    for number in range(40):
        source, destination = duo if number % 2 else duo[::-1]
        ours = PagedMemory(16, page_bytes=rng.choice([64, 4096, 20000])).fill(rng)
        theirs = PagedMemory(16, page_bytes=ours.data.shape[2])
        ids = rng.sample(range(16), rng.randint(1, 16))
        key = TransferKey(f"request-{number}")
        received = destination.receive(key, theirs.sink(ids))
        sent = source.send(key, PeerAddress(destination.zmq_address), ours.source(ids))
        open_transfers.append((sent, received, ours, theirs, ids))
    for sent, received, ours, theirs, ids in open_transfers:
        sent.wait(20)
        received.wait(20)
        assert (theirs.data[:, ids] == ours.data[:, ids]).all()
    assert_idle(*duo)


def test_a_slow_kernel_lets_no_old_byte_leave(duo: list[P2pNcclEngine], double: GpuDouble) -> None:
    """The source is marked ready behind a kernel that has not run yet."""
    sender, receiver = duo
    cuda = Cuda(double.path)
    cuda.use(0)
    stream = cuda.create_stream()
    ours, theirs = PagedMemory(8), PagedMemory(8)
    for value in range(1, 6):
        opened, key = threading.Event(), TransferKey(f"request-{value}")
        gate = HOST_FUNCTION(lambda _, opened=opened: opened.wait(20) and None)
        sent = sender.send(key, PeerAddress(receiver.zmq_address), ours.source(IDS), ready=False)
        received = receiver.receive(key, theirs.sink(IDS))
        cuda.library.cudaLaunchHostFunc(ctypes.c_void_p(stream), gate, None)
        cuda.fill(ours.data.ctypes.data, value, ours.data.nbytes, stream)
        sender.mark_ready(sent, stream=stream)
        eventually(lambda: receiver.stats()["live_bytes"] > 0)  # it is granted
        assert not sent.released
        opened.set()
        received.wait(10)
        assert (theirs.data[:, IDS] == value).all()
    cuda.destroy_stream(stream)


def test_a_sink_is_written_after_what_still_uses_it(
    duo: list[P2pNcclEngine], double: GpuDouble, rng: SeededRandom
) -> None:
    """vLLM zeroes new blocks in its stream: what is loaded comes after that."""
    sender, receiver = duo
    cuda = Cuda(double.path)
    cuda.use(0)
    stream, opened = cuda.create_stream(), threading.Event()
    ours, theirs = PagedMemory(8).fill(rng), PagedMemory(8)
    gate = HOST_FUNCTION(lambda _: opened.wait(20) and None)
    cuda.library.cudaLaunchHostFunc(ctypes.c_void_p(stream), gate, None)
    cuda.fill(theirs.data.ctypes.data, 0, theirs.data.nbytes, stream)
    received = receiver.receive(KEY, theirs.sink(IDS), stream=stream)
    sender.send(KEY, PeerAddress(receiver.zmq_address), ours.source(IDS)).wait(10)
    assert not received.done
    opened.set()
    received.wait(10)
    assert (theirs.data[:, IDS] == ours.data[:, IDS]).all()
    cuda.destroy_stream(stream)


def test_a_full_buffer_costs_no_device_memory(double: GpuDouble, rng: SeededRandom) -> None:
    """On one host the sender copies straight into the receiver's pool."""
    config = gpu_settings(double, "cuda_ipc", kv_buffer_size=40_000)
    with P2pNcclEngine(config) as sender, P2pNcclEngine(config) as receiver:
        ours, theirs = PagedMemory(8).fill(rng), PagedMemory(8)
        keys = [TransferKey(f"request-{number}") for number in range(4)]
        for key in keys:
            sender.send(key, PeerAddress(receiver.zmq_address), ours.source(IDS)).wait(10)
        places = receiver.stats()["landed_bytes_by_place"]
        assert places == {"blocks": 0, "buffer": 4 * 2 * 4096, "pool": 3 * 4 * 2 * 4096}
        for key in keys:
            theirs.data[:] = 0
            receiver.receive(key, theirs.sink(IDS)).wait(10)
            assert (theirs.data[:, IDS] == ours.data[:, IDS]).all()
        assert_idle(sender, receiver)


def test_what_nccl_cannot_place_waits(double: GpuDouble, rng: SeededRandom) -> None:
    config = gpu_settings(double, kv_buffer_size=40_000)
    with P2pNcclEngine(config) as sender, P2pNcclEngine(config) as receiver:
        ours, theirs = PagedMemory(8).fill(rng), PagedMemory(8)
        peer = PeerAddress(receiver.zmq_address)
        sends = [sender.send(TransferKey(f"r{n}"), peer, ours.source(IDS)) for n in range(3)]
        eventually(lambda: receiver.stats()["landed_bytes_by_place"]["buffer"] > 0)
        for number, sent in enumerate(sends):
            theirs.data[:] = 0
            receiver.receive(TransferKey(f"r{number}"), theirs.sink(IDS)).wait(10)
            sent.wait(10)
            assert (theirs.data[:, IDS] == ours.data[:, IDS]).all()
        assert_idle(sender, receiver)


def test_another_release_of_nccl_is_refused_with_both_named(
    double: GpuDouble, rng: SeededRandom
) -> None:
    with P2pNcclEngine(gpu_settings(double)) as receiver:
        with double.fault(nccl_version=23007):
            sender = P2pNcclEngine(gpu_settings(double))
        with sender:
            ours = PagedMemory(8).fill(rng)
            sent = sender.send(KEY, PeerAddress(receiver.zmq_address), ours.source(IDS))
            with pytest.raises(PeerRefused, match=r"NCCL 2\.30\.7 here, 2\.28\.9 there"):
                sent.wait(10)


def test_the_memory_of_groups_is_in_the_statistics(
    duo: list[P2pNcclEngine], rng: SeededRandom
) -> None:
    sender, receiver = duo
    ours, theirs = PagedMemory(8).fill(rng), PagedMemory(8)
    received = receiver.receive(KEY, theirs.sink(IDS))
    sender.send(KEY, PeerAddress(receiver.zmq_address), ours.source(IDS)).wait(10)
    received.wait(10)
    if sender.config.transports == ("nccl",):
        eventually(lambda: sender.stats()["nccl"]["estimated_bytes"] > estimated_bytes(2))
        assert sender.stats()["nccl"]["groups"] == 1
        assert sender.stats()["nccl"]["measured_bytes"] >= estimated_bytes(2)
    else:
        assert sender.stats()["nccl"] == {}


def test_a_withdrawn_send_ends_and_its_landing_too(
    duo: list[P2pNcclEngine], rng: SeededRandom
) -> None:
    sender, receiver = duo
    ours = PagedMemory(8).fill(rng)
    sent = sender.send(KEY, PeerAddress(receiver.zmq_address), ours.source(IDS), ready=False)
    eventually(lambda: receiver.stats()["live_bytes"] > 0)
    sent.cancel("preempted")
    assert sent.wait_released(10)
    eventually(lambda: receiver.stats()["live_bytes"] == 0)
    assert_idle(sender, receiver)


def test_what_the_receiver_refuses_ends_by_name(
    duo: list[P2pNcclEngine], rng: SeededRandom
) -> None:
    sender, receiver = duo
    receiver.discard(KEY, reason="nobody asked")
    sent = sender.send(KEY, PeerAddress(receiver.zmq_address), PagedMemory(8).fill(rng).source(IDS))
    with pytest.raises(TransferRejected, match="nobody asked"):
        sent.wait(10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cuda:7"}, "there are 1 GPUs"),
        ({"transports": "shm"}, "does not move memory"),
        ({"nccl_library": "/nowhere/libnccl.so"}, "/nowhere/libnccl.so"),
        ({"nccl_num_channels": 3}, "1, 2, 4"),
    ],
)
def test_what_cannot_work_is_refused_at_start(
    double: GpuDouble, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        P2pNcclEngine(gpu_settings(double, **{"transport": "nccl", **changes}))  # type: ignore[arg-type]


def test_no_memory_for_the_buffer_is_an_error_that_leaves_nothing(double: GpuDouble) -> None:
    with pytest.raises(Exception, match="cudaMalloc"):
        P2pNcclEngine(gpu_settings(double, kv_buffer_size=1 << 40))


def test_an_engine_without_its_device_thread_is_not_healthy(double: GpuDouble) -> None:
    with P2pNcclEngine(gpu_settings(double)) as engine:
        assert engine.healthy
        device = engine._gpu.device if engine._gpu is not None else None
        assert device is not None
        device._is_stopping = True
        eventually(lambda: not engine.healthy)
        with pytest.raises(TransportError, match="has ended"):
            device.run(lambda: None, 5.0)
        device._is_stopping = device._is_stopped = False
        device._thread = threading.Thread(target=device._run, name="p2p-device", daemon=True)
        device._thread.start()
        device.run(device._start, 5.0)
    assert not engine.healthy
