"""Links: from the first message to each kind of end, with a clock and a wire of the test's own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar, cast

import pytest

from p2p_engine.config import EngineConfig
from p2p_engine.control.plane import ControlPlane
from p2p_engine.control.sockets import Route
from p2p_engine.errors import P2pError, PeerLost, PeerRefused, PeerUnreachable, TransportError
from p2p_engine.peers.closing_channels import CLOSE_SECONDS
from p2p_engine.peers.link import Link, LinkState, PeerAddress
from p2p_engine.peers.links import MAX_CORRUPTED, REST_SECONDS, Links
from p2p_engine.peers.listeners import LinkListener
from p2p_engine.transports.base import (
    Channel,
    Connected,
    ConnectionInterrupted,
    Endpoint,
    Transport,
)
from p2p_engine.wire.messages import (
    AnyMessage,
    Bye,
    Greet,
    Hello,
    Location,
    Lookup,
    Ping,
    Pong,
    Refuse,
    Welcome,
)
from tests.doubles.control import ControlDouble

M = TypeVar("M")
US, THEM, NEW = 1, 2, 3
ADDRESS = "127.0.0.1:5"
PEER = PeerAddress(ADDRESS)
CONFIG = EngineConfig(connect_timeout_seconds=5, peer_timeout_seconds=8, retry_seconds=1)


class TransportDouble:
    """Connects when the test says so."""

    receiver_writes = False
    checks = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.dialled: list[tuple[Endpoint, Connected]] = []
        self.fault: Exception | None = None
        self.seconds = 0.0  # that a connection may take

    def patience(self, endpoint: Endpoint) -> float:
        return self.seconds

    def connect(self, endpoint: Endpoint, connected: Connected) -> None:
        if self.fault is not None:
            raise self.fault
        self.dialled.append((endpoint, connected))


class ChannelDouble:
    """Breaks when the test says so; does not close while it is stuck."""

    closed = stuck = False

    def __init__(self) -> None:
        self.waited: list[float] = []

    def watch(self, broken: Callable[[TransportError], None]) -> None:
        self.broken = broken

    def close(self, timeout: float = 1.0) -> bool:
        self.waited.append(timeout)
        self.closed = not self.stuck
        return self.closed


class LinksScene(LinkListener):
    """One Links and everything around it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.control = ControlDouble()
        self.transports = [TransportDouble("shm"), TransportDouble("tcp")]
        self.events: list[str] = []
        self.is_used = True
        self.links = Links(
            CONFIG, cast("ControlPlane", self.control), US, None,
            cast("list[Transport]", self.transports), lock=threading.RLock(),
            clock=lambda: self.now, listening=lambda: self.now,
        )  # fmt: skip
        self.links.listeners = (self,)

    def link_ready(self, link: Link) -> None:
        self.events.append("ready")

    def link_closed(self, link: Link) -> None:
        self.events.append("closed")

    def channel_ready(self, link: Link) -> None:
        self.events.append("channel")

    def channel_lost(self, link: Link, error: P2pError) -> None:
        self.events.append("channel lost")
        self.lost_for = error

    def uses_link(self, link: Link) -> bool:
        return self.is_used

    def connect(self, number: int, transport: int = 0) -> ChannelDouble:
        """Let the dial `number` of a transport succeed."""
        channel = ChannelDouble()
        self.transports[transport].dialled[number][1](cast("Channel", channel))
        return channel

    def hear(self, message: AnyMessage, address: str = ADDRESS) -> Link | None:
        return self.links.on_message(Route(address), message)

    def last(self, kind: type[M]) -> M:
        message = self.control.sent[-1][1]
        assert isinstance(message, kind)
        return message

    def said(self, kind: type[AnyMessage]) -> int:
        """How often it was said since the last question."""
        sent, self.control.sent = self.control.sent, []
        return sum(isinstance(message, kind) for _, message in sent)

    def welcomed(self, *, data: bool = True) -> Link:
        link = self.links.get(PEER, data=data)
        self.hear(Welcome(THEM, US, 1, None, {"shm": {"a": "1"}, "tcp": {"b": "2"}}))
        return link

    def invite(self) -> None:
        """Hear once more what the peer offers."""
        self.hear(Welcome(THEM, US, 1, None, {"shm": {"a": "1"}, "tcp": {"b": "2"}}))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.links.tick(self.now)


