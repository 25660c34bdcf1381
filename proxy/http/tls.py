"""TlsGuest: TLS below a client's connection, whose handshake waits for its turn.

Python 3.10 has another `asyncio.sslproto`; `Certificate` refuses it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from proxy.http.house import Guest
    from proxy.http.reading import Rest
    from proxy.http.turns import Turns

    class _SSLProtocolTransport(asyncio.Transport):
        """What is used of asyncio's own."""

        _closed: bool

        def __init__(self, loop: asyncio.AbstractEventLoop, protocol: SSLProtocol) -> None: ...

    class SSLProtocol(asyncio.BufferedProtocol):
        """What is used of asyncio's own."""

        _transport: asyncio.Transport | None
        _app_transport: _SSLProtocolTransport | None
        _app_protocol: asyncio.Protocol
        _app_reading_paused: bool
        _ssl_reading_paused: bool
        _state: SSLProtocolState
        _sslobj: ssl.SSLObject
        _incoming: ssl.MemoryBIO
        _outgoing: ssl.MemoryBIO

        def __init__(self, *arguments: Any, **options: Any) -> None: ...
        def _set_state(self, state: SSLProtocolState) -> None: ...
        def _set_write_buffer_limits(self, high: int, low: int) -> None: ...
        def _set_read_buffer_limits(self, high: int, low: int) -> None: ...
        def _start_shutdown(self) -> None: ...
        def _write_appdata(self, pieces: Iterable[bytes]) -> None: ...
        def _control_app_writing(self) -> None: ...
        def _do_read(self) -> None: ...
        def _call_eof_received(self) -> None: ...

    class SSLProtocolState:
        """How far a connection is."""

        UNWRAPPED: SSLProtocolState
        WRAPPED: SSLProtocolState

else:
    from asyncio.sslproto import SSLProtocol, SSLProtocolState, _SSLProtocolTransport

# What is read of a client at once, one record; a connection keeps a buffer of this size.
READ_BYTES = 17 << 10
# So much is kept of what a guest writes, and of what it does not read, before it or the client has
# to wait. The latter goes on below READ_BYTES: what is left may be a part of a record.
WRITE_BYTES = 64 << 10
UNREAD_BYTES = 2 * READ_BYTES
# Of what a client sends, so much may be neither data nor what wraps it: a part of a record, and
# messages of TLS itself. Each KeyUpdate costs 20 us of a core; honest clients send next to none.
MAX_EMPTY_BYTES = READ_BYTES + (4 << 10)
# What wraps the data of a record: in TLS 1.3, and before it at the most.
WRAP_BYTES, OLD_WRAP_BYTES = 22, 128


