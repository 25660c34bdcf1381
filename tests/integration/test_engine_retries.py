"""A request that is sent again under its transfer id, after its first attempt has ended on both
sides: whatever each side did in the first attempt, and whichever is first in the second, it
arrives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch

from p2p_engine import P2pNcclEngine, SendMode, TransferKey
from p2p_engine.errors import TransferRejected
from p2p_engine.memory.layout import TensorSink, TensorSource
from p2p_engine.peers.link import PeerAddress
from p2p_engine.transfer import Transfer
from tests.rigs.engines import assert_idle, engines
from tests.rigs.tensors import pattern
from tests.support import eventually

KEY = TransferKey("request")
BINDING = b"prompt"
NBYTES = 10_000
GET = SendMode.GET
MODES = [SendMode.PUT_ASYNC, GET]

# What a side did in the first attempt, before its request was aborted.
PREFILL_DEEDS = ["nothing", "offered", "computed"]
DECODE_DEEDS = ["nothing", "queued", "asked"]


@dataclass
class PrefillSide:
    """What the worker half of a prefill rank does for one request after another."""

    engine: P2pNcclEngine
    peer: PeerAddress
    mode: SendMode
    generations: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    generation: int = 0
    transfer: Transfer | None = None

    def begin(self, deed: str) -> None:
        self.generation, self.transfer = next(self.generations), None
        source = TensorSource(pattern("request", NBYTES))
        if deed == "nothing" or (self.mode is GET and deed == "offered"):
            return
        if self.mode is GET:
            self.transfer = self.engine.hold(
                KEY, source, binding=BINDING, generation=self.generation
            )
        else:
            self.transfer = self.engine.send(
                KEY, self.peer, source,
                binding=BINDING, ready=deed == "computed", generation=self.generation,
            )  # fmt: skip

    def abort(self) -> None:
        if self.transfer is not None and self.transfer.done and self.transfer.error is None:
            return  # all of it has arrived: the request has ended well
        if self.transfer is not None:
            self.transfer.cancel("the request was aborted")
        self.engine.abandon(
            KEY, self.peer, "the request was aborted", binding=BINDING, generation=self.generation
        )


@dataclass
class DecodeSide:
    """What the worker half of a decode rank does for one request after another."""

    engine: P2pNcclEngine
    peer: PeerAddress
    mode: SendMode
    sink: TensorSink = field(default_factory=TensorSink)
    transfer: Transfer | None = None
    is_kept: bool = False

    def begin(self, deed: str) -> None:
        self.sink, self.transfer = TensorSink(), None
        self.is_kept = deed != "nothing"
        if self.is_kept:
            self.engine.keep(KEY, binding=BINDING, peer=self.peer)
        if deed == "asked":
            self.transfer = self.engine.receive(
                KEY, self.sink, binding=BINDING, peer=self.peer, pull=self.mode is GET
            )

    def abort(self) -> None:
        if self.is_kept:
            self.engine.drop(KEY, binding=BINDING)
        if self.transfer is not None:
            self.transfer.cancel("the request was aborted")
        elif self.is_kept:
            self.engine.discard(KEY, binding=BINDING, peer=self.peer, pull=self.mode is GET)


def hear_all(*parties: P2pNcclEngine) -> None:
    """Wait until each engine has heard all that was said to it."""
    for speaker, listener in itertools.permutations(parties, 2):
        barrier = TransferKey("barrier")
        speaker.keep(barrier, peer=PeerAddress(listener.zmq_address))
        eventually(partial(listener.is_renewed, barrier))
        speaker.drop(barrier)
        with listener._parts.changed:
            listener._parts.holds._renewed.pop((barrier, b""))


@pytest.mark.parametrize("is_heard", [True, False], ids=["heard", "at once"])
@pytest.mark.parametrize("mode", MODES)
def test_a_second_attempt_arrives_whatever_the_first_one_did(
    mode: SendMode, is_heard: bool
) -> None:
    """Each side has ended its own first attempt before its second begins; the other side may not
    have heard of it."""
    with engines(2, lease_seconds=60, retry_seconds=0.05) as (sender, receiver):
        prefill = PrefillSide(sender, PeerAddress(receiver.zmq_address), mode)
        decode = DecodeSide(receiver, PeerAddress(sender.zmq_address), mode)
        hear_all(sender, receiver)  # their links are ready
        wait: Callable[..., None] = hear_all if is_heard else lambda *_: None
        orders = itertools.product(
            PREFILL_DEEDS, DECODE_DEEDS, ["prefill", "decode"], ["prefill", "decode"]
        )
        for deed, answer, aborts_first, begins_first in orders:
            story = f"{mode}: {deed}, {answer}, abort {aborts_first}, begin {begins_first}"
            if answer == "nothing" and begins_first == "decode":
                continue  # nobody could tell it from the first attempt, which was aborted
            prefill.begin(deed)
            decode.begin(answer)
            wait(sender, receiver)
            for side in in_order(prefill, decode, aborts_first):
                side.abort()
                wait(sender, receiver)
            eventually(
                lambda: not receiver._parts.expectations.num_awaited(), what="RELEASE is sent"
            )
            hear_all(sender, receiver)
            for side in in_order(prefill, decode, begins_first):
                side.begin("computed" if side is prefill else "asked")
                wait(sender, receiver)
            assert decode.transfer is not None
            assert prefill.transfer is not None
            eventually(lambda: decode.transfer.done and prefill.transfer.done, 20, story)  # type: ignore[union-attr]
            assert decode.transfer.error is None, story
            assert prefill.transfer.error is None, story
            assert decode.sink.tensor is not None, story
            assert torch.equal(decode.sink.tensor, pattern("request", NBYTES)), story
            receiver.drop(KEY, binding=BINDING)
            assert_idle(sender, receiver)


def ask(decode: P2pNcclEngine, prefill: P2pNcclEngine, binding: bytes = BINDING) -> Transfer:
    """Ask for a held key."""
    peer = PeerAddress(prefill.zmq_address)
    return decode.receive(KEY, TensorSink(), binding=binding, peer=peer, pull=True)


def hold(prefill: P2pNcclEngine, generation: int, binding: bytes = BINDING) -> Transfer:
    """Hold what was computed."""
    source = TensorSource(pattern("request", NBYTES))
    return prefill.hold(KEY, source, binding=binding, generation=generation)


def test_what_ended_before_the_peer_was_met_does_not_end_what_is_asked_for_now() -> None:
    """RELEASE and WANT wait for the same link: the WANT is of the next attempt."""
    with engines(2, lease_seconds=60, retry_seconds=5) as (sender, receiver):
        with sender._parts.changed:  # it does not answer HELLO yet
            ask(receiver, sender).cancel("its request was aborted")
            eventually(lambda: not receiver._parts.expectations.num_awaited(), what="RELEASE waits")
            transfer = ask(receiver, sender)
        hear_all(receiver, sender)
        held = hold(sender, 1)
        transfer.wait(10)
        held.wait(10)
        assert_idle(sender, receiver)


def test_what_ended_with_another_content_is_released_though_its_key_is_asked_for_at_once() -> None:
    """The client changed its prompt. Nobody else would end the first hold before its lease."""
    with engines(2, lease_seconds=60) as (sender, receiver):
        held, other = hold(sender, 1), b"another prompt"
        hear_all(sender, receiver)
        with receiver._parts.changed:  # no tick lies in between
            ask(receiver, sender, BINDING).cancel("its request was aborted")
            transfer = ask(receiver, sender, other)
        held.wait(10)
        hear_all(receiver, sender)
        hold(sender, 2, other).wait(10)
        transfer.wait(10)
        assert_idle(sender, receiver)


def test_what_one_peer_has_got_is_refused_to_another_at_once() -> None:
    """A proxy may send only the decode half of a request again, to another instance."""
    with engines(3, lease_seconds=60) as (sender, receiver, other):
        held = hold(sender, 1)
        ask(receiver, sender).wait(10)
        held.wait(10)
        with pytest.raises(TransferRejected, match="pulled already"):
            ask(other, sender).wait(10)


def in_order(
    prefill: PrefillSide, decode: DecodeSide, first: str
) -> list[PrefillSide | DecodeSide]:
    """Return both sides, in the order that is told."""
    return [prefill, decode] if first == "prefill" else [decode, prefill]


@pytest.mark.parametrize("deed", ["nothing", "offered"])
@pytest.mark.parametrize("mode", MODES)
def test_a_second_attempt_may_begin_on_decode_before_the_first_has_ended_on_prefill(
    mode: SendMode, deed: str
) -> None:
    """Prefill is in a long step, and hears of the abort only behind it."""
    with engines(2, lease_seconds=60, retry_seconds=0.05) as (sender, receiver):
        prefill = PrefillSide(sender, PeerAddress(receiver.zmq_address), mode)
        decode = DecodeSide(receiver, PeerAddress(sender.zmq_address), mode)
        hear_all(sender, receiver)
        prefill.begin(deed)
        decode.begin("asked")
        hear_all(sender, receiver)
        decode.abort()
        eventually(lambda: not receiver._parts.expectations.num_awaited(), what="RELEASE is sent")
        decode.begin("asked")
        hear_all(sender, receiver)
        prefill.abort()
        hear_all(sender, receiver)
        prefill.begin("computed")
        assert decode.transfer is not None
        decode.transfer.wait(20)
        assert decode.sink.tensor is not None
        assert torch.equal(decode.sink.tensor, pattern("request", NBYTES))
        receiver.drop(KEY, binding=BINDING)
        assert_idle(sender, receiver)


def test_a_release_before_the_hold_counts_once() -> None:
    """Decode gives up before prefill holds it, and the hold ends because nobody wants it. In the
    second attempt prefill gives up first, and decode hears of it at once."""
    with engines(2, lease_seconds=60, retry_seconds=0.1) as (sender, receiver):
        prefill = PrefillSide(sender, PeerAddress(receiver.zmq_address), GET)
        decode = DecodeSide(receiver, PeerAddress(sender.zmq_address), GET)
        unheld = sender._parts.holds._unheld
        decode.begin("asked")
        eventually(lambda: len(unheld) == 1)
        decode.abort()
        eventually(lambda: len(unheld) == 0)
        prefill.begin("computed")
        eventually(lambda: prefill.transfer is not None and prefill.transfer.done)
        decode.begin("asked")
        eventually(lambda: len(unheld) == 1)
        prefill.begin("nothing")
        prefill.abort()
        assert decode.transfer is not None
        with pytest.raises(TransferRejected, match="was aborted"):
            decode.transfer.wait(10)
