"""RawClient: a connection on which a test says byte for byte what it wants, and reads strictly."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) [ -~]*")


class NotHTTP(AssertionError):
    """What came is no answer."""


@dataclass(frozen=True)
class RawAnswer:
    """One whole answer; `headers` have names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class RawClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        """Send bytes; never mind if nobody takes them."""
        try:
            self._writer.write(data)
            await self._writer.drain()
        except ConnectionError:
            pass

    def finish(self) -> None:
        """Say that nothing more comes."""
        if self._writer.can_write_eof():
            self._writer.write_eof()

    async def answer(self, method: str = "POST") -> RawAnswer | None:
        """Read one answer to a request of this method; None if the connection ends before it.

        Raises:
            NotHTTP: something else came, or half of an answer.
        """
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise NotHTTP(f"half an answer: {error.partial[:200]!r}") from error
            return None
        line, *lines = head[:-4].split(b"\r\n")
        match = _STATUS.fullmatch(line)
        if match is None:
            raise NotHTTP(f"no answer: {head[:200]!r}")
        pairs = [each.decode("latin-1").partition(": ") for each in lines]
        headers = {name.lower(): value for name, _, value in pairs}
        status = int(match[1])
        if status == 100 or method == "HEAD":
            return RawAnswer(status, headers, b"")
        try:
            return RawAnswer(status, headers, await self._body(headers))
        except (asyncio.IncompleteReadError, ValueError) as error:
            raise NotHTTP(f"half a body after {head!r}: {error}") from error

    async def rest(self) -> bytes:
        """Read what comes until the connection ends."""
        try:
            return await self._reader.read(-1)
        except ConnectionError:
            return b""

    async def _body(self, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int((await self._reader.readuntil(b"\r\n"))[:-2], 16):
                body += (await self._reader.readexactly(size + 2))[:-2]
            await self._reader.readexactly(2)
            return body
        if "content-length" in headers:
            return await self._reader.readexactly(int(headers["content-length"]))
        return await self._reader.read(-1)


@asynccontextmanager
async def raw_client(port: int) -> AsyncIterator[RawClient]:
    """Connect to a port of 127.0.0.1."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.close()