@pytest.fixture
def scene() -> LinksScene:
    return LinksScene()


def ended_with(link: Link, error: type[P2pError], words: str) -> None:
    assert link.state is LinkState.CLOSED
    assert isinstance(link.error, error)
    assert words in str(link.error)


@pytest.mark.parametrize(
    "address", ["", ":1", "a", "a:", "a:0", "a:65536", "a:-1", "a:1x", "a:\u0661x"]
)
def test_address_that_cannot_be_dialled(scene: LinksScene, address: str) -> None:
    with pytest.raises(PeerUnreachable):
        scene.links.get(PeerAddress(address), data=False)
    assert scene.links.count() == {}


def test_hello_is_repeated_until_welcomed(scene: LinksScene) -> None:
    scene.links.get(PEER, data=False)
    assert scene.last(Hello).address == scene.control.address
    scene.pass_time(1.0)
    assert len(scene.control.sent) == 2
    scene.hear(Welcome(THEM, US, 1, None, {}))
    assert scene.events == ["ready"]
    assert scene.links.count() == {"ready": 1}


def test_one_link_for_each_target(scene: LinksScene) -> None:
    assert scene.links.get(PEER, data=False) is scene.links.get(PEER, data=True)


def test_nobody_answers(scene: LinksScene) -> None:
    link = scene.links.get(PEER, data=False)
    scene.pass_time(5.0)
    ended_with(link, PeerUnreachable, "GREETING")
    assert scene.control.hung_up == [ADDRESS]
    assert scene.links.get(PEER, data=False) is not link


def test_refusal(scene: LinksScene) -> None:
    link = scene.links.get(PEER, data=False)
    scene.hear(Refuse(THEM, US, 1, "dtype: 'a' here, 'b' there"))
    ended_with(link, PeerRefused, "dtype")


def test_transports_are_tried_in_order(scene: LinksScene) -> None:
    link = scene.welcomed()
    shm, tcp = scene.transports
    assert [endpoint for endpoint, _ in shm.dialled] == [{"a": "1"}]
    shm.dialled[0][1](TransportError("another host"))
    assert [endpoint for endpoint, _ in tcp.dialled] == [{"b": "2"}]
    tcp.dialled[0][1](cast("Channel", ChannelDouble()))
    assert link.transport is cast("Transport", tcp)
    assert scene.events == ["ready", "channel"]


def test_no_transport_works(scene: LinksScene) -> None:
    """The link lives on: something may come from that peer all the same."""
    link = scene.welcomed()
    for transport in scene.transports:
        transport.dialled[0][1](TransportError("it rains"))
    assert isinstance(scene.lost_for, PeerRefused)
    assert "it rains" in str(scene.lost_for)
    assert link.ready


@pytest.mark.parametrize("which", [0, 1])
def test_connection_that_was_interrupted_may_be_tried_again(scene: LinksScene, which: int) -> None:
    """The peer had let us in: a sender hears of a broken connection, not of a refusal, whichever
    transport was tried last."""
    link = scene.welcomed()
    outcomes = [TransportError("another host"), TransportError("another host")]
    outcomes[which] = ConnectionInterrupted("a fence")
    for transport, outcome in zip(scene.transports, outcomes, strict=True):
        transport.dialled[0][1](outcome)
    assert isinstance(scene.lost_for, TransportError)
    scene.links.get(PEER, data=True)
    scene.pass_time(1.0)
    scene.invite()
    scene.connect(1)
    assert link.channel is not None


def test_data_connection_that_is_never_answered(scene: LinksScene) -> None:
    link = scene.welcomed()
    link.heard_at = 4.0
    scene.pass_time(5.0)
    assert isinstance(scene.lost_for, PeerUnreachable)
    assert link.ready
    assert scene.connect(0).closed  # it was given up
    assert link.channel is None


