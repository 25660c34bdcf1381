"""ControlPlane: frames there and back, whatever the callbacks do, and an end that is bounded."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2p_engine.control import dialler
from p2p_engine.control.plane import ControlPlane, PlaneListener
from p2p_engine.control.sockets import Route
from p2p_engine.errors import ConfigError
from p2p_engine.wire.addresses import join_address, split_address
from p2p_engine.wire.messages import MAX_FRAME_BYTES
from tests.rigs.relay import FaultyRelay
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("no_leaks")


class ControlParty(PlaneListener):
    """A control plane that keeps what it hears; a frame b"raise" is one that it chokes on."""

    def __init__(self, ports: range = range(1), *, starts: bool = True) -> None:
        self.heard: list[tuple[Route, bytes]] = []
        self.ended: list[Route] = []
        self.control = ControlPlane("127.0.0.1", ports, name="p2p-test", listener=self)
        if starts:
            self.control.start()

    def on_ended(self, route: Route) -> None:
        self.ended.append(route)

    def on_frame(self, route: Route, frame: bytes) -> None:
        self.heard.append((route, frame))
        if frame == b"raise":
            raise RuntimeError("a bug")


@pytest.fixture
def parties() -> Iterator[tuple[ControlParty, ControlParty]]:
    made = ControlParty(), ControlParty()
    yield made
    for party in made:
        party.control.close(5)


def test_frames_there_and_back(parties: tuple[ControlParty, ControlParty]) -> None:
    one, other = parties
    for number in range(100):
        one.control.send(Route(other.control.address), b"%d" % number)
    eventually(lambda: len(other.heard) == 100)
    assert [frame for _, frame in other.heard] == [b"%d" % number for number in range(100)]
    other.control.send(other.heard[0][0], b"answer")
    eventually(lambda: one.heard)
    assert one.heard == [(Route(other.control.address), b"answer")]


def threads() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_threads_of_a_pinned_caller_are_not_pinned() -> None:
    """As in a worker that vLLM has pinned to one core: else they starve beside its neighbour."""
    cores, before = os.sched_getaffinity(0), threads()
    os.sched_setaffinity(0, {min(cores)})
    try:
        party = ControlParty()
    finally:
        os.sched_setaffinity(0, cores)
    try:
        eventually(lambda: len(threads() - before) == 3)  # the loop, ZMQ's I/O and its reaper
        ours = threads() - before
        parent = os.sched_getaffinity(os.getppid())
        eventually(lambda: all(os.sched_getaffinity(thread) == parent for thread in ours))
    finally:
        party.control.close(5)


def test_exception_in_a_callback_is_counted_and_survived(
    parties: tuple[ControlParty, ControlParty],
) -> None:
    one, other = parties
    one.control.call_soon(lambda: 1 // 0)  # type: ignore[arg-type]
    one.control.send(Route(other.control.address), b"raise")
    one.control.send(Route(other.control.address), b"after")
    eventually(lambda: len(other.heard) == 2)
    assert (one.control.errors, other.control.errors) == (1, 1)
    assert other.control.alive


def test_hang_up_then_dial_again(parties: tuple[ControlParty, ControlParty]) -> None:
    one, other = parties
    for frame in (b"a", b"b"):
        one.control.send(Route(other.control.address), frame)
        eventually(lambda f=frame: other.heard and other.heard[-1][1] == f)  # type: ignore[misc]
        one.control.hang_up(other.control.address)


def test_connection_that_another_has_followed_is_closed(
    parties: tuple[ControlParty, ControlParty],
) -> None:
    """Even when what was held up on its way comes on it afterwards."""
    one, other = parties
    before = num_descriptors()
    with FaultyRelay(other.control.address) as relay:
        for frame in (b"a", b"b"):
            one.control.send(Route(relay.address), frame)
            eventually(lambda f=frame: other.heard and other.heard[-1][1] == f)  # type: ignore[misc]
            relay.freeze()
            one.control.send(Route(relay.address), b"held")
            one.control.hang_up(relay.address)
        relay.thaw()
        eventually(lambda: sum(frame == b"held" for _, frame in other.heard) == 2)
    eventually(lambda: num_descriptors() == before)


def test_connection_that_nothing_is_said_on_is_closed(
    parties: tuple[ControlParty, ControlParty], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that to the directory of an instance that has been found, or is no more."""
    one, other = parties
    before = num_descriptors()
    for frame in (b"a", b"b"):
        monkeypatch.setattr(dialler, "IDLE_SECONDS", 60.0)
        one.control.send(Route(other.control.address), frame)
        eventually(lambda f=frame: other.heard and other.heard[-1][1] == f)  # type: ignore[misc]
        assert num_descriptors() > before
        monkeypatch.setattr(dialler, "IDLE_SECONDS", 0.1)
        eventually(lambda: num_descriptors() == before)


def test_more_addresses_than_libzmq_has_sockets_are_dialled(
    parties: tuple[ControlParty, ControlParty],
) -> None:
    """Nobody answers at all but one of them."""
    one, other = parties
    before = num_descriptors()
    for port in range(2, 1102):
        one.control.send(Route(f"127.0.0.1:{port}"), b"anybody?")
    one.control.send(Route(other.control.address), b"hello")
    eventually(lambda: other.heard, 30)
    assert one.control.sockets.dropped_frames == 0
    for port in range(2, 1102):
        one.control.hang_up(f"127.0.0.1:{port}")
    eventually(lambda: num_descriptors() <= before + 2, 30)


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_frame_that_is_too_long_does_not_arrive(parties: tuple[ControlParty, ControlParty]) -> None:
    """It costs its connection; what is said again afterwards gets through."""
    one, other = parties
    one.control.send(Route(other.control.address), bytes(MAX_FRAME_BYTES + 1))

    def say_again() -> bool:
        one.control.send(Route(other.control.address), bytes(MAX_FRAME_BYTES))
        return bool(other.heard)

    eventually(say_again)
    assert {len(frame) for _, frame in other.heard} == {MAX_FRAME_BYTES}


