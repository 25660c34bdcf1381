"""Sends that leave by layer, while their last layers are still being computed, over every
transport: no byte leaves before its layer is marked, and nothing is delivered unless all of it
is."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from p2p_engine import P2pNcclEngine, TransferKey
from p2p_engine.config import GPU_TRANSPORTS
from p2p_engine.errors import P2pError, TransportError
from p2p_engine.gpu.cuda import Cuda
from p2p_engine.peers.link import PeerAddress
from p2p_engine.send import shipment
from p2p_engine.transfer import Transfer
from tests.doubles.gpu import GpuDouble
from tests.doubles.slow_kernel import SlowKernel
from tests.rigs.engines import MIB, PagedMemory, assert_idle, engines
from tests.support import SeededRandom, eventually

KEY = TransferKey("request")
LAYERS, BLOCKS, PAGE_BYTES = 8, 24, 4096
IDS = list(range(BLOCKS))
LAYER_BYTES = BLOCKS * PAGE_BYTES
POISON = 0xEE
DOUBLE = GpuDouble()  # before any test looks at the threads that there are
pytestmark = pytest.mark.usefixtures("fork_server", "no_leaks")


@pytest.fixture(autouse=True)
def every_layer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of these small caches is worth a chunk."""
    monkeypatch.setattr(shipment, "MIN_BYTES_BY_LAYER", LAYER_BYTES)


@pytest.fixture(params=["shm", "nixl", "tcp", *GPU_TRANSPORTS])
def duo(request: pytest.FixtureRequest) -> Iterator[list[P2pNcclEngine]]:
    with engines(2, request.param, chunk_bytes=10 * PAGE_BYTES) as made:
        yield made


def caches(rng: SeededRandom) -> tuple[PagedMemory, PagedMemory, PagedMemory]:
    """What is to be computed, where it is computed, and where it goes."""
    wanted, ours, theirs = (PagedMemory(BLOCKS, LAYERS, PAGE_BYTES) for _ in range(3))
    ours.data[:] = POISON
    return wanted.fill(rng), ours, theirs


def compute(sender: P2pNcclEngine, sent: Transfer, ours: PagedMemory, wanted: PagedMemory,
            num_layers: int = LAYERS) -> None:  # fmt: skip
    """Compute the first layers, one after the other, and mark each."""
    for layer in range(num_layers):
        ours.data[layer] = wanted.data[layer]
        sender.mark_layers_ready([sent], layer + 1)


def sent_bytes(engine: P2pNcclEngine) -> int:
    return int(engine.stats()["sent_bytes"])


def test_each_layer_leaves_when_it_is_computed(duo: list[P2pNcclEngine], rng: SeededRandom) -> None:
    """And not before: what is not computed yet is poison."""
    sender, receiver = duo
    wanted, ours, theirs = caches(rng)
    peer = PeerAddress(receiver.zmq_address)
    sent = sender.send(KEY, peer, ours.source(IDS), ready=False, by_layer=True)
    received = receiver.receive(KEY, theirs.sink(IDS))
    for layer in range(LAYERS):
        ours.data[layer] = wanted.data[layer]
        sender.mark_layers_ready([sent], layer + 1)
        eventually(lambda: sent_bytes(sender) == (layer + 1) * LAYER_BYTES)  # noqa: B023
        assert received.done or not sent.released or layer == LAYERS - 1
    received.wait(10)
    sent.wait(10)
    assert (theirs.data == wanted.data).all()
    assert_idle(sender, receiver)


@pytest.mark.parametrize("is_awaited", [True, False])
def test_any_pace_delivers_what_was_computed(
    duo: list[P2pNcclEngine], rng: SeededRandom, is_awaited: bool
) -> None:
    """Marks come while offers are on their way, in any number at a time; and a receive before or
    after all that."""
    sender, receiver = duo
    for number in range(12):
        key = TransferKey(f"request-{number}")
        wanted, ours, theirs = caches(rng)
        peer = PeerAddress(receiver.zmq_address)
        received = receiver.receive(key, theirs.sink(IDS)) if is_awaited else None
        sent = sender.send(key, peer, ours.source(IDS), ready=False, by_layer=True)
        for layer in range(LAYERS):
            ours.data[layer] = wanted.data[layer]
            if rng.random() < 0.7:
                sender.mark_layers_ready([sent], layer + 1)
            if rng.random() < 0.5:
                sender.poll()
                receiver.poll()
            if rng.random() < 0.2:
                before = sent_bytes(sender)
                threading.Event().wait(rng.random() * 0.004)
                assert sent_bytes(sender) >= before
        sender.mark_ready(sent)
        received = received or receiver.receive(key, theirs.sink(IDS))
        received.wait(10)
        sent.wait(10)
        assert (theirs.data == wanted.data).all()
    assert_idle(sender, receiver)


def test_a_send_may_end_in_its_middle(duo: list[P2pNcclEngine], rng: SeededRandom) -> None:
    """Some layers are there; the rest will never come. Nothing is delivered, and every block
    counts as missing."""
    sender, receiver = duo
    for number in range(6):
        key = TransferKey(f"request-{number}")
        wanted, ours, theirs = caches(rng)
        sink = theirs.sink(IDS)
        received = receiver.receive(key, sink)
        peer = PeerAddress(receiver.zmq_address)
        sent = sender.send(key, peer, ours.source(IDS), ready=False, by_layer=True)
        compute(sender, sent, ours, wanted, num_layers=number)
        eventually(lambda: sent_bytes(sender) > 0 or not number)  # noqa: B023
        sent.cancel("the forward failed")
        assert sent.wait_released(10)
        ours.data[:] = POISON
        sender.mark_layers_ready([sent], LAYERS)  # too late
        sender.abandon(key, peer, "the forward failed")
        with pytest.raises(P2pError):
            received.wait(10)
        assert len(sink.missing_blocks()) == BLOCKS
        assert not (theirs.data == POISON).all(axis=2).any()
    assert_idle(sender, receiver)


