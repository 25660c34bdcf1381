"""StrictConnection: one client's connection, HTTP/1.1 or 1.0. What is unclear ends it.

uvicorn parses with llhttp in its strict mode, and runs the application. This class closes the gaps
that it leaves: each request gets exactly one answer, in order, or the connection ends; and no byte
of a body is taken for another request.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from contextlib import suppress
from http import HTTPStatus
from typing import Any, cast

import httptools
import msgspec
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    HEADER_RE,
    HEADER_VALUE_RE,
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from proxy.http.asgi import LEFT, WHOLE, Headers
from proxy.http.reading import Sluice

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 << 10  # of a request line, its headers and its trailers
HEADER_BYTES = 32  # that each header counts beside its name and value, as in HTTP/2
MAX_PIPELINED = 16  # requests that wait on one connection until the one before is answered
# After an answer to a request that has not come whole, what still comes is read and dropped: if
# the connection were closed at once, the client's kernel might drop the answer.
LINGER_SECONDS = 2.0
LINGER_BYTES = 4 << 20
# While requests wait for the answer before theirs, little is read: so often, the kernel is asked
# whether the client has left.
LEFT_SECONDS = 1.0
_LEFT_STATES = (7, 8)  # of TCP: CLOSE after a reset, CLOSE_WAIT after an end

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset
CODE = "bad_http"  # of its errors, as of a ProxyError

_UPGRADE_HEADERS = (b"upgrade", b"http2-settings")
_UPGRADE_TOKENS = (b"upgrade", b"http2-settings")


class _Refused(Exception):
    """A request is not served, and its connection ends."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason  # one of few, for the metric


