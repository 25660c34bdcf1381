"""Renewals, with a clock of the test's own and links that only note what is said."""

from __future__ import annotations

from itertools import chain
from typing import Any, cast

import pytest

from p2p_engine.config import EngineConfig
from p2p_engine.errors import P2pError, PeerLost, PeerUnreachable, TransferRejected
from p2p_engine.peers.link import Link, LinkState, PeerAddress
from p2p_engine.receive.expectations import Expectations
from p2p_engine.receive.renewals import Renewals, batches
from p2p_engine.wire.messages import (
    MAX_FRAME_BYTES,
    ContentKey,
    Renew,
    TransferKey,
    decode,
    encode,
)

PEER, OTHER = PeerAddress("127.0.0.1:1"), PeerAddress("127.0.0.1:2")
CONFIG = EngineConfig(lease_seconds=8, max_renewal_seconds=100)  # a round each 2 s


def content(number: int) -> ContentKey:
    return TransferKey(f"request-{number}"), b"binding"


class LinksDouble:
    """Links that are there at once; `said` are the contents of each RENEW."""

    def __init__(self) -> None:
        self.links: dict[PeerAddress, Link] = {}
        self.is_ready = True
        self.said: list[tuple[PeerAddress, list[ContentKey]]] = []

    def get(self, target: PeerAddress, *, data: bool) -> Link:
        assert not data
        link = self.links.get(target)
        if link is None:
            state = LinkState.READY if self.is_ready else LinkState.GREETING
            link = self.links[target] = Link(target, target.address, state, 0.0, epoch=5)
        return link

    def send(self, link: Link, kind: type[Renew], contents: list[ContentKey]) -> None:
        message = decode(encode(kind(1, link.epoch, contents)))
        assert isinstance(message, Renew)
        self.said.append((link.target, message.contents))

    def all_ready(self) -> list[Link]:
        return []

    def take(self) -> list[list[ContentKey]]:
        """What was said since the last time."""
        said, self.said = self.said, []
        return [contents for _, contents in said]


