"""Strangers: many bare connections to the proxy, held by a process of their own."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
from collections import Counter

PATIENCE_SECONDS = 10.0
YIELDED = 19  # on another machine they would not take the proxy's core


class Strangers:
    """The commands; each does the same over every connection, or some."""

    def __init__(self, address: tuple[str, int]) -> None:
        os.nice(YIELDED)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._address = address
        self._sockets: list[socket.socket] = []

    def open(self, count: int, data: bytes = b"", receive_buffer: int = 0) -> int:
        """Open so many more connections and say `data` on each; return how many were made."""
        made = 0
        for _ in range(count):
            connection = socket.socket()
            connection.settimeout(PATIENCE_SECONDS)
            if receive_buffer:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            try:
                connection.connect(self._address)
                connection.sendall(data)
            except OSError:
                connection.close()
                continue
            connection.setblocking(False)
            self._sockets.append(connection)
            made += 1
        return made

    def say(self, data: bytes) -> int:
        """Send `data` on every connection as far as it goes at once; return how much went."""
        sent = 0
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                sent += connection.send(data)
        return sent

    def num_open(self) -> int:
        """Return how many the proxy has not closed. What it said on the way is dropped."""
        return sum(not _is_closed(connection) for connection in self._sockets)

    def hear(self, seconds: float) -> Counter[bytes]:
        """Wait for an answer on every connection; count first lines, `closed`, and `nothing`."""
        return Counter(_first_line(connection, seconds) for connection in self._sockets)

    def hang_up(self) -> None:
        """Close every connection."""
        while self._sockets:
            self._sockets.pop().close()

    close = hang_up


def _is_closed(connection: socket.socket) -> bool:
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _first_line(connection: socket.socket, seconds: float) -> bytes:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if not poll.poll(seconds * 1000):
        return b"nothing"
    try:
        return connection.recv(1 << 16).partition(b"\r\n")[0] or b"closed"
    except OSError:
        return b"closed"
