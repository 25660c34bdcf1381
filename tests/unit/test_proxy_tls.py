"""TLS below a guest: how a connection ends, and what a client can make it keep or compute."""

from __future__ import annotations

import _ssl
import asyncio
import contextlib
import ctypes
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from proxy.http import tls
from proxy.http.certificate import Certificate
from proxy.http.reading import Rest, Rests
from proxy.http.silence import Silence
from proxy.http.tls import TlsGuest
from proxy.http.turns import Turns
from tests.rigs.certificates import careless_context, made_certificate, needs_openssl
from tests.rigs.proxies import until

pytestmark = needs_openssl
LARGE = 4 << 20


class HearingGuest(asyncio.Protocol):
    """A guest that keeps what it hears."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.heard = bytearray()
        self.is_lost = False
        self.is_paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.heard += data

    def rest_between_reads(self, *between: Any) -> Rest:
        origin, transport, pause, resume = between
        rests = Rests(Silence(), lambda: 1)
        return Rest(rests, origin, transport, pause, resume, lambda: False)

    def note_read(self) -> None:
        pass

    def dissolve(self) -> None:
        pass

    def refuse(self) -> None:
        self.transport.abort()

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True


class TlsClient:
    """The other end, which does nothing by itself."""

    def __init__(self, connection: socket.socket, version: ssl.TLSVersion) -> None:
        self.connection = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = careless_context()
        context.maximum_version = version
        self.tls = context.wrap_bio(self._incoming, self._outgoing)

    async def shake_hands(self) -> None:
        """Complete the handshake."""
        while True:
            try:
                self.tls.do_handshake()
            except ssl.SSLWantReadError:
                await self.send()
                await self.receive()
            else:
                await self.send()
                return

    async def say(self, data: bytes) -> None:
        """Send data."""
        self.tls.write(data)
        await self.send()

    def update_keys(self) -> None:
        """Encrypt a KeyUpdate that asks for another one."""
        library = ctypes.CDLL(_ssl.__file__)
        state = ctypes.c_void_p.from_address(id(self.tls._sslobj) + 3 * 8)  # type: ignore[attr-defined]
        assert library.SSL_key_update(state, 1) == library.SSL_do_handshake(state) == 1

    async def send(self) -> None:
        """Send what is encrypted."""
        loop = asyncio.get_running_loop()
        await asyncio.wait_for(loop.sock_sendall(self.connection, self._outgoing.read()), 20)

    async def receive(self) -> bool:
        """Take what came; tell whether the connection goes on."""
        loop = asyncio.get_running_loop()
        data = await asyncio.wait_for(loop.sock_recv(self.connection, 1 << 16), 20)
        self._incoming.write(data)
        return bool(data)

    async def all(self) -> bytes:
        """Read until the server says that it has said all."""
        heard = bytearray()
        while True:
            try:
                if not (data := self.tls.read(1 << 16)):
                    return bytes(heard)
                heard += data
            except ssl.SSLZeroReturnError:
                return bytes(heard)
            except ssl.SSLWantReadError:
                if not await self.receive():
                    raise ConnectionError(f"cut off after {len(heard)} bytes") from None


@asynccontextmanager
async def connected(
    folder: Path,
    guest: HearingGuest | None = None,
    version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3,
) -> AsyncIterator[tuple[TlsClient, TlsGuest, HearingGuest]]:
    """Connect a client and a guest, and let them shake hands."""
    files = made_certificate(folder, "one")
    context = Certificate(files["tls_cert"], files["tls_key"]).context
    near, far = socket.socketpair()
    guest, loop = guest or HearingGuest(), asyncio.get_running_loop()
    with far:
        far.setblocking(False)
        near.setblocking(False)
        transport, protocol = await loop.connect_accepted_socket(
            lambda: TlsGuest(context, cast("Any", guest), 20.0, Turns(), "one"), near
        )
        assert isinstance(protocol, TlsGuest)
        client = TlsClient(far, version)
        await asyncio.gather(client.shake_hands(), protocol.complete())
        yield client, protocol, guest
        if not guest.is_lost:
            transport.abort()
        await until(lambda: guest.is_lost, "the connection has ended")


async def test_what_is_written_before_the_end_arrives_however_slowly_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(tmp_path) as (client, _, guest):
        guest.transport.write(b"x" * LARGE)
        guest.transport.close()
        loop, an_hour_passed = asyncio.get_running_loop(), asyncio.Event()
        loop.call_later(3600.0, an_hour_passed.set)
        now = loop.time
        monkeypatch.setattr(loop, "time", lambda: now() + 3601)
        await an_hour_passed.wait()
        monkeypatch.undo()
        assert await client.all() == b"x" * LARGE
        await until(lambda: guest.is_lost, "it ends though the client confirms nothing")


async def test_a_connection_that_was_closed_twice_can_be_aborted(tmp_path: Path) -> None:
    async with connected(tmp_path) as (_, _, guest):
        guest.transport.write(b"x" * LARGE)
        guest.transport.close()
        guest.transport.close()
        assert not guest.is_lost
        guest.transport.abort()
        await until(lambda: guest.is_lost, "it has ended")


@pytest.mark.parametrize("is_paused", [False, True], ids=["reads", "does not read"])
async def test_a_client_that_leaves_is_noticed(
    is_paused: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with connected(tmp_path) as (client, _, guest):
        if is_paused:
            guest.transport.pause_reading()
        client.connection.shutdown(socket.SHUT_WR)

        def has_noticed() -> bool:
            guest.transport.write(b"one more")
            return guest.is_lost

        await until(has_noticed, "it is noticed")
        for _ in range(20):
            guest.transport.write(b"one more")
        assert not caplog.records


async def test_the_last_words_of_a_client_that_leaves_are_heard(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, _, guest):
        guest.transport.pause_reading()
        await client.say(b"last words")
        guest.transport.resume_reading()
        client.connection.shutdown(socket.SHUT_WR)
        await until(lambda: guest.is_lost, "it is noticed")
        assert guest.heard == b"last words"


async def test_a_guest_has_to_wait_before_much_is_kept_for_it(tmp_path: Path) -> None:
    piece = b"x" * (16 << 10)
    async with connected(tmp_path) as (client, protocol, guest):
        num_written, transport = 0, protocol._transport
        assert transport is not None
        while not guest.is_paused:
            guest.transport.write(piece)
            num_written += len(piece)
            kept = guest.transport.get_write_buffer_size() + transport.get_write_buffer_size()
            assert kept < 4 * tls.WRITE_BYTES
        guest.transport.pause_reading()
        client.connection.setblocking(False)
        with contextlib.suppress(asyncio.TimeoutError):
            while True:
                await asyncio.wait_for(client.say(piece), 0.2)
        assert protocol._incoming.pending <= tls.UNREAD_BYTES + tls.READ_BYTES


async def test_all_arrives_though_its_reader_pauses_again_and_again(tmp_path: Path) -> None:
    sizes = [1, 100, 16 << 10, 16385, 17 << 10, 40_000] * 30
    words = [bytes([index % 256]) * size for index, size in enumerate(sizes)]

    class Moody(HearingGuest):
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.transport.pause_reading()
            asyncio.get_running_loop().call_soon(self.resume)

        def resume(self) -> None:
            if not self.is_lost:
                self.transport.resume_reading()

    async with connected(tmp_path, Moody()) as (client, _, guest):
        for each in words:
            await client.say(each)
        await until(lambda: len(guest.heard) == sum(sizes), "all is heard")
        assert guest.heard == b"".join(words)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(_ssl.__file__), "SSL_key_update"), reason="not shown")
@pytest.mark.parametrize("said", [b"", b"x"], ids=["alone", "with a byte each"])
async def test_a_client_that_only_renews_its_keys_is_cut_off(said: bytes, tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, _, guest):
        for _ in range(20):
            client.update_keys()
            await client.say(b"hello")
        await until(lambda: len(guest.heard) == 100, "some are taken")
        with contextlib.suppress(ConnectionError):
            for _ in range(3 * tls.MAX_EMPTY_BYTES // 27):
                client.update_keys()
                if said:
                    client.tls.write(said)
                await client.send()
        await until(lambda: guest.is_lost, "it is cut off")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_crumbs_of_data_are_none_of_what_is_counted(
    version: ssl.TLSVersion, tmp_path: Path
) -> None:
    async with connected(tmp_path, version=version) as (client, protocol, guest):
        assert client.tls.version() == version.name.replace("_", ".")
        for _ in range(3000):
            await client.say(b"x")
        await until(lambda: len(guest.heard) == 3000, "all is heard")
        assert protocol._num_empty_bytes == 0
