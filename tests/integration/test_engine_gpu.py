"""What engines on a GPU have beyond the others, on the double of one: slow producers, a pinned
pool, groups of NCCL, peers that die while a kernel waits for them, a device that fails."""

from __future__ import annotations

import ctypes
import hashlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial

import pytest
import torch

from p2p_engine import P2pNcclEngine, Transfer, TransferKey
from p2p_engine.config import GPU_TRANSPORTS
from p2p_engine.errors import ConfigError, P2pError, PeerRefused, TransferRejected, TransportError
from p2p_engine.gpu.cuda import Cuda
from p2p_engine.gpu.device import Device
from p2p_engine.gpu.landing import DeviceLanding
from p2p_engine.gpu.pack import Way
from p2p_engine.memory.arena import PROOF_BYTES
from p2p_engine.memory.layout import TensorSink, TensorSource
from p2p_engine.peers.link import PeerAddress
from p2p_engine.transports import cuda_ipc, cuda_ipc_proof, proof
from p2p_engine.transports.cuda_ipc import CudaIpcTransport
from p2p_engine.transports.nccl.group import Group, GroupState
from p2p_engine.transports.nccl.memory import estimated_bytes
from p2p_engine.transports.nccl.transport import NcclTransport
from p2p_engine.transports.proof import ASK, ProofDesk
from tests.doubles.gpu import GpuDouble
from tests.doubles.slow_kernel import SlowKernel
from tests.rigs.engines import (
    BLOCKS,
    MIB,
    PAGE_BYTES,
    PagedMemory,
    Peer,
    assert_idle,
    engines,
    patterned,
    settings,
    start,
)
from tests.rigs.tensors import random_tensor
from tests.support import SeededRandom, eventually

DOUBLE = GpuDouble()  # before any test looks at the threads that there are
KEY = TransferKey("request")
IDS = [3, 1, 2, 7]
pytestmark = pytest.mark.usefixtures("fork_server", "no_leaks")


@pytest.fixture(params=GPU_TRANSPORTS)
def duo(request: pytest.FixtureRequest) -> Iterator[list[P2pNcclEngine]]:
    with engines(2, request.param) as made:
        yield made


def test_a_slow_kernel_lets_no_old_byte_leave(duo: list[P2pNcclEngine]) -> None:
    """The source is marked ready behind a kernel that has not run yet."""
    sender, receiver = duo
    cuda = Cuda()
    cuda.use(0)
    stream = cuda.create_stream()
    ours, theirs = PagedMemory(8), PagedMemory(8)
    for value in range(1, 6):
        key = TransferKey(f"request-{value}")
        sent = sender.send(key, PeerAddress(receiver.zmq_address), ours.source(IDS), ready=False)
        received = receiver.receive(key, theirs.sink(IDS))
        kernel = SlowKernel(cuda, stream)
        cuda.fill(ours.data.ctypes.data, value, ours.data.nbytes, stream)
        sender.mark_ready(sent, stream=stream)
        eventually(lambda: receiver.stats()["live_bytes"] > 0)  # it is granted
        assert not sent.released
        kernel.end()
        received.wait(10)
        assert (theirs.data[:, IDS] == value).all()
    cuda.destroy_stream(stream)


def test_a_sink_is_written_after_what_still_uses_it(
    duo: list[P2pNcclEngine], rng: SeededRandom
) -> None:
    """vLLM zeroes new blocks in its stream: what is loaded comes after that."""
    sender, receiver = duo
    cuda = Cuda()
    cuda.use(0)
    stream = cuda.create_stream()
    ours, theirs = PagedMemory(8).fill(rng), PagedMemory(8)
    kernel = SlowKernel(cuda, stream)
    cuda.fill(theirs.data.ctypes.data, 0, theirs.data.nbytes, stream)
    received = receiver.receive(KEY, theirs.sink(IDS), stream=stream)
    sender.send(KEY, PeerAddress(receiver.zmq_address), ours.source(IDS)).wait(10)
    assert not received.done
    kernel.end()
    received.wait(10)
    assert (theirs.data[:, IDS] == ours.data[:, IDS]).all()
    cuda.destroy_stream(stream)