def test_broken_channel_is_made_anew_when_it_is_asked_for(scene: LinksScene) -> None:
    link = scene.welcomed()
    first = scene.connect(0)
    scene.pass_time(1.0)
    first.broken(TransportError("reset"))
    assert (first.closed, link.ready, link.channel) == (True, True, None)
    assert scene.events == ["ready", "channel", "channel lost"]
    assert len(scene.transports[0].dialled) == 1
    scene.links.get(PEER, data=True)
    assert len(scene.transports[0].dialled) == 1  # the token is used up
    scene.last(Hello)
    scene.invite()
    scene.invite()  # HELLO may have been said twice
    second = scene.connect(1)
    first.broken(TransportError("said twice"))
    scene.links.break_channel(link, TransportError("a late write"))
    assert second.closed
    assert scene.events == ["ready", *2 * ["channel", "channel lost"]]


def test_old_invitation_is_not_used_and_a_new_one_is_asked_for_until_it_comes(
    scene: LinksScene,
) -> None:
    link = scene.welcomed(data=False)
    scene.pass_time(7.0)
    scene.hear(Pong(THEM, US))
    scene.pass_time(7.0)
    scene.hear(Pong(THEM, US))
    scene.pass_time(1.0)
    scene.control.sent.clear()
    scene.links.get(PEER, data=True)
    for _ in range(3):
        scene.last(Hello)
        scene.control.sent.clear()
        scene.pass_time(1.0)
    assert not scene.transports[0].dialled
    scene.invite()
    scene.connect(0)
    assert link.channel is not None


def test_invitation_that_never_comes_is_no_connection(scene: LinksScene) -> None:
    link = scene.welcomed()
    scene.connect(0).broken(TransportError("reset"))
    scene.links.get(PEER, data=True)
    for _ in range(7):
        scene.pass_time(1.0)
        scene.hear(Pong(THEM, US))
    assert scene.events == ["ready", "channel", "channel lost", "channel lost"]
    scene.invite()  # late
    assert len(scene.transports[0].dialled) == 1
    assert link.ready


def test_connections_follow_each_other_slowly(scene: LinksScene) -> None:
    """One that breaks at once is not made a thousand times a second."""
    link = scene.welcomed()
    for number in range(3):
        scene.connect(number).broken(TransportError("reset"))
        scene.links.get(PEER, data=True)
        assert len(scene.transports[0].dialled) == number + 1
        scene.pass_time(1.0)
        scene.invite()
        assert len(scene.transports[0].dialled) == number + 2
    for transport in scene.transports:
        transport.dialled[-1][1](TransportError("refused"))
    assert isinstance(scene.lost_for, TransportError)  # it worked before: they do match
    assert link.ready


def test_channel_whose_copies_do_not_stop_is_kept_and_counted(scene: LinksScene) -> None:
    link = scene.welcomed()
    channel = scene.connect(0)
    channel.stuck = True
    scene.links.close_link(link, PeerLost("silent"))
    assert scene.links.num_unclosed_channels() == 1
    scene.pass_time(0.1)
    assert scene.links.num_unclosed_channels() == 1
    channel.stuck = False
    scene.pass_time(0.1)
    assert channel.closed
    assert scene.links.num_unclosed_channels() == 0


def test_a_data_connection_may_take_as_long_as_its_transport_says(scene: LinksScene) -> None:
    scene.transports[0].seconds = 20.0
    link = scene.welcomed()
    for _ in range(3):
        scene.pass_time(6.0)
        scene.hear(Pong(THEM, US))
        assert link.connecting
    scene.pass_time(2.5)
    assert scene.events == ["ready", "channel lost"]
    assert "within 20 s" in str(scene.lost_for)


def test_each_further_transport_has_the_time_of_a_first_answer(scene: LinksScene) -> None:
    link = scene.welcomed()
    scene.pass_time(4.9)
    scene.transports[0].dialled[0][1](TransportError("not mapped"))
    scene.hear(Pong(THEM, US))
    scene.pass_time(4.9)
    assert link.connecting
    scene.connect(0, transport=1)
    assert scene.events == ["ready", "channel"]


