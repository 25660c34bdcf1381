"""Checksums between real engines: bytes that change on their way end a transfer by name."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator

import pytest
import torch

from p2p_engine import SendMode, TransferKey
from p2p_engine.config import GPU_TRANSPORTS
from p2p_engine.errors import ConfigError, TransferCorrupted, TransferRejected
from p2p_engine.memory.layout import TensorSink, TensorSource
from p2p_engine.peers.link import PeerAddress
from p2p_engine.receive.ledger import Landing
from p2p_engine.receive.placement import Placement
from p2p_engine.transports.tcp import TcpTransport
from tests import marks
from tests.doubles.gpu import GpuDouble
from tests.rigs.engines import MIB, assert_idle, engines, settings, start
from tests.rigs.nixl import lose_writes
from tests.rigs.relay import FaultyRelay
from tests.rigs.tensors import random_tensor
from tests.support import SeededRandom

KEY = TransferKey("request-1")
pytestmark = pytest.mark.usefixtures("no_leaks")


@contextlib.contextmanager
def bad_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One byte of the first landing changes after it was written, before anybody looks at it."""
    honest, tampered_with = Placement.checksum, set[Landing]()

    def tampered(self: Placement, landing: Landing, ended: Callable[[object], None]) -> int | None:
        if landing.space is not None and not tampered_with and self._arena is not None:
            tampered_with.add(landing)
            middle = self._arena.address(landing.space) + landing.nbytes // 2
            ctypes.c_ubyte.from_address(middle).value ^= 1
        return honest(self, landing, ended)

    monkeypatch.setattr(Placement, "checksum", tampered)
    yield
    monkeypatch.undo()


@contextlib.contextmanager
def bad_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The thousandth byte of each data connection changes on its way."""
    honest, relays = TcpTransport.invite, list[FaultyRelay]()

    def diverted(self: TcpTransport, source_epoch: int) -> dict[str, str] | None:
        endpoint = honest(self, source_epoch)
        assert endpoint is not None
        relays.append(FaultyRelay(endpoint["address"], flip_byte=1000))
        return {**endpoint, "address": relays[-1].address}

    monkeypatch.setattr(TcpTransport, "invite", diverted)
    yield
    monkeypatch.undo()
    for relay in relays:
        relay.close()


@marks.every_transport
@pytest.mark.parametrize("mode", list(SendMode))
def test_checked_tensors_cross_whole(transport: str, mode: SendMode, rng: SeededRandom) -> None:
    with engines(2, transport, send_type=mode, checksum=True) as (sender, receiver):
        for number, nbytes in enumerate((0, 1, 4097, 3 * MIB + 5)):
            key, tensor = TransferKey(f"{number}"), random_tensor(rng, nbytes)
            transfer = sender.send_tensor(key, tensor, receiver.zmq_address)
            received = receiver.recv_tensor(key, sender.zmq_address, timeout=10)
            assert torch.equal(received, tensor)
            transfer.wait(10)
        assert receiver.stats()["corrupted_chunks"] == 0
        assert_idle(sender, receiver)


@marks.every_transport
@pytest.mark.parametrize("who", ["sender", "receiver"])
@pytest.mark.parametrize("order", ["sink first", "bytes first"])
def test_changed_byte_is_found_when_either_side_wants_checksums(
    transport: str, who: str, order: str, rng: SeededRandom, monkeypatch: pytest.MonkeyPatch
) -> None:
    disturb = bad_network if transport == "tcp" else bad_memory
    tensor, sink = random_tensor(rng, MIB), TensorSink()
    configs = [settings(transport, checksum=who == name) for name in ("sender", "receiver")]
    with (
        disturb(monkeypatch),
        start(configs[0]) as sender,
        start(configs[1]) as receiver,
    ):
        waiting = receiver.receive(KEY, sink) if order == "sink first" else None
        sent = sender.send(KEY, PeerAddress(receiver.zmq_address), TensorSource(tensor))
        with pytest.raises(TransferCorrupted):
            sent.wait(10)
        if waiting is not None:
            with pytest.raises(TransferCorrupted, match="checksum"):
                waiting.wait(10)
        assert receiver.stats()["corrupted_chunks"] == 1
        assert_idle(sender, receiver)


@pytest.mark.parametrize("order", ["sink first", "bytes first"])
def test_a_changed_chunk_of_another_member_does_not_end_a_wait(
    order: str, rng: SeededRandom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receive names its sender, and only that one can end it."""
    tensor, sink = random_tensor(rng, MIB), TensorSink()
    with (
        bad_memory(monkeypatch),
        engines(3, "shm", checksum=True) as (sender, receiver, member),
    ):
        to_receiver, to_sender = (PeerAddress(one.zmq_address) for one in (receiver, sender))
        waits = [receiver.receive(KEY, sink, peer=to_sender)] if order == "sink first" else []
        with pytest.raises(TransferCorrupted):
            member.send(KEY, to_receiver, TensorSource(tensor)).wait(10)
        waiting = waits[0] if waits else receiver.receive(KEY, sink, peer=to_sender)
        assert not waiting.done
        sender.send(KEY, to_receiver, TensorSource(tensor)).wait(10)
        waiting.wait(10)
        assert sink.tensor is not None
        assert torch.equal(sink.tensor, tensor)
        assert_idle(sender, receiver, member)