@pytest.mark.parametrize("transport", GPU_TRANSPORTS)
def test_a_device_that_fails_ends_everything_by_name(transport: str, rng: SeededRandom) -> None:
    """After a kernel's fault, anybody's, every call of CUDA reports it, and nothing runs."""
    with engines(2, transport, transfer_timeout_seconds=5) as (sender, receiver):
        ours, theirs = PagedMemory(8).fill(rng), PagedMemory(8)
        peer = PeerAddress(receiver.zmq_address)
        sent = sender.send(KEY, peer, ours.source(IDS), ready=False)
        received = receiver.receive(KEY, theirs.sink(IDS))
        eventually(lambda: receiver.stats()["live_bytes"] > 0)
        cuda = Cuda()
        cuda.use(0)
        stream = cuda.create_stream()
        kernel = SlowKernel(cuda, stream)
        sender.mark_ready(sent, stream=stream)
        with DOUBLE.fault(sticky_error=700):
            kernel.end()
            for transfer in (sent, received):
                with pytest.raises(P2pError):
                    transfer.wait(15)
            assert not theirs.data.any()
            assert not sender.healthy
            assert sender._parts.gpu is not None
            assert "the GPU has failed: cuEventQuery" in sender._parts.gpu.device.failure
            assert sender._parts.gpu.device.stop_jobs(5)
        cuda.destroy_stream(stream)


def connect(sender: P2pNcclEngine, receiver: P2pNcclEngine) -> None:
    """Have a mapping proven, for which the device's thread is needed."""
    key = TransferKey("connects")
    sender.send_tensor(key, torch.zeros(1, dtype=torch.uint8), receiver.zmq_address).wait(10)
    receiver.discard(key)
    eventually(lambda: receiver.stats()["live_bytes"] == 0)


def test_a_device_that_fails_frees_nothing_that_a_copy_may_still_write(rng: SeededRandom) -> None:
    """A fault on one stream does not prove that copies on others have ended."""
    ours, theirs = PagedMemory(8).fill(rng), PagedMemory(8)
    with engines(2, "cuda_ipc", transfer_timeout_seconds=2) as (sender, receiver):
        connect(sender, receiver)
        assert sender._parts.gpu is not None
        device = sender._parts.gpu.device
        stream = device._streams[Way.ON_DEVICE]
        kernel = device.run(lambda: SlowKernel(device.cuda, stream), 5.0)
        sent = sender.send(KEY, PeerAddress(receiver.zmq_address), ours.source(IDS))
        received = receiver.receive(KEY, theirs.sink(IDS))
        eventually(lambda: any(job.is_in_peer for job in device.open_jobs))
        device.post(lambda: device.lost(TransportError("cuEventQuery: an illegal access (700)")))
        with pytest.raises(P2pError):
            received.wait(15)
        eventually(lambda: receiver.stats()["quarantined_bytes"] > 0)
        assert not sent.released
        assert not sender.healthy
        kernel.end()
        for job in list(device.open_jobs):
            device.post(partial(job.end, "failed", "the test says so"))
        eventually(lambda: receiver.stats()["live_bytes"] == 0)