@pytest.mark.parametrize("address", ["a b:1", "", "*:5", "127.0.0.1:x"])
def test_address_that_zmq_refuses_costs_a_frame(
    parties: tuple[ControlParty, ControlParty], address: str
) -> None:
    one, _ = parties
    one.control.send(Route(address or " "), b"x")
    eventually(lambda: one.control.sockets.dropped_frames == 1)
    assert one.control.alive


def test_answer_to_nobody_is_dropped(parties: tuple[ControlParty, ControlParty]) -> None:
    one, _ = parties
    one.control.send(Route(identity=b"nobody"), b"x")
    eventually(lambda: one.control.sockets.dropped_frames == 1)


def test_watched_descriptor_calls_back_in_the_control_thread(
    parties: tuple[ControlParty, ControlParty],
) -> None:
    one, _ = parties
    called = threading.Event()
    fd = os.eventfd(0, os.EFD_NONBLOCK)

    def ready() -> None:
        os.eventfd_read(fd)
        called.set()

    one.control.call_soon(lambda: one.control.watch(fd, ready))
    os.eventfd_write(fd, 1)
    assert called.wait(10)
    done = threading.Event()
    for _ in range(2):
        one.control.call_soon(lambda: one.control.unwatch(fd))
    one.control.call_soon(done.set)
    assert done.wait(10)
    os.close(fd)


def test_calls_made_before_the_end_are_run() -> None:
    party, ran = ControlParty(), threading.Event()
    party.control.call_soon(ran.set)
    assert party.control.close(5)
    assert ran.is_set()
    assert party.control.close(5)
    party.control.send(Route("127.0.0.1:1"), b"too late")


def test_what_was_queued_leaves_before_the_end(parties: tuple[ControlParty, ControlParty]) -> None:
    _, other = parties
    leaving = ControlParty()
    leaving.control.send(Route(other.control.address), b"bye")
    leaving.control.close(5, linger_seconds=5)
    eventually(lambda: other.heard)


def test_never_started_can_be_closed() -> None:
    control = ControlPlane("127.0.0.1", range(1), name="x")
    assert control.close(1)


def test_ports_that_are_all_taken_are_named(parties: tuple[ControlParty, ControlParty]) -> None:
    _, port = split_address(parties[0].control.address)
    with pytest.raises(ConfigError, match=str(port)):
        ControlParty(range(port, port + 1))


@pytest.mark.parametrize(("host", "text"), [("a", "a:1"), ("::1", "[::1]:1")])
def test_addresses_are_joined_and_split(host: str, text: str) -> None:
    assert join_address(host, 1) == text
    assert split_address(text) == (host, 1)


def timers_of(port: int) -> list[str]:
    """Which timer runs on each open connection that came in at a port: 02 is keep-alive."""
    tables = [Path(f"/proc/self/net/{name}").read_text().splitlines() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table[1:]]
    return [row[5][:2] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "01"]


def test_connection_of_a_host_that_vanished_is_noticed(
    parties: tuple[ControlParty, ControlParty],
) -> None:
    """No packet tells of its end, not even the one that would close it: the kernel has to ask."""
    one, other = parties
    one.control.send(Route(other.control.address), b"hello")
    eventually(lambda: other.heard)
    port = split_address(other.control.address)[1]
    eventually(lambda: timers_of(port) == ["02"])


def test_the_end_of_a_connection_is_told_to_both_sides_unless_it_was_their_own() -> None:
    one, other = ControlParty(), ControlParty()
    ended = one.ended, other.ended
    with FaultyRelay(other.control.address) as relay:
        one.control.send(Route(relay.address), b"a")
        eventually(lambda: other.heard)
        relay.cut()
        eventually(lambda: all(ended))
        assert ended[0][0] == Route(relay.address)
        assert ended[1][0] == other.heard[0][0]
        one.control.send(Route(relay.address), b"b")
        eventually(lambda: len(other.heard) == 2)
        num_told = len(ended[0])
        one.control.hang_up(relay.address)
        eventually(lambda: other.heard[1][0] in ended[1])
        assert len(ended[0]) == num_told
    for party in (one, other):
        party.control.close(5)


def test_the_end_of_a_connection_is_not_told_of_who_has_its_descriptor_next() -> None:
    """Even if the first word of the next one is read before that end is.

    The next connection usually has the descriptor; who has it is for the kernel to say.
    """
    party, one = ControlParty(starts=False), ControlParty()
    control = party.control
    sockets = control.sockets
    descriptors: list[int] = []

    def num_heard() -> int:
        sockets._receive(sockets._router)
        return len(party.heard)

    def hear_a_connection() -> None:
        num_before = len(party.heard)
        one.control.send(Route(control.address), b"a")
        eventually(lambda: num_heard() > num_before)
        sockets._serve_events()
        [descriptor] = sockets._names
        descriptors.append(descriptor)

    try:
        hear_a_connection()
        while len(descriptors) < 50 and descriptors[-1] not in descriptors[:-1]:
            one.control.hang_up(control.address)
            assert sockets._authenticator.sockets()[0].poll(10_000)
            hear_a_connection()
            assert party.ended == [route for route, _ in party.heard[:-1]]
        assert descriptors[-1] in descriptors[:-1]
    finally:
        one.control.close(5)
        assert control.close(5)
