"""How what was asked for, sent or given up ends when the weights are named anew: soon, and without
an end of what has the new name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import pytest

pytest.importorskip("vllm")

from p2p_engine import P2pNcclEngine, TransferKey
from p2p_engine.errors import TransferRejected
from p2p_engine.peers.link import PeerAddress
from p2p_engine.receive import store
from p2p_engine.transfer import Transfer
from p2p_engine.wire.bindings import bind, renamed, weights_in
from p2p_engine.wire.request_ids import new_transfer_id
from tests import marks
from tests.doubles.pair import SEND_TYPES, MakePair, Pair, prompt_of
from tests.rigs.engines import PagedMemory, engines
from tests.support import SeededRandom, eventually

pytestmark = marks.simulated_vllm

SOON_SECONDS = 10.0  # far below what is waited for a transfer or for a lease here
KEY, PROMPT = TransferKey("request"), b"p" * 16
BLOCKS = [0, 1, 2, 3]
MakeSlow: TypeAlias = Callable[[str], Pair]


@pytest.fixture
def make_slow(make_pair: MakePair) -> MakeSlow:
    """Whoever waits for a deadline waits for longer than the tests do; one slot on each side."""

    def make(send_type: str) -> Pair:
        return make_pair(
            send_type=send_type,
            policy="recompute",
            lease_seconds=60.0,
            transfer_timeout_seconds=60.0,
            prefill={"max_num_seqs": 1},
            decode={"max_num_seqs": 1},
        )

    return make


def label(pair: Pair, sides: str, name: str) -> None:
    """Label these sides, one after the other; the workers hear of each at once."""
    for side in sides:
        instance = pair.p if side == "p" else pair.d
        instance.connector.weights_labelled(name)
        for _ in range(2):
            instance.step()


@pytest.mark.parametrize("sides", ["pd", "dp"])
@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_what_came_under_an_earlier_name_is_not_waited_for(
    make_slow: MakeSlow, send_type: str, sides: str
) -> None:
    """Prefill has nothing to say of the new name: what it pushed has been dropped by decode."""
    pair, prompt = make_slow(send_type), prompt_of(100)
    request_id = pair.ask(prompt, order="prefill first")
    prefill_id = pair.prefill_ids[-1]
    pair.run(lambda: prefill_id in pair.p.finished)
    if send_type != "GET":
        pair.run(lambda: pair.landed_bytes() > 0)
    label(pair, sides, "step-41")
    pair.ask_waiting()
    pair.run(lambda: request_id in pair.d.finished, timeout=SOON_SECONDS)
    pair.check_answers(num_computed=len(prompt))


@pytest.mark.parametrize("name", ["unknown-0", "step-2", "none (asleep)"])
@pytest.mark.parametrize("is_refused", [True, False], ids=["refused", "landed"])
def test_however_often_weights_are_named_anew_what_came_before_is_not_waited_for(
    is_refused: bool, name: str
) -> None:
    """A reset gives a name of its own before the label comes, and so does sleep."""
    with engines(2, lease_seconds=60.0, transfer_timeout_seconds=60) as (sender, receiver):
        theirs, ours = PagedMemory(16).fill(SeededRandom(7)), PagedMemory(16)
        sender.use_weights("step-1")
        receiver.use_weights(name if is_refused else "step-1")
        there, binding = PeerAddress(receiver.zmq_address), bind(PROMPT, "step-1")
        sent = sender.send(KEY, there, theirs.source(BLOCKS), binding=binding, generation=1)
        with contextlib.suppress(TransferRejected):
            sent.wait(SOON_SECONDS)
        for each in (name, "step-3"):
            for engine in (sender, receiver):
                engine.use_weights(each)
                engine.drop_landed()
        with pytest.raises(TransferRejected, match=r"dropped|weights"):
            _receive(receiver, sender, ours, bind(PROMPT, "step-3")).wait(SOON_SECONDS)


@pytest.mark.parametrize("send_type", ["PUT", "PUT_ASYNC"])
def test_what_was_refused_under_an_earlier_name_is_not_waited_for(
    make_slow: MakeSlow, send_type: str
) -> None:
    """Decode was labelled before prefill pushed, and asks when both are."""
    pair, prompt = make_slow(send_type), prompt_of(100)
    label(pair, "d", "step-41")
    request_id = pair.ask(prompt, order="prefill first")
    prefill_id = pair.prefill_ids[-1]
    pair.run(lambda: prefill_id in pair.p.finished)
    label(pair, "p", "step-41")
    pair.ask_waiting()
    pair.run(lambda: request_id in pair.d.finished, timeout=SOON_SECONDS)
    pair.check_answers(num_computed=len(prompt))


@pytest.mark.parametrize("sides", ["pd", "dp"])
@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_what_waits_on_both_sides_is_computed_by_decode(
    make_slow: MakeSlow, send_type: str, sides: str
) -> None:
    """Prefill computes it under the new name, and decode has given the old one up."""
    pair, prompt = make_slow(send_type), prompt_of(100)
    pair.p.add("other-p", prompt_of(20, 9), max_tokens=1000)
    pair.d.add("other-d", prompt_of(20, 8), max_tokens=1000)
    for _ in range(3):
        pair.step()
    request_id = pair.ask(prompt, order="together")
    for _ in range(3):
        pair.step()
    label(pair, sides, "step-41")
    pair.p.abort("other-p")
    pair.d.abort("other-d")
    pair.run(lambda: request_id in pair.d.finished, timeout=SOON_SECONDS)
    pair.check_answers(num_computed=len(prompt))


@pytest.mark.parametrize("is_held", [True, False], ids=["held before", "held later"])
def test_a_release_of_an_earlier_name_says_nothing_of_the_new_one(is_held: bool) -> None:
    """Decode's RELEASE of the one may come behind prefill's hold of the other, or before it."""
    with engines(2, lease_seconds=60.0) as (sender, receiver):
        theirs, ours = PagedMemory(16).fill(SeededRandom(3)), PagedMemory(16)
        for engine in (sender, receiver):
            engine.use_weights("step-2")
        peer, binding = PeerAddress(sender.zmq_address), bind(PROMPT, "step-2")
        if is_held:
            sender.hold(KEY, theirs.source(BLOCKS), binding=binding)
        receiver.discard(KEY, binding=bind(PROMPT, "step-1"), peer=peer, pull=True)
        over = sender._parts.holds._endings
        eventually(lambda: over._endings.get((KEY, bind(PROMPT, "step-1"))) is not None)
        if not is_held:
            sender.hold(KEY, theirs.source(BLOCKS), binding=binding)
        [hold] = sender._parts.holds._holds.values()
        assert hold.lease_ends_at == hold.held_at + 60.0
        _receive(receiver, sender, ours, binding, pull=True).wait(SOON_SECONDS)
        hold.transfer.wait(SOON_SECONDS)
        assert (ours.data[:, BLOCKS] == theirs.data[:, BLOCKS]).all()


@pytest.mark.parametrize("kind", ["send", "hold", "stash"])
def test_nothing_of_other_weights_leaves_an_engine(kind: str) -> None:
    """Whatever a caller has forgotten to rename; a name is not asked for."""
    with engines(1) as (sender,):
        source = PagedMemory(16).source(BLOCKS)
        arguments: dict[str, dict[str, Any]] = {
            "send": {"peer": PeerAddress(sender.zmq_address)},
            "hold": {},
            "stash": {"beginnings": {}},
        }
        give = partial(getattr(sender, kind), KEY, source=source, **arguments[kind])
        sender.use_weights("step-2")
        with pytest.raises(TransferRejected, match="weights: step-2 here, step-1 there"):
            give(binding=bind(PROMPT, "step-1"))
        give(binding=PROMPT).cancel("it was taken")


@pytest.mark.parametrize("is_named", [True, False], ids=["named", "nameless"])
def test_an_offer_of_other_weights_ends_the_wait_that_begins_behind_it(is_named: bool) -> None:
    with engines(2, transfer_timeout_seconds=60) as (sender, receiver):
        theirs, ours = PagedMemory(16).fill(SeededRandom(5)), PagedMemory(16)
        sender.use_weights("step-1")
        receiver.use_weights("step-2")
        sent = sender.send(
            KEY,
            PeerAddress(receiver.zmq_address),
            theirs.source(BLOCKS),
            binding=bind(PROMPT, "step-1"),
            generation=1,
        )
        with pytest.raises(TransferRejected, match=r"weights: step-. here, step-. there"):
            sent.wait(SOON_SECONDS)
        peer = PeerAddress(sender.zmq_address) if is_named else None
        with pytest.raises(TransferRejected, match=r"weights: step-. here, step-. there"):
            receiver.receive(
                KEY, ours.sink(BLOCKS), binding=bind(PROMPT, "step-2"), peer=peer
            ).wait(SOON_SECONDS)


def test_decode_keeps_what_has_landed_when_only_prefill_is_named_anew() -> None:
    """It is of decode's own weights, and its RENEW asks for nothing."""
    with engines(2) as (sender, receiver):
        theirs, ours = PagedMemory(16).fill(SeededRandom(6)), PagedMemory(16)
        for engine in (sender, receiver):
            engine.use_weights("step-1")
        binding, peer = bind(PROMPT, "step-1"), PeerAddress(sender.zmq_address)
        there = PeerAddress(receiver.zmq_address)
        sender.send(KEY, there, theirs.source(BLOCKS), binding=binding).wait(SOON_SECONDS)
        sender.use_weights("step-2")
        receiver.keep(KEY, binding=binding, peer=peer)
        eventually(lambda: sender.is_renewed(KEY, binding=binding))
        receiver.drop(KEY, binding=binding)
        _receive(receiver, sender, ours, binding).wait(SOON_SECONDS)
        assert (ours.data[:, BLOCKS] == theirs.data[:, BLOCKS]).all()