class RenewalsWorld:
    """A clock, links, and renewals that tell them."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.links = LinksDouble()
        self.failed: list[tuple[ContentKey, P2pError]] = []
        self.here: set[ContentKey] = set()
        self.discarded: list[ContentKey] = []
        self.expectations = Expectations()
        self.renewals = Renewals(
            CONFIG, cast("Any", self.links), cast("Any", None), None, lambda: self.now,
            cast("Any", self), self.expectations,
        )  # fmt: skip

    def fail_content(self, content: ContentKey, error: P2pError, said_by: int = 0) -> None:
        """Stand in for the store."""
        self.failed.append((content, error))

    def dropped(self, content: ContentKey) -> None:
        """Stand in for the store."""
        self.discarded.append(content)

    def has_any(self, content: ContentKey) -> bool:
        """Stand in for the store."""
        return content in self.here

    def advance(self, seconds: float) -> list[list[ContentKey]]:
        """Let time pass tick by tick; returns what was said."""
        for _ in range(round(seconds / 0.125)):
            self.now += 0.125
            self.renewals.tick(self.now)
        return self.links.take()


@pytest.fixture
def world() -> RenewalsWorld:
    return RenewalsWorld()


def test_new_contents_are_told_at_once_and_all_of_them_four_times_in_a_lease(
    world: RenewalsWorld,
) -> None:
    world.renewals.keep(content(1), PEER)
    assert world.advance(0.125) == [[content(1)]]
    world.renewals.keep(content(2), PEER)
    assert world.advance(0.125) == [[content(2)]]
    assert world.advance(8) == [[content(1), content(2)]] * 4


def test_a_peer_with_a_shorter_lease_is_told_more_often(world: RenewalsWorld) -> None:
    world.renewals.keep(content(1), PEER)
    world.links.get(PEER, data=False).lease = 2
    assert len(world.advance(8)) == 16


def test_what_is_dropped_is_told_no_more(world: RenewalsWorld) -> None:
    for number in (1, 2):
        world.renewals.keep(content(number), PEER)
    world.renewals.drop(content(1))
    assert world.advance(0.125) == [[content(2)]]
    world.renewals.drop(content(2))
    assert world.advance(100) == []
    assert world.expectations.num_kept() == 0
    assert not world.expectations.is_kept(content(2))


def test_a_peer_is_not_asked_to_keep_what_it_was_told_is_not_wanted(world: RenewalsWorld) -> None:
    """A RENEW behind a RELEASE would mean the next attempt, and hold it there for a lease."""
    for number in (1, 2):
        world.renewals.keep(content(number), PEER)
    released = world.expectations.kept(content(1))
    assert released is not None
    released.is_released = True
    assert world.advance(0.125) == [[content(2)]]
    assert world.advance(8) == [[content(2)]] * 4
    world.renewals.keep(content(1), PEER)
    assert world.advance(0.125) == [[content(1)]]


def test_what_is_kept_no_longer_is_told_of_however_that_ends(world: RenewalsWorld) -> None:
    let_go = []
    world.renewals.keep(content(1), PEER)
    world.expectations.let_go[content(1)] = lambda: let_go.append(1)
    world.renewals.keep(content(1), PEER)  # another request wants it, too
    assert world.discarded == []
    world.renewals.drop(content(1))
    assert let_go == [1]
    world.renewals.keep(content(2), PEER)
    world.advance(101)
    assert world.discarded == [content(1), content(2)]


def test_who_has_no_work_asks_for_nothing(world: RenewalsWorld) -> None:
    """A paused vLLM still steps, because requests come and go, or because it holds something."""
    world.renewals.keep(content(1), PEER)
    world.advance(1)
    for _ in range(50):
        world.renewals.step_began(has_work=False)
        world.renewals.keep(content(2), PEER)
        world.renewals.step_ended()
        world.advance(1)
    assert world.links.take() == []
    world.renewals.step_began(has_work=True)
    assert world.advance(1) == [[content(1), content(2)]]
    assert len(world.advance(50)) == 25  # however long that step takes
    world.renewals.step_ended()
    world.advance(1)
    assert world.advance(50) == []


def test_who_works_may_be_between_two_steps(world: RenewalsWorld) -> None:
    world.renewals.keep(content(1), PEER)
    world.advance(0.125)
    said = []
    for _ in range(16):
        world.renewals.step_began(has_work=True)
        world.renewals.step_ended()
        said += world.advance(0.5)
    assert said == [[content(1)]] * 4


def test_what_has_no_peer_is_kept_here(world: RenewalsWorld) -> None:
    world.renewals.keep(content(1), None)
    assert world.expectations.is_kept(content(1))
    assert world.expectations.is_kept((content(1)[0], b""))
    assert not world.expectations.is_kept((content(1)[0], b"another"))
    assert world.advance(50) == []


def test_nothing_is_kept_for_longer_than_max_renewal_seconds(world: RenewalsWorld) -> None:
    world.renewals.keep(content(1), PEER)
    world.advance(60)
    world.renewals.keep(content(2), PEER)
    world.advance(41)
    assert not world.expectations.is_kept(content(1))
    assert world.expectations.is_kept(content(2))
    world.advance(60)
    assert world.advance(50) == []


def test_who_is_not_connected_is_told_when_it_is(world: RenewalsWorld) -> None:
    world.links.is_ready = False
    world.renewals.keep(content(1), PEER)
    assert world.advance(5) == []
    link = world.links.get(PEER, data=False)
    link.state = LinkState.READY
    world.renewals.link_ready(link)
    assert world.advance(0.125) == [[content(1)]]


def test_a_lost_link_is_dialled_again_long_before_a_lease_ends(world: RenewalsWorld) -> None:
    world.renewals.keep(content(1), PEER)
    world.advance(0.125)
    link = world.links.links.pop(PEER)
    link.heard_at = world.now
    world.renewals.link_closed(link)
    world.advance(1)
    assert PEER in world.links.links


def test_what_a_peer_does_not_have_fails_once_and_is_remembered(world: RenewalsWorld) -> None:
    world.renewals.keep(content(1), PEER)
    world.advance(1)
    error = TransferRejected("it was aborted")
    world.renewals.on_gone(OTHER, content(1), 9, error)
    assert not world.failed
    world.renewals.on_gone(PEER, content(1), 9, error)
    world.renewals.on_gone(PEER, content(1), 9, error)
    assert world.failed == [(content(1), error)]
    assert world.advance(50) == []
    assert world.expectations.is_kept(content(1))  # so that its tombstone stands


def test_a_restarted_peer_has_lost_what_its_last_start_had(world: RenewalsWorld) -> None:
    """But for what is here, and for what it may have been asked for since."""
    world.here = {content(2)}
    for number in (1, 2):
        world.renewals.keep(content(number), PEER)
    world.advance(1)
    link = world.links.links.pop(PEER)
    link.heard_at += 1
    world.advance(1)
    world.renewals.keep(content(3), PEER)
    world.renewals.link_closed(link)
    link = world.links.get(PEER, data=False)
    link.epoch = 6
    world.renewals.link_ready(link)
    assert [name for name, error in world.failed if isinstance(error, PeerLost)] == [content(1)]
    assert world.advance(0.125) == [[content(2), content(3)]]


def test_an_address_that_is_none_keeps_nothing(world: RenewalsWorld) -> None:
    with pytest.raises(PeerUnreachable):
        world.renewals.keep(content(1), PeerAddress("nowhere"))
    assert not world.expectations.is_kept(content(1))


def test_thousands_of_contents_are_some_messages(world: RenewalsWorld) -> None:
    for number in range(10_000):
        world.renewals.keep(content(number), PEER)
    first = world.advance(0.125)
    assert len(first) <= 20
    assert [*chain(*first)] == [content(number) for number in range(10_000)]
    assert len(world.advance(8)) <= 80


def test_messages_are_as_many_as_long_names_need() -> None:
    names = [(TransferKey("x" * 512, "y" * 512, group=number), b"z" * 64) for number in range(300)]
    messages = list(batches(names))
    assert [*chain(*messages)] == names
    assert 4 < len(messages) < 10
    for contents in messages:
        assert len(encode(Renew((1 << 63) - 1, (1 << 63) - 1, contents))) <= MAX_FRAME_BYTES


def test_a_round_costs_nothing_between_its_times(world: RenewalsWorld) -> None:
    world.renewals.keep(content(1), PEER)
    world.advance(0.125)
    world.renewals._duties = cast("Any", None)  # nobody looks at it before the round is due
    world.renewals.tick(world.now + 1)