class TlsGuest(SSLProtocol):
    """TLS below a client's connection. Each step of the handshake costs up to a millisecond, so a
    client that has said something in it has its turn as those who wait to be let in.

    It is asyncio's own protocol, also on loops with another one: how much a connection keeps, and
    when it works, is decided here.
    """

    max_size = READ_BYTES

    def __init__(
        self,
        context: ssl.SSLContext,
        guest: Guest,
        seconds: float,
        turns: Turns,
        origin: str,
    ) -> None:
        """`guest` begins when the handshake is complete, which may take `seconds`."""
        loop = asyncio.get_running_loop()
        self._complete: asyncio.Future[None] = loop.create_future()
        self._turns = turns
        self._origin = origin
        self._guest = guest
        self._rest: Rest | None = None
        self._num_empty_bytes = 0
        super().__init__(
            loop, guest, context, self._complete, server_side=True,
            ssl_handshake_timeout=seconds,
        )  # fmt: skip
        self._set_write_buffer_limits(WRITE_BYTES, WRITE_BYTES // 4)
        self._set_read_buffer_limits(UNREAD_BYTES, READ_BYTES)

    async def complete(self) -> None:
        """Wait until the handshake is complete.

        Raises:
            OSError: it failed.
        """
        try:
            await self._complete
        except asyncio.CancelledError:
            self.abort()
            raise
        except OSError as error:
            error.__traceback__ = None  # one of asyncio's frames has it: no circle of references
            raise

    def abort(self) -> None:
        """End in the handshake; idempotent."""
        self._complete.cancel()
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake, unless it was aborted."""
        own = cast("asyncio.Transport", transport)
        if self._complete.cancelled():
            own.abort()
            return
        self._rest = self._guest.rest_between_reads(
            self._origin, own, own.pause_reading, self._read_on
        )
        super().connection_made(transport)

    def buffer_updated(self, nbytes: int) -> None:
        """Take what came; in the handshake, when it is this client's turn."""
        transport = self._transport
        if self._complete.done() or transport is None:
            if self._rest is not None:
                self._rest.begin()
            self._guest.note_read()
            super().buffer_updated(nbytes)
        elif not transport.is_closing():
            transport.pause_reading()  # so what came stays in the buffer
            self._turns.ask(self._origin, self, partial(self._go_on, nbytes))

    def eof_received(self) -> None:
        """End; at once if the guest does not read, for it would never hear of it."""
        if self._transport is None or self._state is not SSLProtocolState.WRAPPED:
            super().eof_received()
        elif self._app_reading_paused:
            self._transport.abort()
        else:
            self._do_read()
            self._call_eof_received()
            self._start_shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._turns.leave(self._origin, self)
        if self._rest is not None:
            self._rest.leave()
        complete = self._complete
        has_ended = complete.done() and not complete.cancelled()
        error = complete.exception() if has_ended else None
        if error is not None or not has_ended:  # the guest hears of nothing
            self._guest.dissolve()
        super().connection_lost(exc)
        # No circle of references: an error has the frames that it passed.
        del self._guest, self._rest
        self._complete = asyncio.get_running_loop().create_future()
        self._complete.set_result(None)

    def _read_on(self) -> None:
        """Read on, unless the guest has more than it takes."""
        if self._transport is not None and not self._ssl_reading_paused:
            self._transport.resume_reading()

    def _go_on(self, nbytes: int) -> None:
        super().buffer_updated(nbytes)
        if self._transport is None or self._transport.is_closing():
            return
        # What ends the handshake may bring a request, after which the connection rests already.
        if self._rest is None or not self._rest.is_on:
            self._transport.resume_reading()
        if self._rest is not None:
            self._rest.begin()

    # What asyncio does otherwise.

    def _do_read__copied(self) -> None:
        """Pass on what the client said; end if too much came that says nothing."""
        before, pieces, has_ended = self._incoming.pending, list[bytes](), False
        with suppress(ssl.SSLWantReadError, ssl.SSLSyscallError):
            while piece := self._sslobj.read(READ_BYTES):  # one record's
                pieces.append(piece)
            has_ended = True
        data = b"".join(pieces)
        wrap = WRAP_BYTES if self._sslobj.version() == "TLSv1.3" else OLD_WRAP_BYTES
        # Each byte may have one of padding.
        num_paid = wrap * len(pieces) + 2 * len(data)
        num_read = before - self._incoming.pending
        self._num_empty_bytes = max(0, self._num_empty_bytes + num_read - num_paid)
        if self._num_empty_bytes > MAX_EMPTY_BYTES:
            self._guest.refuse()
            return
        if data:
            self._app_protocol.data_received(data)
        if has_ended:
            self._call_eof_received()
            self._start_shutdown()

    def _get_app_transport(self) -> asyncio.Transport:
        if self._app_transport is None:
            self._app_transport = _TlsTransport(asyncio.get_running_loop(), self)
        return self._app_transport

    def _start_shutdown(self) -> None:
        """Say that the connection ends, and close it when all is sent.

        The client need not confirm it. How long it may take to read is the guest's to limit, as
        without TLS; asyncio would cut off what is not sent by a time of its own.
        """
        transport = self._transport
        if transport is None or self._state is not SSLProtocolState.WRAPPED:
            super()._start_shutdown()
            return
        if self._app_transport is not None:
            self._app_transport._closed = True
        with suppress(ssl.SSLError):  # the client has not confirmed it
            self._sslobj.unwrap()
        self._set_state(SSLProtocolState.UNWRAPPED)
        transport.write(self._outgoing.read())
        transport.close()
        self._control_app_writing()

    def _write_appdata(self, pieces: Iterable[bytes]) -> None:
        """Write; what comes after the end is dropped, without a line in the log for each."""
        if self._state is SSLProtocolState.WRAPPED:
            super()._write_appdata(pieces)


class _TlsTransport(_SSLProtocolTransport):
    """The transport as guests see it. asyncio's own could not be aborted after a second close."""

    def close(self) -> None:
        """End when all is sent; idempotent."""
        if not self._closed:
            super().close()
