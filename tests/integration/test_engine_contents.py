"""Several contents under one key: a router may send the prompts of one client's request as requests
of their own, all with one id."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from p2p_engine import P2pNcclEngine, TransferKey
from p2p_engine.control.sockets import Route
from p2p_engine.errors import TransferRejected
from p2p_engine.memory.layout import TensorSink, TensorSource
from p2p_engine.peers.link import PeerAddress
from p2p_engine.receive.pulls import Pulls
from p2p_engine.send import holds
from p2p_engine.transfer import Transfer
from p2p_engine.wire.messages import Gone, encode
from tests.rigs.engines import assert_idle, engines
from tests.rigs.tensors import pattern
from tests.support import eventually

KEY = TransferKey("request")
BINDINGS = [b"first", b"second", b"third", b"fourth"]
NBYTES = 10_000
pytestmark = pytest.mark.usefixtures("no_leaks")


class ContentsScene:
    """A prefill side that holds what it is told to, and a decode side that asks for all."""

    def __init__(self, prefill: P2pNcclEngine, decode: P2pNcclEngine) -> None:
        self.prefill, self.decode = prefill, decode
        self.peer, self.there = PeerAddress(prefill.zmq_address), PeerAddress(decode.zmq_address)
        self.sinks: dict[bytes, TensorSink] = {}
        self.held: dict[bytes, Transfer] = {}

    def hold(self, binding: bytes) -> None:
        source = TensorSource(pattern(binding.decode(), NBYTES))
        self.held[binding] = self.prefill.hold(
            KEY, source, binding=binding, generation=len(self.held) + 1
        )

    def receive(self, binding: bytes) -> Transfer:
        self.sinks[binding] = TensorSink()
        return self.decode.receive(
            KEY, self.sinks[binding], binding=binding, peer=self.peer, pull=True
        )

    def await_push(self, binding: bytes, *, is_named: bool) -> Transfer:
        self.sinks[binding] = TensorSink()
        peer = self.peer if is_named else None
        return self.decode.receive(KEY, self.sinks[binding], binding=binding, peer=peer)

    def push(self, binding: bytes) -> None:
        source = TensorSource(pattern(binding.decode(), NBYTES))
        self.prefill.send(KEY, self.there, source, binding=binding, generation=2)

    def abandon(self, binding: bytes) -> None:
        """Let prefill give it up, and decode hear of it."""
        self.prefill.abandon(KEY, self.there, "it was aborted", binding=binding, generation=1)
        eventually(lambda: not len(self.prefill._parts.sender._abandoned))

    def check(self, binding: bytes, transfer: Transfer) -> None:
        transfer.wait(9)
        tensor = self.sinks[binding].tensor
        assert tensor is not None
        assert torch.equal(tensor, pattern(binding.decode(), NBYTES))

    def say_gone(self, binding: bytes) -> None:
        """Prefill will not send it in its first attempt."""
        prefill, decode = self.prefill.epoch, self.decode.epoch
        message = Gone(prefill, decode, KEY, "it was aborted", 1, binding)
        self.decode._parts.dispatch.on_frame(Route(self.prefill.zmq_address), encode(message))


@pytest.fixture
def scene() -> Iterator[ContentsScene]:
    with engines(2) as (prefill, decode):
        yield ContentsScene(prefill, decode)
        assert_idle(prefill, decode)


@pytest.mark.parametrize("is_kept", [False, True], ids=["", "kept"])
@pytest.mark.parametrize("is_met", [False, True], ids=["first contact", "known"])
def test_all_are_pulled(scene: ContentsScene, is_met: bool, is_kept: bool) -> None:
    if is_met:
        scene.hold(b"hello")
        scene.check(b"hello", scene.receive(b"hello"))
    for binding in BINDINGS:
        scene.hold(binding)
        if is_kept:
            scene.decode.keep(KEY, binding=binding, peer=scene.peer)
    transfers = [scene.receive(binding) for binding in BINDINGS]
    for binding, transfer in zip(BINDINGS, transfers, strict=True):
        scene.check(binding, transfer)
        scene.decode.drop(KEY, binding=binding)


def test_those_held_later_are_pulled_too(scene: ContentsScene) -> None:
    """Whichever of them are waited for, and have been pulled, before."""
    transfers = []
    for binding in BINDINGS:
        transfers.append(scene.receive(binding))
        scene.hold(binding)
    for binding, transfer in zip(BINDINGS, transfers, strict=True):
        scene.check(binding, transfer)


def test_one_that_will_not_come_ends_only_its_own_receive(scene: ContentsScene) -> None:
    transfers = [scene.receive(binding) for binding in BINDINGS]
    eventually(lambda: len(scene.prefill._parts.holds._unheld) == len(BINDINGS))
    scene.say_gone(BINDINGS[0])
    with pytest.raises(TransferRejected, match="aborted"):
        transfers[0].wait(9)
    for binding, transfer in zip(BINDINGS[1:], transfers[1:], strict=True):
        scene.hold(binding)
        scene.check(binding, transfer)


def test_one_that_is_abandoned_ends_the_wait_for_another_that_does_not_follow(
    scene: ContentsScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides may call one prompt by two bindings, as with an adapter that only one can name."""
    monkeypatch.setattr(Pulls, "_pause", lambda *_: 60.0)  # no WANT is repeated by itself
    waiting = scene.await_push(BINDINGS[1], is_named=True)
    [item] = scene.decode._parts.expectations.awaited_of(KEY)
    eventually(lambda: any(asked.num_wants for asked in item.asked))
    scene.abandon(BINDINGS[0])
    with pytest.raises(TransferRejected, match=r"another content .* was given up: "):
        waiting.wait(9)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a busy machine take its time between a content's end and the next one's beginning."""
    monkeypatch.setattr(holds, "OTHERS_SECONDS", 8)


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("is_named", [False, True], ids=["any sender", "named"])
def test_one_that_is_abandoned_ends_only_its_own_receive(
    scene: ContentsScene, is_named: bool
) -> None:
    first, *others = (scene.await_push(binding, is_named=is_named) for binding in BINDINGS)
    scene.abandon(BINDINGS[0])
    with pytest.raises(TransferRejected, match="aborted"):
        first.wait(9)
    for binding, transfer in zip(BINDINGS[1:], others, strict=True):
        scene.push(binding)
        scene.check(binding, transfer)


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("is_named", [False, True], ids=["any sender", "named"])
def test_one_that_was_abandoned_before_ends_no_other_receive(
    scene: ContentsScene, is_named: bool
) -> None:
    scene.abandon(BINDINGS[0])
    others = [scene.await_push(binding, is_named=is_named) for binding in BINDINGS[1:]]
    with pytest.raises(TransferRejected, match="aborted"):
        scene.await_push(BINDINGS[0], is_named=is_named).wait(9)
    for binding, transfer in zip(BINDINGS[1:], others, strict=True):
        scene.push(binding)
        scene.check(binding, transfer)


def test_a_later_one_does_not_make_the_end_of_an_earlier_one_old(scene: ContentsScene) -> None:
    """GONE of an attempt counts, although a later attempt to send the key was offered."""
    first, second = (scene.receive(binding) for binding in BINDINGS[:2])
    eventually(lambda: len(scene.prefill._parts.holds._unheld) == 2)
    scene.held[BINDINGS[0]] = second  # the first has the first generation
    scene.hold(BINDINGS[1])
    scene.check(BINDINGS[1], second)
    scene.say_gone(BINDINGS[0])
    with pytest.raises(TransferRejected, match="aborted"):
        first.wait(9)
