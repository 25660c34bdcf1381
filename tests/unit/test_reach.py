"""Frames by name: sockets see numeric addresses only, everybody above the name that was given."""

from __future__ import annotations

from typing import cast

import pytest

from p2p_engine.control.reach import IDLE_SECONDS, MAX_FRAMES, Reach
from p2p_engine.control.resolver import Answer, Resolver, Told
from p2p_engine.control.sockets import Route, Sockets
from p2p_engine.errors import PeerUnreachable

REFRESH_SECONDS = 30.0


class SocketsDouble:
    def __init__(self) -> None:
        self.dropped_frames = 0
        self.sent: list[tuple[str, bytes]] = []
        self.hung_up: list[str] = []

    def send(self, route: Route, frame: bytes) -> bool:
        self.sent.append((route.address, frame))
        return True

    def hang_up(self, address: str) -> None:
        self.hung_up.append(address)


class ReachScene:
    """A reach whose names are resolved when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0
        self.asked: list[tuple[str, Told]] = []
        self.heard: list[tuple[str, bytes]] = []
        self.refused: list[tuple[str, str]] = []
        self.unresolved: list[tuple[str, str]] = []
        self.ended: list[str] = []
        self.sockets = SocketsDouble()
        self.reach = Reach(
            cast("Resolver", self), REFRESH_SECONDS, lambda: self.now,
            lambda route, frame: self.heard.append((route.address, frame)),
            lambda address, reason: self.refused.append((address, reason)),
            lambda address, error: self.unresolved.append((address, str(error))),
            lambda route: self.ended.append(route.address),
        )  # fmt: skip
        self.reach.sockets = cast("Sockets", self.sockets)

    def resolve(self, host: str, told: Told) -> None:
        self.asked.append((host, told))

    def answer(self, answer: Answer) -> None:
        self.asked.pop(0)[1](answer)

    def say(self, address: str, frame: bytes = b"x") -> None:
        assert self.reach.send(Route(address), frame)


@pytest.fixture
def scene() -> ReachScene:
    return ReachScene()


@pytest.mark.parametrize("address", ["10.0.0.1:5", "[::1]:5", "no address"])
def test_what_is_no_name_goes_straight_to_the_sockets(scene: ReachScene, address: str) -> None:
    scene.say(address)
    assert scene.sockets.sent == [(address, b"x")]
    scene.reach.hang_up(address)
    assert scene.sockets.hung_up == [address]
    assert not scene.asked


def test_frames_wait_for_the_name_and_answers_bear_it(scene: ReachScene) -> None:
    for frame in (b"a", b"a", b"b"):
        scene.say("peer:5", frame)
    assert [host for host, _ in scene.asked] == ["peer"]
    scene.answer(("10.0.0.1", "::1"))
    scene.say("peer:5", b"c")
    assert scene.sockets.sent == [("10.0.0.1:5", frame) for frame in (b"a", b"b", b"c")]
    scene.reach.hear(Route("10.0.0.1:5"), b"d")
    assert ("peer:5", b"d") in scene.heard
    scene.reach.refused("10.0.0.1:5", "no key")
    assert ("peer:5", "no key") in scene.refused


def test_frames_that_wait_are_bounded(scene: ReachScene) -> None:
    for number in range(MAX_FRAMES + 3):
        scene.say("peer:5", bytes([number]))
    assert scene.sockets.dropped_frames == 3
    scene.answer(PeerUnreachable("no such name"))
    assert scene.sockets.dropped_frames == MAX_FRAMES + 3
    assert scene.unresolved == [("peer:5", "no such name")]
    scene.say("peer:5")  # is looked up again
    assert len(scene.asked) == 1


def test_a_name_in_use_is_looked_up_again_and_followed(scene: ReachScene) -> None:
    scene.say("proxy:5")
    scene.answer(("10.0.0.1",))
    scene.now += REFRESH_SECONDS
    scene.say("proxy:5")
    scene.answer(("10.0.0.3", "10.0.0.1"))  # still one of them
    assert not scene.sockets.hung_up
    scene.now += REFRESH_SECONDS
    scene.say("proxy:5")
    scene.answer(PeerUnreachable("no server answers"))  # nothing better is known
    assert not scene.unresolved
    scene.now += REFRESH_SECONDS
    scene.say("proxy:5")
    scene.answer(("10.0.0.2",))
    assert scene.sockets.hung_up == ["10.0.0.1:5"]
    scene.say("proxy:5", b"y")
    assert scene.sockets.sent[-1] == ("10.0.0.2:5", b"y")


def test_whoever_goes_by_a_name_is_told_when_its_connection_was_another_one_s_to_close(
    scene: ReachScene,
) -> None:
    for name in ("a:5", "b:5"):
        scene.say(name)
        scene.answer(("10.0.0.1",))
    scene.now += REFRESH_SECONDS
    scene.say("a:5")
    scene.answer(("10.0.0.2",))
    assert scene.ended == ["a:5"]  # it is asked over the new one, and nothing may be open with it
    scene.reach.hang_up("10.0.0.1:5")
    assert scene.ended == ["a:5", "b:5"]
    scene.reach.hang_up("b:5")
    assert scene.ended == ["a:5", "b:5"]


def test_two_names_of_one_address_share_a_connection(scene: ReachScene) -> None:
    for name in ("one:5", "two:5"):
        scene.say(name)
        scene.answer(("10.0.0.1",))
    scene.reach.hear(Route("10.0.0.1:5"), b"d")
    assert {address for address, _ in scene.heard} == {"one:5", "two:5", "10.0.0.1:5"}
    scene.reach.hang_up("one:5")
    assert not scene.sockets.hung_up
    scene.reach.hang_up("two:5")
    assert scene.sockets.hung_up == ["10.0.0.1:5"]


def test_who_hangs_up_before_the_answer_hears_no_more(scene: ReachScene) -> None:
    scene.say("peer:5")
    scene.reach.hang_up("peer:5")
    scene.answer(("10.0.0.1",))
    assert not scene.sockets.sent


def test_a_new_dial_looks_the_name_up_anew(scene: ReachScene) -> None:
    scene.say("peer:5")
    scene.answer(("10.0.0.1",))
    scene.reach.hang_up("peer:5")
    scene.say("peer:5", b"y")
    scene.answer(("10.0.0.2",))
    assert scene.sockets.sent[-1] == ("10.0.0.2:5", b"y")


def test_names_that_nothing_is_said_to_are_forgotten(scene: ReachScene) -> None:
    """Whoever names many hosts fills no memory."""
    for number in range(100):
        scene.say(f"peer-{number}:5")
        scene.answer((f"10.0.0.{number}",))
    scene.now += IDLE_SECONDS
    scene.reach.tick(scene.now)
    assert not scene.reach._leads
    assert not scene.reach._by_numeric
    assert len(scene.sockets.hung_up) == 100


def test_a_route_back_is_the_sockets_affair(scene: ReachScene) -> None:
    route = Route(identity=b"session")
    assert scene.reach.send(route, b"x")
    scene.reach.hear(route, b"y")
    assert scene.heard == [("", b"y")]
