"""Pulls, with a clock of the test's own and one link that only notes what is said."""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2p_engine.bounded import Budget
from p2p_engine.config import EngineConfig
from p2p_engine.errors import TransferCancelled
from p2p_engine.peers.link import InstanceAddress, Link, LinkState, PeerAddress
from p2p_engine.receive.expectations import Expectations, Kept
from p2p_engine.receive.pulls import WANTS_IN_A_LEASE, Pulls
from p2p_engine.transfer import Transfer
from p2p_engine.wire.messages import ContentKey, Message, Release, TransferKey, Want

PEER = PeerAddress("127.0.0.1:1")
LEASE = 60.0
KEY = TransferKey("of an instance")
NUM_KEYS = 2_000


class PullsWorld:
    """A peer that answers nothing, and many keys that are awaited from it."""

    def __init__(self, *, pull: bool) -> None:
        self.now = 0.0
        self.said: Counter[TransferKey] = Counter()
        self.expectations = Expectations()
        self.asked_where: list[InstanceAddress] = []
        self.left: set[ContentKey] = set()
        self.released: list[TransferKey] = []
        self.link = Link(PEER, PEER.address, LinkState.READY, 0.0, epoch=5)
        nothing: Any = lambda *_: None  # noqa: E731
        store = cast("Any", SimpleNamespace(
            sender_known=nothing, offered_until=lambda *_: 0.0, is_left=lambda key: key in self.left
        ))  # fmt: skip
        self.awaited = Pulls(
            EngineConfig(), cast("Any", self), cast("Any", self), None, lambda: self.now,
            store, self.expectations, Budget(),
        )  # fmt: skip
        changed = threading.Condition()
        for number in range(NUM_KEYS):
            transfer = Transfer(TransferKey(f"{number}"), 0, changed, nothing)
            self.awaited.add(transfer, PEER, b"", pull=pull)

    def get(self, peer: PeerAddress, *, data: bool) -> Link:
        """Stand in for Links."""
        return self.link

    def send(self, link: Link, kind: type[Message], key: TransferKey, *_: object) -> None:
        """Stand in for Links."""
        if kind is Release:
            self.released.append(key)
            return
        assert kind is Want
        self.said[key] += 1

    def ask(self, instance: InstanceAddress, answered: object) -> None:
        """Stand in for Locator; it never answers."""
        self.asked_where.append(instance)

    def run(self, seconds: float) -> Counter[TransferKey]:
        """Let time go by in ticks; returns what was said meanwhile."""
        self.said.clear()
        ends_at = self.now + seconds
        while self.now < ends_at:
            self.now += 0.25
            self.awaited.tick(self.now)
        return self.said.copy()


@pytest.mark.parametrize("pull", [True, False])
def test_what_is_not_answered_is_asked_for_four_times_in_a_lease(pull: bool) -> None:
    world = PullsWorld(pull=pull)
    assert world.said.total() == NUM_KEYS * pull
    assert world.run(LEASE).total() <= 8 * NUM_KEYS
    for _ in range(4):  # so often at least: what was lost is said again long before a lease ends
        said = world.run(LEASE)
        assert set(said.values()) == {WANTS_IN_A_LEASE}
        assert len(said) == NUM_KEYS


def test_who_could_not_be_asked_yet_is_told_that_nothing_is_wanted() -> None:
    """Its directory had not answered, and it may have been told to keep it."""
    world, instance, content = PullsWorld(pull=True), InstanceAddress("127.0.0.1:9"), (KEY, b"")
    transfer = Transfer(KEY, 0, threading.Condition(), lambda *_: None)
    world.awaited.add(transfer, instance, b"", pull=True)
    with transfer._changed:
        transfer.end(TransferCancelled("its request was aborted"))
    world.left.add(content)
    world.awaited.tick(world.now)
    assert world.asked_where == [instance]
    world.left.clear()
    world.expectations.let_go.pop(content)()
    assert world.asked_where == [instance, instance]


def test_who_is_told_that_nothing_is_wanted_is_not_asked_to_keep_it() -> None:
    """Nor is it if the wish is dropped only later; another request's wish is its own."""
    world, content = PullsWorld(pull=True), (KEY, b"")
    earlier, later = Kept(content, 0.0), Kept(content, 0.0)
    transfer = Transfer(KEY, 0, threading.Condition(), lambda *_: None)
    world.expectations.keep(earlier)
    world.awaited.add(transfer, PEER, b"", pull=True)
    world.expectations.keep(later)
    with transfer._changed:
        transfer.end(TransferCancelled("its request was aborted"))
    assert not earlier.is_released
    world.awaited.tick(world.now)
    assert world.released == [KEY]
    assert earlier.is_released
    assert not later.is_released


def test_who_is_told_nothing_is_asked_to_keep_it_still() -> None:
    """Another request here may ask for the same content, and be what it is kept for."""
    world, content = PullsWorld(pull=True), (KEY, b"")
    kept, transfer = Kept(content, 0.0), Transfer(KEY, 0, threading.Condition(), lambda *_: None)
    world.expectations.keep(kept)
    world.awaited.add(transfer, PEER, b"", pull=True)
    with transfer._changed:
        transfer.end(None)
    world.awaited.tick(world.now)
    assert world.expectations.awaited(content) is None
    assert world.released == []
    assert not kept.is_released


def test_a_peer_that_is_met_again_is_asked_at_once() -> None:
    world = PullsWorld(pull=True)
    world.run(LEASE)
    world.said.clear()
    world.awaited.link_ready(world.link)
    assert set(world.said.values()) == {1}
    assert len(world.said) == NUM_KEYS
    assert set(world.run(LEASE).values()) == {WANTS_IN_A_LEASE}
