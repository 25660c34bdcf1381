"""Caller: a client's connection before it is one of HTTP."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import Any


class Caller:
    """A connection that has said nothing yet, or is in its TLS handshake.

    While it is silent, a reader of the loop waits for its first byte, and `waiting` has it, until
    when it may be so.
    """

    was_answered = False

    def __init__(self, connection: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self.connection = connection
        self.loop = loop
        self.app: Any = None
        self.is_silent = True
        self.is_entering = False  # it has spoken, and will be one of HTTP at once
        self.waiting: dict[Caller, float] = {}

    @property
    def has_spoken(self) -> bool:
        """Tell whether its request may have come, and is not read yet."""
        return self.is_entering or (self.is_silent and bool(self.look()))

    def look(self) -> bytes | None:
        """Return the first byte, empty if the connection has ended; None if nothing came yet."""
        try:
            return self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def stop_waiting(self) -> None:
        """Wait for its first byte no longer; idempotent."""
        if self.is_silent:
            self.is_silent = False
            self.waiting.pop(self, None)
            self.loop.remove_reader(self.connection.fileno())

    def drop(self) -> None:
        """Close the connection."""
        if self.is_silent:
            self.stop_waiting()
            self.connection.close()
        else:
            with suppress(OSError):  # its transport closes it
                self.connection.shutdown(socket.SHUT_RDWR)
