"""Connections of clients: how long one may stay, what it may cost, and which one makes room."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from p2p_engine.errors import ConfigError
from proxy.http import house, turns
from proxy.http.caller import Caller
from proxy.http.descriptors import Shares
from tests.doubles.server import Behaviour
from tests.rigs.proxies import ASKED as ASKED_JSON
from tests.rigs.proxies import RunningProxy, fleet, running_proxy, until

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
STREAM = b'{"stream": true}'
ASKED = b"%bContent-Length: %d\r\n\r\n%b" % (HEAD, len(STREAM), STREAM)
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


class BareClient:
    """One bare connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def say(self, data: bytes) -> None:
        """Send bytes; a connection that is closed takes them, too."""
        with contextlib.suppress(OSError):
            self._writer.write(data)
            await self._writer.drain()

    async def status(self) -> int:
        """Wait for an answer and return its status; 0 if the proxy closes the connection."""
        with contextlib.suppress(OSError):
            line = await asyncio.wait_for(self._reader.readline(), 20)
            return int(line.split()[1]) if line else 0
        return 0

    async def line(self, wanted: bytes) -> bool:
        """Read until a line comes; tell whether it did."""
        while line := await asyncio.wait_for(self._reader.readline(), 20):
            if wanted in line:
                return True
        return False

    async def ended(self) -> None:
        """Wait until the proxy closes the connection."""
        with contextlib.suppress(OSError):
            await asyncio.wait_for(self._reader.read(), 20)


@asynccontextmanager
async def client(
    proxy: RunningProxy, data: bytes = b"", buffer: int = 0
) -> AsyncIterator[BareClient]:
    """Connect and say `data`; `buffer` is how much the kernel takes of what is not read."""
    host, port = proxy.url.removeprefix("http://").split(":")
    made_socket = socket.socket()
    if buffer:
        made_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    made_socket.setblocking(False)
    await asyncio.get_running_loop().sock_connect(made_socket, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=made_socket, limit=buffer or 1 << 16)
    try:
        made = BareClient(reader, writer)
        await made.say(data)
        yield made
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def closed(proxy: RunningProxy, limit: str) -> float:
    name = f'p2p_proxy_closed_connections_total{{limit="{limit}"}}'
    return (await proxy.metrics()).get(name, 0.0)


async def test_a_connection_without_a_request_is_closed() -> None:
    async with running_proxy(idle_timeout_seconds=0.2) as proxy, client(proxy) as silent:
        await silent.ended()
        assert await closed(proxy, "idle") >= 1


async def test_a_connection_is_closed_some_time_after_its_last_answer() -> None:
    async with (
        running_proxy(idle_timeout_seconds=0.5) as proxy,
        client(proxy, HEALTH) as served,
    ):
        assert await served.status() == 200
        await served.ended()


@pytest.mark.parametrize("begun", [HEAD, HEALTH + b"GET /"], ids=["first", "second"])
async def test_half_of_a_head_is_waited_for_no_longer_because_it_drips(begun: bytes) -> None:
    async with running_proxy(head_timeout_seconds=0.3) as proxy, client(proxy, begun) as slow:

        async def is_closed() -> bool:
            await slow.say(b"x")
            return await closed(proxy, "slow") == 1

        await until(is_closed, "it is closed")


async def test_a_body_that_was_answered_already_does_not_keep_its_connection() -> None:
    early = b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
    async with running_proxy() as proxy, client(proxy, early) as slow:
        assert await slow.status() == 200

        async def is_left() -> bool:
            await slow.say(b"x")
            return (await proxy.metrics())["p2p_proxy_connections"] == 1

        await until(is_left, "it is closed")


async def test_the_longest_idle_makes_room_for_the_next() -> None:
    async with fleet(max_connections=4) as (proxy, _, _), contextlib.AsyncExitStack() as clients:
        crowd = [await clients.enter_async_context(client(proxy)) for _ in range(4)]
        for _ in range(3):
            assert (await proxy.ask(headers={"Connection": "close"}))[0] == 200
        await crowd[0].ended()
        assert await closed(proxy, "room") >= 1


async def test_who_was_served_before_does_not_make_room_for_a_crowd() -> None:
    async with fleet(max_connections=4) as (proxy, _, _), contextlib.AsyncExitStack() as clients:
        known = await clients.enter_async_context(client(proxy, HEALTH))
        assert await known.status() == 200
        crowd = [await clients.enter_async_context(client(proxy)) for _ in range(10)]
        await crowd[5].ended()
        await known.say(HEALTH)
        assert await known.line(b"HTTP/1.1 200 OK")


