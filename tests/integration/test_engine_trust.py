"""Who may say what: each message, from a peer that it is not for, changes nothing and is counted.

The table is in docs/security.md. Three engines: the one that is spoken to, the peer whose affair it
is, and another member of the fleet.
"""

from __future__ import annotations

import gc
import re
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from p2p_engine import P2pNcclEngine, TransferKey
from p2p_engine.control.sockets import Route
from p2p_engine.errors import TransferRejected
from p2p_engine.memory.layout import TensorSink, TensorSource
from p2p_engine.peers import sessions
from p2p_engine.peers.link import PeerAddress
from p2p_engine.receive import store
from p2p_engine.transfer import Transfer
from p2p_engine.wire.messages import (
    Abandon,
    AbandonOk,
    AnyMessage,
    Bye,
    Cancel,
    Cancelled,
    Commit,
    Deny,
    Done,
    Fail,
    Gone,
    Grant,
    Greet,
    Location,
    Manifest,
    Message,
    Offer,
    Pong,
    Refuse,
    Release,
    Renew,
    Want,
    Welcome,
    encode,
)
from tests.rigs.engines import MIB, assert_idle, engines
from tests.rigs.tensors import random_tensor
from tests.support import SeededRandom, eventually

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
KEY = TransferKey("request-1")
OTHER = b"another prompt"
pytestmark = pytest.mark.usefixtures("no_leaks")


class RogueScene:
    """All know each other; `tensor` is what the right peer sends."""

    def __init__(self, parties: list[P2pNcclEngine], rng: SeededRandom) -> None:
        self.engine, self.peer, self.rogue = parties
        self.target = PeerAddress(self.peer.zmq_address)
        self.tensor = random_tensor(rng, 1000)
        hello = TransferKey("hello")
        for one in parties:
            for two in parties:
                if one is not two:
                    one.send(hello, PeerAddress(two.zmq_address), TensorSource(self.tensor)).wait(9)
                    two.recv_tensor(hello, timeout=9)

    def answer(self, kind: type[Message], *fields: Any, epoch: int | None = None) -> None:
        """The rogue says something to who has dialled it."""
        source = self.rogue.epoch if epoch is None else epoch
        message: Any = kind(source, self.engine.epoch, *fields)
        self.engine._parts.dispatch.on_frame(Route(self.rogue.zmq_address), encode(message))

    def request(self, kind: type[Message], *fields: Any, epoch: int | None = None) -> None:
        """The rogue says something to whom it has dialled."""
        source = self.rogue.epoch if epoch is None else epoch
        message: Any = kind(source, self.engine.epoch, *fields)
        self.engine._parts.dispatch.on_frame(
            self.engine._parts.sessions._sessions[self.rogue.epoch].route, encode(message)
        )

    @property
    def num_wrong(self) -> int:
        return self.engine._parts.counters.wrong_messages

    def chunk(self) -> tuple[Transfer, int]:
        """A chunk for the right peer that is granted and not written; its number."""
        source = TensorSource(self.tensor)
        transfer = self.engine.send(KEY, self.target, source, ready=False)
        chunks = self.engine._parts.sender._chunks
        eventually(lambda: [chunk for chunk in chunks.values() if chunk.grant is not None])
        return transfer, next(iter(chunks))

    def finish_chunk(self, transfer: Transfer) -> None:
        self.engine.mark_ready(transfer)
        transfer.wait(9)
        assert torch.equal(self.peer.recv_tensor(KEY, timeout=9), self.tensor)

    def waiting(self, *, is_named: bool = True) -> tuple[Transfer, TensorSink]:
        """A receive of what nobody sends yet."""
        sink = TensorSink()
        peer = self.target if is_named else None
        return self.engine.receive(KEY, sink, peer=peer, pull=is_named, timeout=30), sink

    def finish_waiting(self, transfer: Transfer, sink: TensorSink) -> None:
        self.peer.hold(KEY, TensorSource(self.tensor))
        transfer.wait(9)
        assert sink.tensor is not None
        assert torch.equal(sink.tensor, self.tensor)


@pytest.fixture
def scene(rng: SeededRandom) -> Iterator[RogueScene]:
    with engines(3, "shm") as parties:
        yield RogueScene(parties, rng)
        assert_idle(*parties)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Grant, (0, 1, 0, 7)),
        (Deny, ("full", 100.0)),
        (Commit, ()),
        (Fail, ("TransferRejected", "no")),
        (Fail, ("TransportError", "broken")),
        (Cancel, ()),
    ],
)
def test_the_answer_to_a_chunk_comes_from_who_it_is_for(
    scene: RogueScene, kind: type[Message], fields: tuple[Any, ...]
) -> None:
    transfer, seq = scene.chunk()
    scene.answer(kind, seq, 0, *fields)
    assert scene.num_wrong == 1
    assert not transfer.done
    scene.finish_chunk(transfer)


