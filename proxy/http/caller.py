"""Caller: a client's connection before it is one of HTTP."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from proxy.http.silence import Silence
    from proxy.http.turns import Turns


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
        heard: Callable[[Caller], object],
    ) -> None:
        """`heard` is called when it has spoken or has ended."""
        self.connection = connection
        self.origin = origin
        self.loop = loop
        self.application: Any = None
        self.is_silent = True
        self.is_let_in = False  # a transport has the connection
        # How to end it then; without TLS, the house ends it when it is told of the transport.
        self.abort: Callable[[], None] = _nothing
        self.line: dict[Caller, float] = {}
        self._silence = silence
        self._turns = turns
        self._heard = heard

    @property
    def has_spoken(self) -> bool:
        """Tell whether something came of which nobody has heard yet."""
        return self.is_silent and bool(self.look())

    def hear(self) -> None:
        """Note that something came, or that the connection has ended."""
        self._heard(self)

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
            self.abort()
        else:
            self.line.pop(self, None)
            self._silence.remove(self.connection.fileno(), self)
            self._turns.leave(self.origin, self)
            self.connection.close()


def _nothing() -> None:
    """Do nothing."""