def test_closing_a_channel_waits_for_no_copy(scene: LinksScene) -> None:
    """The engine's lock is held meanwhile, and everybody waits for that."""
    link = scene.welcomed()
    first = scene.connect(0)
    first.broken(TransportError("reset"))
    scene.links.get(PEER, data=True)
    scene.pass_time(1.0)
    scene.invite()
    second = scene.connect(1)
    scene.links.close_link(link, PeerLost("silent"))
    assert first.waited == second.waited == [0.0]


def test_broken_channel_is_told_when_its_copies_have_stopped(scene: LinksScene) -> None:
    """Until then what they read cannot be tried again, and no other channel is made."""
    link = scene.welcomed()
    channel = scene.connect(0)
    channel.stuck = True
    channel.broken(TransportError("reset"))
    scene.links.get(PEER, data=True)
    scene.pass_time(0.1)
    assert scene.events == ["ready", "channel"]
    assert not link.connecting
    channel.stuck = False
    scene.pass_time(0.1)
    assert scene.events == ["ready", "channel", "channel lost"]


def test_broken_channel_whose_copies_never_stop_is_told_in_the_end(scene: LinksScene) -> None:
    scene.welcomed()
    channel = scene.connect(0)
    channel.stuck = True
    channel.broken(TransportError("reset"))
    for _ in range(3):
        scene.pass_time(CLOSE_SECONDS)
    assert scene.events == ["ready", "channel", "channel lost"]
    assert scene.links.num_unclosed_channels() == 1


def test_a_transport_that_was_left_is_used_again_if_nothing_else_works(scene: LinksScene) -> None:
    link = scene.welcomed()
    scene.connect(0)
    corrupt(scene, link)
    scene.links.get(PEER, data=True)
    scene.invite()
    scene.transports[1].dialled[0][1](TransportError("no group can be made"))
    channel = scene.connect(1)
    assert link.transport is cast("Transport", scene.transports[0])
    scene.links.note_corrupted(link, cast("Channel", channel))  # the other one is tried once more
    assert channel.closed


def test_another_name_of_a_peer_knows_which_transport_was_left(scene: LinksScene) -> None:
    link = scene.welcomed()
    scene.connect(0)
    corrupt(scene, link)
    other = scene.links.get(PeerAddress("localhost:5"), data=True)
    offers = {"shm": {"a": "1"}, "tcp": {"b": "2"}}
    scene.hear(Welcome(THEM, US, 1, None, offers), "localhost:5")
    scene.connect(0, transport=1)
    assert other.transport is cast("Transport", scene.transports[1])


def corrupt(scene: LinksScene, link: Link) -> None:
    """Have a link's channel bring wrong bytes until it is left."""
    for _ in range(MAX_CORRUPTED):
        scene.links.note_corrupted(link, link.channel)
    assert link.channel is None
    scene.pass_time(1.0)


def test_transport_that_fails_over_an_invitation_is_passed_over_at_once(scene: LinksScene) -> None:
    """By a bug of ours, or by what the peer said: the next one is tried."""
    scene.transports[0].fault = OverflowError("Python int too large to convert to C long")
    scene.welcomed()
    scene.connect(0, transport=1)
    assert scene.events == ["ready", "channel"]


def test_channel_is_made_when_data_is_first_asked_for(scene: LinksScene) -> None:
    scene.welcomed(data=False)
    assert not scene.transports[0].dialled
    scene.links.get(PEER, data=True)
    scene.links.get(PEER, data=True)
    assert len(scene.transports[0].dialled) == 1


def test_silence_ends_a_link(scene: LinksScene) -> None:
    link = scene.welcomed(data=False)
    for _ in range(10):
        scene.pass_time(2.0)
        scene.last(Ping)
        scene.hear(Pong(THEM, US))
    scene.pass_time(8.0)
    ended_with(link, PeerLost, "silent for 8.0 s")


def rested(scene: LinksScene) -> Link:
    """A link that nobody uses, some time after the last PING."""
    link = scene.welcomed(data=False)
    scene.is_used = False
    scene.pass_time(2.0)
    scene.pass_time(2.0)
    assert (link.is_resting, scene.said(Ping)) == (True, 0)
    return link


