"""Who is cut: a connection of which libzmq holds too much, and none that it is slow to read."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator

import pytest

from p2p_engine.control.intake import MAX_HELD_BYTES, MAX_UNREAD_BYTES, Intake
from p2p_engine.control.plane import TICK_SECONDS

MUCH = MAX_HELD_BYTES + 8192


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Return both ends; the second one's is libzmq's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
        with ours, theirs:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
            yield ours, theirs


TICKS = itertools.count(step=TICK_SECONDS)


@pytest.fixture
def intake() -> Iterator[Intake]:
    intake = Intake()
    yield intake
    intake.close()


def look(intake: Intake) -> None:
    """Look after all whole messages were taken."""
    intake.drained = True
    intake.check(next(TICKS))


def test_what_libzmqs_thread_has_not_read_is_nobodys_fault(
    connection: tuple[socket.socket, socket.socket], intake: Intake
) -> None:
    ours, theirs = connection
    intake.add(theirs.fileno())
    ours.sendall(bytes(MUCH))
    for _ in range(5):
        look(intake)
    assert intake.num_cut == 0


def test_what_libzmq_has_read_and_cannot_hand_on_is_cut(
    connection: tuple[socket.socket, socket.socket], intake: Intake
) -> None:
    ours, theirs = connection
    intake.add(theirs.fileno())
    ours.sendall(bytes(MUCH))
    assert len(theirs.recv(MUCH, socket.MSG_WAITALL)) == MUCH
    for _ in range(2):
        look(intake)
    assert intake.num_cut == 1


def test_what_comes_slowly_is_cut_though_epoll_tells_nothing_of_it(
    connection: tuple[socket.socket, socket.socket], intake: Intake
) -> None:
    ours, theirs = connection
    intake.add(theirs.fileno())
    for _ in range(MAX_UNREAD_BYTES // 1024 + 1):
        ours.sendall(bytes(1024))
        assert len(theirs.recv(1024, socket.MSG_WAITALL)) == 1024  # before anybody looks
        intake.check(next(TICKS))
    look(intake)
    assert intake.num_cut == 1


def test_what_is_taken_between_two_looks_is_no_reason(
    connection: tuple[socket.socket, socket.socket], intake: Intake
) -> None:
    ours, theirs = connection
    intake.add(theirs.fileno())
    for _ in range(5):
        ours.sendall(bytes(MUCH))
        assert len(theirs.recv(MUCH, socket.MSG_WAITALL)) == MUCH
        look(intake)
        intake.take(theirs.fileno(), MUCH)
    assert intake.num_cut == 0
