"""Client: HTTP/1.1 to instances over keep-alive connections; only what two legs need.

A connection carries one request at a time. The client reads an answer's body no faster than its
caller takes it.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Mapping
from typing import Any

import httptools
import msgspec

from p2p_engine.control.resolver import Answer, Resolver
from p2p_engine.errors import P2pError, PeerUnreachable
from proxy.http.deadlines import Deadline, Deadlines
from proxy.http.memory import Parts, Span
from proxy.http.reading import Rest, Rests, Sluice
from proxy.http.silence import Silence

# Bytes of an answer that are buffered before the client stops reading from the instance.
HIGH_WATER_BYTES = 64 << 10
READ_BYTES = 64 << 10  # of an answer at once; an answer that nobody takes holds so much
# After a read of no more than this, as tokens are, a connection needs no rest in a crowd: to read
# it takes as long as a rest.
SMALL_BYTES = 4 << 10
MAX_HEADER_BYTES = 64 << 10
MAX_INTERIM = 16  # 1xx answers before the answer
_ENCODING = b"transfer-encoding"
NAME_SECONDS = 4.5  # to resolve an instance's name
# What this machine lacks, and not the instance: descriptors, memory, local ports.
_SHORTAGES = (
    errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL,
)  # fmt: skip


class ClientError(P2pError):
    """An instance did not send a complete answer."""


class Unreachable(ClientError):
    """The instance could not be connected to."""


class TimedOut(ClientError):
    """The instance was silent for too long."""


class ConnectTimedOut(Unreachable, TimedOut):
    """The connection was not established in time."""


class NoRoom(ClientError):
    """This process can have no more connections, whatever the instance does."""


class Broken(ClientError):
    """The connection ended before the answer was complete, or the bytes were not HTTP."""


class Limits(msgspec.Struct, frozen=True):
    """Timeouts in seconds: to connect, for a silence of the instance, and from the request to the
    last byte of the answer. None: no limit. In a crowd, the answer is read in turns of `origin`,
    for which it is."""

    connect: float
    silence: float | None = None
    total: float | None = None
    origin: str = ""


class Response:
    """An answer, from the moment its request is written. The owner must `close` it in every
    case."""

    def __init__(self, connection: _Connection, limits: Limits) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.silence = limits.silence
        self.is_complete = False
        self.has_begun = False  # some of it has come
        self._connection = connection
        self._loop = connection.loop
        self._pieces: list[bytes] = []
        self._num_buffered = 0
        self._num_header_bytes = 0
        self._num_interim = 0
        self._error: ClientError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._deadline: Deadline | None = None
        if limits.total is not None:
            self._deadline = connection.deadlines.add(
                limits.total, lambda: self.fail(TimedOut("in all"))
            )

    async def head(self) -> None:
        """Wait for the status and the headers.

        Raises:
            ClientError: they do not arrive.
        """
        while not self.status:
            await self._wait()

    async def piece(self) -> bytes:
        """Return the bytes that came since the last call; wait for some; empty at the end of the
        answer.

        Raises:
            ClientError: the answer broke off.
        """
        while not self._pieces:
            if self.is_complete:
                return b""
            await self._wait()
        return self.taken()

    async def ahead(self, num_bytes: int) -> bytes:
        """Return the start of the body, once it is complete or has `num_bytes`; does not consume
        it.

        Raises:
            ClientError: the answer broke off.
        """
        while not self.is_complete and self._num_buffered < num_bytes:
            await self._wait()
        return b"".join(self._pieces)

    def taken(self) -> bytes:
        """Return the bytes that came since the last call; never waits."""
        taken = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        if self._num_buffered > HIGH_WATER_BYTES:
            self._connection.resume()
        self._num_buffered = 0
        return taken

    def header(self, name: bytes) -> bytes:
        """Return the value of a header, empty if it is missing; `name` is in lower case."""
        for key, value in self.headers:
            if key == name:
                return value
        return b""

    @property
    def content_type(self) -> bytes:
        """The content type without its parameters."""
        return self.header(b"content-type").partition(b";")[0].strip().lower()

    def close(self) -> None:
        """Stop reading. If the answer is incomplete, the connection is closed. Idempotent."""
        if not self.is_complete:
            self.fail(Broken("closed here"))

    # Called by the connection.

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header.

        Raises:
            Broken: there are too many bytes of headers.
        """
        self._num_header_bytes += len(name) + len(value)
        if self._num_header_bytes > MAX_HEADER_BYTES:
            raise Broken(f"headers of more than {MAX_HEADER_BYTES} bytes")
        self.headers.append((name.lower(), value))

    def on_headers(self, status: int, version: str) -> None:
        """Set the status; interim (1xx) answers are skipped.

        Raises:
            Broken: nobody can say where this answer ends, or there are too many interim ones.
        """
        if 100 <= status < 200:
            self._num_interim += 1
            if self._num_interim > MAX_INTERIM:
                raise Broken(f"more than {MAX_INTERIM} interim answers")
            self.headers.clear()
            return
        if version not in ("1.0", "1.1") or not 200 <= status < 600:
            raise Broken(f"an answer of HTTP/{version} with status {status}")
        encodings = [v.strip().lower() for k, v in self.headers if k == _ENCODING]
        if encodings and (encodings != [b"chunked"] or version != "1.1"):
            raise Broken(f"Transfer-Encoding {encodings} in HTTP/{version}")
        self.status = status
        self._wake()

    def on_body(self, piece: bytes) -> None:
        """Add a piece of the body; pause the connection above `HIGH_WATER_BYTES`."""
        self._pieces.append(piece)
        self._num_buffered += len(piece)
        if self._num_buffered > HIGH_WATER_BYTES:
            self._connection.pause()
        self._wake()

    def complete(self) -> None:
        """Mark the answer as complete, unless it has failed."""
        self.is_complete = self._error is None
        self._end()

    def fail(self, error: ClientError) -> None:
        """Fail the answer and abort its connection; buffered bytes can still be taken."""
        if self._error is None and not self.is_complete:
            self._error = error
            self._end()
            self._connection.abort()

    def _end(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None  # no circle of references
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        if self._error is not None:
            # Another one each time: an error has the frames that it passed, and ours has it.
            raise type(self._error)(*self._error.args)
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


class _Connection(asyncio.BufferedProtocol):
    """One connection; `response` is the answer in progress, or None while the connection is
    idle."""

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
        self._is_in_head = False
        self._is_full = False
        self._num_dry_bytes = 0  # since the last head or piece of a body
        self._writing: asyncio.Task[None] | None = None
        self._can_write = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Tell whether a request can be written."""
        return not self._transport.is_closing()

    def ask(
        self, request: Parts, limits: Limits, on_sent: Callable[[], None] = lambda: None
    ) -> Response:
        """Write a request, or begin to write a large one, and return its answer.

        `on_sent` is called when the last of it is written.
        """
        self.response = Response(self, limits)
        if not self.is_open:
            self.response.fail(Broken("the instance had closed the connection"))
            return self.response
        self._rest.origin = limits.origin
        self._rest.begin()
        if Span in map(type, request):
            self._writing = asyncio.ensure_future(self._write(request, on_sent))
        else:
            self._transport.writelines(request)
            on_sent()
        return self.response

    async def _write(self, request: Parts, on_sent: Callable[[], None]) -> None:
        """Write a large request no faster than the instance takes it."""
        try:
            for part in request:
                if isinstance(part, bytes):
                    self._transport.write(part)
                    continue
                async for piece in part.pieces():
                    await self._can_write.wait()
                    self._transport.write(piece)
            if self.is_open:
                on_sent()
        except Exception as error:  # noqa: BLE001  # whatever it is, the request is not whole
            self._break(Broken(f"the request could not be written: {error!r}"))

    def abort(self) -> None:
        """Abort the connection at once."""
        self._transport.abort()

    def pause(self) -> None:
        """Stop reading until `resume`."""
        if not self._is_full:
            self._is_full = True
            self._sluice.pause_reading()

    def resume(self) -> None:
        """Continue to read."""
        if self._is_full:
            self._is_full = False
            self._sluice.resume_reading()

    # Called by asyncio and by the HTTP parser.

    def connection_made(self, transport: Any) -> None:
        """Remember the transport."""
        self._pool.add(self)
        self._transport, sluice = transport, Sluice(transport)
        self._sluice = sluice
        self._rest = Rest(
            self._pool.rests,
            "",
            transport,
            sluice.pause_reading,
            sluice.resume_reading,
            lambda: True,  # the first to come is read first: none of them is new
        )
        self._can_write.set()

    def pause_writing(self) -> None:
        """Let a large request wait for the instance."""
        self._can_write.clear()

    def resume_writing(self) -> None:
        """Go on with a large request."""
        self._can_write.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go: all connections use one place, one after the other."""
        return self._pool.buffer

    def buffer_updated(self, num_bytes: int) -> None:
        """Parse the bytes that came."""
        self._parse(self._pool.buffer[:num_bytes])
        if self.response is not None and num_bytes > SMALL_BYTES:
            self._rest.begin(num_bytes)

    def _parse(self, data: memoryview) -> None:
        """Parse the bytes; abort the connection if no request is in progress."""
        if self.response is None:
            self.abort()
            return
        self.response.has_begun = True
        self._num_dry_bytes += len(data)
        try:
            self._parser.feed_data(data)
            if self._num_dry_bytes > MAX_HEADER_BYTES:
                raise Broken(f"more than {MAX_HEADER_BYTES} bytes that are no part of a body")
        except Broken as error:
            self._break(error)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._break(_cause(error) or Broken(f"not HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        """End the answer. An answer without framing headers is complete when the connection closes
        cleanly."""
        self._pool.forget(self)
        self._rest.leave()
        self._parser = None  # no circle of references
        if self._writing is not None:
            self._writing.cancel()
        response, self.response = self.response, None
        if response is None:
            return
        is_framed = response.header(b"content-length") or response.header(b"transfer-encoding")
        if response.status and not is_framed and error is None:
            response.complete()
        else:
            response.fail(Broken(f"the connection ended: {error or 'the instance closed it'}"))

    def on_message_begin(self) -> None:
        """Abort the connection if an answer begins without a request."""
        self._is_in_head = True
        if self.response is None:
            self.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Pass a header to the answer; a trailer is none, and is dropped."""
        if self.response is not None and self._is_in_head:
            self.response.on_header(name, value)

    def on_headers_complete(self) -> None:
        """Pass the status to the answer."""
        self._is_in_head = False
        if self.response is not None:
            parser = self._parser
            self.response.on_headers(parser.get_status_code(), parser.get_http_version())
            self._num_dry_bytes = 0

    def on_body(self, piece: bytes) -> None:
        """Pass a piece of the body to the answer."""
        self._num_dry_bytes = 0
        if self.response is not None:
            self.response.on_body(piece)

    def on_message_complete(self) -> None:
        """Complete the answer; return the connection to the pool if it may be kept.

        If the instance has not taken the whole request, nobody can say what it takes the rest for.
        """
        response = self.response
        if response is None or not response.status:
            return
        self.response = None
        response.complete()
        is_written = self._writing is None or self._writing.done()
        if not is_written or self._transport.get_write_buffer_size():
            self.abort()
        elif self._parser.should_keep_alive():
            self.resume()
            self._pool.keep(self)
        else:
            self._transport.close()

    def _break(self, error: Broken) -> None:
        if self.response is not None:
            self.response.fail(error)
        self.abort()


class Pool:
    """Connections by address. Idle ones are kept for `keepalive_seconds`.

    No address has a limit of its own, because stream 101 must not wait until one of the first 100
    ends.
    """

    def __init__(
        self,
        keepalive_seconds: float,
        deadlines: Deadlines,
        refusal: Callable[[str, str, int], str] = lambda host, ip, port: "",
        silence: Silence | None = None,
    ) -> None:
        """`refusal` says why an address, to which a host resolves, may not be dialled, or ""."""
        self.loop = asyncio.get_running_loop()
        self.deadlines = deadlines
        self.buffer = memoryview(bytearray(READ_BYTES))
        self._keepalive_seconds = keepalive_seconds
        self._refusal = refusal
        # Connections at a time; a probe is made beyond it, too.
        self.max_open = 1 << 20
        self._num_making = 0
        # For each address, in order of last use.
        self._idle: dict[str, dict[_Connection, None]] = {}
        self._open: set[_Connection] = set()
        self.rests = Rests(silence or Silence(), lambda: len(self._open))
        self._names = Resolver(NAME_SECONDS, self.loop.call_soon_threadsafe, self.loop.time)

    async def connect(self, address: str, timeout: float) -> _Connection:
        """Return a connection, an idle one if there is any; raises like `connect_anew`."""
        kept = self._idle.get(address)
        while kept:
            connection, _ = kept.popitem()
            if connection.is_open and not self._is_old(connection, self.loop.time()):
                connection.is_reused = True
                return connection
            connection.abort()
        return await self.connect_anew(address, timeout)

    async def connect_anew(
        self, address: str, timeout: float, *, is_probe: bool = False
    ) -> _Connection:
        """Return a new connection.

        Raises:
            Unreachable: the connection failed.
            ConnectTimedOut: it was not established within `timeout` seconds.
            NoRoom: all `max_open` are in use, or the system gives no more.
        """
        if not is_probe:
            self._make_room()
        making = asyncio.ensure_future(self._make(address))
        self._num_making += 1
        try:  # wait_for can lose a cancellation that arrives with the result
            await asyncio.wait([making], timeout=timeout)
        except asyncio.CancelledError:
            _abandon(making)
            raise
        finally:
            self._num_making -= 1
        if not making.done():
            _abandon(making)
            raise ConnectTimedOut(f"no connection within {timeout:g} s")
        try:
            connection = making.result()
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in _SHORTAGES:
                raise NoRoom(repr(error)) from error
            raise Unreachable(repr(error)) from error
        finally:
            del making  # its error has this frame: no circle of references
        return connection

    def _make_room(self) -> None:
        """Close the connection that was idle for the longest, if there are too many."""
        if len(self._open) + self._num_making < self.max_open:
            return
        idle = [next(iter(kept)) for kept in self._idle.values() if kept]
        if not idle:
            raise NoRoom(f"{self.max_open} connections to instances are in use")
        oldest = min(idle, key=lambda connection: connection.idle_since)
        self.forget(oldest)
        oldest.abort()

    async def addresses(self, address: str) -> tuple[str, ...]:
        """Return the IP addresses of a "host:port"; waits for at most NAME_SECONDS.

        Raises:
            OSError: it does not resolve, or may not be dialled.
        """
        host, _, port = address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        found = await self._resolve(host)
        for ip in found:
            if refusal := self._refusal(host, ip, int(port)):
                raise OSError(refusal)
        if not found:
            raise OSError(f"{host!r} has no address")
        return found

    async def _make(self, address: str) -> _Connection:
        found, port = await self.addresses(address), address.rpartition(":")[2]
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
        raise AssertionError("an address resolved to nothing")

    async def _resolve(self, host: str) -> tuple[str, ...]:
        """Return a host's addresses.

        asyncio's own resolver is not used: a few names that do not resolve block all of its
        threads.
        """
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
        """Keep a connection for the next request; close those that were idle for too long."""
        now = connection.idle_since = self.loop.time()
        kept = self._idle.setdefault(connection.address, {})
        kept[connection] = None
        while self._is_old(oldest := next(iter(kept)), now):
            del kept[oldest]
            oldest.abort()

    def add(self, connection: _Connection) -> None:
        """Count a connection until it is forgotten."""
        self._open.add(connection)

    def forget(self, connection: _Connection) -> None:
        """Remove a connection that has ended."""
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
        await asyncio.sleep(0)  # asyncio reports the ends in the loop's next turn

    def _is_old(self, connection: _Connection, now: float) -> bool:
        return now - connection.idle_since > self._keepalive_seconds


def _cause(error: BaseException) -> Broken | None:
    """Return what one of our calls raised within the parser."""
    return error.__context__ if isinstance(error.__context__, Broken) else None


def _abandon(making: asyncio.Future[_Connection]) -> None:
    if not making.cancel() and not making.cancelled() and making.exception() is None:
        making.result().abort()


def request_bytes(
    method: str, address: str, path: str, headers: Mapping[str, str], body: Parts
) -> Parts:
    """Return the head and the body of an HTTP/1.1 request.

    Raises:
        ValueError: a value would end its line.
    """
    length = sum(map(len, body))
    lines = [f"{method} {path} HTTP/1.1", f"Host: {address}", f"Content-Length: {length}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    head, num_ends = "\r\n".join([*lines, "", ""]), len(lines) + 1
    if head.count("\n") != num_ends or head.count("\r") != num_ends or "\0" in head:
        raise ValueError("a value with a line end or NUL in the head of a request")
    return (head.encode("latin-1"), *body)