@pytest.mark.parametrize("order", ["together", "decode first", "prefill first"])
@pytest.mark.parametrize("sides", ["pd", "dp"])
@pytest.mark.parametrize("send_type", SEND_TYPES)
def test_a_request_that_is_tried_again_moves_under_the_new_name(
    make_slow: MakeSlow, send_type: str, sides: str, order: str
) -> None:
    """Under the same transfer id, after the first try was given up under the old name."""
    pair, prompt, transfer_id = make_slow(send_type), prompt_of(100), new_transfer_id()
    pair.ask(prompt, transfer_id=transfer_id, by="params")
    for _ in range(3):
        pair.step()
    pair.d.abort(pair.decode_ids[-1])
    pair.step()
    pair.p.abort(pair.prefill_ids[-1])
    label(pair, sides, "step-41")
    for instance in (pair.p, pair.d):
        instance.evict()
    request_id = pair.ask(prompt, transfer_id=transfer_id, by="params", order=order)
    pair.run(timeout=SOON_SECONDS)
    assert pair.d.num_computed_prompt_tokens[request_id] == 1


def test_a_sender_may_send_again_under_another_name() -> None:
    """What the peer has dropped under the first one refuses nothing of the second."""
    with engines(2) as (sender, receiver):
        theirs, ours = PagedMemory(16).fill(SeededRandom(1)), PagedMemory(16)
        for number, name in enumerate(("step-1", "step-2"), 1):
            for engine in (sender, receiver):
                engine.use_weights(name)
            receiver.drop_landed()
            sent = sender.send(
                KEY,
                PeerAddress(receiver.zmq_address),
                theirs.source(BLOCKS),
                binding=bind(PROMPT, name),
                generation=number,
            )
            sent.wait(SOON_SECONDS)
        _receive(receiver, sender, ours, bind(PROMPT, "step-2")).wait(SOON_SECONDS)
        assert (ours.data[:, BLOCKS] == theirs.data[:, BLOCKS]).all()