class StrictConnection(HttpToolsProtocol):
    """Serves the requests of one connection, one after the other."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.parser = httptools.HttpRequestParser(self)  # without uvicorn's leniency
        self.application = self.app
        self.app = self._serve
        self._running: _Cycle | None = None
        self._exit: _Exit | None = None
        self._is_in_head = False
        self._is_upgrade = False  # this head asks for another protocol, and is parsed again
        self._is_over = False  # what still comes is dropped
        self._num_head_bytes = 0
        self._num_open_bytes = 0  # of a header that the parser has not reported yet
        self._num_dropped_bytes = 0
        self._looking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin."""
        super().connection_made(transport)
        self._exit = _Exit(self)
        self.sluice = Sluice(transport)
        self.flow = FlowControl(cast("asyncio.Transport", self.sluice))

    def data_received(self, data: bytes | memoryview) -> None:
        """Parse what came; a request that is not clear ends the connection."""
        if self._is_over:
            self._drop(data)
            return
        self._unset_keepalive_if_required()
        was_in_head = self._is_in_head
        try:
            self._parse(data)
            if was_in_head and self._is_in_head:
                self._count_open(len(data))
        except httptools.HttpParserError as error:
            self._refuse(_cause(error) or _Refused(400, "syntax", "not HTTP/1.1"))
        except _Refused as refused:
            self._refuse(refused)

    def _parse(self, data: bytes | memoryview) -> None:
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                # The parser has skipped the body, and would take it for the next request.
                head = self._head_without_upgrade()
                self.parser = httptools.HttpRequestParser(self)
                self.parser.feed_data(head)
                data = data[upgrade.args[0] :]
            else:
                return

    def _head_without_upgrade(self) -> bytes:
        """Return the head again, without the wish for another protocol, which is not granted."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(t for t in tokens if t.lower() not in _UPGRADE_TOKENS)
            if name not in _UPGRADE_HEADERS:
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    # Called by the parser.

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self._is_in_head = True
        self._num_head_bytes = self._num_open_bytes = 0

    def on_url(self, url: bytes) -> None:
        """Take a piece of the target."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; a trailer is none, and is dropped."""
        self._count_head(len(name) + len(value) + HEADER_BYTES)
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Check the head, then run the request or let it wait for its turn."""
        self._is_in_head = False
        version = self.parser.get_http_version()
        self._check_head(version)
        self._is_upgrade = self.parser.should_upgrade()
        if self._is_upgrade:
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _Refused(
                400, "pipeline", f"more than {MAX_PIPELINED} requests wait for their answers"
            )
        is_first = self._running is None or self._running.response_complete
        super().on_headers_complete()
        # Servers in front guard routes by paths: /%69nstances/add is no way to /instances/add.
        self.scope["path"] = self.scope["raw_path"].decode("ascii")
        self.cycle.__class__ = _Cycle  # uvicorn has no setting for it
        self.cycle.transport = cast("asyncio.Transport", self._exit)
        if version == "1.0":
            self.cycle.waiting_for_100_continue = False
        if is_first:
            self._running = cast("_Cycle", self.cycle)
        else:
            self._look_again()

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        if not self._is_upgrade:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """End the body."""
        if not self._is_upgrade:
            super().on_message_complete()
            if self.cycle is self._running:
                self.flow.resume_reading()  # nothing more is asked for, but its client may leave

    # Called by cycles.

    def on_response_complete(self) -> None:
        """Begin with the next request that waits, if there may be one."""
        following = cast("_Cycle", self.pipeline[-1][0]) if self.pipeline else None
        if self._is_over:
            self.server_state.total_requests += 1
            return
        super().on_response_complete()
        self._running = following

    def finish(self) -> None:
        """Close the connection after an answer, or in the middle of one that cannot be completed.

        An answer that ends with the connection is reset, so that it does not look complete.
        """
        running = self._running
        if running is not None and running.is_cut:
            own = self.transport.get_extra_info("socket")
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.transport.abort()
        elif self._is_over or (running is not None and running.more_body):
            self._linger()
        else:
            self._is_over = True
            self.end()

    def end(self) -> None:
        """Close the connection when all is sent; idempotent."""
        self.transport.close()

    def abandon(self) -> None:
        """End the request in progress, for whose answer nobody waits; idempotent."""
        running = self._running
        if running is None or running.response_complete or running.disconnected:
            return
        running.disconnected = True
        running.scope["state"][LEFT] = True
        running.message_event.set()
        if running.task is not None:
            running.task.cancel()

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        """Run the application for the request in progress, unless its client has left."""
        if self._running is None or self._running.disconnected:
            return
        self._running.task = asyncio.current_task(self.loop)
        with suppress(asyncio.CancelledError):
            await self.application(scope, receive, send)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request in progress, also if others wait behind it."""
        self.abandon()
        self._running = None
        self.pipeline.clear()
        self._unset_keepalive_if_required()
        if self._looking is not None:
            self._looking.cancel()
        super().connection_lost(exc)
        self.dissolve()

    def dissolve(self) -> None:
        """Let go of all that refers to this connection, which has ended: the proxy seldom looks for
        circles of references."""
        if self._exit is not None:
            self._exit.connection = None
        self.app = self.application
        self.parser = cast("httptools.HttpRequestParser", None)

    def _check_head(self, version: str) -> None:
        """Refuse what two servers may read in two ways, and what is not served here."""
        num_hosts, encodings, has_length = 0, list[bytes](), False
        for name, value in self.headers:
            if name == b"host":
                num_hosts += 1
            elif name == b"content-length":
                has_length = True
            elif name == b"transfer-encoding":
                encodings.append(value.strip().lower())
            elif name == b"expect" and value.strip().lower() != b"100-continue":
                raise _Refused(417, "expect", "the only Expect is 100-continue")
        if version not in ("1.0", "1.1"):
            raise _Refused(505, "version", "only HTTP/1.1 and HTTP/1.0 are served")
        if self.parser.get_method() == b"CONNECT":
            raise _Refused(405, "method", "there are no tunnels here")
        # Quart would take //instances/add for /instances/add, which servers in front may guard.
        if b"//" in self.url and (httptools.parse_url(self.url).path or b"").startswith(b"//"):
            raise _Refused(400, "path", "the path begins with two slashes")
        if num_hosts > 1 or (num_hosts == 0 and version == "1.1"):
            raise _Refused(400, "host", f"{num_hosts} Host headers")
        if encodings and (version == "1.0" or has_length):
            raise _Refused(400, "length", "Transfer-Encoding beside Content-Length, or in HTTP/1.0")
        if encodings and encodings != [b"chunked"]:
            raise _Refused(501, "encoding", "the only Transfer-Encoding is chunked")

    def _count_head(self, num_bytes: int) -> None:
        """Count a part of the head that the parser has reported whole."""
        self._num_open_bytes = 0
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            raise _too_large()

    def _count_open(self, num_bytes: int) -> None:
        """Count what the parser has of a header that has not come whole."""
        self._num_open_bytes += num_bytes
        if self._num_head_bytes + self._num_open_bytes > MAX_HEAD_BYTES:
            raise _too_large()

    # The end.

    def _look_again(self) -> None:
        if self._looking is None:
            self._looking = self.loop.call_later(LEFT_SECONDS, self._look)

    def _look(self) -> None:
        """End the connection if the client has left behind bytes that are not read."""
        self._looking = None
        running = self._running
        if self.transport.is_closing() or running is None or running.response_complete:
            return
        own = self.transport.get_extra_info("socket")
        if own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _LEFT_STATES:
            self.transport.abort()
        else:
            self._look_again()

    def count_refused(self, reason: str) -> None:
        """Take note that a request is not clear."""

    def _refuse(self, refused: _Refused) -> None:
        """End the connection: after the answer in progress, if there is one, else with an error."""
        logger.debug(
            "request refused client=%s status=%d: %s", self.client, refused.status, refused
        )
        self.count_refused(refused.reason)
        self._is_over = True
        self.pipeline.clear()
        running = self._running
        if running is not None and not running.response_complete:
            if running is not self.cycle or not running.more_body:
                running.keep_alive = False
                self.flow.resume_reading()
                return
            self.abandon()  # its own body is what is not clear
            if running.response_started:
                self.transport.abort()
                return
        self.transport.write(_error(refused))
        self._linger()

    def _linger(self) -> None:
        """Close for writing, drop what still comes, and close soon."""
        self._is_over = True
        if self.transport.is_closing():
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(LINGER_SECONDS, self.end)

    def _drop(self, data: bytes | memoryview) -> None:
        self._num_dropped_bytes += len(data)
        if self._num_dropped_bytes > LINGER_BYTES:
            running = self._running
            if running is None or running.response_complete or running.disconnected:
                self.end()
            else:
                self.flow.pause_reading()
                self._look_again()


