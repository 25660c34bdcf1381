"""Two and more real engines: modes, orders, places and the named ways to fail."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch

from p2p_engine import P2pNcclEngine, SendMode, TransferKey
from p2p_engine.config import GPU_TRANSPORTS
from p2p_engine.errors import (
    LocalProtocolError,
    PeerRefused,
    PeerUnreachable,
    TransferCancelled,
    TransferError,
    TransferRejected,
    TransferTimeout,
    TransferTooLarge,
)
from p2p_engine.memory.layout import TensorSink, TensorSource
from p2p_engine.peers.link import PeerAddress
from p2p_engine.wire.messages import CacheSpec
from tests import marks
from tests.rigs.engines import MIB, PagedMemory, assert_idle, engines, settings, start
from tests.rigs.tensors import random_tensor
from tests.support import SeededRandom, eventually

KEY = TransferKey("request-1", "layers.0")
pytestmark = pytest.mark.usefixtures("no_leaks")


@marks.every_transport
@pytest.mark.parametrize("mode", list(SendMode))
def test_tensor_crosses_whole(transport: str, mode: SendMode, rng: SeededRandom) -> None:
    with engines(2, transport, send_type=mode) as (sender, receiver):
        tensor = random_tensor(rng, MIB + 3).view(torch.uint8)
        transfer = sender.send_tensor(KEY, tensor, receiver.zmq_address)
        if mode is not SendMode.PUT_ASYNC:  # which may be there by now
            assert transfer.done == (mode is SendMode.PUT)
        received = receiver.recv_tensor(KEY, sender.zmq_address, timeout=10)
        assert torch.equal(received, tensor)
        transfer.wait(10)
        assert_idle(sender, receiver)


@marks.every_transport
@pytest.mark.parametrize("mode", [SendMode.PUT_ASYNC, SendMode.GET])
def test_receiver_first(transport: str, mode: SendMode, rng: SeededRandom) -> None:
    with engines(2, transport, send_type=mode) as (sender, receiver):
        tensor = random_tensor(rng, MIB)
        sink, peer = TensorSink(), PeerAddress(sender.zmq_address)
        waiting = receiver.receive(KEY, sink, peer=peer, pull=mode is SendMode.GET)
        eventually(lambda: receiver.stats()["links"] == {"ready": 1})
        transfer = sender.send_tensor(KEY, tensor, receiver.zmq_address)
        waiting.wait(10)
        assert sink.tensor is not None
        assert torch.equal(sink.tensor, tensor)
        transfer.wait(10)
        assert_idle(sender, receiver)


@marks.every_transport
@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0, 5),
        torch.tensor(3.5),
        torch.arange(12, dtype=torch.int64).reshape(3, 4).T,
        torch.randn(7, 3).to(torch.bfloat16),
        torch.tensor([True, False]),
        torch.randn(4).to(torch.float8_e4m3fn),
    ],
    ids=["empty", "zero-dim", "strided", "bfloat16", "bool", "float8"],
)
def test_tensors_of_every_kind(transport: str, tensor: torch.Tensor) -> None:
    with engines(2, transport) as (sender, receiver):
        sender.send_tensor(KEY, tensor, receiver.zmq_address)
        received = receiver.recv_tensor(KEY, timeout=10)
        assert received.dtype == tensor.dtype
        assert received.shape == tensor.shape
        assert received.contiguous().view(-1).view(torch.uint8).tolist() == (
            tensor.contiguous().view(-1).view(torch.uint8).tolist()
        )


@marks.every_transport
def test_conjugate_view_arrives_as_its_values(transport: str) -> None:
    tensor = torch.randn(5, dtype=torch.complex64).conj()
    with engines(2, transport) as (sender, receiver):
        sender.send_tensor(KEY, tensor, receiver.zmq_address)
        assert torch.equal(receiver.recv_tensor(KEY, timeout=10), tensor.resolve_conj())


@marks.every_transport
def test_receive_into_a_given_tensor(transport: str, rng: SeededRandom) -> None:
    with engines(2, transport) as (sender, receiver):
        tensor, out = random_tensor(rng, 4096), torch.zeros(4096, dtype=torch.uint8)
        sender.send_tensor(KEY, tensor, receiver.zmq_address)
        assert receiver.recv_tensor(KEY, timeout=10, out=out) is out
        assert torch.equal(out, tensor)


@marks.every_transport
def test_tensor_of_another_shape_is_named(transport: str) -> None:
    with engines(2, transport) as (sender, receiver):
        sender.send_tensor(KEY, torch.zeros(3), receiver.zmq_address)
        with pytest.raises(TransferRejected, match=r"\[3\]"):
            receiver.recv_tensor(KEY, timeout=10, out=torch.zeros(4))
        assert_idle(sender, receiver)


def test_tensor_that_is_not_in_host_memory_is_refused() -> None:
    with engines(1) as (engine,):
        with pytest.raises(LocalProtocolError, match="meta"):
            engine.send_tensor(KEY, torch.zeros(3, device="meta"), "127.0.0.1:1")
        with pytest.raises(LocalProtocolError, match="meta"):
            engine.recv_tensor(KEY, timeout=1, out=torch.zeros(3, device="meta"))


@marks.every_transport
@pytest.mark.parametrize("receiver_first", [True, False])
def test_pages_in_chunks(transport: str, receiver_first: bool, rng: SeededRandom) -> None:
    """Blocks 1 to 7 of a request, sent as three chunks, into scattered blocks."""
    theirs, ours = PagedMemory(16).fill(rng), PagedMemory(16)
    sources, places = rng.sample(range(16), 8), rng.sample(range(16), 7)
    with engines(2, transport) as (sender, receiver):
        peer = PeerAddress(receiver.zmq_address)
        waiting = None
        if receiver_first:
            waiting = receiver.receive(KEY, ours.sink(places, 1))
        for first, last in ((4, 6), (0, 4), (6, 8)):
            chunk = theirs.source(sources[first:last], first)
            sender.send(KEY, peer, chunk, ready=False)
            transfer = sender.send(TransferKey(f"{first}"), peer, chunk, ready=False)
            transfer.cancel("only to disturb")
        for transfer in list(sender._parts.sender._shipments):
            sender.mark_ready(transfer)
        if waiting is None:
            eventually(lambda: receiver.stats()["live_bytes"] > 0)
            waiting = receiver.receive(KEY, ours.sink(places, 1))
        waiting.wait(10)
        assert (ours.data[:, places] == theirs.data[:, sources[1:]]).all()
        untouched = sorted(set(range(16)) - set(places))
        assert not ours.data[:, untouched].any()


@marks.every_transport
def test_many_pages_at_once_in_both_directions(transport: str, rng: SeededRandom) -> None:
    with engines(2, transport) as parties:
        open_transfers = []
        for number in range(40):
            source, destination = parties if number % 2 else parties[::-1]
            theirs = PagedMemory(16, page_bytes=rng.choice([64, 4096, 20000])).fill(rng)
            ours = PagedMemory(16, page_bytes=theirs.data.shape[2])
            ids, key = rng.sample(range(16), rng.randint(1, 16)), TransferKey(f"{number}")
            received = destination.receive(key, ours.sink(ids))
            sent = source.send(key, PeerAddress(destination.zmq_address), theirs.source(ids))
            open_transfers.append((sent, received, ours, theirs, ids))
        for sent, received, ours, theirs, ids in open_transfers:
            sent.wait(20)
            received.wait(20)
            assert (ours.data[:, ids] == theirs.data[:, ids]).all()
        assert_idle(*parties)


@marks.every_transport
@pytest.mark.parametrize("num_layers", [1, 64])
def test_a_chunk_costs_four_messages_however_many_layers(
    transport: str, num_layers: int, rng: SeededRandom
) -> None:
    slow = {"retry_seconds": 30, "peer_timeout_seconds": 300, "kv_buffer_size": 64 * MIB}
    with engines(2, transport, **slow) as (sender, receiver):
        target = PeerAddress(receiver.zmq_address)
        landing = receiver._parts.arena
        assert landing is not None
        eventually(lambda: landing.arena.touched_bytes >= MIB)  # else the first offer is denied
        sender.send(TransferKey("greeting"), target, TensorSource(torch.zeros(1))).wait(10)
        eventually(lambda: receiver.stats()["messages_sent"] == 3)  # it counts after the fact
        before = [engine.stats()["messages_sent"] for engine in (sender, receiver)]
        memory = PagedMemory(8, num_layers).fill(rng)
        target_memory = PagedMemory(8, num_layers)
        waiting = receiver.receive(KEY, target_memory.sink(list(range(8))))
        sender.send(KEY, target, memory.source(list(range(8)))).wait(10)
        waiting.wait(10)
        assert (target_memory.data == memory.data).all()
        eventually(lambda: receiver.stats()["messages_sent"] - before[1] >= 2)
        after = [engine.stats()["messages_sent"] for engine in (sender, receiver)]
        assert [b - a for a, b in zip(before, after, strict=True)] == [2, 2]


@marks.every_transport
def test_blocks_that_are_not_wanted_are_not_sent(transport: str, rng: SeededRandom) -> None:
    theirs, ours = PagedMemory(8).fill(rng), PagedMemory(8)
    with engines(2, transport) as (sender, receiver):
        waiting = receiver.receive(KEY, ours.sink([6, 7], 6))
        source = theirs.source(list(range(8)))
        sender.send(KEY, PeerAddress(receiver.zmq_address), source).wait(10)
        waiting.wait(10)
        assert sender.stats()["sent_bytes"] == 2 * 2 * 4096
        assert (ours.data[:, 6:] == theirs.data[:, 6:]).all()


@pytest.mark.parametrize("transport", ["shm", *GPU_TRANSPORTS])
def test_overflow_lands_in_the_pool(transport: str, rng: SeededRandom) -> None:
    with engines(2, transport, kv_buffer_size=MIB) as (sender, receiver):
        tensors = [random_tensor(rng, 600_000) for _ in range(4)]
        for number, tensor in enumerate(tensors):
            key = TransferKey(f"{number}")
            sender.send_tensor(key, tensor, receiver.zmq_address).wait(10)
        landed = receiver.stats()["landed_bytes_by_place"]
        assert landed == {"blocks": 0, "buffer": 600_000, "pool": 1_800_000}
        for number, tensor in enumerate(tensors):
            received = receiver.recv_tensor(TransferKey(f"{number}"), timeout=10)
            assert torch.equal(received, tensor)
        assert_idle(sender, receiver)


@marks.every_transport
def test_full_receiver_denies_until_there_is_room(transport: str, rng: SeededRandom) -> None:
    with engines(2, transport, kv_buffer_size=MIB, mem_pool_size_gb=0) as (sender, receiver):
        first, second = random_tensor(rng, 900_000), random_tensor(rng, 900_000)
        sender.send_tensor(TransferKey("first"), first, receiver.zmq_address).wait(10)
        waiting = sender.send_tensor(TransferKey("second"), second, receiver.zmq_address)
        eventually(lambda: sender.stats()["denied_offers"] > 2)
        assert not waiting.released
        assert torch.equal(receiver.recv_tensor(TransferKey("first"), timeout=10), first)
        waiting.wait(10)
        assert torch.equal(receiver.recv_tensor(TransferKey("second"), timeout=10), second)
        assert_idle(sender, receiver)


@pytest.mark.parametrize("transport", ["shm", *GPU_TRANSPORTS])
def test_too_large_is_named_on_both_sides(transport: str) -> None:
    with engines(2, transport, kv_buffer_size=MIB, mem_pool_size_gb=0) as (sender, receiver):
        waiting = receiver.receive(KEY, TensorSink())
        transfer = sender.send_tensor(
            KEY, torch.zeros(2 * MIB, dtype=torch.uint8), receiver.zmq_address
        )
        with pytest.raises(TransferTooLarge, match="2097152"):
            transfer.wait(10)
        with pytest.raises(TransferTooLarge, match="2097152"):
            waiting.wait(10)


def test_larger_than_the_store_goes_straight_into_blocks_over_tcp(rng: SeededRandom) -> None:
    with engines(2, "tcp", kv_buffer_size=MIB, mem_pool_size_gb=0) as (sender, receiver):
        tensor = random_tensor(rng, 3 * MIB)
        sender.send_tensor(KEY, tensor, receiver.zmq_address)
        assert torch.equal(receiver.recv_tensor(KEY, timeout=10), tensor)
        assert receiver.stats()["landed_bytes_by_place"]["blocks"] == 3 * MIB


@marks.every_transport
@pytest.mark.parametrize("pull", [False, True])
@pytest.mark.parametrize("sender_first", [False, True])
def test_content_that_differs_is_named(transport: str, pull: bool, sender_first: bool) -> None:
    with engines(2, transport) as (sender, receiver):
        target, peer = PeerAddress(receiver.zmq_address), PeerAddress(sender.zmq_address)

        def offer() -> None:
            source = TensorSource(torch.zeros(3))
            if pull:
                sender.hold(KEY, source, binding=b"A", lease=5)
                return
            transfer = sender.send(KEY, target, source, binding=b"A")
            if sender_first:
                transfer.wait(10)

        if sender_first:
            offer()
        waiting = receiver.receive(KEY, TensorSink(), binding=b"B", peer=peer, pull=pull)
        if not sender_first:
            offer()
        with pytest.raises(TransferRejected, match=r"content|another"):
            waiting.wait(10)


def test_content_that_was_asked_for_before_another_was_held_is_named() -> None:
    with engines(2, transfer_timeout_seconds=60) as (sender, receiver):
        peer = PeerAddress(sender.zmq_address)
        waiting = receiver.receive(KEY, TensorSink(), binding=b"B", peer=peer, pull=True)
        eventually(lambda: sender._parts.holds._unheld)
        sender.hold(KEY, TensorSource(torch.zeros(3)), binding=b"A", lease=50)
        with pytest.raises(TransferRejected, match="content"):
            waiting.wait(30)


def test_same_key_cannot_be_received_or_held_twice() -> None:
    with engines(1) as (engine,):
        engine.receive(KEY, TensorSink())
        with pytest.raises(TransferError, match="already"):
            engine.receive(KEY, TensorSink())
        engine.hold(KEY, TensorSource(torch.zeros(1)))
        with pytest.raises(TransferError, match="already"):
            engine.hold(KEY, TensorSource(torch.zeros(1)))


@marks.every_transport
def test_same_key_sent_twice_arrives_once(transport: str, rng: SeededRandom) -> None:
    with engines(2, transport) as (sender, receiver):
        tensor = random_tensor(rng, 100_000)
        for _ in range(2):
            sender.send_tensor(KEY, tensor, receiver.zmq_address).wait(10)
        assert torch.equal(receiver.recv_tensor(KEY, timeout=10), tensor)
        assert_idle(sender, receiver)


def test_deadline_of_a_receive_is_named() -> None:
    with engines(1) as (engine,), pytest.raises(TransferTimeout, match="request-1"):
        engine.recv_tensor(KEY, timeout=0.1)


def test_deadline_of_a_send_names_key_and_state() -> None:
    with engines(2) as (sender, receiver):
        peer = PeerAddress(receiver.zmq_address)
        transfer = sender.send(KEY, peer, TensorSource(torch.zeros(1)), timeout=0.3, ready=False)
        with pytest.raises(TransferTimeout, match=r"request-1.*(QUEUED|OFFERED|GRANTED)"):
            transfer.wait(10)
        assert_idle(sender, receiver)


def test_wait_that_times_out_leaves_the_transfer_alone(rng: SeededRandom) -> None:
    with engines(2) as (sender, receiver):
        tensor = random_tensor(rng, 1000)
        peer = PeerAddress(receiver.zmq_address)
        transfer = sender.send(KEY, peer, TensorSource(tensor), ready=False)
        with pytest.raises(TransferTimeout, match="still open"):
            transfer.wait(0.01)
        assert not transfer.wait_released(0.01)
        sender.mark_ready(transfer)
        assert torch.equal(receiver.recv_tensor(KEY, timeout=10), tensor)
        transfer.wait(10)


@marks.every_transport
def test_hold_is_released_when_it_was_pulled(transport: str, rng: SeededRandom) -> None:
    with engines(2, transport) as (sender, receiver):
        tensor = random_tensor(rng, 5000)
        held = sender.hold(KEY, TensorSource(tensor))
        sink = TensorSink()
        receiver.receive(KEY, sink, peer=PeerAddress(sender.zmq_address), pull=True).wait(10)
        held.wait(10)
        assert sink.tensor is not None
        assert torch.equal(sink.tensor, tensor)
        assert_idle(sender, receiver)


def test_hold_that_nobody_wants_ends_with_its_lease() -> None:
    with engines(2) as (sender, receiver):
        held = sender.hold(KEY, TensorSource(torch.zeros(1)), lease=0.1)
        with pytest.raises(TransferTimeout, match="lease"):
            held.wait(10)
        peer = PeerAddress(sender.zmq_address)
        late = receiver.receive(KEY, TensorSink(), peer=peer, pull=True)
        with pytest.raises(TransferRejected, match="lease"):
            late.wait(10)


def test_pull_of_what_was_never_held_is_named() -> None:
    with engines(2, transfer_timeout_seconds=0.5) as (sender, receiver):
        peer = PeerAddress(sender.zmq_address)
        waiting = receiver.receive(KEY, TensorSink(), peer=peer, pull=True, timeout=10)
        with pytest.raises(TransferRejected, match="never held"):
            waiting.wait(10)


def test_pull_needs_a_peer() -> None:
    with engines(1) as (engine,), pytest.raises(LocalProtocolError, match="peer"):
        engine.receive(KEY, TensorSink(), pull=True)


@pytest.mark.parametrize(
    ("key", "binding"),
    [
        (TransferKey("x" * 513), b""),
        (TransferKey("x", layer="y" * 513), b""),
        (TransferKey("x", prompt_index=-1), b""),
        (TransferKey("x", child_index=1 << 70), b""),
        (TransferKey("\ud800"), b""),
        (KEY, bytes(65)),
    ],
    ids=["id", "layer", "negative", "huge", "no unicode", "binding"],
)
def test_what_the_wire_cannot_carry_is_refused_at_once(key: TransferKey, binding: bytes) -> None:
    with engines(1) as (engine,):
        source, peer = TensorSource(torch.zeros(1)), PeerAddress("127.0.0.1:1")
        calls: list[Callable[[], object]] = [
            lambda: engine.send(key, peer, source, binding=binding),
            lambda: engine.hold(key, source, binding=binding),
            lambda: engine.receive(key, TensorSink(), binding=binding),
            lambda: engine.discard(key, binding=binding),
        ]
        if key is not KEY:
            calls.append(lambda: engine.abandon(key, peer, "not needed"))
        for call in calls:
            with pytest.raises(LocalProtocolError, match="wire"):
                call()
        assert_idle(engine)


def test_manifest_that_the_wire_cannot_carry_is_refused_at_once() -> None:
    with engines(1) as (engine,):
        many_dimensions = TensorSource(torch.zeros([1] * 17))
        many_layers = PagedMemory(1, num_layers=1025).source([0])
        for source in (many_dimensions, many_layers):
            with pytest.raises(LocalProtocolError, match="wire"):
                engine.send(KEY, PeerAddress("127.0.0.1:1"), source)
            with pytest.raises(LocalProtocolError, match="wire"):
                engine.hold(KEY, source)
        assert_idle(engine)


def test_cache_that_the_wire_cannot_describe_is_refused_at_once() -> None:
    with pytest.raises(LocalProtocolError, match="wire"):
        P2pNcclEngine(settings(), spec=CacheSpec(identity=b"m" * 65))


@pytest.mark.parametrize("reason", ["r" * 10_000, "\ud800"])
def test_reason_of_any_length_arrives(reason: str) -> None:
    with engines(2) as (sender, receiver):
        peer, key = PeerAddress(sender.zmq_address), TransferKey("x" * 512, "y" * 512)
        sender.abandon(key, None, reason)
        waiting = receiver.receive(key, TensorSink(), peer=peer, pull=True)
        with pytest.raises(TransferRejected):
            waiting.wait(10)
        waiting = receiver.receive(KEY, TensorSink(), peer=peer)
        sender.abandon(KEY, PeerAddress(receiver.zmq_address), reason)
        with pytest.raises(TransferRejected):
            waiting.wait(10)
        held = sender.hold(TransferKey("z" * 512, "y" * 512), TensorSource(torch.zeros(1)))
        held.cancel(reason)
        sender.abandon(held.key, None, reason)
        waiting = receiver.receive(held.key, TensorSink(), peer=peer, pull=True)
        with pytest.raises(TransferRejected):
            waiting.wait(10)


@marks.every_transport
@pytest.mark.parametrize("pull", [False, True])
def test_abandoned_key_fails_its_receive(transport: str, pull: bool) -> None:
    with engines(2, transport) as (sender, receiver):
        peer = PeerAddress(sender.zmq_address)
        waiting = receiver.receive(KEY, TensorSink(), peer=peer, pull=pull)
        target = None if pull else PeerAddress(receiver.zmq_address)
        sender.abandon(KEY, target, "the request was preempted")
        with pytest.raises(TransferRejected, match="preempted"):
            waiting.wait(10)


@marks.every_transport
def test_discarded_key_is_refused_to_its_sender(transport: str) -> None:
    with engines(2, transport) as (sender, receiver):
        receiver.discard(KEY, reason="the client left")
        transfer = sender.send_tensor(KEY, torch.zeros(9), receiver.zmq_address)
        with pytest.raises(TransferRejected, match="the client left"):
            transfer.wait(10)
        assert_idle(sender, receiver)


@pytest.mark.parametrize("is_wanted", [True, False], ids=["wanted", "not yet wanted"])
def test_hold_that_is_withdrawn_may_be_held_again(rng: SeededRandom, is_wanted: bool) -> None:
    """As after a preemption. The peer has been offered the first one, and waits for memory."""
    with engines(2) as (sender, receiver):
        tensor, sink = random_tensor(rng, 4 * MIB + 1), TensorSink()
        for number in range(2):  # one in the buffer, one in the pool: neither has room for two
            full = sender.send_tensor(TransferKey(f"full {number}"), tensor, receiver.zmq_address)
            full.wait(10)
        pull = partial(receiver.receive, KEY, sink, peer=PeerAddress(sender.zmq_address), pull=True)
        first = sender.hold(KEY, TensorSource(random_tensor(rng, 4 * MIB + 1)))
        pulled = pull() if is_wanted else None
        if is_wanted:
            eventually(lambda: sender.stats()["denied_offers"] > 0)
        first.cancel("preempted")
        assert first.wait_released(10)
        pulled = pulled or pull()
        eventually(lambda: sender._parts.holds._unheld)
        second = sender.hold(KEY, TensorSource(tensor))
        receiver.drop_landed()
        pulled.wait(10)
        second.wait(10)
        assert sink.tensor is not None
        assert torch.equal(sink.tensor, tensor)
        assert_idle(sender, receiver)


def test_discard_of_a_pull_frees_the_hold() -> None:
    with engines(2) as (sender, receiver):
        held = sender.hold(KEY, TensorSource(torch.zeros(1)), lease=100)
        peer = PeerAddress(sender.zmq_address)
        receiver.discard(KEY, peer=peer, pull=True, reason="not needed")
        held.wait(10)


def test_dropped_landings_are_named_at_once() -> None:
    with engines(2) as (sender, receiver):
        sender.send_tensor(KEY, torch.zeros(100), receiver.zmq_address).wait(10)
        assert receiver.drop_landed() == 400
        assert_idle(sender, receiver)
        with pytest.raises(TransferRejected, match="dropped"):
            receiver.recv_tensor(KEY, timeout=10)


@marks.every_transport
def test_cancel_on_either_side(transport: str) -> None:
    with engines(2, transport) as (sender, receiver):
        peer = PeerAddress(receiver.zmq_address)
        for key in (TransferKey("sender"), TransferKey("receiver")):
            waiting = receiver.receive(key, TensorSink())
            transfer = sender.send(key, peer, TensorSource(torch.zeros(1)), ready=False)
            eventually(lambda: sender.stats()["links"] == {"ready": 1})
            if key.transfer_id == "sender":
                transfer.cancel("preempted")
                with pytest.raises(TransferCancelled, match="preempted"):
                    transfer.wait(10)
                waiting.cancel()
            waiting.cancel("aborted")
            with pytest.raises(TransferCancelled):
                waiting.wait(10)
            with pytest.raises(TransferError):
                transfer.wait(10)
        assert_idle(sender, receiver)


def test_refusal_names_the_field_that_differs() -> None:
    here, there = CacheSpec(identity=b"m", block_size=16), CacheSpec(identity=b"m", block_size=64)
    with P2pNcclEngine(settings(), spec=here) as sender, P2pNcclEngine(
        settings(), spec=there
    ) as receiver:  # fmt: skip
        transfer = sender.send_tensor(KEY, torch.zeros(1), receiver.zmq_address)
        with pytest.raises(PeerRefused, match=r"block_size: 64 here, 16 there"):
            transfer.wait(10)
        waiting = receiver.receive(KEY, TensorSink(), peer=PeerAddress(sender.zmq_address))
        with pytest.raises(PeerRefused, match="block_size"):
            waiting.wait(10)


def test_peers_without_a_common_transport_say_what_is_offered() -> None:
    with P2pNcclEngine(settings("shm")) as sender, P2pNcclEngine(settings("tcp")) as receiver:
        transfer = sender.send_tensor(KEY, torch.zeros(1), receiver.zmq_address)
        with pytest.raises(PeerRefused, match="shm here, tcp there"):
            transfer.wait(10)


@pytest.mark.parametrize("transport", GPU_TRANSPORTS)
@pytest.mark.parametrize("is_sender", [True, False])
def test_a_gpu_and_a_peer_in_host_memory_are_told_the_way(transport: str, is_sender: bool) -> None:
    on_gpu, on_host = start(settings(transport)), start(settings("shm,tcp"))
    sender, receiver = (on_gpu, on_host) if is_sender else (on_host, on_gpu)
    with on_gpu, on_host:
        awaited = receiver.receive(KEY, TensorSink(), peer=PeerAddress(sender.zmq_address))
        transfer = sender.send_tensor(KEY, torch.zeros(1), receiver.zmq_address)
        with pytest.raises(
            PeerRefused, match=r'shm, tcp.*"kv_buffer_device": "cpu" on both'
        ) as refused:
            transfer.wait(5)
        assert transport in str(refused.value)
        with pytest.raises(TransferRejected, match="kv_buffer_device"):
            awaited.wait(5)
        assert_idle(on_gpu, on_host)


def test_first_transport_that_works_is_taken(rng: SeededRandom) -> None:
    """A receiver without landing memory offers no shm."""
    sender = P2pNcclEngine(settings("shm,tcp"))
    receiver = P2pNcclEngine(settings("shm,tcp"), receives=False)
    with sender, receiver:
        tensor = random_tensor(rng, 10_000)
        sender.send_tensor(KEY, tensor, receiver.zmq_address)
        assert torch.equal(receiver.recv_tensor(KEY, timeout=10), tensor)


def test_addresses_that_nobody_answers(free_port: int) -> None:
    with engines(1, connect_timeout_seconds=0.3) as (engine,):
        address = f"127.0.0.1:{free_port}"
        transfer = engine.send_tensor(KEY, torch.zeros(1), address)
        with pytest.raises(PeerUnreachable, match=address):
            transfer.wait(10)
        with pytest.raises(PeerUnreachable, match=address):
            engine.recv_tensor(KEY, address, timeout=10)
        assert_idle(engine)


@pytest.mark.parametrize("address", ["", "nowhere", "host:", "host:99999", ":80", "a b:1"])
def test_addresses_that_cannot_be(address: str) -> None:
    """Nothing stays behind: the key can be received from elsewhere, the memory is the caller's."""
    with engines(1, connect_timeout_seconds=0.3) as (engine,):
        with pytest.raises(PeerUnreachable):
            engine.send_tensor(KEY, torch.zeros(1), address).wait(10)
        with pytest.raises(PeerUnreachable):
            engine.recv_tensor(KEY, address, timeout=10)
        assert_idle(engine)