def test_who_waits_for_what_other_weights_would_make_is_refused_at_once() -> None:
    """Not when its WANT is said again, which comes ever more seldom."""
    with engines(2, lease_seconds=60.0, transfer_timeout_seconds=60) as (sender, receiver):
        for engine in (sender, receiver):
            engine.use_weights("step-1")
        ours = PagedMemory(16)
        waiting = _receive(receiver, sender, ours, bind(PROMPT, "step-1"), pull=True)
        eventually(lambda: len(sender._parts.holds._unheld) == 1)
        with sender._parts.changed:
            [kept] = sender._parts.holds._unheld._unheld
            sender._parts.dispatch.use_weights("step-2")
            assert len(sender._parts.holds._unheld) == 0, kept
        with pytest.raises(TransferRejected, match=r"weights: step-. here, step-. there"):
            waiting.wait(SOON_SECONDS)


def test_an_offer_of_other_weights_ends_only_the_wait_for_its_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A router may send several prompts under one id: another one's KV may still come."""
    monkeypatch.setattr(store, "MISMATCH_GRACE_SECONDS", 60.0)
    first, second = (bind(prompt * 16, "step-2") for prompt in (b"1", b"2"))
    with engines(2, transfer_timeout_seconds=60) as (sender, receiver):
        theirs, ours = PagedMemory(16).fill(SeededRandom(4)), PagedMemory(16)
        sender.use_weights("step-1")
        receiver.use_weights("step-2")
        waits = [_receive(receiver, sender, ours, binding) for binding in (first, second)]
        known = receiver._parts.expectations
        eventually(lambda: all(known.is_from((KEY, it), sender.epoch) for it in (first, second)))
        for binding in (renamed(first, "step-1"), second):
            peer = PeerAddress(receiver.zmq_address)
            sender.use_weights(weights_in(binding))
            sender.send(KEY, peer, theirs.source(BLOCKS), binding=binding)
        with pytest.raises(TransferRejected, match=r"weights: step-. here, step-. there"):
            waits[0].wait(SOON_SECONDS)
        waits[1].wait(SOON_SECONDS)