def test_a_fault_between_two_looks_at_a_groups_kernels_is_noticed(
    rng: SeededRandom, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = PagedMemory(8).fill(rng), PagedMemory(8)
    with engines(2, "nccl", transfer_timeout_seconds=3) as (sender, receiver):
        assert sender._parts.gpu is not None
        device, honest = sender._parts.gpu.device, Group._note_ends

        def fails(event: int) -> bool:
            raise TransportError("cuEventQuery: an illegal access (700)")

        def note_ends(group: Group) -> None:
            if group._device is device:
                monkeypatch.setattr(device.cuda, "is_complete", fails)
            honest(group)

        monkeypatch.setattr(Group, "_note_ends", note_ends)
        sent = sender.send(KEY, PeerAddress(receiver.zmq_address), ours.source(IDS))
        received = receiver.receive(KEY, theirs.sink(IDS))
        eventually(lambda: device.failure)
        for transfer in (sent, received):
            with pytest.raises(P2pError):
                transfer.wait(15)
        assert not sender.healthy
        monkeypatch.undo()


def test_a_copy_to_the_pool_that_hangs_costs_its_own_transfer_only(rng: SeededRandom) -> None:
    """The pool's memory is nobody else's until the copy has ended."""
    tensors = [random_tensor(rng, 600_000) for _ in range(3)]
    with engines(2, "nccl", kv_buffer_size=MIB) as (sender, receiver):
        with DOUBLE.fault(copies_hang=1):
            keys = [TransferKey(f"{number}") for number in range(3)]
            sender.send_tensor(keys[0], tensors[0], receiver.zmq_address).wait(10)
            stuck = sender.send_tensor(keys[1], tensors[1], receiver.zmq_address)
            eventually(lambda: DOUBLE["hanging_copies"])
            assert stuck.wait_released(10)
            assert torch.equal(receiver.recv_tensor(keys[0], timeout=10), tensors[0])
            sender.send_tensor(keys[2], tensors[2], receiver.zmq_address).wait(10)
            assert torch.equal(receiver.recv_tensor(keys[2], timeout=10), tensors[2])
            receiver.discard(keys[1], reason="nobody wants it")
            eventually(lambda: receiver.stats()["quarantined_bytes"] >= 600_000)
            assert receiver.stats()["live_bytes_by_place"]["pool"] > 600_000
        assert_idle(sender, receiver)
        with pytest.raises(TransferRejected):
            stuck.wait(10)


def test_close_keeps_what_a_copy_to_the_pool_may_still_write(rng: SeededRandom) -> None:
    with engines(2, "nccl", kv_buffer_size=0) as (sender, receiver):
        with DOUBLE.fault(copies_hang=1):
            tensor = random_tensor(rng, 600_000)
            sender.send_tensor(KEY, tensor, receiver.zmq_address)
            eventually(lambda: DOUBLE["hanging_copies"])
            receiver.close(0.2)
            assert receiver._parts.arena is not None
            assert len(receiver._parts.arena.arena.view(0, 8)) == 8  # it is mapped
        receiver.close()
        with pytest.raises(ValueError, match="closed"):
            receiver._parts.arena.arena.view(0, 8)


def test_close_keeps_a_buffer_into_which_a_peer_may_still_copy(rng: SeededRandom) -> None:
    """CUDA keeps it for nobody who has mapped it: the copy would go into what is there then."""
    with engines(2, "cuda_ipc") as (sender, receiver):
        connect(sender, receiver)
        num_allocations, opened = DOUBLE["live_allocations"], threading.Event()

        def stand_still() -> None:  # as on a busy machine
            opened.wait(20)

        assert sender._parts.gpu is not None
        sender._parts.gpu.device.post(stand_still)
        sent = sender.send_tensor(KEY, random_tensor(rng, 600_000), receiver.zmq_address)
        eventually(lambda: "WRITING" in states(sender))
        receiver.close()
        num_kept = DOUBLE["live_allocations"]
        opened.set()
        assert num_kept == num_allocations - 2  # what it packs with, and writes proofs from
        with pytest.raises(P2pError):
            sent.wait(10)
        assert isinstance(receiver._parts.arena, DeviceLanding)
        cuda, address = Cuda(), receiver._parts.arena.device_address
        cuda.on(0, lambda: cuda.free(address))


def test_writes_that_overlap_are_counted_once(rng: SeededRandom) -> None:
    """Else a rate that is computed from it is too low by as much as there are at once."""
    with engines(2, "cuda_ipc") as (sender, receiver):
        connect(sender, receiver)
        opened, tensor = threading.Event(), random_tensor(rng, 100_000)
        assert sender._parts.gpu is not None
        before, start_at = sender.stats()["writing_seconds"], time.monotonic()

        def stand_still() -> None:
            opened.wait(20)

        sender._parts.gpu.device.post(stand_still)
        keys = [TransferKey(f"{number}") for number in range(4)]
        sent = [sender.send_tensor(key, tensor, receiver.zmq_address) for key in keys]
        eventually(lambda: states(sender) == ["WRITING"] * 4)
        time.sleep(0.3)
        opened.set()
        for transfer in sent:
            transfer.wait(10)
        writing_seconds = sender.stats()["writing_seconds"] - before
        assert 0.3 <= writing_seconds <= time.monotonic() - start_at


def test_a_buffer_that_is_not_mapped_in_time_leaves_the_peer_to_nccl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver may keep the call waiting for as long as it likes. What comes of it is undone."""
    monkeypatch.setattr(cuda_ipc, "MAP_SECONDS", 0.3)
    config = settings("cuda_ipc", transports="cuda_ipc,nccl", connect_timeout_seconds=2)
    with P2pNcclEngine(config) as engine, Peer(config) as peer:
        with DOUBLE.fault(ipc_hangs=1):
            put(engine, peer, "there")
            eventually(lambda: engine.stats()["nccl"]["made"] == 1)
            assert engine.stats()["live_bytes"] == 0
        eventually(lambda: not any(t.name == "p2p-map" for t in threading.enumerate()))
        eventually(lambda: not DOUBLE["live_imports"])


def test_groups_that_break_and_copies_that_hang_lose_nothing_of_the_rest(
    monkeypatch: pytest.MonkeyPatch, rng: SeededRandom
) -> None:
    """Many transfers between three engines, by small slabs and mostly into the pool."""
    defaults = NcclTransport.__init__.__kwdefaults__ or {}
    monkeypatch.setitem(defaults, "slab_bytes", 64 << 10)
    # What a break has made to be sent twice lands for nobody, and ends with its lease.
    with engines(3, "nccl", kv_buffer_size=300_000, lease_seconds=1) as parties:
        open_transfers = []
        for number in range(40):
            sender, receiver = rng.sample(parties, 2)
            tensor, sink = random_tensor(rng, rng.choice([0, 1, 5000, 700_000])), TensorSink()
            received = receiver.receive(TransferKey(f"{number}"), sink)
            target, source = PeerAddress(receiver.zmq_address), TensorSource(tensor)
            sent = sender.send(TransferKey(f"{number}"), target, source)
            open_transfers.append((sent, received, tensor, sink))
            DOUBLE["copies_hang"] ^= rng.random() < 0.1
            if rng.random() < 0.1:
                transport = receiver._parts.transports["nccl"]
                assert isinstance(transport, NcclTransport)
                with receiver._parts.changed:
                    for pair in list(transport._senders.values()):  # dials add some
                        group = pair.group
                        if group is not None and group.state is GroupState.READY:
                            transport._end(pair, "the test says so")
        DOUBLE["copies_hang"] = 0
        for sent, received, tensor, sink in open_transfers:
            eventually(lambda: sent.done and received.done, 20)  # noqa: B023
            whole = sink.tensor is not None and torch.equal(sink.tensor, tensor)
            assert whole or isinstance(received.error, P2pError)
        assert_idle(*parties)


def test_another_release_of_nccl_is_refused_with_both_named(rng: SeededRandom) -> None:
    with P2pNcclEngine(settings("nccl")) as receiver:
        with DOUBLE.fault(nccl_version=23007):
            sender = P2pNcclEngine(settings("nccl"))
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
        assert sender.stats()["nccl"]["registered_bytes"] == 0
    else:
        assert sender.stats()["nccl"] == {}


def test_buffer_and_slabs_are_registered_if_the_setting_says_so(rng: SeededRandom) -> None:
    with engines(2, "nccl", nccl_register=True) as (sender, receiver):
        ours, theirs = PagedMemory(8).fill(rng), PagedMemory(8)
        received = receiver.receive(KEY, theirs.sink(IDS))
        sender.send(KEY, PeerAddress(receiver.zmq_address), ours.source(IDS)).wait(10)
        received.wait(10)
        size = sender.config.kv_buffer_size
        eventually(lambda: sender.stats()["nccl"]["registered_bytes"] >= size)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cuda:7"}, "there are 1 GPUs"),
        ({"transports": "shm"}, "does not move memory"),
        ({"nccl_library": "/nowhere/libnccl.so"}, "/nowhere/libnccl.so"),
        ({"nccl_num_channels": 3}, "1, 2, 4"),
    ],
)
def test_what_cannot_work_is_refused_at_start(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        P2pNcclEngine(settings(**{"transport": "nccl", **changes}))  # type: ignore[arg-type]


def test_cuda_that_shares_no_memory_leaves_the_other_transport(
    rng: SeededRandom, caplog: pytest.LogCaptureFixture
) -> None:
    """As under WSL, where cuIpcGetMemHandle refuses."""
    with DOUBLE.fault(export_fails=801):
        with pytest.raises(ConfigError, match=r"none can be used here.*cuIpcGetMemHandle"):
            P2pNcclEngine(settings("cuda_ipc"))
        sender, receiver = (
            start(settings("cuda_ipc", transports="cuda_ipc,nccl")) for _ in range(2)
        )
    with sender, receiver:
        said = sender.stats()["unusable_transports"]["cuda_ipc"]
        assert "cuIpcGetMemHandle" in said
        assert "the transport cuda_ipc cannot be used here: cuIpcGetMemHandle" in caplog.text
        tensor = random_tensor(rng, MIB)
        sender.send_tensor(KEY, tensor, receiver.zmq_address)
        assert torch.equal(receiver.recv_tensor(KEY, timeout=10), tensor)
        eventually(lambda: sender.stats()["nccl"]["made"] == 1)
        assert_idle(sender, receiver)


def test_a_device_that_does_not_answer_is_not_one_that_shares_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = Device.run

    def run(device: Device, call: Callable[[], object], timeout: float) -> object:
        if call.__qualname__.startswith(CudaIpcTransport.__name__):
            raise TransportError("the thread p2p-gpu did not answer within 10 s")
        return honest(device, call, timeout)

    monkeypatch.setattr(Device, "run", run)
    with pytest.raises(TransportError, match="did not answer"):
        P2pNcclEngine(settings("cuda_ipc", transports="cuda_ipc,nccl"))


def test_a_driver_that_does_not_work_is_named() -> None:
    with (
        DOUBLE.fault(driver_fails=803),
        pytest.raises(ConfigError, match=r"device='cuda': CUDA cannot be used: cuInit: .* \(803\)"),
    ):
        P2pNcclEngine(settings("cuda_ipc"))


def test_a_variable_of_nccls_that_makes_groups_larger_is_refused_at_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NCCL_MIN_NCHANNELS", "8")
    with pytest.raises(ConfigError, match=r"NCCL_MIN_NCHANNELS=8.*nccl_num_channels to at least 8"):
        P2pNcclEngine(settings("nccl"))
    P2pNcclEngine(settings("nccl", nccl_num_channels=8)).close()
    P2pNcclEngine(settings("cuda_ipc")).close()


def test_a_client_of_mps_needs_more_queues_than_it_has_by_default() -> None:
    with DOUBLE.fault(mps_enabled=1), pytest.raises(ConfigError, match="MPS's clients 2"):
        P2pNcclEngine(settings("nccl"))


def test_no_memory_for_the_buffer_is_an_error_that_leaves_nothing() -> None:
    with pytest.raises(Exception, match="cuMemAlloc"):
        P2pNcclEngine(settings("nccl", kv_buffer_size=1 << 40))


def test_an_engine_without_its_device_thread_is_not_healthy() -> None:
    with P2pNcclEngine(settings("nccl")) as engine:
        assert engine.healthy
        device = engine._parts.gpu.device if engine._parts.gpu is not None else None
        assert device is not None
        device._is_stopping = True
        eventually(lambda: not engine.healthy)
        with pytest.raises(TransportError, match="has ended"):
            device.run(lambda: None, 5.0)
        device._is_stopping = device._is_over = False
        device._start_thread()
        device.run(device._start, 5.0)
    assert not engine.healthy


def put(engine: P2pNcclEngine, peer: Peer, name: str) -> None:
    ours, target = patterned(name), PeerAddress(peer.address)
    sent = engine.send(TransferKey(name), target, ours.source(list(range(BLOCKS))))
    assert peer.ask("receive_blocks", name, 20.0)
    sent.wait(10)


def test_the_buffer_of_another_process_is_mapped() -> None:
    config = settings("cuda_ipc")
    with P2pNcclEngine(config) as engine, Peer(config) as peer:
        put(engine, peer, "there")
        assert DOUBLE["live_imports"] == 1


@pytest.mark.parametrize("nbytes", [1 << 44, 10 * MIB, 0, -4096])
def test_a_peer_that_says_another_size_of_its_buffer_is_not_written_to_behind_it(
    nbytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings("cuda_ipc", transports="cuda_ipc,nccl")
    with P2pNcclEngine(config) as engine, Peer(config) as peer:
        peer.ask("forge", {"buffer_bytes": str(nbytes)})
        put(engine, peer, "there")
        eventually(lambda: engine.stats()["nccl"]["made"] == 1)
        assert f"the peer says {nbytes} bytes, {12 * MIB} bytes are mapped" in caplog.text
        eventually(lambda: not DOUBLE["live_imports"])


def test_a_peer_that_names_memory_of_ours_has_its_own_mapped() -> None:
    """What it says is what it was told of us: everybody who asks is told."""
    config = settings("cuda_ipc")
    with P2pNcclEngine(config) as engine, Peer(config) as peer:
        transport, landing = engine._parts.transports["cuda_ipc"], engine._parts.arena
        assert isinstance(transport, CudaIpcTransport)
        assert isinstance(landing, DeviceLanding)
        names = ("process", "address", "device", "buffer")
        said = {name: transport._extra[name] for name in names if name in transport._extra}
        peer.ask("forge", said)
        put(engine, peer, "there")
        assert DOUBLE["live_imports"] == 1
        assert not any((ctypes.c_char * PROOF_BYTES).from_address(landing.proof_address).raw)


@pytest.mark.parametrize("lost", [{}, {"lost_above_bytes": MIB}], ids=["all", "large copies"])
def test_kv_goes_by_nccl_where_writes_to_a_peers_memory_are_lost(
    lost: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    """CUDA reports success for all of them: only the peer can tell."""
    faults = {"lost_writes": 1, **lost}
    config = settings("cuda_ipc", transports="cuda_ipc,nccl")
    memory = PagedMemory(BLOCKS, page_bytes=PAGE_BYTES)
    with (
        DOUBLE.fault(**faults),
        P2pNcclEngine(config) as engine,
        Peer(config, None, faults) as peer,
    ):
        put(engine, peer, "there")
        eventually(lambda: engine.stats()["nccl"]["made"] == 1)
        received = engine.receive(KEY, memory.sink(list(range(BLOCKS))))
        peer.ask("send_blocks", KEY.transfer_id, engine.zmq_address)
        received.wait(10)
        assert (memory.data == patterned(KEY.transfer_id).data).all()
        eventually(lambda: peer.ask("stats")["nccl"]["made"] == 1)
        assert_idle(engine)
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len([text for text in said if f"peer={peer.address} transport=cuda_ipc" in text]) == 1
    assert len([text for text in said if "does not arrive" in text]) == 1


def test_many_senders_prove_themselves_one_after_the_other(rng: SeededRandom) -> None:
    with engines(5, "cuda_ipc") as (receiver, *senders):
        tensor = random_tensor(rng, 100_000)
        for number, sender in enumerate(senders):
            sender.send_tensor(TransferKey(f"{number}"), tensor, receiver.zmq_address)
        for number in range(len(senders)):
            received = receiver.recv_tensor(TransferKey(f"{number}"), timeout=10)
            assert torch.equal(received, tensor)
        assert_idle(receiver, *senders)


def stand_still(opened: threading.Event) -> None:
    opened.wait(30)


def stop_in_its_proof(
    still: P2pNcclEngine, receiver: P2pNcclEngine, tensor: torch.Tensor
) -> tuple[CudaIpcTransport, Transfer, threading.Event]:
    """Have a sender stand still in its proof: the receiver's transport, what is sent, and the event
    that lets the sender go on."""
    transport, opened = receiver._parts.transports["cuda_ipc"], threading.Event()
    assert isinstance(transport, CudaIpcTransport)
    desk = transport._desk
    assert desk is not None
    assert still._parts.gpu is not None
    still._parts.gpu.device.post(partial(stand_still, opened))
    sent = still.send_tensor(TransferKey("still"), tensor, receiver.zmq_address)
    eventually(lambda: desk._lent is not None)
    return transport, sent, opened


def test_a_sender_that_stands_still_in_its_proof_holds_up_others_for_a_while(
    rng: SeededRandom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may still write, so they get the memory for their proofs when it cannot any more."""
    monkeypatch.setattr(cuda_ipc, "MAP_SECONDS", 2.0)
    tensor = random_tensor(rng, 100_000)
    with engines(4, "cuda_ipc", transports="cuda_ipc,nccl") as (receiver, still, second, third):
        transport, sent, opened = stop_in_its_proof(still, receiver, tensor)
        for sender, made in ((second, 1), (third, 0)):
            sender.send_tensor(KEY, tensor, receiver.zmq_address)
            assert torch.equal(receiver.recv_tensor(KEY, timeout=10), tensor)
            eventually(lambda: sender.stats()["nccl"]["made"] == made)  # noqa: B023
            opened.set()
            eventually(lambda: transport.is_gone(still._parts.epoch))
        sent.wait(10)
        assert torch.equal(receiver.recv_tensor(TransferKey("still"), timeout=10), tensor)
        assert_idle(receiver, still, second, third)


def test_a_sender_that_never_ends_its_proof_holds_up_others_for_seconds(
    rng: SeededRandom, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What it writes late, by an old seed, proves nothing."""
    monkeypatch.setattr(proof, "LENT_SECONDS", 0.5)
    tensor = random_tensor(rng, 100_000)
    with engines(3, "cuda_ipc") as (receiver, still, other):
        _, sent, opened = stop_in_its_proof(still, receiver, tensor)
        other.send_tensor(KEY, tensor, receiver.zmq_address)
        assert torch.equal(receiver.recv_tensor(KEY, timeout=15), tensor)
        assert caplog.text.count("has not proven its mapping in time") == 1
        opened.set()
        assert torch.equal(receiver.recv_tensor(TransferKey("still"), timeout=15), tensor)
        sent.wait(10)
        assert_idle(receiver, still, other)


@pytest.mark.parametrize("name", ["p2p-prove", "p2p-map"])
def test_a_proof_for_which_there_is_no_thread_is_tried_again(
    name: str, rng: SeededRandom, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_ipc, "MAP_SECONDS", 1.0)
    tensor, honest, refused = random_tensor(rng, 100_000), threading.Thread.start, list[str]()

    def begin(thread: threading.Thread) -> None:
        if thread.name == name and not refused:
            refused.append(name)
            raise RuntimeError("can't start new thread")
        honest(thread)

    monkeypatch.setattr(threading.Thread, "start", begin)
    with engines(2, "cuda_ipc") as (sender, receiver):
        sender.send_tensor(KEY, tensor, receiver.zmq_address)
        assert torch.equal(receiver.recv_tensor(KEY, timeout=10), tensor)
        assert refused
        assert_idle(sender, receiver)


def test_a_receiver_that_cannot_read_its_memory_does_not_say_that_writes_are_lost(
    rng: SeededRandom, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tensor, failed = random_tensor(rng, 100_000), list[bytes]()

    def look(device: Device, address: int, seed: bytes) -> bool:
        if not failed:
            failed.append(seed)
            raise TransportError("cuMemcpyAsync: out of memory (2)")
        return cuda_ipc_proof.has_arrived(device, address, seed)

    monkeypatch.setattr(cuda_ipc, "has_arrived", look)
    with engines(2, "cuda_ipc") as (sender, receiver):
        sender.send_tensor(KEY, tensor, receiver.zmq_address)
        assert torch.equal(receiver.recv_tensor(KEY, timeout=10), tensor)
        assert "what a sender has written cannot be read: cuMemcpyAsync" in caplog.text
        assert "not arrive" not in caplog.text
        assert_idle(sender, receiver)


def test_a_proof_that_is_not_answered_in_time_is_asked_for_again(
    rng: SeededRandom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there is no other transport: the peer may only have been busy."""
    monkeypatch.setattr(cuda_ipc, "MAP_SECONDS", 1.0)
    tensor, honest, unheard = random_tensor(rng, 100_000), ProofDesk.hear, list[bytes]()

    def hear(desk: ProofDesk, epoch: int, connection: socket.socket, said: bytes) -> None:
        if unheard:
            honest(desk, epoch, connection, said)
        unheard.append(said)

    monkeypatch.setattr(ProofDesk, "hear", hear)
    with engines(2, "cuda_ipc") as (sender, receiver):
        sender.send_tensor(KEY, tensor, receiver.zmq_address)
        assert torch.equal(receiver.recv_tensor(KEY, timeout=10), tensor)
        assert unheard[0] == ASK
        assert_idle(sender, receiver)


def test_each_new_mapping_is_proven_again() -> None:
    """A peer that was restarted may be in another container, or on another GPU."""
    config = settings("cuda_ipc", transports="cuda_ipc,nccl")
    with P2pNcclEngine(config) as engine:
        with Peer(config) as peer:
            put(engine, peer, "before")
            assert engine.stats()["nccl"]["made"] == 0
        with DOUBLE.fault(lost_writes=1), Peer(config) as peer:
            put(engine, peer, "after")
            eventually(lambda: engine.stats()["nccl"]["made"] == 1)
        with Peer(config) as peer:
            put(engine, peer, "whole again")
            assert DOUBLE["live_imports"] == 1


@pytest.mark.parametrize("transport", GPU_TRANSPORTS)
def test_two_processes_whose_streams_share_hardware_queues_exchange_all(transport: str) -> None:
    config, faults = settings(transport), {"hardware_queues": 8}
    with (
        DOUBLE.fault(**faults),
        P2pNcclEngine(config) as engine,
        Peer(config, None, faults) as peer,
    ):
        for number in range(10):
            memory = PagedMemory(BLOCKS, page_bytes=PAGE_BYTES)
            received = engine.receive(
                TransferKey(f"here {number}"), memory.sink(list(range(BLOCKS)))
            )
            peer.ask("send_blocks", f"here {number}", engine.zmq_address)
            put(engine, peer, f"there {number}")
            received.wait(10)
            assert (memory.data == patterned(f"here {number}").data).all()
        assert_idle(engine)


def test_a_peer_that_dies_while_a_kernel_waits_for_it_costs_its_own_transfers_only() -> None:
    config = settings("nccl", peer_timeout_seconds=3.0)
    ours = patterned("there")
    with P2pNcclEngine(config) as engine, Peer(config) as other:
        with Peer(config) as peer:
            put(engine, peer, "before")
            with DOUBLE.fault(send_hangs=1):
                source = ours.source(list(range(BLOCKS)))
                sent = engine.send(KEY, PeerAddress(peer.address), source)
                eventually(lambda: "WRITING" in states(engine))
                peer.kill()
                with pytest.raises(P2pError):
                    sent.wait(10)
        put(engine, other, "after")
        assert_idle(engine)


def test_the_memory_of_a_sender_that_dies_is_kept_until_its_copies_have_ended() -> None:
    """Its socket ends first; what it has submitted goes on until its process has ended."""
    config = settings("cuda_ipc")
    with P2pNcclEngine(config) as engine, Peer(config) as peer:
        put(engine, peer, "before")  # the peer maps our buffer when it sends
        epoch, transport = peer.ask("epoch"), engine._parts.transports["cuda_ipc"]
        peer.ask("send_blocks", "connects", engine.zmq_address)
        memory = PagedMemory(BLOCKS, page_bytes=PAGE_BYTES)
        engine.receive(TransferKey("connects"), memory.sink(list(range(BLOCKS)))).wait(10)

        def is_gone() -> bool:  # where the engine asks, too
            found: Future[bool] = Future()
            engine._parts.control.call_soon(lambda: found.set_result(transport.is_gone(epoch)))
            return found.result(10)

        assert not is_gone()
        peer.ask("set_fault", "copy_milliseconds", 200)  # for each of four chunks
        peer.ask("send_blocks", "slow", engine.zmq_address)
        eventually(lambda: engine.stats()["live_bytes_by_place"]["buffer"] >= memory.data.nbytes)
        assert isinstance(engine._parts.arena, DeviceLanding)
        landing = engine._parts.arena
        view = (ctypes.c_char * landing.device_bytes).from_address(landing.device_address)
        eventually(lambda: patterned("slow").data[0, 0, :64].tobytes() in bytes(view))
        peer.tell("die", 1000)
        eventually(lambda: epoch not in transport._senders)  # type: ignore[attr-defined]
        eventually(is_gone)
        at_end = hashlib.sha256(view).digest()
        time.sleep(1.2)  # longer than it dies
        assert hashlib.sha256(view).digest() == at_end
        assert peer.has_ended()


def states(engine: P2pNcclEngine) -> list[str]:
    return [chunk.state.name for chunk in engine._parts.sender._chunks.values()]