async def test_in_a_full_house_newcomers_are_told_so_and_nobody_else_suffers() -> None:
    release = asyncio.Event()
    async with fleet(max_connections=3) as (proxy, _, [decode]):
        decode.behaviour = Behaviour(hold=release)
        async with contextlib.AsyncExitStack() as clients:
            guests = [await clients.enter_async_context(client(proxy, ASKED)) for _ in range(3)]
            await until(lambda: len(decode.received) == 3, "three are being served")
            # One after the other: none of them takes a place.
            for _ in range(house.MAX_TURNED_AWAY + 1):
                async with client(proxy, ASKED) as newcomer:
                    assert await newcomer.status() == 503
                    await newcomer.ended()
            release.set()
            assert [await guest.status() for guest in guests] == [200] * 3
        await proxy.until_idle()
        assert len(decode.received) == 3
        assert await closed(proxy, "full") == house.MAX_TURNED_AWAY + 1


async def test_a_request_that_comes_slowly_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(house, "SENDING_SECONDS", 0.0)
    async with fleet(max_connections=2) as (proxy, _, _):
        begun = HEAD + b"Content-Length: 100\r\n\r\n{"
        async with client(proxy, begun) as slow, client(proxy, begun):
            async with client(proxy, ASKED) as third:
                assert await third.status() == 200
            await slow.ended()
        await proxy.until_idle()