@pytest.mark.parametrize("pushes", [True, False])
def test_bindings_of_callers_without_weights_are_not_read(pushes: bool) -> None:
    """They may have any bytes at any place, and what ends under one says nothing of another."""
    first, second = b"session-00000001@turn-1", b"session-00000001@turn-2"
    with engines(2) as (sender, receiver):
        theirs, ours = PagedMemory(16).fill(SeededRandom(2)), PagedMemory(16)
        if pushes:
            receiver.discard(KEY, binding=first)
            sent = sender.send(
                KEY, PeerAddress(receiver.zmq_address), theirs.source(BLOCKS), binding=second
            )
            sent.wait(SOON_SECONDS)
            received = _receive(receiver, sender, ours, second)
        else:
            sender.abandon(KEY, None, "given up", binding=first)
            sender.hold(KEY, theirs.source(BLOCKS), binding=second)
            received = _receive(receiver, sender, ours, second, pull=True)
        received.wait(SOON_SECONDS)
        assert (ours.data[:, BLOCKS] == theirs.data[:, BLOCKS]).all()


def _receive(
    engine: P2pNcclEngine,
    peer: P2pNcclEngine,
    into: PagedMemory,
    binding: bytes,
    pull: bool = False,
) -> Transfer:
    address = PeerAddress(peer.zmq_address)
    return engine.receive(KEY, into.sink(BLOCKS), binding=binding, peer=address, pull=pull)
