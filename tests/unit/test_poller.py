"""Poller: a wake that comes while they are closed writes into nothing of somebody else's."""

from __future__ import annotations

import os
import threading

import pytest

from p2p_engine.control.poller import Poller


def test_a_wake_after_the_end_is_nothing() -> None:
    poller = Poller()
    poller.close()
    poller.wake()
    poller.close()
    assert poller.is_closed


@pytest.mark.usefixtures("no_leaks")
def test_a_wake_during_the_end_writes_into_no_other_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its number is given away the moment it is closed."""
    poller, close, waker = Poller(), os.close, threading.Thread
    file: list[int] = []
    threads: list[threading.Thread] = []

    def close_and_give_away(fd: int) -> None:
        close(fd)
        monkeypatch.setattr(os, "close", close)
        another = os.eventfd(0, os.EFD_NONBLOCK)
        if another != fd:
            os.dup2(another, fd)
            close(another)
        file.append(fd)
        threads.append(waker(target=poller.wake))
        threads[0].start()
        threads[0].join(0.2)  # it may wait for the end; it must not write

    monkeypatch.setattr(os, "close", close_and_give_away)
    poller.close()
    threads[0].join(10)
    with pytest.raises(BlockingIOError):
        os.eventfd_read(file[0])
    os.close(file[0])