def test_link_that_nobody_uses_rests_and_is_asked_seldom(scene: LinksScene) -> None:
    link = rested(scene)
    for _ in range(10):
        scene.pass_time(REST_SECONDS)
        assert scene.said(Ping) == 1
        scene.hear(Pong(THEM, US))
        scene.pass_time(2.0)
        assert scene.said(Ping) == 0
    scene.pass_time(REST_SECONDS)
    for _ in range(3):
        scene.pass_time(2.0)
    assert scene.said(Ping) == 4
    assert link.ready
    scene.pass_time(2.0)
    ended_with(link, PeerLost, "silent for 8.0 s")


@pytest.mark.parametrize("is_used", [True, False])
def test_rest_ends_when_the_link_is_used_or_its_connection_ends(
    scene: LinksScene, is_used: bool
) -> None:
    """The silence of the rest does not count, that after it does."""
    link = rested(scene)
    scene.pass_time(20.0)
    assert scene.said(Ping) == 0
    if is_used:
        assert scene.links.get(PEER, data=False) is link
        scene.is_used = True
    else:
        scene.links.connection_ended(ADDRESS)
    scene.pass_time(0.02)
    assert scene.said(Ping) == 1
    for _ in range(3):
        scene.pass_time(2.0)
    assert link.ready
    scene.pass_time(2.5)
    ended_with(link, PeerLost, "silent for 8.5 s")


def test_restarted_peer_of_a_link_that_would_rest_next_is_noticed(scene: LinksScene) -> None:
    """Its last PING was answered, by who is gone."""
    link = scene.welcomed(data=False)
    scene.is_used = False
    scene.said(Hello)
    for _ in range(3):
        scene.links.connection_ended(ADDRESS)
    scene.pass_time(2.0)
    assert (link.is_resting, scene.said(Ping)) == (False, 1)
    scene.hear(Pong(NEW, US))
    ended_with(link, PeerLost, "restarted")


def test_link_does_not_rest_while_a_ping_is_unanswered_or_it_is_used(scene: LinksScene) -> None:
    link = scene.welcomed(data=False)
    scene.pass_time(2.0)
    scene.is_used = False
    scene.pass_time(2.0)
    assert scene.said(Ping) == 2
    scene.hear(Pong(THEM, US))
    scene.pass_time(2.0)
    assert link.is_resting


def test_link_whose_connection_ended_while_it_was_used_asks_before_it_rests(
    scene: LinksScene,
) -> None:
    """A word that was on its way is no answer: it came over the connection that is gone."""
    link = scene.welcomed(data=False)
    scene.links.connection_ended(ADDRESS)
    scene.hear(Pong(THEM, US))
    scene.is_used = False
    scene.said(Ping)
    scene.pass_time(2.0)
    assert scene.said(Ping) == 1
    assert not link.is_resting
    scene.hear(Pong(THEM, US))
    scene.pass_time(2.0)
    assert link.is_resting


def test_restarted_peer_of_a_resting_link_is_noticed_when_its_connection_has_ended(
    scene: LinksScene,
) -> None:
    link = rested(scene)
    scene.links.connection_ended(ADDRESS)
    scene.pass_time(0.02)
    scene.hear(Pong(NEW, US))
    ended_with(link, PeerLost, "restarted")


@pytest.mark.parametrize("message", [Pong(NEW, US), Welcome(NEW, US, 1, None, {})])
def test_answer_of_a_newer_engine_ends_a_link(scene: LinksScene, message: AnyMessage) -> None:
    link = scene.welcomed(data=False)
    assert scene.hear(message) is None
    ended_with(link, PeerLost, "restarted")


def test_bye_ends_a_link_and_its_channel(scene: LinksScene) -> None:
    link, channel = scene.welcomed(), ChannelDouble()
    scene.transports[0].dialled[0][1](cast("Channel", channel))
    scene.hear(Bye(THEM, US))
    ended_with(link, PeerLost, "closing")
    assert channel.closed


