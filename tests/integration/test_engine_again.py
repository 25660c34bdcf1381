"""A load is given up, and the same content is asked for again, while the first shipment of it is
still on its way: what that one brings is of no use to the second load, which must get all."""

from __future__ import annotations

import contextlib

import pytest

from p2p_engine import P2pNcclEngine, TransferKey
from p2p_engine.errors import TransferError
from p2p_engine.peers.link import PeerAddress
from p2p_engine.receive.store import Store
from p2p_engine.transfer import Transfer
from p2p_engine.transports.base import Transport
from p2p_engine.wire.messages import Offer
from tests.rigs.engines import PagedMemory, assert_idle, engines
from tests.support import SeededRandom, eventually

KEY, BINDING = TransferKey("request-1"), b"x"
NUM_BLOCKS = 16  # of 8 KiB, two in a chunk
IDS = list(range(NUM_BLOCKS))
CHUNKED = {"chunk_bytes": 2 * 8192, "retry_seconds": 0.1}
pytestmark = pytest.mark.usefixtures("no_leaks")


def provide(engine: P2pNcclEngine, memory: PagedMemory, kind: str) -> Transfer:
    source = memory.source(IDS)
    if kind == "hold":
        return engine.hold(KEY, source, binding=BINDING, lease=100.0)
    stashed = engine.stash(KEY, source, binding=BINDING, beginnings={}, lease=100.0)
    assert stashed.wait_released(10)
    return stashed


def load(engine: P2pNcclEngine, memory: PagedMemory, holder: P2pNcclEngine) -> Transfer:
    sink, peer = memory.sink(IDS), PeerAddress(holder.zmq_address)
    return engine.receive(KEY, sink, binding=BINDING, peer=peer, pull=True)


@pytest.mark.parametrize("kind", ["stash", "hold"])
@pytest.mark.parametrize("num_before", [1, 2])
def test_a_load_begins_anew_while_chunks_are_offered(
    kind: str, num_before: int, rng: SeededRandom, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, given_up, ours = PagedMemory(16).fill(rng), PagedMemory(16), PagedMemory(16)
    honest, offers, loads = Store.on_offer, list[int](), list[Transfer]()
    with engines(2, "shm", **CHUNKED) as (sender, receiver):

        def on_offer(self: Store, epoch: int, offer: Offer, transport: Transport) -> None:
            honest(self, epoch, offer, transport)
            offers.append(offer.seq)
            if len(offers) == num_before:
                loads[0].cancel("its request ended")
                loads.append(load(receiver, ours, sender))

        monkeypatch.setattr(Store, "on_offer", on_offer)
        provided = provide(sender, theirs, kind)
        with receiver._parts.changed:
            loads.append(load(receiver, given_up, sender))
        eventually(lambda: len(loads) == 2)
        loads[1].wait(10)
        assert (ours.data == theirs.data).all()
        provided.wait(10)
        assert_idle(sender, receiver)


@pytest.mark.parametrize("kind", ["stash", "hold"])
def test_the_next_load_gets_what_the_one_before_had_taken(
    kind: str, rng: SeededRandom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written at the moment of the change, so nothing is cancelled by itself."""
    theirs, given_up, ours = PagedMemory(16).fill(rng), PagedMemory(16), PagedMemory(16)
    honest, offered, loads = Store.on_offer, list[int](), list[Transfer]()
    with engines(2, "shm", **CHUNKED) as (sender, receiver):

        def on_offer(self: Store, epoch: int, offer: Offer, transport: Transport) -> None:
            if offer.seq not in offered:
                offered.append(offer.seq)
            if len(loads) == 1 and offered.index(offer.seq) >= 2:
                if loads[0].nbytes < 2 * CHUNKED["chunk_bytes"]:
                    return  # it will be offered again
                loads[0].cancel("its request ended")
                loads.append(load(receiver, ours, sender))
            honest(self, epoch, offer, transport)

        monkeypatch.setattr(Store, "on_offer", on_offer)
        provided = provide(sender, theirs, kind)
        with receiver._parts.changed:
            loads.append(load(receiver, given_up, sender))
        eventually(lambda: len(loads) == 2)
        loads[1].wait(10)
        assert (ours.data == theirs.data).all()
        provided.wait(10)
        assert_idle(sender, receiver)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("kind", ["stash", "hold"])
def test_a_load_begins_anew_at_any_moment(transport: str, kind: str, rng: SeededRandom) -> None:
    """It arrives whole, or is refused: the holder may have heard that nobody wants it. If so, a
    hold is waited for (docs/protocol.md), so this one is held again."""
    theirs = PagedMemory(16).fill(rng)
    with engines(2, transport, **CHUNKED) as (sender, receiver):
        for _ in range(30):
            ours, given_up = PagedMemory(16), PagedMemory(16)
            provided = provide(sender, theirs, kind)
            first = load(receiver, given_up, sender)
            first.wait_released(rng.uniform(0.0, 0.01))
            first.cancel("its request ended")
            eventually(lambda: first.done)  # noqa: B023
            second = load(receiver, ours, sender)
            eventually(lambda: second.done or provided.done)  # noqa: B023
            if kind == "hold" and not second.done:
                provided = provide(sender, theirs, kind)
            with contextlib.suppress(*([TransferError] if kind == "stash" else [])):
                second.wait(10)
                assert (ours.data == theirs.data).all()
            provided.cancel("it is over")
            eventually(lambda: provided.done)  # noqa: B023
        assert_idle(sender, receiver)
