"""A load is given up, and the same content is asked for again, at once: while the first shipment of
it is still on its way, what that one brings is of no use to the second load, which must get all."""

from __future__ import annotations

import contextlib
import itertools
import time

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


@pytest.mark.parametrize("kind", ["stash", "hold"])
def test_a_load_of_an_older_engine_begins_anew(
    kind: str, rng: SeededRandom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives its receives no numbers. Its RELEASE and its next WANT come one behind the other."""
    theirs, given_up, ours = PagedMemory(16).fill(rng), PagedMemory(16), PagedMemory(16)
    honest, loads = Store.on_offer, list[Transfer]()
    with engines(2, "shm", **CHUNKED, transfer_timeout_seconds=5) as (sender, receiver):
        receiver._parts.pulls._attempts = itertools.repeat(0)  # type: ignore[assignment]

        def on_offer(self: Store, epoch: int, offer: Offer, transport: Transport) -> None:
            if len(loads) == 1:
                loads[0].cancel("its request ended")
                receiver._parts.pulls.tick(time.monotonic())
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


def begin_anew(
    receiver: P2pNcclEngine, memory: PagedMemory, holder: P2pNcclEngine, *, pull: bool = True
) -> Transfer:
    """Begin a receive, give it up, and begin it again before anybody has looked."""
    sink, peer = memory.sink(IDS), PeerAddress(holder.zmq_address)
    with receiver._parts.changed:
        receiver.receive(KEY, sink, binding=BINDING, peer=peer, pull=pull).cancel("it is over")
        return receiver.receive(KEY, sink, binding=BINDING, peer=peer, pull=pull)


@pytest.mark.parametrize("pull", [True, False])
def test_what_has_arrived_is_sent_again_under_its_key(pull: bool, rng: SeededRandom) -> None:
    """Who names no attempts may use a key again."""
    theirs, ours = PagedMemory(16).fill(rng), PagedMemory(16)
    with engines(2, "shm", **CHUNKED) as (sender, receiver):
        peer, source = PeerAddress(receiver.zmq_address), theirs.source(IDS)
        first = begin_anew(receiver, ours, sender, pull=pull)
        if pull:
            sender.hold(KEY, source, binding=BINDING)
        else:
            sender.send(KEY, peer, source, binding=BINDING)
        first.wait(10)
        theirs.fill(rng)
        sent = sender.send(KEY, peer, source, binding=BINDING)
        sent.wait(10)
        receiver.receive(KEY, ours.sink(IDS), binding=BINDING).wait(10)
        assert (ours.data == theirs.data).all()


def test_what_is_given_up_behind_a_load_that_began_anew_fails_the_next_one_at_once(
    rng: SeededRandom,
) -> None:
    theirs, ours = PagedMemory(16).fill(rng), PagedMemory(16)
    with engines(2, "shm", **CHUNKED, transfer_timeout_seconds=60) as (sender, receiver):
        first = begin_anew(receiver, ours, sender)
        held = sender.hold(KEY, theirs.source(IDS), binding=BINDING, generation=1)
        first.wait(10)
        held.wait(10)
        eventually(lambda: receiver._parts.expectations.num_awaited() == 0)
        sender.abandon(KEY, None, "its request was aborted", binding=BINDING, generation=2)
        with pytest.raises(TransferError, match="its request was aborted"):
            load(receiver, ours, sender).wait(10)


def test_a_load_that_begins_anew_elsewhere_releases_the_first_holder(rng: SeededRandom) -> None:
    theirs, ours = PagedMemory(16).fill(rng), PagedMemory(16)
    with engines(3, "shm", **CHUNKED) as (first, second, receiver):
        given_up = load(receiver, PagedMemory(16), first)
        eventually(lambda: len(first._parts.holds._unheld) == 1)
        with receiver._parts.changed:
            given_up.cancel("another one is tried")
            loading = load(receiver, ours, second)
        provide(second, theirs, "hold")
        loading.wait(10)
        eventually(lambda: len(first._parts.holds._unheld) == 0)
        provide(first, theirs, "hold").wait(10)
        assert_idle(first, second, receiver)


def test_what_only_the_reader_began_again_does_not_spoil_later_attempts(rng: SeededRandom) -> None:
    """It has ended one attempt more than the holder, for which its RELEASE looks like that of the
    next one."""
    theirs, ours = PagedMemory(16).fill(rng), PagedMemory(16)
    with engines(2, "shm", **CHUNKED, transfer_timeout_seconds=5) as (sender, receiver):
        held = sender.hold(KEY, theirs.source(IDS), binding=BINDING, generation=1)
        load(receiver, ours, sender).wait(10)
        held.wait(10)
        alone = load(receiver, ours, sender)
        eventually(lambda: len(sender._parts.holds._unheld) == 1)
        alone.cancel("its client has gone")
        eventually(lambda: len(sender._parts.holds._unheld) == 0)
        for generation in (2, 3):
            held = sender.hold(KEY, theirs.source(IDS), binding=BINDING, generation=generation)
            load(receiver, ours.fill(rng), sender).wait(10)
            assert (ours.data == theirs.data).all()
            held.wait(10)
