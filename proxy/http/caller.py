"""Caller: a client's connection before it is one of HTTP; Silence: all that have said nothing."""

from __future__ import annotations

import asyncio
import select
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from proxy.http.turns import Turns


class Silence:
    """Connections that have said nothing, behind one descriptor for the event loop.

    So however many of them speak or end at once, the loop looks at a few in each round.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._callers: dict[int, Caller] = {}

    def fileno(self) -> int:
        """Return the descriptor that is readable when one has spoken or has ended."""
        return self._epoll.fileno()

    def add(self, caller: Caller) -> None:
        """Wait for the first byte of one more."""
        self._callers[caller.connection.fileno()] = caller
        self._epoll.register(caller.connection, select.EPOLLIN)

    def remove(self, caller: Caller) -> None:
        """Wait for its first byte no longer; idempotent. Its connection is still open."""
        if self._callers.pop(caller.connection.fileno(), None) is not None:
            self._epoll.unregister(caller.connection)

    def broken(self, most: int) -> list[Caller]:
        """Return some that have spoken or have ended."""
        return [self._callers[descriptor] for descriptor, _ in self._epoll.poll(0, most)]

    def close(self) -> None:
        """Wait for nobody; idempotent."""
        self._epoll.close()


class Caller:
    """A connection that has said nothing yet, waits to be let in, or is in its TLS handshake.

    `line` is the line in which it waits, with the time until when it may.
    """

    was_answered = False

    def __init__(
        self,
        connection: socket.socket,
        origin: str,
        loop: asyncio.AbstractEventLoop,
        silence: Silence,
        turns: Turns,
    ) -> None:
        self.connection = connection
        self.origin = origin
        self.loop = loop
        self.app: Any = None
        self.is_silent = True
        self.is_let_in = False  # a transport has the connection
        self.line: dict[Caller, float] = {}
        self._silence = silence
        self._turns = turns

    @property
    def has_spoken(self) -> bool:
        """Tell whether something came of which nobody has heard yet."""
        return self.is_silent and bool(self.look())

    def look(self) -> bytes | None:
        """Return the first byte, empty if the connection has ended; None if nothing came yet."""
        try:
            return self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def wait_in(self, line: dict[Caller, float], seconds: float) -> None:
        """Wait in another line, for so long at the most."""
        self.line.pop(self, None)
        self.line = line
        line[self] = self.loop.time() + seconds

    def drop(self) -> None:
        """Close the connection."""
        if self.is_let_in:
            with suppress(OSError):  # its transport closes it
                self.connection.shutdown(socket.SHUT_RDWR)
        else:
            self.line.pop(self, None)
            self._silence.remove(self)
            self._turns.leave(self.origin, self)
            self.connection.close()