def test_abandon_ok_of_another_peer_lets_the_news_be_repeated(scene: RogueScene) -> None:
    with scene.engine._parts.changed:  # before the peer's own answer
        scene.engine.abandon(KEY, scene.target, "over")
        scene.answer(AbandonOk, KEY, b"", 1)
        assert scene.engine._parts.sender._abandoned
    eventually(lambda: not scene.engine._parts.sender._abandoned)


def test_gone_is_believed_from_who_was_asked(scene: RogueScene) -> None:
    transfer, sink = scene.waiting()
    scene.answer(Gone, KEY, "never was", 0, b"")
    assert scene.num_wrong == 1
    scene.finish_waiting(transfer, sink)


def test_abandon_is_believed_from_who_sends_the_key(scene: RogueScene) -> None:
    transfer, sink = scene.waiting()
    scene.request(Abandon, KEY, "over", 0, b"")
    assert scene.num_wrong == 1
    scene.finish_waiting(transfer, sink)


def test_abandon_before_anybody_waits_counts_when_its_speaker_is_who_sends_the_key(
    scene: RogueScene,
) -> None:
    scene.request(Abandon, KEY, "over", 0, b"")
    transfer, sink = scene.waiting()
    scene.finish_waiting(transfer, sink)
    second = TransferKey("request-2")
    scene.peer.abandon(second, PeerAddress(scene.engine.zmq_address), "given up")
    eventually(lambda: not scene.peer._parts.sender._abandoned)
    failed = scene.engine.receive(second, TensorSink(), peer=scene.target, timeout=30)
    with pytest.raises(TransferRejected, match="given up"):
        failed.wait(9)


def test_abandon_before_the_sender_is_known_is_judged_when_it_is(scene: RogueScene) -> None:
    """The peer's address is known, its epoch is not yet. The peer is asked, and says it again."""
    scene.peer.abandon(TransferKey("request-2"), None, "given up")
    with scene.engine._parts.changed:
        scene.engine._parts.links.session_over(scene.peer.epoch, TransferRejected("dial again"))
        transfer, sink = scene.waiting()
        scene.request(Abandon, KEY, "over", 0, b"")
        second = TransferKey("request-2")
        failed = scene.engine.receive(second, TensorSink(), peer=scene.target, timeout=30)
        scene.request(Abandon, second, "not theirs", 0, b"")
        session = scene.engine._parts.sessions._sessions[scene.peer.epoch]
        message = Abandon(scene.peer.epoch, scene.engine.epoch, second, "given up", 0, b"")
        scene.engine._parts.dispatch.on_frame(session.route, encode(message))
    with pytest.raises(TransferRejected, match="given up"):
        failed.wait(9)
    scene.finish_waiting(transfer, sink)


def test_where_nobody_is_named_abandon_is_believed_from_who_has_offered(scene: RogueScene) -> None:
    transfer, _ = scene.waiting(is_named=False)
    to_engine = PeerAddress(scene.engine.zmq_address)
    sending = scene.peer.send(KEY, to_engine, TensorSource(scene.tensor), ready=False)
    eventually(lambda: scene.engine._parts.store._ledger.landings)
    scene.request(Abandon, KEY, "over", 0, b"")
    assert scene.num_wrong == 1
    scene.peer.mark_ready(sending)
    transfer.wait(9)


def test_where_nobody_is_named_and_nobody_has_offered_anybody_is_believed(
    scene: RogueScene,
) -> None:
    transfer, _ = scene.waiting(is_named=False)
    scene.request(Abandon, KEY, "over", 0, b"")
    with pytest.raises(TransferRejected, match="over"):
        transfer.wait(9)


def test_an_abandoned_key_may_still_come_from_another_peer(scene: RogueScene) -> None:
    scene.request(Abandon, KEY, "over", 0, b"")
    to_engine = PeerAddress(scene.engine.zmq_address)
    scene.peer.send(KEY, to_engine, TensorSource(scene.tensor)).wait(9)
    assert torch.equal(scene.engine.recv_tensor(KEY, timeout=9), scene.tensor)


