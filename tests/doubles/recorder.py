"""RecordingInstance: an instance that keeps every byte of every connection, and parses strictly.

It reads requests exactly as the proxy is meant to write them: whatever else arrives is a fault. Its
answer to a completion repeats the prompt, so that a swapped answer is seen.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

# A request line that the proxy writes, and headers without folds, controls or repetition.
_LINE = re.compile(rb"(POST|GET) (/[a-z0-9_/]+) HTTP/1\.1")
_HEADER = re.compile(rb"([A-Za-z0-9-]+): ([\t\x20-\x7e\x80-\xff]*)")
MAX_HEAD_BYTES = 1 << 17

Answerer = Callable[["Recorded"], bytes]


@dataclass
class Recorded:
    """One request that arrived."""

    method: str
    path: str
    headers: dict[str, bytes]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        """The body as vLLM reads it."""
        content: dict[str, Any] = json.loads(self.body)
        return content


@dataclass(eq=False)
class RecordingInstance:
    """An instance on 127.0.0.1; `async with` it."""

    answer: Answerer = field(default_factory=lambda: echo)
    health: Answerer = field(default_factory=lambda: lambda _: whole(b"{}"))
    closes: bool = False  # after each answer
    hold: asyncio.Event | None = None  # waited for before each answer
    # The requests other than the proxy's own looks, in order of arrival; and what was no request.
    received: list[Recorded] = field(default_factory=list)
    faults: list[bytes] = field(default_factory=list)
    num_connections: int = 0
    address: str = ""
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def __aenter__(self) -> RecordingInstance:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=MAX_HEAD_BYTES)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.add(writer)
        try:
            while (request := await self._read(reader)) is not None:
                if request.path == "/health":
                    writer.write(self.health(request))
                elif request.path == "/is_paused":  # which vLLM has in its development mode only
                    writer.write(whole(b"{}", b"404 Not Found"))
                else:
                    self.received.append(request)
                    if self.hold is not None:
                        await self.hold.wait()
                    writer.write(self.answer(request))
                with suppress(ConnectionError):
                    await writer.drain()
                if self.closes and request.path not in ("/health", "/is_paused"):
                    return
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> Recorded | None:
        """Return the next request; None at the end, or at a fault."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except ConnectionError:  # a leg that ended before its answer had gone
            return None
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            partial = getattr(error, "partial", b"a head without an end")
            self.faults += [partial] if partial else []
            return None
        line, *lines = head[:-4].split(b"\r\n")
        matches = [_HEADER.fullmatch(each) for each in lines]
        start = _LINE.fullmatch(line)
        if start is None or None in matches:
            self.faults.append(head)
            return None
        pairs = [(match[1].decode().lower(), match[2]) for match in matches if match is not None]
        headers = dict(pairs)
        length = headers.get("content-length", b"")
        if len(headers) != len(pairs) or not length.isdigit() or "transfer-encoding" in headers:
            self.faults.append(head)
            return None
        try:
            body = await reader.readexactly(int(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None  # the proxy gave the request up
        return Recorded(start[1].decode(), start[2].decode(), headers, body)


def whole(body: bytes, status: bytes = b"200 OK", *headers: bytes) -> bytes:
    """An answer with a length."""
    extra = b"".join(header + b"\r\n" for header in headers)
    head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%b\r\n"
    return head % (status, len(body), extra) + body


def echo(request: Recorded) -> bytes:
    """A completion whose text is the prompt."""
    if request.method == "GET":
        return whole(b'{"object": "list", "data": [{"id": "tiny"}]}')
    text = request.json.get("prompt", "")
    choice = {"index": 0, "text": text, "finish_reason": "length"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return whole(json.dumps({"id": "x", "choices": [choice], "usage": usage}).encode())