def test_what_has_come_by_layer_is_completed_by_another_attempt(
    duo: list[P2pNcclEngine], rng: SeededRandom
) -> None:
    """A preempted request is computed again; its second attempt need not go by layer."""
    sender, receiver = duo
    wanted, ours, theirs = caches(rng)
    peer = PeerAddress(receiver.zmq_address)
    received = receiver.receive(KEY, theirs.sink(IDS))
    first = sender.send(KEY, peer, ours.source(IDS), ready=False, by_layer=True, generation=1)
    compute(sender, first, ours, wanted, num_layers=3)
    eventually(lambda: sent_bytes(sender) >= 2 * LAYER_BYTES)
    first.cancel("preempted")
    assert first.wait_released(10)
    ours.data[:] = wanted.data
    sender.send(KEY, peer, ours.source(IDS), generation=2).wait(10)
    received.wait(10)
    assert (theirs.data == wanted.data).all()
    assert sent_bytes(sender) <= wanted.data.nbytes + 3 * LAYER_BYTES
    assert_idle(sender, receiver)


def test_a_data_connection_may_break_while_layers_are_computed(
    duo: list[P2pNcclEngine], rng: SeededRandom
) -> None:
    sender, receiver = duo
    wanted, ours, theirs = caches(rng)
    peer = PeerAddress(receiver.zmq_address)
    received = receiver.receive(KEY, theirs.sink(IDS))
    sent = sender.send(KEY, peer, ours.source(IDS), ready=False, by_layer=True)
    for layer in range(LAYERS):
        ours.data[layer] = wanted.data[layer]
        sender.mark_layers_ready([sent], layer + 1)
        if layer in (2, 5):
            eventually(lambda: sent_bytes(sender) >= layer * LAYER_BYTES)  # noqa: B023
            with sender._parts.changed:
                for link in [item for item in sender._parts.links._links.values() if item.channel]:
                    sender._parts.links.break_channel(link, TransportError("the test breaks it"))
    received.wait(20)
    sent.wait(20)
    assert (theirs.data == wanted.data).all()
    assert_idle(sender, receiver)


@pytest.mark.parametrize("transport", GPU_TRANSPORTS)
def test_a_layer_leaves_behind_its_own_kernels(transport: str, rng: SeededRandom) -> None:
    """All marks are made before the device has computed anything, as vLLM launches ahead: each
    layer waits for its own moment, and for no later one."""
    with engines(2, transport) as (sender, receiver):
        cuda = Cuda()
        cuda.use(0)
        stream = cuda.create_stream()
        _, ours, theirs = caches(rng)
        peer = PeerAddress(receiver.zmq_address)
        first = receiver.receive(TransferKey("first"), theirs.sink(IDS))
        sender.send(TransferKey("first"), peer, ours.source(IDS)).wait(10)
        first.wait(10)  # what waits for an idle device is done
        before = sent_bytes(sender)
        received = receiver.receive(KEY, theirs.sink(IDS))
        sent = sender.send(KEY, peer, ours.source(IDS), ready=False, by_layer=True)
        kernels = list[SlowKernel]()
        for layer in range(LAYERS):
            kernels.append(SlowKernel(cuda, stream))
            address = ours.data.ctypes.data + layer * LAYER_BYTES
            cuda.fill(address, layer + 1, LAYER_BYTES, stream)
            sender.mark_layers_ready([sent], layer + 1, stream=stream)
        sender.mark_ready(sent, stream=stream)
        for layer, kernel in enumerate(kernels):
            assert sent_bytes(sender) <= before + layer * LAYER_BYTES
            kernel.end()
            wanted = before + (layer + 1) * LAYER_BYTES
            eventually(lambda: sent_bytes(sender) == wanted)  # noqa: B023
        received.wait(10)
        assert (theirs.data == [[[layer + 1]] for layer in range(LAYERS)]).all()
        cuda.destroy_stream(stream)


@pytest.mark.parametrize("transport", ["shm", "nixl", "tcp"])
def test_all_layers_of_few_bytes_leave_together(
    transport: str, rng: SeededRandom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk for each layer would cost more than it hides."""
    monkeypatch.setattr(shipment, "MIN_BYTES_BY_LAYER", 4 * MIB)
    with engines(2, transport) as (sender, receiver):
        wanted, ours, theirs = caches(rng)
        received = receiver.receive(KEY, theirs.sink(IDS))
        peer = PeerAddress(receiver.zmq_address)
        sent = sender.send(KEY, peer, ours.source(IDS), ready=False, by_layer=True)
        compute(sender, sent, ours, wanted, num_layers=LAYERS - 1)
        eventually(lambda: receiver.stats()["live_bytes"] > 0)
        assert sent_bytes(sender) == 0
        compute(sender, sent, ours, wanted)
        received.wait(10)
        assert (theirs.data == wanted.data).all()
