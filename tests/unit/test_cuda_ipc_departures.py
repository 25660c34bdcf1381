"""When a sender that copies with a GPU counts as gone: after its farewell, or after its process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2p_engine.transports import cuda_ipc_departures
from p2p_engine.transports.cuda_ipc_departures import (
    EXITED_SECONDS,
    UNSEEN,
    UNSEEN_SECONDS,
    Departures,
    watch_peer,
)
from tests.doubles.clock import Clock

pytestmark = pytest.mark.usefixtures("no_leaks")
EPOCH = 7


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as made:
        yield made
        made.kill()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def departures(clock: Clock) -> Iterator[Departures]:
    made = Departures(clock)
    yield made
    made.close()


def test_a_sender_that_says_farewell_is_gone_with_its_connection(
    departures: Departures, process: subprocess.Popen[bytes]
) -> None:
    departures.admit(EPOCH, os.pidfd_open(process.pid))
    departures.say_farewell(EPOCH)
    departures.leave(EPOCH)
    assert departures.is_over(EPOCH)


def test_a_sender_that_says_nothing_is_gone_after_its_process(
    departures: Departures, clock: Clock, process: subprocess.Popen[bytes]
) -> None:
    departures.admit(EPOCH, os.pidfd_open(process.pid))
    departures.leave(EPOCH)
    clock.now += 1000
    assert not departures.is_over(EPOCH)
    process.kill()
    process.wait()
    assert not departures.is_over(EPOCH)
    clock.now += EXITED_SECONDS
    assert departures.is_over(EPOCH)


def test_a_sender_that_cannot_be_watched_is_gone_after_a_longer_time(
    departures: Departures, clock: Clock
) -> None:
    departures.admit(EPOCH, UNSEEN)
    departures.leave(EPOCH)
    clock.now += UNSEEN_SECONDS - 0.1
    assert not departures.is_over(EPOCH)
    clock.now += 0.1
    assert departures.is_over(EPOCH)


def test_a_sender_that_dials_again_has_not_died(
    departures: Departures, process: subprocess.Popen[bytes]
) -> None:
    """It gave its first dial up before it had an answer, and so said no farewell."""
    departures.admit(EPOCH, os.pidfd_open(process.pid))
    departures.leave(EPOCH)
    departures.admit(EPOCH, os.pidfd_open(process.pid))
    departures.say_farewell(EPOCH)
    departures.leave(EPOCH)
    assert departures.is_over(EPOCH)


def test_closing_waits_for_processes_that_end(process: subprocess.Popen[bytes]) -> None:
    departures = Departures()
    departures.admit(EPOCH, os.pidfd_open(process.pid))
    departures.leave(EPOCH)
    assert not departures.wait(0.05)
    process.kill()
    assert departures.wait(EXITED_SECONDS + 10)
    departures.close()


@pytest.mark.parametrize("kernel", ["this", "older than 6.5"])
def test_the_process_at_the_other_end_is_watched(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel != "this":
        monkeypatch.setattr(cuda_ipc_departures, "_PEER_PIDFD", 9999)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pidfd = watch_peer(ours)
    assert pidfd != UNSEEN
    assert f"Pid:\t{os.getpid()}\n" in Path(f"/proc/self/fdinfo/{pidfd}").read_text()
    os.close(pidfd)


def test_no_process_is_watched_that_may_have_taken_the_number_of_the_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_ipc_departures, "_PEER_PIDFD", 9999)
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        assert watch_peer(ours) == UNSEEN


def test_a_process_that_cannot_be_seen_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise ProcessLookupError(pid)

    monkeypatch.setattr(cuda_ipc_departures, "_PEER_PIDFD", 9999)
    monkeypatch.setattr(os, "pidfd_open", refuse)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert watch_peer(ours) == UNSEEN