class _Cycle(RequestResponseCycle):
    """One request and its answer."""

    ends_with_connection = False
    whole: Any = None  # the head of an answer whose body comes next
    task: asyncio.Task[None] | None = None  # in which the application runs

    @property
    def is_cut(self) -> bool:
        """Tell whether only the end of the connection can tell the client that it has not all."""
        return self.ends_with_connection and not self.response_complete

    async def send(self, message: Any) -> None:
        """Send a part of the answer.

        If the request has not come whole, the connection ends with the answer: nobody can say
        whether the client still sends the rest. HTTP/1.0 has no chunks, so an answer whose length
        is not known ends with the connection.
        """
        if self.whole is not None:
            await self._send_whole(self.whole, message["body"])
            return
        if WHOLE in message:
            self.whole = message
            return
        if message["type"] == "http.response.start":
            self.keep_alive = self.keep_alive and not self.more_body
            if self.scope["http_version"] == "1.0" and _has_unknown_length(message):
                self.ends_with_connection, self.chunked_encoding = True, False
        elif self.ends_with_connection:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)

    async def _send_whole(self, start: Any, body: bytes) -> None:
        """Send a whole answer at once, as uvicorn would in two parts."""
        self.whole = None
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        self.keep_alive = self.keep_alive and not self.more_body
        head = self._head(start["status"], start["headers"])
        self.waiting_for_100_continue = False
        self.response_started = self.response_complete = True
        self.transport.write(head if self.scope["method"] == "HEAD" else head + body)
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()

    def _head(self, status: int, headers: Headers) -> bytes:
        """Return a head; an answer with a header `Connection` closes it."""
        lines = [STATUS_LINE[status]]
        for name, value in (*self.default_headers, *headers):
            if HEADER_RE.search(name) or HEADER_VALUE_RE.search(value):
                raise RuntimeError(f"{name!r} is no name of a header, or {value!r} no value")
            lower = name.lower()
            if lower == b"connection":
                self.keep_alive = False
            else:
                lines.append(b"%b: %b\r\n" % (lower, value))
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        return b"".join((*lines, b"\r\n"))


class _Exit:
    """The transport as cycles see it: `StrictConnection` ends it in its own way."""

    def __init__(self, connection: StrictConnection) -> None:
        self.connection: StrictConnection | None = connection
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing

    def close(self) -> None:
        """End the connection."""
        if self.connection is not None:
            self.connection.finish()


def _cause(error: BaseException) -> _Refused | None:
    """Return what one of our calls raised within the parser."""
    return error.__context__ if isinstance(error.__context__, _Refused) else None


def _too_large() -> _Refused:
    return _Refused(431, "head", f"the head is larger than {MAX_HEAD_BYTES} bytes")


def _has_unknown_length(message: Any) -> bool:
    names = {name.lower() for name, _ in message.get("headers", ())}
    return b"content-length" not in names and message["status"] not in (204, 304)


def _error(refused: _Refused) -> bytes:
    """Return a whole answer in the form of OpenAI's API, as `proxy/errors.py` makes it."""
    error = {"message": str(refused), "type": "invalid_request_error", "param": None}
    body = msgspec.json.encode({"error": {**error, "code": CODE}})
    status = HTTPStatus(refused.status)
    return (
        b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
        % (status, status.phrase.encode(), len(body))
        + b"connection: close\r\n\r\n"
        + body
    )