def test_engine_that_is_over_ends_the_links_to_it(scene: LinksScene) -> None:
    """Found out elsewhere: it said BYE, or another one greets us from its address."""
    link = scene.welcomed(data=False)
    scene.links.session_over(NEW, PeerLost("another one"))
    assert link.ready
    scene.links.session_over(THEM, PeerLost("it is closing"))
    ended_with(link, PeerLost, "closing")


@pytest.mark.parametrize("message", [Bye(NEW, US), Bye(0, US), Greet(NEW, US)])
def test_bye_of_a_stranger_is_ignored(scene: LinksScene, message: AnyMessage) -> None:
    link = scene.welcomed(data=False)
    assert scene.hear(message) is None
    assert link.ready


def test_peer_that_forgot_us_is_greeted_again(scene: LinksScene) -> None:
    """Nothing that is open ends by it."""
    link, channel = scene.welcomed(), scene.connect(0)
    scene.hear(Greet(THEM, US))
    assert link.state is LinkState.GREETING
    num_said = len(scene.control.sent)
    scene.last(Hello)
    scene.hear(Greet(THEM, US))  # the answer to what was said before HELLO
    assert len(scene.control.sent) == num_said
    scene.invite()
    assert link.ready
    assert link.channel is cast("Channel", channel)
    assert scene.events == ["ready", "channel", "ready"]


def test_peer_that_forgot_us_and_says_no_more_is_not_to_be_had(scene: LinksScene) -> None:
    link = scene.welcomed(data=False)
    scene.now += 100.0
    scene.hear(Greet(THEM, US))
    scene.pass_time(CONFIG.connect_timeout_seconds)
    ended_with(link, PeerUnreachable, "did not answer")


def test_peer_that_forgot_us_and_was_restarted_ends_its_link(scene: LinksScene) -> None:
    link = scene.welcomed(data=False)
    scene.hear(Greet(THEM, US))
    scene.hear(Welcome(NEW, US, 1, None, {}))
    ended_with(link, PeerLost, "restarted")


def test_hello_is_recognised_until_it_is_answered(scene: LinksScene) -> None:
    """The peer asks the session that it has whether it greets by another connection, too."""
    scene.links.get(PEER, data=False)
    number = scene.last(Hello).number
    assert number
    scene.pass_time(1.0)
    assert scene.last(Hello).number == number  # said again
    for asked, told in ((number, number), (number ^ 2, 0), (0, 0)):
        scene.hear(Ping(THEM, US, asked), "127.0.0.1:6")
        assert scene.last(Pong) == Pong(US, THEM, told)
    scene.hear(Welcome(THEM, US, 1, None, {}))
    scene.hear(Ping(THEM, US, number), "127.0.0.1:6")
    assert scene.last(Pong) == Pong(US, THEM, 0)


def test_close_says_bye_after_the_channel_is_joined(scene: LinksScene) -> None:
    link, channel = scene.welcomed(), ChannelDouble()
    scene.transports[0].dialled[0][1](cast("Channel", channel))
    scene.links.close(PeerLost("the end"))
    assert channel.closed
    assert scene.last(Bye).destination_epoch == THEM
    assert link.state is LinkState.CLOSED
    assert scene.events.count("closed") == 1


def test_rank_is_looked_up(scene: LinksScene) -> None:
    link = scene.links.get(PeerAddress(ADDRESS, 3), data=False)
    assert scene.last(Lookup).rank == 3
    scene.hear(Location(9, US, 2, "127.0.0.1:7", 4, None))  # the answer to another question
    assert link.state is LinkState.LOCATING
    scene.hear(Location(9, US, 3, "127.0.0.1:6", 4, None))
    assert scene.control.sent[-1][0].address == "127.0.0.1:6"
    scene.hear(Welcome(THEM, US, 1, None, {}), "127.0.0.1:6")
    assert link.ready


@pytest.mark.parametrize("address", ["", "nowhere", "host:99999"])
def test_location_that_is_none(scene: LinksScene, address: str) -> None:
    link = scene.links.get(PeerAddress(ADDRESS, 3), data=False)
    scene.hear(Location(9, US, 3, address, 2, None))
    assert link.state is LinkState.CLOSED
    assert isinstance(link.error, PeerRefused | PeerUnreachable)
