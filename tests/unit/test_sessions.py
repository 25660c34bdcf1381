"""Sessions: who may take the place of one, with a clock and a wire of the test's own."""

from __future__ import annotations

import gc
import resource
import threading
import tracemalloc
from typing import cast

import pytest

from p2p_engine.config import EngineConfig
from p2p_engine.control.plane import ControlPlane
from p2p_engine.control.sockets import Route
from p2p_engine.errors import PeerLost
from p2p_engine.peers import sessions
from p2p_engine.peers.listeners import SessionListener
from p2p_engine.peers.sessions import SESSION_REST_SECONDS, Sessions
from p2p_engine.transports.base import Transport
from p2p_engine.wire.messages import (
    PROTOCOL_VERSION,
    AnyMessage,
    Bye,
    CacheSpec,
    Greet,
    Hello,
    Ping,
    Pong,
    Refuse,
    TransferKey,
    Want,
    Welcome,
    decode,
    encode,
)
from tests.doubles.control import ControlDouble

US, SESSION, OTHER = 1, 2, 3
BUDGET = 8 << 20
ADDRESS = "127.0.0.1:5"
HERE, THERE = Route(identity=b"here"), Route(identity=b"there")
CONFIG = EngineConfig(peer_timeout_seconds=8)


class ForgettingTransport:
    """Keeps whom it was told to forget, and whether these may still write."""

    name = "double"

    def __init__(self) -> None:
        self.forgotten: list[tuple[int, bool]] = []

    def invite(self, source_epoch: int) -> None:
        """Nobody can send by it."""

    def forget(self, source_epoch: int, *, may_write: bool) -> None:
        """Keep what was said."""
        self.forgotten.append((source_epoch, may_write))


class SessionsScene(SessionListener):
    """Sessions with one session, which came over HERE."""

    def __init__(self) -> None:
        self.now = 0.0
        self.control = ControlDouble()
        self.lost: list[int] = []
        self.over: list[int] = []
        self.used: set[int] = set()
        self.transport = ForgettingTransport()
        self.sessions = Sessions(
            CONFIG, cast("ControlPlane", self.control), US, None,
            [cast("Transport", self.transport)], lock=threading.RLock(),
            clock=lambda: self.now, listening=lambda: self.now,
        )  # fmt: skip
        self.sessions.listeners = (self,)
        self.greet(HERE, SESSION)
        self.control.sent.clear()

    def session_lost(self, epoch: int, error: PeerLost) -> None:
        self.lost.append(epoch)

    def session_over(self, epoch: int, error: PeerLost) -> None:
        self.over.append(epoch)

    def uses_session(self, epoch: int) -> bool:
        return epoch in self.used

    def greet(
        self,
        route: Route,
        epoch: int,
        address: str = ADDRESS,
        number: int = 7,
        spec: CacheSpec | None = None,
    ) -> None:
        hello = Hello(epoch, 0, PROTOCOL_VERSION, address, spec, {}, number)
        self.hear(route, decode(encode(hello)))

    def hear(self, route: Route, message: AnyMessage) -> object:
        return self.sessions.on_message(route, message)

    def said(self) -> list[tuple[Route, type[AnyMessage]]]:
        """What was said since it was asked last, to whom."""
        sent, self.control.sent = self.control.sent, []
        return [(route, type(message)) for route, message in sent]

    def is_session(self, route: Route, epoch: int) -> bool:
        is_heard = self.hear(route, Pong(epoch, US)) is not None
        self.control.sent.clear()
        return is_heard


@pytest.fixture
def scene() -> SessionsScene:
    return SessionsScene()


@pytest.mark.parametrize("address", [ADDRESS, "127.0.0.1:6"])
def test_an_epoch_that_somebody_has_read_takes_no_living_session_s_place(
    scene: SessionsScene, address: str
) -> None:
    scene.greet(THERE, SESSION, address)
    assert scene.said() == [(HERE, Ping)]
    assert scene.is_session(HERE, SESSION)  # its PONG says that the HELLO was not its own
    scene.greet(THERE, SESSION, address)
    scene.said()
    scene.hear(HERE, Pong(SESSION, US))
    assert scene.said() == []
    assert not scene.is_session(THERE, SESSION)
    assert scene.lost == scene.over == []


def test_a_session_that_greets_by_another_connection_too_says_so_and_moves(
    scene: SessionsScene,
) -> None:
    """It dials us by two of our addresses; nothing that is open with it ends."""
    scene.greet(THERE, SESSION, number=8)
    ((_, ping),) = scene.control.sent
    assert ping == Ping(US, SESSION, 8)
    scene.said()
    scene.hear(HERE, Pong(SESSION, US, 8))
    assert scene.said() == [(THERE, Welcome)]
    assert scene.is_session(THERE, SESSION)
    assert scene.hear(HERE, Pong(SESSION, US)) is None
    assert scene.said() == [(HERE, Greet)]
    assert scene.lost == scene.over == []