@marks.every_transport
def test_eight_threads_use_one_engine(transport: str, rng: SeededRandom) -> None:
    with engines(2, transport) as (one, other):
        tensors = {f"{i}": random_tensor(rng, rng.randrange(1, 300_000)) for i in range(40)}

        def exchange(name: str) -> bool:
            source, target = (one, other) if int(name) % 2 else (other, one)
            source.send_tensor(TransferKey(name), tensors[name], target.zmq_address)
            received = target.recv_tensor(TransferKey(name), source.zmq_address, timeout=20)
            return torch.equal(received, tensors[name])

        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(exchange, tensors))
        assert_idle(one, other)


@marks.every_transport
def test_many_to_one_and_one_to_many(transport: str, rng: SeededRandom) -> None:
    with engines(4, transport) as parties:
        tensors = {}
        for source in parties:
            for target in parties:
                name = f"{source.zmq_address} to {target.zmq_address}"
                tensors[name] = random_tensor(rng, 50_000)
                source.send_tensor(TransferKey(name), tensors[name], target.zmq_address)
        for source in parties:
            for target in parties:
                name = f"{source.zmq_address} to {target.zmq_address}"
                received = target.recv_tensor(TransferKey(name), timeout=20)
                assert torch.equal(received, tensors[name])
        assert_idle(*parties)


