"""Intake: bounds the bytes that a connection has brought and that nobody has read yet.

libzmq bounds the whole messages that wait, and the bytes of one message part. It does not bound the
number of parts of a message that never ends. So the intake compares the kernel's count of bytes
received on a connection with the bytes read from it, and cuts a connection whose difference is too
large.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import logging
import math
import os
import select
import socket
import struct
import termios
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from p2p_engine.bounded import RateLimitedWarnings
from p2p_engine.wire.messages import MAX_FRAME_BYTES

logger = logging.getLogger(__name__)

RECEIVE_QUEUE_FRAMES = 8  # whole messages that libzmq may hold for one connection
KERNEL_BUFFER_BYTES = 1 << 16  # asked for in each direction; Linux takes twice that
FRAME_OVERHEAD_BYTES = 64  # ZMTP's header with CURVE's nonce and tag are 42
FRAME_BYTES = MAX_FRAME_BYTES + FRAME_OVERHEAD_BYTES
# Whole messages, one being read, one that waits for room, and the kernel's buffers.
MAX_UNREAD_BYTES = (RECEIVE_QUEUE_FRAMES + 2) * FRAME_BYTES + 2 * KERNEL_BUFFER_BYTES
MAX_UNREAD_BYTES_IN_ALL = 1 << 26  # of all connections with more than LIGHT_BYTES
LIGHT_BYTES = 1 << 14
BATCH_BYTES = 1 << 13  # the bytes that libzmq reads at a time (in_batch_size)
MAX_HELD_BYTES = FRAME_BYTES + BATCH_BYTES
ROUND_SECONDS = 2.0  # to look at each connection once, even if epoll is silent
_RESET = struct.pack("ii", 1, 0)
_RECEIVED = struct.Struct("=128xQ")  # tcpi_bytes_received in struct tcp_info, since Linux 4.1


@dataclass(eq=False)
class Account:
    """One connection. Its descriptor is libzmq's, which may close and reuse it at any time."""

    peer: Any  # the peer's address: if it differs, the descriptor is another connection's
    taken_bytes: int
    held_bytes: int = 0  # by libzmq, at the previous look
    moved: bool = True  # a message was taken since that look


class Intake:
    """The connections of one ZMQ socket. Only the owner of that socket may call its methods."""

    def __init__(self) -> None:
        """Start without connections; `close` gives a descriptor back."""
        self.num_cut = 0  # connections with too many unread bytes
        self.drained = False  # the socket was read empty at least once since the last check
        self._accounts: dict[int, Account] = {}
        self._heavy: dict[int, int] = {}  # unread bytes, where more than LIGHT_BYTES
        self._unseen: list[int] = []  # connections still to check in this round
        self._epoll = select.epoll()
        self._checked_at = 0.0
        self._warnings = RateLimitedWarnings(logger)

    def __len__(self) -> int:
        """Return how many connections are watched."""
        return len(self._accounts)

    def add(self, fd: int) -> None:
        """Watch a connection; bytes that came before do not count."""
        with contextlib.suppress(OSError), _borrowed(fd) as connection:
            received = _received_bytes(connection)
            self._accounts[fd] = Account(connection.getpeername(), received)
            self._heavy.pop(fd, None)
            with contextlib.suppress(FileExistsError):
                self._epoll.register(fd, select.EPOLLIN | select.EPOLLET)

    def remove(self, fd: int) -> None:
        """Forget a connection that has ended; idempotent."""
        self._accounts.pop(fd, None)
        self._heavy.pop(fd, None)

    def take(self, fd: int, num_bytes: int) -> None:
        """Count a whole message that was taken from a connection."""
        account = self._accounts.get(fd)
        if account is not None:
            account.taken_bytes += num_bytes + FRAME_OVERHEAD_BYTES
            account.moved = True

    def fileno(self) -> int:
        """Return a descriptor that is readable if a connection may have unread bytes."""
        return self._epoll.fileno()

    def check(self, now: float) -> None:
        """Cut the connections with too many unread bytes.

        It looks at connections that epoll reports, at those with many unread bytes, and at a few
        others. The last are needed because libzmq has already read what arrives slowly, so that
        epoll does not report it.
        """
        seconds, self._checked_at = now - self._checked_at, now
        some = self._some(min(1.0, seconds / ROUND_SECONDS))
        for fd in {fd for fd, _ in self._epoll.poll(0)} | self._heavy.keys() | some:
            self._look(fd)
        self.drained = False
        while sum(self._heavy.values()) > MAX_UNREAD_BYTES_IN_ALL:
            self.end(
                max(self._heavy, key=self._heavy.__getitem__),
                "all connections together have too many unread bytes",
            )

    def end(self, fd: int, reason: str) -> None:
        """Cut a connection, if the descriptor still belongs to it."""
        account = self._accounts.get(fd)
        self.remove(fd)
        if account is None:
            return
        with contextlib.suppress(OSError), duplicate(fd) as connection:
            if connection.getpeername() == account.peer:
                # libzmq's close sends a reset, so that a peer blocked in a write notices it.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                connection.shutdown(socket.SHUT_RDWR)
                self.num_cut += 1
                self._warnings.warn("cut: connection of %s: %s", account.peer[0], reason)

    def close(self) -> None:
        """Stop watching; idempotent."""
        self._epoll.close()

    def _some(self, share: float) -> set[int]:
        """Return the next connections of a round; each connection has its turn once a round."""
        if not self._unseen:
            self._unseen = list(self._accounts)
        count = math.ceil(len(self._accounts) * share)
        taken, self._unseen = self._unseen[:count], self._unseen[count:]
        return set(taken)

    def _look(self, fd: int) -> None:
        account, received, waiting = self._accounts.get(fd), None, 0
        if account is not None:
            with contextlib.suppress(OSError), _borrowed(fd) as connection:
                if connection.getpeername() == account.peer:
                    received = _received_bytes(connection)
                    waiting = _waiting_bytes(connection)  # second: held is never overestimated
        if account is None or received is None:
            self.remove(fd)
            return
        account.taken_bytes = min(account.taken_bytes, received)
        unread = received - account.taken_bytes
        # Once all whole messages are taken, libzmq holds one incomplete message and at most one
        # read batch. Bytes that still wait in the kernel are a delay of its I/O thread, not the
        # peer's fault.
        is_stuck = self.drained and not account.moved and account.held_bytes > MAX_HELD_BYTES
        account.held_bytes, account.moved = unread - waiting, False
        if unread > MAX_UNREAD_BYTES or is_stuck:
            self.end(fd, f"a message of several parts does not end: {unread} bytes")
        elif unread > LIGHT_BYTES:
            self._heavy[fd] = unread
        else:
            self._heavy.pop(fd, None)


def duplicate(fd: int) -> socket.socket:
    """Return a duplicate of a descriptor as a socket; it stays what the descriptor is now.

    Raises:
        OSError: the descriptor is closed or no socket, or none is left for the duplicate.
    """
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """Lend another owner's descriptor, for reading its state only: it may change at any time.

    Raises:
        OSError: it is closed by now, or no socket.
    """
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=fd)
    try:
        yield connection
    finally:
        connection.detach()


def _waiting_bytes(connection: socket.socket) -> int:
    """Return the bytes that the kernel holds and libzmq has not read."""
    count = array.array("i", [0])
    fcntl.ioctl(connection.fileno(), termios.FIONREAD, count)
    return count[0]


def _received_bytes(connection: socket.socket) -> int:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size)
    return int(_RECEIVED.unpack(info)[0]) if len(info) == _RECEIVED.size else 0
