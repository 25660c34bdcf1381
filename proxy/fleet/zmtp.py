"""Zmtp: hears a ZMQ publisher, and asks its ROUTER for what was missed, over asyncio.

libzmq would dial a publisher that restarts again without a word, and it does not bound the parts of
a message. Here a connection is one publisher's life, and a message has a largest size.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

# `asyncio.wait_for` of Python 3.10 and 3.11 loses a cancellation that comes with the result.
from async_timeout import timeout

MAX_MESSAGE_BYTES = 4 << 20  # the events of a step that caches 800,000 tokens at once
MAX_PARTS = 5  # a command counts as one
CONNECT_SECONDS = 5.0  # to connect, and for the handshake
MESSAGE_SECONDS = 10.0  # for a message, once its first byte has come
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
_MORE, _LONG, _COMMAND = 1, 2, 4
_GREETING_BYTES = 64
_GREETING = (
    b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
)  # of ZMTP 3.0


class ZmtpError(ValueError):
    """The peer does not speak ZMTP as a publisher does, or says too much at once."""


class ZmtpConnection:
    """One connection, after its handshake."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, *parts: bytes) -> None:
        """Send a message; never waits."""
        for number, part in enumerate(parts, 1):
            flags = _LONG | (_MORE if number < len(parts) else 0)
            self._writer.write(struct.pack(">BQ", flags, len(part)) + part)

    async def receive(self) -> list[bytes]:
        """Wait for the next message, however long it takes to begin; return its parts.

        Raises:
            EOFError, OSError: the connection ended.
            ZmtpError: the message is too large or has too many parts.
            asyncio.TimeoutError: it began and did not end in time.
        """
        first = await self._reader.readexactly(1)
        async with timeout(MESSAGE_SECONDS):
            return await self._message(first[0])

    async def shake_hands(self, kind: bytes) -> None:
        """Greet the peer as a socket of this kind; raises like `receive`."""
        ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
        self._writer.write(_GREETING + bytes((_COMMAND, len(ready))) + ready)
        greeting = await self._reader.readexactly(_GREETING_BYTES)
        if greeting[:1] != b"\xff" or greeting[10] < 3 or not greeting[12:].startswith(b"NULL\0"):
            raise ZmtpError("the peer speaks no ZMTP 3, or asks for a key")
        flags = (await self._reader.readexactly(1))[0]
        command = await self._body(flags, MAX_MESSAGE_BYTES)
        if not flags & _COMMAND or not command.startswith(b"\x05READY"):
            raise ZmtpError("the peer is not ready")

    async def _message(self, flags: int) -> list[bytes]:
        parts: list[bytes] = []
        room = MAX_MESSAGE_BYTES
        for _ in range(MAX_PARTS):
            body = await self._body(flags, room)
            room -= len(body)
            if not flags & _COMMAND:
                parts.append(body)
            if not flags & (_MORE | _COMMAND):
                return parts
            flags = (await self._reader.readexactly(1))[0]
        raise ZmtpError(f"a message of more than {MAX_PARTS} parts")

    async def _body(self, flags: int, room: int) -> bytes:
        form = struct.Struct(">Q" if flags & _LONG else ">B")
        (size,) = form.unpack(await self._reader.readexactly(form.size))
        if size > room:
            raise ZmtpError(f"a message of more than {MAX_MESSAGE_BYTES} bytes")
        return await self._reader.readexactly(size)


@asynccontextmanager
async def zmtp_connection(host: str, port: int, kind: bytes) -> AsyncGenerator[ZmtpConnection]:
    """Dial an IP address as a socket of this kind.

    Raises:
        EOFError, OSError, ZmtpError, asyncio.TimeoutError: no such peer can be reached there.
    """
    async with timeout(CONNECT_SECONDS):
        reader, writer = await asyncio.open_connection(host, port)
    try:
        dialled = writer.get_extra_info("socket")
        dialled.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            dialled.setsockopt(socket.IPPROTO_TCP, option, value)
        connection = ZmtpConnection(reader, writer)
        async with timeout(CONNECT_SECONDS):
            await connection.shake_hands(kind)
        yield connection
    finally:
        writer.transport.abort()