def test_a_session_that_greets_by_another_connection_too_is_not_refused_by_an_older_answer(
    scene: SessionsScene,
) -> None:
    """Its PONG of a PING before that HELLO says nothing of it."""
    scene.greet(THERE, SESSION, number=8)
    scene.said()
    scene.hear(HERE, Pong(SESSION, US))
    assert scene.said() == []
    scene.greet(THERE, SESSION, number=8)
    scene.said()
    scene.hear(HERE, Pong(SESSION, US, 8))
    assert scene.said() == [(THERE, Welcome)]


def test_a_session_whose_connection_has_ended_comes_back_at_once(scene: SessionsScene) -> None:
    scene.control.ended.add(HERE)
    scene.greet(THERE, SESSION)
    assert scene.said() == [(THERE, Welcome)]
    assert scene.is_session(THERE, SESSION)
    assert scene.lost == scene.over == []


def test_a_hello_without_a_number_is_nobody_s_own(scene: SessionsScene) -> None:
    scene.greet(THERE, SESSION, number=0)
    scene.said()
    scene.hear(HERE, Pong(SESSION, US, 0))
    assert scene.said() == [(THERE, Refuse)]


def test_a_session_does_not_vouch_for_another_engine(scene: SessionsScene) -> None:
    scene.greet(THERE, OTHER, number=9)
    assert scene.said() == [(HERE, Ping)]
    scene.hear(HERE, Pong(SESSION, US, 9))
    assert scene.said() == [(THERE, Refuse)]
    assert scene.is_session(HERE, SESSION)


def test_who_greets_under_the_epoch_of_a_silent_session_waits_until_that_is_forgotten(
    scene: SessionsScene,
) -> None:
    scene.greet(THERE, SESSION)
    scene.now += CONFIG.peer_timeout_seconds
    scene.sessions.tick()
    assert scene.lost == [SESSION]
    scene.said()
    scene.greet(THERE, SESSION)
    assert scene.said() == [(THERE, Welcome)]


def test_who_may_still_write_is_forgotten_when_the_last_of_it_has_ended(
    scene: SessionsScene,
) -> None:
    scene.used.add(SESSION)
    scene.hear(HERE, Bye(SESSION, US))
    pass_time(scene, 2.0)
    assert scene.transport.forgotten == [(SESSION, True)] * 2
    scene.used.clear()
    pass_time(scene, 2.0)
    pass_time(scene, 50.0)
    assert scene.transport.forgotten[2:] == [(SESSION, False)]


def test_who_comes_back_is_not_forgotten(scene: SessionsScene) -> None:
    scene.used.add(SESSION)
    scene.hear(HERE, Bye(SESSION, US))
    scene.greet(HERE, SESSION)
    scene.used.clear()
    pass_time(scene, 2.0)
    assert scene.transport.forgotten == [(SESSION, True)]


# Rest


def pass_time(scene: SessionsScene, seconds: float) -> None:
    scene.now += seconds
    scene.sessions.tick()