async def test_lines_that_are_no_head_are_bounded() -> None:
    async with running_proxy() as proxy, client(proxy) as endless:
        for _ in range(3 * house.MAX_DRY_BYTES // 1000):
            await endless.say(b"\r\n" * 500)
        await endless.ended()
        assert await closed(proxy, "refused") == 1


@pytest.mark.parametrize("piece", [b"X: y\r\n", b"y" * 100], ids=["trailers", "one trailer"])
async def test_what_follows_a_body_is_bounded(piece: bytes) -> None:
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nX: "
    async with fleet() as (proxy, [prefill], _), client(proxy, chunked) as endless:
        for _ in range(3 * house.MAX_DRY_BYTES // len(piece)):
            await endless.say(piece)
        await endless.ended()
        await proxy.until_idle()
        assert prefill.received == []


async def test_who_reads_no_answer_holds_no_request_for_ever() -> None:
    """The second answer waits for room in a buffer that the first one fills."""
    answer = b'{"choices": [{}], "usage": {}, "x": "%b"}' % (b"x" * 60_000)
    asked = b"%bContent-Length: 2\r\n\r\n{}" % HEAD
    async with fleet(client_timeout_seconds=0.2) as (proxy, [prefill], [decode]):
        prefill.behaviour = decode.behaviour = Behaviour(body=answer)
        async with client(proxy, buffer=4096) as deaf:

            async def is_closed() -> bool:
                if len(decode.received) == decode_count[0]:
                    decode_count[0] += 1
                    await deaf.say(asked)
                return await closed(proxy, "stalled") == 1

            decode_count = [0]
            await until(is_closed, "it is closed")
        await proxy.until_idle()


async def test_little_is_read_of_a_stream_that_nobody_takes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="proxy.access")
    async with fleet(client_timeout_seconds=0.5) as (proxy, _, [decode]):
        decode.behaviour = Behaviour(pieces=[b"x" * (64 << 10)] * 200)
        async with client(proxy, ASKED, buffer=4096):
            await until(lambda: closed(proxy, "stalled"), "it is given up")
        ended = await until(
            lambda: [each.getMessage() for each in caplog.records if each.name == "proxy.access"],
            "it is logged",
        )
        assert 0 < json.loads(ended[0])["bytes"] < 640 << 10


@pytest.mark.parametrize("num_descriptors", [256, 1024, 20_000, 1 << 20])
@pytest.mark.parametrize("num_requests", [1, 4096, 1 << 20])
def test_shares_leave_room_for_both_connections_of_every_client(
    num_descriptors: int, num_requests: int
) -> None:
    shares = Shares.of(num_descriptors, 1 << 20, num_requests, 256)
    assert shares.upstream >= 2 * min(shares.clients, num_requests) - 2
    others = min(4096, num_descriptors // 4) + min(256, num_descriptors // 8) + 64
    assert shares.clients + shares.upstream + others <= num_descriptors
    assert Shares.of(num_descriptors, 20, num_requests, 256).clients == 20


def test_too_few_descriptors_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"64 descriptors .* for clients"):
        Shares.of(64, 1000, 1000, 256)


async def test_who_has_spoken_is_let_in_one_in_each_round_and_the_newest_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_in: list[int] = []
    open_door, num_rounds = house.ClientHouse.open_door, 0

    def opened(self: house.ClientHouse, **options: Any) -> house.Guest:
        let_in.append(num_rounds)
        return open_door(self, **options)

    def count() -> None:
        nonlocal num_rounds
        num_rounds += 1
        loop.call_soon(count)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(turns, "LEAST_PER_SECOND", 0)
    async with running_proxy(max_connections=500) as proxy:
        monkeypatch.setattr(house.ClientHouse, "open_door", opened)
        address = ("127.0.0.1", int(proxy.url.rpartition(":")[2]))
        crowd = [socket.create_connection(address) for _ in range(200)]
        for connection in crowd:
            connection.sendall(HEAD)
        loop.call_soon(count)
        await until(lambda: len(let_in) == len(crowd), "all are let in")
        assert max(Counter(let_in).values()) <= 2
        for connection in crowd:
            connection.close()


async def test_a_crowd_at_the_door_delays_nobody_from_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_in: list[str] = []
    open_door = house.ClientHouse.open_door

    def opened(self: house.ClientHouse, caller: Caller, **options: Any) -> house.Guest:
        let_in.append(caller.origin)
        return open_door(self, caller=caller, **options)

    async with running_proxy(max_connections=500) as proxy:
        monkeypatch.setattr(house.ClientHouse, "open_door", opened)
        address = ("127.0.0.1", proxy.port)
        one = socket.create_connection(address, source_address=("127.0.0.2", 0))
        one.sendall(HEAD)
        crowd = [socket.create_connection(address) for _ in range(200)]
        for connection in crowd:
            connection.sendall(HEAD)
        await until(lambda: len(let_in) == len(crowd) + 1, "all are let in")
        assert let_in.index("127.0.0.2") <= 1
        for connection in (one, *crowd):
            connection.close()


async def test_who_leaves_before_being_let_in_leaves_nothing_behind() -> None:
    async with running_proxy() as proxy:
        address = ("127.0.0.1", int(proxy.url.rpartition(":")[2]))
        before = len(os.listdir("/proc/self/fd"))

        async def are_gone() -> bool:
            num_connections = (await proxy.metrics())["p2p_proxy_connections"]
            return num_connections == 1 and len(os.listdir("/proc/self/fd")) <= before

        for said in (b"", HEAD):
            crowd = [socket.create_connection(address) for _ in range(100)]
            for connection in crowd:
                connection.sendall(said)
                connection.close()
            await until(are_gone, "all are gone")


async def test_tiny_chunks_of_many_bytes_hold_nobody_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pieces, num_rounds = list[int](), 0
    on_body = house.Guest.on_body

    def counted(self: house.Guest, body: bytes) -> None:
        pieces.append(num_rounds)
        on_body(self, body)

    def count() -> None:
        nonlocal num_rounds
        num_rounds += 1
        loop.call_soon(count)

    loop = asyncio.get_running_loop()
    for module in (house, turns):
        monkeypatch.setattr(module, "TURN_SECONDS", 1e-9)
    monkeypatch.setattr(house.Guest, "on_body", counted)
    content = json.dumps({**ASKED_JSON, "prompt": "x" * 20_000}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in content) + b"0\r\n\r\n"
    async with fleet() as (proxy, [prefill], _):
        loop.call_soon(count)
        async with client(proxy, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks) as one:
            assert await one.status() == 200
        assert len(pieces) == len(content)
        assert max(Counter(pieces).values()) <= 2 * house.LEAST_SLICE_BYTES // 6 + 2
        assert prefill.received[0].json["prompt"] == "x" * 20_000


async def test_a_crowd_that_is_inside_is_parsed_for_a_while_in_each_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed, num_rounds = list[int](), 0
    on_headers_complete = house.Guest.on_headers_complete

    def counted(self: house.Guest) -> None:
        parsed.append(num_rounds)
        on_headers_complete(self)

    def count() -> None:
        nonlocal num_rounds
        num_rounds += 1
        loop.call_soon(count)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(house.Guest, "on_headers_complete", counted)
    async with running_proxy() as proxy:
        crowd = [socket.create_connection(("127.0.0.1", proxy.port)) for _ in range(100)]
        for connection in crowd:
            connection.sendall(HEALTH)
        await until_answered(crowd)
        monkeypatch.setattr(turns, "TURN_SECONDS", 1e-9)
        monkeypatch.setattr(turns, "LEAST_PER_SECOND", 0)
        parsed.clear()
        loop.call_soon(count)
        for connection in crowd:
            connection.sendall(HEALTH)
        await until_answered(crowd)
        assert len(parsed) == len(crowd)
        assert max(Counter(parsed).values()) <= 2
        for connection in crowd:
            connection.close()


async def until_answered(connections: list[socket.socket]) -> None:
    """Wait until something has come on each."""
    loop = asyncio.get_running_loop()
    for connection in connections:
        connection.setblocking(False)
        assert await asyncio.wait_for(loop.sock_recv(connection, 1 << 16), 20)


async def test_a_large_head_may_come_in_any_pieces() -> None:
    async with running_proxy() as proxy:
        large = b"X-Large: " + b"y" * 40_000
        whole = HEALTH[:-2] + large + b"\r\n\r\n"
        async with client(proxy) as one:
            for start in range(0, len(whole), 1400):
                await one.say(whole[start : start + 1400])
                await asyncio.sleep(0)
            assert await one.status() == 200
