"""The proxy's HTTP client against servers that say byte for byte what a test wants."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from p2p_engine.control import resolver
from proxy.http.client import (
    HIGH_WATER_BYTES,
    MAX_HEADER_BYTES,
    MAX_INTERIM,
    Broken,
    ConnectTimedOut,
    Limits,
    NoRoom,
    Pool,
    Response,
    TimedOut,
    Unreachable,
    _Connection,
    request_bytes,
)
from proxy.http.deadlines import TICK_SECONDS, Deadlines
from tests.rigs.proxies import until

LIMITS = Limits(5.0, silence=20.0)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class ScriptedServer:
    """Says the next of `says` to each request, then closes where that is None."""

    def __init__(self, says: list[bytes | None]) -> None:
        self.says = says
        self.requests: list[bytes] = []
        self.num_connections = 0
        self.num_closed = 0
        self.address = ""
        self.num_written = 0
        self.answers_at_once = b""  # to the first bytes of a request, and takes no more

    async def speak(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        self.num_connections += 1
        try:
            if self.answers_at_once:
                await reader.read(1)
                writer.write(self.answers_at_once)
                await writer.drain()
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                await asyncio.sleep(0.5)
                return
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                while self.says and (said := self.says.pop(0)) is not None:
                    writer.write(said)
                    self.num_written += len(said)
                    if not self.says or self.says[0] is None or self.says[0].startswith(b"HTTP"):
                        break
                    await writer.drain()
                if self.says[:1] == [None]:
                    del self.says[0]
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.num_closed += 1
            writer.close()


async def test_names_that_nobody_resolves_hold_no_other_instance_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More of them than asyncio's resolver has threads."""
    real, over, bad = socket.getaddrinfo, threading.Event(), list[asyncio.Future[_Connection]]()

    def resolve(host: str, *rest: Any, **options: Any) -> Any:
        if "nodns" in str(host):
            over.wait(60)
            raise socket.gaierror(socket.EAI_AGAIN, "no server answers")
        return real(host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(resolver, "FRESH_SECONDS", 0.0)
    async with serving() as (server, pool):
        address = "localhost:" + server.address.rpartition(":")[2]
        try:
            await pool.connect_anew(address, 20.0)
            for number in range(40):
                connecting = pool.connect_anew(f"p{number}.nodns:1", 60.0)
                bad.append(asyncio.ensure_future(connecting))
            await asyncio.sleep(0)
            await pool.connect_anew(address, 20.0)
            assert not any(connecting.done() for connecting in bad)
        finally:
            over.set()
            outcomes = await asyncio.gather(*bad, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {Unreachable}
    await until(
        lambda: not [thread for thread in threading.enumerate() if thread.name == "p2p-name"],
        "no look-up is left",
    )


@asynccontextmanager
async def serving(*says: bytes | None) -> AsyncIterator[tuple[ScriptedServer, Pool]]:
    """Run a server and a pool of connections."""
    script = ScriptedServer(list(says))
    server = await asyncio.start_server(script.speak, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    script.address = f"{host}:{port}"
    pool = Pool(3.0, Deadlines())
    try:
        yield script, pool
    finally:
        await pool.close()
        server.close()
        await until(lambda: script.num_closed == script.num_connections, "all are closed")


async def ask(
    server: ScriptedServer, pool: Pool, limits: Limits = LIMITS
) -> tuple[Response, bytes]:
    """Ask once and take the whole answer."""
    connection = await pool.connect(server.address, limits.connect)
    request = request_bytes("POST", server.address, "/x", {"a": "b"}, (b"{}",))
    response = connection.ask(request, limits)
    try:
        await response.head()
        body = b""
        while piece := await response.piece():
            body += piece
    finally:
        response.close()
    return response, body


WHOLE = {
    "length": (OK, b"ok"),
    "chunks": (CHUNKED + b"1\r\no\r\n1\r\nk\r\n0\r\n\r\n", b"ok"),
    "a hundred before it": (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK, b"ok"),
    "no body": (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    "an empty body": (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
    "a few before it": (b"HTTP/1.1 100 Continue\r\n\r\n" * MAX_INTERIM + OK, b"ok"),
    "a trailer": (CHUNKED + b"2\r\nok\r\n0\r\nLink: x\r\nX-Trailer: y\r\n\r\n", b"ok"),
    "an extension": (CHUNKED + b"2;a=b\r\nok\r\n0\r\n\r\n", b"ok"),
    "an offer": (OK.replace(b"Co", b"Upgrade: x\r\nConnection: upgrade\r\nCo"), b"ok"),
}  # fmt: skip


@pytest.mark.parametrize("shape", WHOLE)
async def test_a_whole_answer_keeps_its_connection(shape: str) -> None:
    said, expected = WHOLE[shape]
    async with serving(said, said, said) as (server, pool):
        for _ in range(3):
            response, body = await ask(server, pool)
            assert body == expected
            assert {b"link", b"x-trailer"} & {name.lower() for name, _ in response.headers} == set()
        assert server.num_connections == 1
        assert server.requests[0].endswith(b"\r\na: b\r\n\r\n{}")


async def test_an_answer_that_closes_is_whole_where_it_has_no_length() -> None:
    said = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nall of it"
    async with serving(said, None, OK) as (server, pool):
        assert (await ask(server, pool))[1] == b"all of it"
        assert (await ask(server, pool))[1] == b"ok"
        assert server.num_connections == 2


CUT = {
    "nothing": b"",
    "half a status": b"HTTP/1.1 2",
    "half a body": b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\nhalf",
    "half a chunk": CHUNKED + b"9\r\nhalf",
    "no last chunk": CHUNKED + b"1\r\nx\r\n",
    "no HTTP": b"\x15\x03\x01 what is this",
    "a wrong chunk": CHUNKED + b"zz\r\nx\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nokk",
    "endless headers": b"HTTP/1.1 200 OK\r\nx: " + b"y" * (2 * MAX_HEADER_BYTES) + b"\r\n\r\n",
    "two equal lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok",
    "chunks and a length": CHUNKED[:-2] + b"Content-Length: 2\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "two encodings": CHUNKED[:-2] + b"Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "another encoding": CHUNKED.replace(b"chunked", b"gzip") + b"ok",
    "another encoding before chunks": CHUNKED.replace(b"chunked", b"gzip, chunked")
    + b"2\r\nok\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": CHUNKED.replace(b"1.1", b"1.0") + b"2\r\nok\r\n0\r\n\r\n",
    "a huge chunk": CHUNKED + b"10000000000000002\r\nok\r\n0\r\n\r\n",
    "a huge length": OK.replace(b": 2", b": 18446744073709551618"),
    "a negative length": OK.replace(b": 2", b": -2"),
    "a list of lengths": OK.replace(b": 2", b": 2, 2"),
    "line feeds alone": OK.replace(b"\r\n", b"\n"),
    "a folded header": OK.replace(b"\r\n\r\n", b"\r\nX: y\r\n z\r\n\r\n"),
    "NUL in a header": OK.replace(b"\r\n\r\n", b"\r\nX: \x00\r\n\r\n"),
    "a space before a colon": OK.replace(b"\r\n\r\n", b"\r\nX : y\r\n\r\n"),
    "an odd version": OK.replace(b"1.1", b"2.0"),
    "a status of 099": OK.replace(b"200", b"099"),
    "a status of 600": OK.replace(b"200", b"600"),
    "a status of 999": OK.replace(b"200", b"999"),
    "a status of four digits": OK.replace(b"200", b"2000"),
    "no version": b"ok",
    "another protocol": b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
}


@pytest.mark.parametrize("shape", CUT)
async def test_what_is_no_whole_answer_is_broken(shape: str) -> None:
    async with serving(CUT[shape], None) as (server, pool):
        with pytest.raises(Broken):
            await ask(server, pool)


ENDLESS = {
    "a status": (b"HTTP/1.1 200 ", b"x" * 4096),
    "a header": (b"HTTP/1.1 200 OK\r\nX: ", b"x" * 4096),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * 512),
    "a header's name": (b"HTTP/1.1 200 OK\r\n", b"x" * 4096),
    "interim answers": (b"HTTP/1.1", b" 103 Early Hints\r\n\r\nHTTP/1.1" * 128),
    "empty lines": (b"\r\n", b"\r\n" * 512),
    "a trailer": (CHUNKED + b"0\r\nX: ", b"x" * 4096),
    "trailers": (CHUNKED + b"0\r\n", b"X: y\r\n" * 512),
    "an extension": (CHUNKED + b"2;", b"x" * 4096),
}


@pytest.mark.parametrize("what", ENDLESS)
async def test_what_never_ends_is_broken_off_soon(what: str) -> None:
    """The instance does not close, and is never silent."""
    start, more = ENDLESS[what]
    async with serving(start, *[more] * 4096) as (server, pool):
        with pytest.raises(Broken):
            await asyncio.wait_for(ask(server, pool), 20.0)
        assert server.says


async def test_an_answer_before_the_request_was_taken_ends_its_connection() -> None:
    """Nobody can say whether the instance takes the rest for another request."""
    async with serving() as (server, pool):
        server.answers_at_once = OK
        connection = await pool.connect(server.address, 5.0)
        request = request_bytes("POST", server.address, "/", {}, (b"x" * (64 << 20),))
        response = connection.ask(request, LIMITS)
        await response.head()
        assert await response.piece() == b"ok"
        response.close()
        assert not connection.is_open


@pytest.mark.parametrize("limits", [Limits(5.0, silence=0.05), Limits(5.0, total=0.05)])
@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx"])
async def test_silence_ends_in_time_and_ends_the_connection(limits: Limits, said: bytes) -> None:
    async with serving(said) as (server, pool):
        with pytest.raises(TimedOut):
            await ask(server, pool, limits)
        await until(lambda: server.num_closed, "the connection is closed")


async def test_bytes_that_nobody_asked_for_end_a_kept_connection() -> None:
    async with serving(OK + b"HTTP/1.1 200 OK\r\n", OK) as (server, pool):
        assert (await ask(server, pool))[1] == b"ok"
        assert (await ask(server, pool))[1] == b"ok"
        assert server.num_connections == 2


async def test_a_connection_that_was_idle_for_too_long_is_not_used() -> None:
    async with serving(OK, OK) as (server, pool):
        await ask(server, pool)
        pool._keepalive_seconds = -1.0
        await ask(server, pool)
        assert server.num_connections == 2


async def test_an_answer_is_read_no_faster_than_it_is_taken() -> None:
    piece, count = b"x" * 65536, 400
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (len(piece) * count)
    async with serving(head, *[piece] * count) as (server, pool):
        connection = await pool.connect(server.address, 5.0)
        request = request_bytes("POST", server.address, "/", {}, ())
        response = connection.ask(request, LIMITS)
        await response.head()
        await until(lambda: response._num_buffered > HIGH_WATER_BYTES, "much has come")

        async def has_stopped() -> bool:
            before = server.num_written
            await asyncio.sleep(0.1)
            return server.num_written == before

        await until(has_stopped, "the server waits for us")
        assert server.num_written < len(piece) * count
        assert response._num_buffered < 8 * HIGH_WATER_BYTES
        total = 0
        while taken := await response.piece():
            total += len(taken)
        assert total == len(piece) * count
        assert response.is_complete


async def test_an_answer_that_nobody_wants_ends_its_connection() -> None:
    async with serving(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf") as (server, pool):
        waiting = asyncio.ensure_future(ask(server, pool))
        await until(lambda: server.num_written, "half of it is sent")
        waiting.cancel()
        await until(lambda: server.num_closed, "the connection is closed")


async def test_the_address_that_is_checked_is_the_one_that_is_dialled() -> None:
    async with serving(OK) as (server, _):
        port, checked = int(server.address.rpartition(":")[2]), list[tuple[str, int]]()

        def refusal(host: str, ip: str, port: int) -> str:
            checked.append((host, port))
            return f"{ip} is refused"

        pool = Pool(3.0, Deadlines(), refusal)
        try:
            with pytest.raises(Unreachable, match="is refused"):
                await pool.connect(f"localhost:{port}", 5.0)
            assert server.num_connections == 0
            assert set(checked) == {("localhost", port)}
        finally:
            await pool.close()


@pytest.mark.parametrize("end", ["\r\n", "\n", "\r", "\0"])
@pytest.mark.parametrize("place", range(5))
def test_no_value_ends_a_line(end: str, place: int) -> None:
    method, address, path, name, value = (
        text + end * (place == number) for number, text in enumerate("mapnv")
    )
    with pytest.raises(ValueError, match="line end"):
        request_bytes(method, address, path, {name: value}, ())


async def test_who_cannot_be_reached_is_named(free_port: int) -> None:
    pool = Pool(3.0, Deadlines())
    for address in (f"127.0.0.1:{free_port}", "a..b:80"):
        with pytest.raises(Unreachable):
            await pool.connect(address, 5.0)
    with pytest.raises(ConnectTimedOut):
        await pool.connect("127.0.0.1:9", 0.0)


async def test_connections_are_bounded_and_idle_ones_make_room() -> None:
    async with serving() as (server, pool):
        other = server.address.replace("127.0.0.1", "localhost")
        pool.max_open = 2
        kept = [await pool.connect(server.address, 20.0) for _ in range(2)]
        with pytest.raises(NoRoom):
            await pool.connect(other, 20.0)
        await pool.connect_anew(other, 20.0, is_probe=True)
        pool.max_open = 3
        for connection in kept:
            pool.keep(connection)
        await pool.connect(other, 20.0)
        assert [connection.is_open for connection in kept] == [False, True]


@pytest.mark.parametrize("num_turns", range(6))
async def test_who_is_cancelled_as_the_connection_is_made_stays_cancelled(
    num_turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`asyncio.wait_for` would lose the cancellation before Python 3.12."""
    loop, made, was_asked = asyncio.get_running_loop(), _Connection.connection_made, []

    def cancel_in(num_turns: int) -> None:
        if num_turns:
            loop.call_soon(cancel_in, num_turns - 1)
        else:
            was_asked.append(connecting.cancel())

    def made_and_cancelled(self: _Connection, transport: Any) -> None:
        made(self, transport)
        cancel_in(num_turns)

    async with serving() as (server, pool):
        monkeypatch.setattr(_Connection, "connection_made", made_and_cancelled)
        connecting = asyncio.ensure_future(pool.connect(server.address, 20.0))
        await asyncio.wait([connecting])
        await until(lambda: was_asked, "it was asked to end")
        assert connecting.cancelled() is was_asked[0]


async def test_deadlines_act_once_and_only_if_they_are_not_cancelled() -> None:
    deadlines = Deadlines()
    acted: list[str] = []
    kept = deadlines.add(0.0, lambda: acted.append("kept"))
    for _ in range(10):
        deadlines.add(0.0, lambda: acted.append("cancelled")).cancel()
    late = deadlines.add(60.0, lambda: acted.append("late"))
    await until(lambda: acted, "one has acted")
    await asyncio.sleep(3 * TICK_SECONDS)
    assert acted == ["kept"]
    assert deadlines.pending == [late]
    kept.cancel()
    late.cancel()
    deadlines.add(0.0, lambda: acted.append("again"))
    await until(lambda: acted == ["kept", "again"], "the timer runs again")


@pytest.mark.parametrize("is_polite", [True, False])
async def test_a_connection_that_ended_before_its_request_fails_it_and_is_forgotten(
    is_polite: bool,
) -> None:
    def end(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if is_polite:
            writer.close()
        else:
            writer.transport.abort()

    pool = Pool(3.0, Deadlines())
    async with await asyncio.start_server(end, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        for _ in range(20):
            connection = await pool.connect_anew(f"{host}:{port}", 20)
            await until(partial(_has_ended, connection), "it has ended")
            response = connection.ask((b"GET / HTTP/1.1\r\n\r\n",), Limits(20, total=20))
            with pytest.raises(Broken, match="had closed"):
                await response.head()
        await until(lambda: not pool._open, "all are forgotten")
    await pool.close()


def _has_ended(connection: Any) -> bool:
    return not connection.is_open