def test_another_content_from_another_peer_does_not_cut_a_wait_short(scene: RogueScene) -> None:
    to_engine, source = PeerAddress(scene.engine.zmq_address), TensorSource(scene.tensor)
    before = scene.rogue.send(KEY, to_engine, source, binding=OTHER)
    before.wait(9)
    transfer, sink = scene.waiting()
    after = scene.rogue.send(KEY, to_engine, source, binding=OTHER + b"!")
    after.wait(9)
    (receive,) = scene.engine._parts.store._ledger.receives.values()
    assert not receive.mismatched
    scene.finish_waiting(transfer, sink)
    scene.engine.drop_landed()


def test_who_has_offered_a_chunk_and_leaves_ends_no_wait_for_another_peer(
    scene: RogueScene,
) -> None:
    transfer, sink = scene.waiting()
    to_engine, source = PeerAddress(scene.engine.zmq_address), TensorSource(scene.tensor)
    scene.rogue.send(KEY, to_engine, source, ready=False)
    eventually(lambda: scene.engine._parts.store._ledger.landings)
    scene.request(Bye)
    assert not transfer.done
    scene.finish_waiting(transfer, sink)


@pytest.mark.parametrize("has_landed", [True, False])
def test_what_another_peer_sent_before_and_does_not_fit_ends_no_wait(
    scene: RogueScene, has_landed: bool
) -> None:
    to_engine, misfit = PeerAddress(scene.engine.zmq_address), TensorSource(scene.tensor[:7])
    landings = scene.engine._parts.store._ledger.landings
    sent = scene.rogue.send(KEY, to_engine, misfit, ready=has_landed)
    eventually(lambda: sent.done if has_landed else landings)
    sink = TensorSink(torch.empty_like(scene.tensor))
    transfer = scene.engine.receive(KEY, sink, peer=scene.target, pull=True, timeout=30)
    assert not transfer.done
    scene.finish_waiting(transfer, sink)


@pytest.mark.parametrize("is_named", [True, False])
def test_what_the_right_peer_sent_before_and_does_not_fit_ends_the_wait_at_once(
    scene: RogueScene, is_named: bool
) -> None:
    to_engine, misfit = PeerAddress(scene.engine.zmq_address), TensorSource(scene.tensor[:7])
    scene.peer.send(KEY, to_engine, misfit).wait(9)
    sink, peer = TensorSink(torch.empty_like(scene.tensor)), scene.target if is_named else None
    transfer = scene.engine.receive(KEY, sink, peer=peer, timeout=30)
    with pytest.raises(TransferRejected, match="came for"):
        transfer.wait(9)


@pytest.mark.parametrize(("kind", "fields"), [(Done, (0,)), (Cancelled, ())])
def test_the_end_of_a_chunk_is_said_by_its_sender(
    scene: RogueScene, kind: type[Message], fields: tuple[Any, ...]
) -> None:
    to_engine, source = PeerAddress(scene.engine.zmq_address), TensorSource(scene.tensor)
    sending = scene.peer.send(KEY, to_engine, source, ready=False)
    eventually(lambda: scene.engine._parts.store._ledger.landings)
    ((epoch, seq),) = scene.engine._parts.store._ledger.landings
    scene.request(kind, seq, 0, *fields)
    scene.request(kind, seq, 0, *fields, epoch=epoch)  # in the other one's name
    scene.peer.mark_ready(sending)
    assert torch.equal(scene.engine.recv_tensor(KEY, timeout=9), scene.tensor)
    sending.wait(9)


def test_release_names_the_content(scene: RogueScene) -> None:
    held = scene.engine.hold(KEY, TensorSource(scene.tensor))
    scene.request(Release, KEY, OTHER)
    assert not held.done
    scene.request(Release, KEY, b"")
    held.wait(9)


def test_renew_names_the_content(scene: RogueScene) -> None:
    held = scene.engine.hold(KEY, TensorSource(scene.tensor))
    (hold,) = scene.engine._parts.holds._holds.values()
    ends_at = hold.lease_ends_at
    scene.request(Renew, [(KEY, OTHER)])
    assert hold.lease_ends_at == ends_at
    scene.request(Renew, [(KEY, b"")])
    assert hold.lease_ends_at > ends_at
    scene.request(Release, KEY, b"")
    held.wait(9)


def test_an_offer_of_a_transport_that_was_not_agreed_on_is_counted(scene: RogueScene) -> None:
    manifest = TensorSource(scene.tensor).manifest
    scene.request(Offer, 1, 0, KEY, manifest, b"", "pigeon")
    assert scene.num_wrong == 1
    assert not scene.engine._parts.store._ledger.landings