@marks.every_transport
def test_source_is_released_only_after_its_last_byte_was_read(
    transport: str, rng: SeededRandom
) -> None:
    """The caller reuses the memory at `released`; what arrives is what was there before."""
    with engines(2, transport, kv_buffer_size=64 * MIB) as (sender, receiver):
        source = random_tensor(rng, 16 * MIB)
        expected = source.clone()
        transfer = sender.send_tensor(KEY, source, receiver.zmq_address)
        assert transfer.wait_released(20)
        source.zero_()
        assert torch.equal(receiver.recv_tensor(KEY, timeout=20), expected)


def test_stats_tell_what_happened() -> None:
    with engines(2) as (sender, receiver):
        sender.send_tensor(KEY, torch.zeros(25), receiver.zmq_address).wait(10)
        receiver.recv_tensor(KEY, timeout=10)
        assert sender.stats()["sent_bytes"] == 100
        assert sender.stats()["transfers_by_outcome"] == {"sent ok": 1}
        assert receiver.stats()["transfers_by_outcome"] == {"received ok": 1}
        assert receiver.stats()["landed_bytes_by_place"]["buffer"] == 100
        assert np.sum(list(receiver.stats()["live_bytes_by_place"].values())) == 0
        assert receiver.healthy
    assert not receiver.healthy
