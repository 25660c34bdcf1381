"""Authenticator: how many connections there may be, and what a broken handshake says."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator

import pytest
import zmq

from p2p_engine.control.auth import (
    HANDSHAKE_SECONDS,
    MAX_YOUNG,
    Authenticator,
    Connections,
    Curve,
    Handshakes,
)
from p2p_engine.control.listener import Listener


def test_young_connections_of_one_address_are_few() -> None:
    connections = Connections(limit=10 * MAX_YOUNG)
    taken = [connections.add(fd, "10.0.0.1", 0.0) for fd in range(2 * MAX_YOUNG)]
    assert taken == [True] * MAX_YOUNG + [False] * MAX_YOUNG
    assert connections.add(1000, "10.0.0.2", 0.1)  # somebody else's are their own
    connections.remove(5)
    assert connections.add(5, "10.0.0.1", 0.2)
    assert not connections.add(1001, "10.0.0.1", 0.2)
    assert connections.add(1001, "10.0.0.1", HANDSHAKE_SECONDS)  # the first ones have grown old
    assert len(connections) == MAX_YOUNG + 2


def test_connections_in_all_are_bounded_and_one_address_leaves_room_for_others() -> None:
    connections = Connections(limit=20)
    now = 0.0
    for fd in range(30):
        now += HANDSHAKE_SECONDS
        assert connections.add(fd, "10.0.0.1", now) == (fd < 10)
    for fd in range(30, 60):
        now += HANDSHAKE_SECONDS
        assert connections.add(fd, f"10.0.1.{fd}", now) == (fd < 40)
    for fd in range(60):
        connections.remove(fd)
        connections.remove(fd)
    assert len(connections) == 0
    assert connections.add(1, "10.0.0.1", now)


def test_a_descriptor_that_comes_again_is_another_connection() -> None:
    connections = Connections(limit=20)
    for number in range(100):
        assert connections.add(7, f"10.0.0.{number}", 0.0)
    assert len(connections) == 1


NO_DETAIL = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


@pytest.mark.parametrize(("num_keys", "patience"), [(0, 3), (1, 3), (2, 4)])
def test_a_peer_that_breaks_off_is_given_up_after_some_attempts(
    num_keys: int, patience: int
) -> None:
    handshakes = Handshakes(num_keys)
    for _ in range(2):
        assert [handshakes.take(NO_DETAIL, 104) for _ in range(patience - 1)] == [""] * (
            patience - 1
        )
        assert handshakes.take(zmq.EVENT_HANDSHAKE_SUCCEEDED, 0) == ""
    reasons = [handshakes.take(NO_DETAIL, 104) for _ in range(patience)]
    assert reasons[-1].startswith("it breaks every handshake off")
    assert ("another key" in reasons[-1]) == (num_keys > 0)
    assert "this is no kv_port" in reasons[-1]


def test_a_peer_that_is_silent_is_not_one_that_breaks_off() -> None:
    """It is stopped, or its interpreter is busy: that is what other deadlines are for."""
    handshakes = Handshakes(1)
    assert [handshakes.take(NO_DETAIL, errno.EAGAIN) for _ in range(10)] == [""] * 10


@pytest.mark.parametrize(
    ("num_keys", "event", "value", "told"),
    [
        (1, zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400, "does not accept our key"),
        (1, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, 0x11000002, "an old connector"),
        (0, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, 0x11000002, "asks for a key"),
        (1, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, 0x11000001, "0x11000001"),
    ],
)
def test_what_cannot_get_better_is_named_at_once(
    num_keys: int, event: int, value: int, told: str
) -> None:
    assert told in Handshakes(num_keys).take(event, value)


@pytest.fixture
def authenticator() -> Iterator[Authenticator]:
    listener = Listener("127.0.0.1", range(1))
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        made = Authenticator(context, router, listener, Curve(()))
        yield made
        made.close()
    listener.close()


@pytest.mark.usefixtures("no_leaks")
def test_a_descriptor_that_is_another_thing_by_now_is_left_alone(
    authenticator: Authenticator,
) -> None:
    """The connection of which we are told may have ended, and its number been given away."""
    file, closed = os.eventfd(0), os.eventfd(0)
    os.close(closed)
    unix, far = socket.socketpair()
    with unix, far, socket.create_server(("127.0.0.1", 0)) as server:
        for fd in (file, closed, unix.fileno(), server.fileno()):
            authenticator._accept(fd)
        with (
            socket.create_connection(server.getsockname()) as one,
            server.accept()[0] as other,
        ):
            authenticator._accept(one.fileno())
            authenticator._accept(other.fileno())
            one.sendall(b"x")
            assert other.recv(1) == b"x"
    os.eventfd_write(file, 1)
    os.close(file)
    assert (len(authenticator.connections), authenticator.refused) == (0, 0)
