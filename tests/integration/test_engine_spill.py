"""GET under block pressure: what is held moves into the pool, its caller has the memory back."""

from __future__ import annotations

import itertools

import pytest
import torch

from p2p_engine import P2pNcclEngine, TransferKey
from p2p_engine.errors import TransferCancelled, TransferTimeout
from p2p_engine.memory.layout import TensorSink, TensorSource
from p2p_engine.peers.link import PeerAddress
from tests import marks
from tests.rigs.engines import MIB, PagedMemory, assert_idle, engines, is_idle, settings
from tests.rigs.tensors import random_tensor
from tests.support import SeededRandom, eventually

KEY = TransferKey("request-1")
pytestmark = pytest.mark.usefixtures("no_leaks")


@marks.every_transport
def test_spilled_pages_are_the_callers_at_once_and_arrive_all_the_same(
    transport: str, rng: SeededRandom
) -> None:
    theirs, ours = PagedMemory(16).fill(rng), PagedMemory(16)
    sources, places = rng.sample(range(16), 8), rng.sample(range(16), 6)
    expected = theirs.data[:, sources[2:]].copy()
    with engines(2, transport) as (sender, receiver):
        held = sender.hold(KEY, theirs.source(sources))
        assert sender.spill(held)
        assert held.wait_released(10)
        assert not held.done
        theirs.data[:] = 0
        assert sender.stats()["live_bytes_by_place"]["pool"] == 8 * 2 * 4096
        sink, peer = ours.sink(places, 2), PeerAddress(sender.zmq_address)
        receiver.receive(KEY, sink, peer=peer, pull=True).wait(10)
        held.wait(10)
        assert (ours.data[:, places] == expected).all()
        assert sender.stats()["spilled_bytes"] == 8 * 2 * 4096
        assert_idle(sender, receiver)


@marks.every_transport
def test_want_that_comes_during_the_copy_is_served_after_it(
    transport: str, rng: SeededRandom
) -> None:
    tensor, sink = random_tensor(rng, 4 * MIB), TensorSink()
    with engines(2, transport) as (sender, receiver):
        waiting = receiver.receive(KEY, sink)
        held = sender.hold(KEY, TensorSource(tensor))
        with sender._parts.changed:  # nobody hears of the copy's end
            assert sender.spill(held)
            peer = PeerAddress(receiver.zmq_address)
            sender._parts.holds.on_want(
                (KEY, b""), peer, None, lambda ending: pytest.fail(ending.reason)
            )
            assert sender.stats()["open_transfers"] == 1
        waiting.wait(10)
        held.wait(10)
        assert sink.tensor is not None
        assert torch.equal(sink.tensor, tensor)
        assert_idle(sender, receiver)


@pytest.mark.parametrize("end", ["cancel", "lease", "close", "cancel, close"])
@pytest.mark.parametrize("when", ["during the copy", "after it"])
def test_spilled_memory_is_given_back_at_each_end(end: str, when: str, rng: SeededRandom) -> None:
    with P2pNcclEngine(settings("shm")) as engine:
        lease = 0.1 if end == "lease" else 100.0
        source = TensorSource(random_tensor(rng, 2 * MIB))
        with engine._parts.changed:  # no lease ends before the copy has begun
            held = engine.hold(KEY, source, lease=lease)
            assert engine.spill(held)
            if when == "after it":
                engine._parts.changed.wait_for(lambda: held.released, 10)
            if end.startswith("cancel"):
                held.cancel("not needed")
            if end == "cancel, close":
                engine._parts.mover.close()  # the copy has stopped, and nobody was told
        if end == "lease":
            with pytest.raises(TransferTimeout, match="lease"):
                held.wait(10)
        elif end == "cancel":
            with pytest.raises(TransferCancelled):
                held.wait(10)
        else:
            engine.close()
            assert held.done
        eventually(lambda: is_idle(engine))


def test_what_cannot_be_spilled_stays_where_it_is(rng: SeededRandom) -> None:
    tensor = random_tensor(rng, MIB)
    with P2pNcclEngine(settings("shm"), receives=False) as engine:
        held = engine.hold(KEY, TensorSource(tensor))
        assert not engine.spill(held)  # there is no pool
        assert not held.released
    with engines(2, "tcp", kv_buffer_size=3 * MIB, mem_pool_size_gb=0) as (sender, receiver):
        transfers = [
            sender.hold(TransferKey(f"{i}"), TensorSource(random_tensor(rng, MIB)))
            for i in range(3)
        ]
        assert [sender.spill(item) for item in transfers] == [True, True, False]  # a reserve stays
        assert not sender.spill(transfers[0])  # twice
        offered = sender.send(KEY, PeerAddress(receiver.zmq_address), TensorSource(tensor))
        assert not sender.spill(offered)  # not held
        offered.wait(10)


def test_pull_that_has_begun_needs_no_spill(rng: SeededRandom) -> None:
    with engines(2, "shm") as (sender, receiver):
        waiting = receiver.receive(
            KEY, TensorSink(), peer=PeerAddress(sender.zmq_address), pull=True
        )
        eventually(lambda: sender._parts.holds._unheld)
        held = sender.hold(KEY, TensorSource(random_tensor(rng, 4 * MIB)))
        assert not sender.spill(held)
        waiting.wait(10)
        held.wait(10)
        assert_idle(sender, receiver)


@marks.every_transport
def test_two_full_engines_pull_from_each_other(transport: str, rng: SeededRandom) -> None:
    """Each spills what it holds until it finds no room; what the other one gives must land."""
    tensors = {TransferKey(f"{number}"): random_tensor(rng, MIB) for number in range(40)}
    changes = {"kv_buffer_size": 4 * MIB, "mem_pool_size_gb": 4 * MIB / (1 << 30)}
    with engines(2, transport, **changes, chunk_bytes=MIB // 2) as both:
        pairs = dict(zip(tensors, itertools.cycle([both, both[::-1]])))  # holder, reader
        held = {key: pairs[key][0].hold(key, TensorSource(tensors[key])) for key in tensors}
        is_spilled = [pairs[key][0].spill(transfer) for key, transfer in held.items()]
        assert 8 < is_spilled.count(True) <= 16  # of sixteen that buffers and pools could take
        sinks = {key: TensorSink() for key in tensors}
        waiting = [
            reader.receive(key, sinks[key], peer=PeerAddress(holder.zmq_address), pull=True)
            for key, (holder, reader) in pairs.items()
        ]
        for item in waiting:
            item.wait(30)
        for key, sink in sinks.items():
            assert sink.tensor is not None
            assert torch.equal(sink.tensor, tensors[key])
        assert_idle(*both)