def test_without_checksums_nobody_looks(rng: SeededRandom, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the option is for: memory that lies is believed."""
    with bad_network(monkeypatch), engines(2, "tcp") as (sender, receiver):
        tensor = random_tensor(rng, MIB)
        sender.send_tensor(KEY, tensor, receiver.zmq_address).wait(10)
        received = receiver.recv_tensor(KEY, sender.zmq_address, timeout=10)
        assert (received != tensor).sum() == 1


@marks.every_transport
def test_the_next_transfer_is_none_the_worse(
    transport: str, rng: SeededRandom, monkeypatch: pytest.MonkeyPatch
) -> None:
    disturb = bad_network if transport == "tcp" else bad_memory
    with disturb(monkeypatch), engines(2, transport, checksum=True) as (sender, receiver):
        sent = sender.send_tensor(KEY, random_tensor(rng, MIB), receiver.zmq_address)
        with pytest.raises(TransferCorrupted):
            sent.wait(10)
        key, tensor = TransferKey("request-2"), random_tensor(rng, MIB)
        sender.send_tensor(key, tensor, receiver.zmq_address)
        assert torch.equal(receiver.recv_tensor(key, sender.zmq_address, timeout=10), tensor)
        assert_idle(sender, receiver)


@pytest.mark.parametrize("transports", ["shm,tcp", "shm"])
def test_a_transport_that_corrupts_two_chunks_is_left_if_there_is_another(
    transports: str,
    rng: SeededRandom,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with engines(2, transports=transports, checksum=True) as (sender, receiver):

        def send(name: str) -> None:
            key, tensor = TransferKey(name), random_tensor(rng, MIB)
            sender.send_tensor(key, tensor, receiver.zmq_address).wait(10)
            receiver.discard(key)

        used = []
        for number in range(3):
            if number:
                with bad_memory(monkeypatch), pytest.raises(TransferCorrupted):
                    send(f"corrupted {number}")
            send(f"whole {number}")
            (link,) = sender._parts.links.all_ready()
            used.append(link.transport.name if link.transport is not None else "")
        assert used == ["shm", "shm", transports.split(",")[-1]]
        assert_idle(sender, receiver)
    left = [record for record in caplog.records if "transport=shm is left" in record.message]
    assert [record.levelname for record in left] == ["WARNING"] * (transports != "shm")


@pytest.mark.parametrize("transport", GPU_TRANSPORTS)
def test_what_lands_in_the_host_pool_of_a_gpu_is_checked(
    transport: str, rng: SeededRandom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender's kernel and the receiver's mover compute the same."""
    tensor = random_tensor(rng, MIB)
    with engines(2, transport, checksum=True, kv_buffer_size=0) as (sender, receiver):
        sender.send_tensor(KEY, tensor, receiver.zmq_address)
        assert torch.equal(receiver.recv_tensor(KEY, sender.zmq_address, timeout=10), tensor)
        assert receiver.stats()["landed_bytes_by_place"]["pool"] == MIB
        with bad_memory(monkeypatch):
            sent = sender.send_tensor(TransferKey("other"), tensor, receiver.zmq_address)
            with pytest.raises(TransferCorrupted):
                sent.wait(10)
        assert_idle(sender, receiver)


@pytest.mark.parametrize("transport", GPU_TRANSPORTS)
def test_without_a_kernel_nobody_claims_to_compare(transport: str, rng: SeededRandom) -> None:
    """An engine that is to compute checksums does not start, and takes nothing unchecked."""
    gpu = GpuDouble()
    with gpu.fault(compiler_fails=1):
        with pytest.raises(ConfigError, match="checksum: this GPU has no kernel"):
            start(settings(transport, checksum=True))
        sender = start(settings(transport))
    with sender, start(settings(transport, checksum=True)) as receiver:
        sent = sender.send_tensor(KEY, random_tensor(rng, 1000), receiver.zmq_address)
        with pytest.raises(TransferRejected, match="checksums are on here"):
            sent.wait(10)
        assert_idle(sender, receiver)
    with gpu.fault(compiler_fails=1):
        receiver = start(settings(transport))
    with receiver, start(settings(transport, checksum=True)) as sender:
        sent = sender.send_tensor(KEY, random_tensor(rng, 1000), receiver.zmq_address)
        with pytest.raises(TransferRejected, match=f"it has checksums, {transport} has none here"):
            sent.wait(10)
        assert_idle(sender, receiver)


@pytest.mark.parametrize("min_bytes", [0, MIB], ids=["all", "large pieces"])
@pytest.mark.parametrize("first", ["nixl"])
def test_kv_goes_by_tcp_where_writes_over_nixl_are_lost(
    first: str,
    min_bytes: int,
    rng: SeededRandom,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """NIXL reports success for all of them: only the peer can tell."""
    lose_writes(monkeypatch, min_bytes)
    tensor = random_tensor(rng, 3 * MIB)
    with engines(2, first, transports=f"{first},tcp") as (sender, receiver):
        sender.send_tensor(KEY, tensor, receiver.zmq_address)
        assert torch.equal(receiver.recv_tensor(KEY, timeout=20), tensor)
        assert_idle(sender, receiver)
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len([text for text in said if "transport=nixl not usable" in text]) == 1
    assert len([text for text in said if "does not arrive" in text]) == 1
    assert "transport=tcp" in caplog.text