def test_a_session_of_which_nothing_is_open_may_be_silent_for_long(scene: SessionsScene) -> None:
    for _ in range(5):
        for _ in range(int(SESSION_REST_SECONDS) // 2 - 1):
            pass_time(scene, 2.0)
        assert scene.said() == []
        scene.hear(HERE, Ping(SESSION, US))
        assert scene.said() == [(HERE, Pong)]
    pass_time(scene, SESSION_REST_SECONDS)
    assert scene.said() == [(HERE, Ping)]
    for _ in range(3):
        pass_time(scene, 2.0)
    assert (scene.said(), scene.lost) == ([(HERE, Ping)] * 3, [])
    pass_time(scene, 2.0)
    assert scene.lost == [SESSION]


def test_a_session_of_which_something_is_open_is_asked_and_lost_in_time(
    scene: SessionsScene,
) -> None:
    pass_time(scene, 30.0)
    scene.hear(HERE, Want(SESSION, US, TransferKey("a"), b""))
    scene.used.add(SESSION)
    for _ in range(3):
        pass_time(scene, 2.0)
    assert (HERE, Ping) in scene.said()
    scene.hear(HERE, Pong(SESSION, US))
    for _ in range(3):
        pass_time(scene, 2.0)
        assert scene.lost == []
    pass_time(scene, 2.0)
    assert scene.lost == [SESSION]


def test_a_session_whose_connection_has_ended_is_lost_in_time_and_not_spoken_to(
    scene: SessionsScene,
) -> None:
    pass_time(scene, 30.0)
    scene.sessions.connection_ended(HERE)
    for _ in range(3):
        pass_time(scene, 2.0)
    assert (scene.lost, scene.said()) == ([], [])
    pass_time(scene, 2.0)
    assert scene.lost == [SESSION]


def test_a_session_whose_connection_had_ended_before_its_hello_was_read_is_lost_in_time(
    scene: SessionsScene,
) -> None:
    """Nothing tells of its end any more, but that it cannot be answered."""
    pass_time(scene, 50.0)
    scene.control.ended |= {HERE, THERE}
    scene.greet(THERE, OTHER, "127.0.0.1:6")
    scene.sessions.reply(SESSION, Ping, (0,))
    for _ in range(4):
        assert scene.lost == []
        pass_time(scene, 2.0)
    assert set(scene.lost) == {OTHER, SESSION}


def test_a_session_that_comes_back_by_another_connection_is_no_lost_one(
    scene: SessionsScene,
) -> None:
    scene.sessions.connection_ended(HERE)
    scene.control.ended.add(HERE)
    pass_time(scene, 2.0)
    scene.greet(THERE, SESSION)
    for _ in range(10):
        pass_time(scene, 2.0)
    assert (scene.lost, scene.said()) == ([], [(THERE, Welcome)])


def test_a_resting_session_that_is_challenged_has_its_time_to_answer(scene: SessionsScene) -> None:
    pass_time(scene, 50.0)
    scene.greet(THERE, OTHER)
    for _ in range(3):
        pass_time(scene, 2.0)
    assert scene.lost == []
    pass_time(scene, 2.0)
    assert scene.lost == [SESSION]


def large_spec(number: int) -> CacheSpec:
    """As much as a HELLO can carry: half a MiB in memory."""
    group = CacheSpec(layers=tuple([1] * 1000), is_draft=True)
    return CacheSpec(identity=b"m", rank=number, more=(group,) * 60)


def test_peers_with_equal_caches_share_a_description_of_them(scene: SessionsScene) -> None:
    scene.sessions._spec = CacheSpec(identity=b"m")
    before = scene.sessions.budget.used_bytes
    draft = CacheSpec(layers=tuple(range(80)), is_draft=True)
    spec = CacheSpec(identity=b"m", more=(draft,))
    for number in range(100):
        route, address = Route(identity=b"%d" % number), f"127.0.0.1:{9 + number}"
        scene.greet(route, 10 + number, address, spec=spec)
    assert 0 < scene.sessions.budget.used_bytes - before < 8000
    sessions = [scene.sessions._sessions[10 + number] for number in range(100)]
    assert len({id(session.spec) for session in sessions}) == 1
    for number in range(100):
        scene.hear(Route(identity=b"%d" % number), Bye(10 + number, US))
    assert scene.sessions.budget.used_bytes == before


def test_descriptions_of_caches_take_no_more_memory_than_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of peers that claim the place of another count, too. Who has a small one still gets
    in."""
    monkeypatch.setattr(sessions, "BUDGET_BYTES", BUDGET)
    scene = SessionsScene()
    scene.sessions._spec = CacheSpec(identity=b"m")
    tracemalloc.start()
    try:
        for number in range(40):
            name, is_rival = b"%d" % number, number % 2
            address = ADDRESS if is_rival else f"127.0.0.1:{9 + number}"
            scene.greet(Route(identity=name), 10 + number, address, spec=large_spec(number))
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < BUDGET
    finally:
        tracemalloc.stop()
    assert scene.sessions.budget.used_bytes <= BUDGET
    refusals = [message.reason for _, message in scene.control.sent if isinstance(message, Refuse)]
    assert any("no memory left" in reason for reason in refusals)
    scene.said()
    scene.greet(THERE, OTHER, "127.0.0.1:6", spec=CacheSpec(identity=b"m"))
    assert scene.said() == [(THERE, Welcome)]


def test_sessions_that_ended_and_hold_something_open_count_as_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each may keep a data connection. What closes makes room."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (40, 40))
    scene = SessionsScene()
    scene.used = set(range(SESSION, 100))
    for epoch in range(SESSION + 1, 20):
        scene.greet(HERE, epoch)
    (*_, last) = scene.control.sent
    assert isinstance(last[1], Refuse)
    assert "10 peers are here already, 9 of them ended with something still open" in last[1].reason
    scene.used.clear()
    scene.now += CONFIG.peer_timeout_seconds
    scene.sessions.tick()
    scene.said()
    scene.greet(HERE, 20)
    assert (HERE, Welcome) in scene.said()


def test_a_description_is_charged_to_the_session_that_brought_it_first(
    scene: SessionsScene,
) -> None:
    scene.sessions._spec = CacheSpec(identity=b"m")
    scene.greet(HERE, SESSION, spec=large_spec(0))
    scene.greet(THERE, OTHER, "127.0.0.1:6", spec=large_spec(0))
    budget = scene.sessions.budget
    most = (budget._nbytes - budget.used_bytes) // 2
    assert not budget.take(SESSION, most)
    assert budget.take(OTHER, most)
    budget.give_back(OTHER, most)
    scene.hear(HERE, Bye(SESSION, US))
    scene.hear(THERE, Bye(OTHER, US))
    assert not budget.used_bytes


def test_a_session_that_greets_again_stays_whatever_is_left_of_the_budget(
    scene: SessionsScene,
) -> None:
    scene.sessions._spec = CacheSpec(identity=b"m")
    scene.greet(HERE, SESSION, spec=large_spec(0))
    while scene.sessions.budget.take(5, 10) or scene.sessions.budget.take(6, 10):
        pass
    scene.said()
    scene.greet(HERE, SESSION, spec=large_spec(0))
    assert scene.said() == [(HERE, Welcome)]
