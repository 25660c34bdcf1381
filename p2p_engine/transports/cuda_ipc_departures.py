"""Departures: the senders whose connection has ended, and whose copies may not have.

The copies of a sender that closes its channel have ended: it says FAREWELL first. A sender that
dies says nothing. The kernel closes the descriptors of a dying process one after the other, and the
copies that it has submitted go on until the driver's are closed: 30 to 47 ms were measured between
a socket and a descriptor that was opened before it. So the end of the connection proves nothing.
The sender counts as gone when its process has ended, and EXITED_SECONDS later, because the driver
may finish in a thread of its own. If its process cannot be watched, it counts as gone
UNSEEN_SECONDS after the end of the connection.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

FAREWELL = b"\x02"
EXITED_SECONDS = 1.0
UNSEEN_SECONDS = 10.0
UNSEEN = -1

_PEER_PIDFD = 77  # SO_PEERPIDFD, Linux 6.5; it also sees into other PID namespaces
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid


@dataclass
class Departure:
    """A sender's process, from its admission until its copies have ended."""

    pidfd: int
    has_said_farewell: bool = False
    gone_at: float = math.inf  # on the clock of Departures; infinite while nothing proves its end

    def let_go(self) -> None:
        """Stop watching the process; idempotent."""
        if self.pidfd != UNSEEN:
            os.close(self.pidfd)
            self.pidfd = UNSEEN


class Departures:
    """The processes of the senders of one engine, by epoch. Not thread-safe: in callbacks of the
    control plane, or when its thread has ended."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._connected: dict[int, Departure] = {}
        self._leaving: dict[int, Departure] = {}

    def admit(self, epoch: int, pidfd: int) -> None:
        """Watch a sender's process by this pidfd, which is ours from now on. If the epoch was
        leaving, it lives: its process would not dial again while it dies."""
        self.forget(epoch)
        self._connected[epoch] = Departure(pidfd)

    def forget(self, epoch: int) -> None:
        """Stop watching a sender's process, of which nothing is open here; idempotent."""
        self._forget(self._connected, epoch)
        self._forget(self._leaving, epoch)

    def say_farewell(self, epoch: int) -> None:
        """Note that a sender's copies have ended."""
        if epoch in self._connected:
            self._connected[epoch].has_said_farewell = True

    def leave(self, epoch: int) -> None:
        """Note that a sender's connection has ended."""
        departure = self._connected.pop(epoch, None)
        if departure is None:
            return
        if departure.has_said_farewell:
            departure.let_go()
            return
        if departure.pidfd == UNSEEN:
            departure.gone_at = self._clock() + UNSEEN_SECONDS
        self._leaving[epoch] = departure

    def is_over(self, epoch: int) -> bool:
        """Whether a sender whose connection has ended cannot write any more."""
        self.look()
        return epoch not in self._leaving

    def look(self) -> None:
        """Find processes that have ended, and forget senders that are gone."""
        now = self._clock()
        for epoch, departure in list(self._leaving.items()):
            if departure.pidfd != UNSEEN and _wait_for_end([departure.pidfd], 0.0):
                departure.let_go()
                departure.gone_at = now + EXITED_SECONDS
            if now >= departure.gone_at:
                self._forget(self._leaving, epoch)

    def wait(self, timeout: float) -> bool:
        """Block until all senders whose connection has ended are gone, for at most `timeout`
        seconds; returns whether they are."""
        deadline = self._clock() + timeout
        self.look()
        while self._leaving and (left := deadline - self._clock()) > 0:
            next_at = min(each.gone_at for each in self._leaving.values())
            pidfds = [each.pidfd for each in self._leaving.values() if each.pidfd != UNSEEN]
            _wait_for_end(pidfds, max(0.0, min(left, next_at - self._clock())))
            self.look()
        return not self._leaving

    def close(self) -> None:
        """Stop watching all processes; idempotent."""
        for departures in (self._connected, self._leaving):
            for epoch in list(departures):
                self._forget(departures, epoch)

    def _forget(self, departures: dict[int, Departure], epoch: int) -> None:
        departure = departures.pop(epoch, None)
        if departure is not None:
            departure.let_go()


def watch_peer(connection: socket.socket) -> int:
    """Return a pidfd of the process at the other end of a Unix socket; UNSEEN if the kernel gives
    none.

    The process must be connected: only that proves that its number was not given to another one.
    """
    with contextlib.suppress(OSError):
        return connection.getsockopt(socket.SOL_SOCKET, _PEER_PIDFD)
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(peer_process(connection))  # refuses 0
        if _is_connected(connection):
            return pidfd
        os.close(pidfd)
    return UNSEEN


def peer_process(connection: socket.socket) -> int:
    """Return the process at the other end of a Unix socket, as the kernel says; 0 if it is in
    another PID namespace, or the kernel does not say."""
    with contextlib.suppress(OSError):
        size = _CREDENTIALS.size
        data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return int(_CREDENTIALS.unpack(data)[0])
    return 0


def _is_connected(connection: socket.socket) -> bool:
    """Whether the other end is open and has sent nothing more."""
    try:
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _wait_for_end(pidfds: Iterable[int], timeout: float) -> bool:
    """Whether a process of these has ended within `timeout` seconds: its descriptors are closed
    then."""
    poll = select.poll()
    for pidfd in pidfds:
        poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(math.ceil(timeout * 1000)))