@pytest.mark.parametrize("kind", [Bye, Greet, Pong])
def test_what_ends_a_link_is_said_by_the_engine_that_is_meant(
    scene: RogueScene, kind: type[Message]
) -> None:
    links = scene.engine.stats()["links"]
    scene.answer(kind, epoch=scene.peer.epoch)
    scene.request(kind, epoch=scene.peer.epoch)
    link = scene.engine._parts.links.get(scene.target, data=False)
    assert link.ready
    assert link.epoch == scene.peer.epoch
    assert scene.peer.epoch in scene.engine._parts.sessions._sessions
    assert sum(scene.engine.stats()["links"].values()) >= sum(links.values()) - 1


@pytest.mark.parametrize(
    "message",
    [
        Welcome(1, 1, 1, None, {}),
        Refuse(1, 1, 1, "no"),
        Location(1, 1, 0, "127.0.0.1:9", 1, None),
    ],
)
def test_the_answer_to_a_first_word_concerns_the_address_that_was_dialled(
    scene: RogueScene, message: AnyMessage
) -> None:
    transfer, sink = scene.waiting()
    scene.engine._parts.dispatch.on_frame(Route(scene.rogue.zmq_address), encode(message))
    link = scene.engine._parts.links.get(scene.target, data=False)
    assert link.ready
    scene.finish_waiting(transfer, sink)


FACE = "\N{GRINNING FACE}"  # four bytes, and as many again for Python's own copy
FLOODS: dict[str, Callable[[int, TransferKey], tuple[Any, ...]]] = {
    "releases": lambda _, key: (Release, key, b"b" * 64),
    "wants": lambda _, key: (Want, key, b"b" * 64),
    "renewals": lambda _, key: (Renew, [(key, b"b" * 64)]),
    "abandons": lambda _, key: (Abandon, key, FACE * 500, 1, b"b" * 64),
    "chunks without bytes": lambda number, key: (
        Offer, number, 1, key, Manifest(0, 0, [1000] * 1000), b"", "shm", False, 1,
    ),
    "chunks of one byte": lambda number, key: (
        Offer, number, 1, key, Manifest(0, 1, [0] * 1000 + [1]), b"", "shm", False, 1,
    ),
}  # fmt: skip


def traced_bytes() -> int:
    """What was allocated since the tracing began."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def test_wants_and_descriptions_of_many_sessions_leave_room_for_what_is_offered(
    scene: RogueScene,
) -> None:
    budget = scene.engine._parts.sessions.budget
    for epoch in range(40):
        while budget.take(epoch, 1000):
            pass
    scene.peer.send(KEY, PeerAddress(scene.engine.zmq_address), TensorSource(scene.tensor)).wait(9)
    assert torch.equal(scene.engine.recv_tensor(KEY, timeout=9), scene.tensor)


@pytest.mark.parametrize("flood", FLOODS)
def test_what_a_member_says_takes_no_more_memory_than_the_budget(
    flood: str, rng: SeededRandom, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = MIB // 4
    monkeypatch.setattr(sessions, "BUDGET_BYTES", budget // 2)
    monkeypatch.setattr(store, "OFFERED_BYTES", budget // 2)
    with engines(3, "shm") as parties:
        scene = RogueScene(parties, rng)

        def say(number: int) -> None:
            kind, *fields = FLOODS[flood](number, TransferKey(f"{number}{FACE * 500}", FACE * 500))
            scene.request(kind, *fields)

        say(0)
        gc.collect()
        tracemalloc.start()
        try:
            for number in range(1, 400):
                say(number)
            eventually(lambda: traced_bytes() < budget + MIB // 8)  # answers are under way
        finally:
            tracemalloc.stop()
        assert scene.engine.stats()["remembered_bytes"] <= budget
        scene.peer.send(KEY, PeerAddress(scene.engine.zmq_address), TensorSource(scene.tensor))
        received = scene.engine.recv_tensor(KEY, scene.peer.zmq_address, timeout=9)
        assert torch.equal(received, scene.tensor)
        scene.finish_chunk(scene.chunk()[0])


def test_every_message_has_its_row_in_the_table() -> None:
    section = PAGE.read_text().partition("### Who may say what")[2]
    told = set(re.findall(r"`([A-Z_]+)`", "".join(re.findall(r"^\|[^|]+\|", section, re.M))))
    assert told == {kind.__struct_config__.tag for kind in get_args(AnyMessage)}
