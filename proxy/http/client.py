"""Client: HTTP/1.1 to instances, over connections that are kept; as little as two legs need.

One request at a time on a connection. An answer's body is read no faster than it is taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httptools

from p2p_engine.control.resolver import Answer, Resolver
from p2p_engine.errors import P2pError, PeerUnreachable
from proxy.http.deadlines import Deadline, Deadlines

# What is read ahead of who takes an answer, before the instance has to wait.
HIGH_WATER_BYTES = 64 << 10
MAX_HEADER_BYTES = 64 << 10
NAME_SECONDS = 4.5  # for an instance's name to be resolved


class ClientError(P2pError):
    """An instance gave no whole answer."""


class Unreachable(ClientError):
    """No connection to it could be made."""


class TimedOut(ClientError):
    """It was silent for too long."""


class ConnectTimedOut(Unreachable, TimedOut):
    """No connection to it was made in time."""


class Broken(ClientError):
    """The connection ended, or what came is not HTTP, before the answer was whole."""


@dataclass(frozen=True)
class Limits:
    """Seconds: to connect, for any silence of the instance, and from the request to its last byte;
    None: any."""

    connect: float
    silence: float | None = None
    total: float | None = None


class Response:
    """An answer, from the moment that its request is written. `close` it, whatever happened."""

    def __init__(self, connection: _Connection, limits: Limits) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.silence = limits.silence
        self.is_complete = False
        self._connection = connection
        self._loop = connection.loop
        self._pieces: list[bytes] = []
        self._num_buffered = 0
        self._num_header_bytes = 0
        self._error: ClientError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._deadline: Deadline | None = None
        if limits.total is not None:
            self._deadline = connection.deadlines.add(
                limits.total, lambda: self.fail(TimedOut("in all"))
            )

    async def head(self) -> None:
        """Wait for status and headers.

        Raises:
            ClientError: they do not come.
        """
        while not self.status:
            await self._wait()

    async def piece(self) -> bytes:
        """Return what has come since the last call, as soon as there is any; nothing at the end.

        Raises:
            ClientError: the answer does not go on.
        """
        while not self._pieces:
            if self.is_complete:
                return b""
            await self._wait()
        return self.taken()

    async def ahead(self, num_bytes: int) -> bytes:
        """Return what the body begins with, once it is complete or so much is here; it stays there.

        Raises:
            ClientError: the answer does not go on.
        """
        while not self.is_complete and self._num_buffered < num_bytes:
            await self._wait()
        return b"".join(self._pieces)

    def taken(self) -> bytes:
        """Return what has come since the last call; never waits."""
        taken = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        if self._num_buffered > HIGH_WATER_BYTES:
            self._connection.resume()
        self._num_buffered = 0
        return taken

    def header(self, name: bytes) -> bytes:
        """Return a header's value, or nothing; the name is in lower case."""
        return next((value for key, value in self.headers if key.lower() == name), b"")

    @property
    def content_type(self) -> bytes:
        """The type without its parameters."""
        return self.header(b"content-type").partition(b";")[0].strip().lower()

    def close(self) -> None:
        """Read no more: what has not come whole ends its connection. Idempotent."""
        if not self.is_complete:
            self.fail(Broken("closed here"))

    # What the connection tells.

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take in a header."""
        self._num_header_bytes += len(name) + len(value)
        if self._num_header_bytes > MAX_HEADER_BYTES:
            self.fail(Broken(f"headers of more than {MAX_HEADER_BYTES} bytes"))
        self.headers.append((name, value))

    def on_headers(self, status: int) -> None:
        """Take in the status, unless the real one is still to come."""
        if status < 200:
            self.headers.clear()
            return
        self.status = status
        self._wake()

    def on_body(self, piece: bytes) -> None:
        """Take in a piece of the body."""
        self._pieces.append(piece)
        self._num_buffered += len(piece)
        if self._num_buffered > HIGH_WATER_BYTES:
            self._connection.pause()
        self._wake()

    def complete(self) -> None:
        """The whole answer is here."""
        self.is_complete = True
        self._end()

    def fail(self, error: ClientError) -> None:
        """Nothing more will come; what came can still be taken."""
        if self._error is None and not self.is_complete:
            self._error = error
            self._end()
            self._connection.abort()

    def _end(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        limit = None
        if self.silence is not None:
            limit = self._connection.deadlines.add(self.silence, self._fall_silent)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if limit is not None:
                limit.cancel()

    def _fall_silent(self) -> None:
        self.fail(TimedOut("silence"))


class _Connection(asyncio.Protocol):
    """One connection; `response` is what is being answered on it."""

    def __init__(self, pool: Pool, address: str) -> None:
        self.loop = pool.loop
        self.deadlines = pool.deadlines
        self.response: Response | None = None
        self.is_reused = False
        self.idle_since = 0.0
        self._pool = pool
        self.address = address
        self._transport: Any = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._is_paused = False

    @property
    def is_open(self) -> bool:
        """Whether a request may be written to it."""
        return not self._transport.is_closing()

    def ask(self, request: tuple[bytes, bytes], limits: Limits) -> Response:
        """Write a request."""
        self.response = Response(self, limits)
        self._transport.writelines(request)
        return self.response

    def abort(self) -> None:
        """Break the connection now."""
        self._transport.abort()

    def pause(self) -> None:
        """Read no more until `resume`."""
        if not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._is_paused:
            self._is_paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    # What asyncio and the parser tell.

    def connection_made(self, transport: Any) -> None:
        """Remember the transport."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Parse; bytes that nobody asked for end the connection."""
        if self.response is None:
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self.response is not None:
                self.response.fail(Broken(f"not HTTP: {error}"))
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """End the answer; without a length it is whole now."""
        self._pool.forget(self)
        response, self.response = self.response, None
        if response is None:
            return
        is_framed = response.header(b"content-length") or response.header(b"transfer-encoding")
        if response.status and not is_framed and error is None:
            response.complete()
        else:
            response.fail(Broken(f"the connection ended: {error!r}"))

    def on_message_begin(self) -> None:
        """End a connection on which an answer begins that nobody asked for."""
        if self.response is None:
            self.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Hand on a header."""
        if self.response is not None:
            self.response.on_header(name, value)

    def on_headers_complete(self) -> None:
        """Hand on the status."""
        if self.response is not None:
            self.response.on_headers(self._parser.get_status_code())

    def on_body(self, piece: bytes) -> None:
        """Hand on a piece of the body."""
        if self.response is not None:
            self.response.on_body(piece)

    def on_message_complete(self) -> None:
        """Give the connection back, if it may be kept."""
        response = self.response
        if response is None or not response.status:
            return
        self.response = None
        response.complete()
        if self._parser.should_keep_alive():
            self.resume()
            self._pool.keep(self)
        else:
            self._transport.close()


class Pool:
    """Connections by address: without a limit, because the 101st stream must not wait for one of
    the first 100 to end; those that are idle are kept for `keepalive_seconds`."""

    def __init__(self, keepalive_seconds: float, deadlines: Deadlines) -> None:
        self.loop = asyncio.get_running_loop()
        self.deadlines = deadlines
        self._keepalive_seconds = keepalive_seconds
        # In order of their last use.
        self._idle: dict[str, dict[_Connection, None]] = {}
        self._open: set[_Connection] = set()
        self._names = Resolver(NAME_SECONDS, self.loop.call_soon_threadsafe, self.loop.time)

    async def connect(self, address: str, timeout: float) -> _Connection:
        """Return a connection, a kept one if there is any; raises like `connect_anew`."""
        kept = self._idle.get(address)
        while kept:
            connection, _ = kept.popitem()
            if connection.is_open and not self._is_old(connection):
                connection.is_reused = True
                return connection
            connection.abort()
        return await self.connect_anew(address, timeout)

    async def connect_anew(self, address: str, timeout: float) -> _Connection:
        """Return a connection that carried nothing yet.

        Raises:
            Unreachable: none can be made; ConnectTimedOut, within `timeout` seconds.
        """
        making = asyncio.ensure_future(self._make(address))
        try:  # wait_for would lose a cancellation that comes with the connection
            await asyncio.wait([making], timeout=timeout)
        except asyncio.CancelledError:
            _abandon(making)
            raise
        if not making.done():
            _abandon(making)
            raise ConnectTimedOut(f"no connection within {timeout:g} s")
        try:
            connection = making.result()
        except (OSError, ValueError) as error:
            raise Unreachable(repr(error)) from error
        self._open.add(connection)
        return connection

    async def _make(self, address: str) -> _Connection:
        host, _, port = address.rpartition(":")
        found = await self._resolve(host.removeprefix("[").removesuffix("]"))
        for ip in found:
            try:
                made = await self.loop.create_connection(
                    lambda: _Connection(self, address), ip, int(port)
                )
            except OSError:
                if ip == found[-1]:
                    raise
            else:
                return made[1]
        raise OSError(f"{host!r} has no address")

    async def _resolve(self, host: str) -> tuple[str, ...]:
        """Return a host's addresses; asyncio's own resolver has few threads, and bad names take
        them all."""
        resolved: asyncio.Future[Answer] = self.loop.create_future()

        def told(answer: Answer) -> None:
            if not resolved.done():
                resolved.set_result(answer)

        self._names.resolve(host, told)
        if not resolved.done():
            self.loop.call_later(NAME_SECONDS, lambda: self._names.tick(self.loop.time()))
        answer = await resolved
        if isinstance(answer, PeerUnreachable):
            raise OSError(str(answer))
        return answer

    def keep(self, connection: _Connection) -> None:
        """Keep a connection for the next request; close what was idle for too long."""
        connection.idle_since = self.loop.time()
        kept = self._idle.setdefault(connection.address, {})
        kept[connection] = None
        while self._is_old(oldest := next(iter(kept))):
            del kept[oldest]
            oldest.abort()

    def forget(self, connection: _Connection) -> None:
        """A connection has ended."""
        self._open.discard(connection)
        kept = self._idle.get(connection.address, {})
        kept.pop(connection, None)
        if not kept:
            self._idle.pop(connection.address, None)

    async def close(self) -> None:
        """Close every connection, idle or not; idempotent."""
        self._names.close()
        for connection in list(self._open):
            connection.abort()
        await asyncio.sleep(0)  # their ends are told in the loop's next turn

    def _is_old(self, connection: _Connection) -> bool:
        return self.loop.time() - connection.idle_since > self._keepalive_seconds


def _abandon(making: asyncio.Future[_Connection]) -> None:
    if not making.cancel() and not making.cancelled() and making.exception() is None:
        making.result().abort()


def request_bytes(
    method: str, address: str, path: str, headers: Mapping[str, str], body: bytes
) -> tuple[bytes, bytes]:
    """Return the head and the body of a request."""
    lines = [f"{method} {path} HTTP/1.1\r\nHost: {address}\r\nContent-Length: {len(body)}\r\n"]
    lines += [f"{name}: {value}\r\n" for name, value in headers.items()]
    lines.append("\r\n")
    return "".join(lines).encode("latin-1"), body
