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
from proxy.config import ProxyConfig
from proxy.http import door, house, strict, turns
from proxy.http.caller import Caller
from proxy.http.descriptors import Shares
from tests.doubles.server import Behaviour
from tests.rigs.proxies import ASKED as ASKED_JSON
from tests.rigs.proxies import RunningProxy, fleet, running_proxy, serving, until
from tests.rigs.rounds import rounds_of

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

    async def all(self) -> int:
        """Read until nothing comes for a while; return how many bytes came."""
        num_bytes = 0
        with contextlib.suppress(asyncio.TimeoutError):
            while data := await asyncio.wait_for(self._reader.read(1 << 16), 0.5):
                num_bytes += len(data)
        return num_bytes

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


async def until_closed(proxy: RunningProxy, limit: str, count: int) -> None:
    """Wait until so many connections were closed by a limit."""

    async def are_closed() -> bool:
        return await closed(proxy, limit) >= count

    await until(are_closed, f"{count} are closed")


async def test_a_connection_without_a_request_is_closed() -> None:
    async with running_proxy(idle_timeout_seconds=0.2) as proxy, client(proxy) as silent:
        await silent.ended()
        assert await closed(proxy, "idle") >= 1


async def test_who_is_let_in_while_the_proxy_ends_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The task that would let it in is cancelled before it begins, so it ends nothing."""
    let_in, entered = door.ClientDoor._let_in, list[Caller]()

    def let_in_and_close(self: door.ClientDoor, caller: Caller) -> None:
        let_in(self, caller)
        self.close()
        entered.append(caller)

    async with running_proxy() as proxy:
        monkeypatch.setattr(door.ClientDoor, "_let_in", let_in_and_close)
        async with client(proxy, HEALTH) as late:
            await until(lambda: bool(entered), "its turn has come")
            await late.ended()
            assert entered[0].connection.fileno() == -1


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


async def test_who_was_refused_stays_no_longer_because_it_speaks_in_a_crowd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is no time left to parse what it says."""
    async with running_proxy() as proxy, client(proxy, b"GARBAGE\r\n\r\n") as refused:
        assert await refused.status() == 400
        with monkeypatch.context() as crowded:
            crowded.setattr(turns.Turns, "do_now", lambda *_: False)
            parsed = asyncio.Event()
            crowded.setattr(house.Guest, "_fall_behind", lambda *_, **__: parsed.set())
            await refused.say(b"x")
            await asyncio.wait_for(parsed.wait(), 20)

        async def is_left() -> bool:
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


@pytest.mark.parametrize("before", [b"", HEALTH], ids=["first", "behind another"])
async def test_a_request_that_comes_slowly_makes_room(
    before: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(house, "SENDING_SECONDS", 0.0)
    async with fleet(max_connections=2) as (proxy, _, _):
        begun = before + HEAD + b"Content-Length: 100\r\n\r\n{"
        async with client(proxy, begun) as slow, client(proxy, begun):
            async with client(proxy, ASKED) as third:
                assert await third.status() == 200
            await slow.ended()
        await proxy.until_idle()


async def test_who_speaks_again_and_again_makes_room_before_who_came_later(crowd: None) -> None:
    async with running_proxy(max_connections=5) as proxy, contextlib.AsyncExitStack() as clients:

        async def come(count: int, said: bytes) -> list[BareClient]:
            return [await clients.enter_async_context(client(proxy, said)) for _ in range(count)]

        talkers = await come(2, b"GET")
        assert await closed(proxy, "room") == 0  # they are let in meanwhile
        later = await come(2, b"")
        for _ in range(20):
            for talker in talkers:
                await talker.say(b"x")
            assert await closed(proxy, "room") == 0  # they are read meanwhile
        for newcomer in await come(2, HEALTH):
            assert await newcomer.status() == 200
        for each in later:
            await each.say(HEALTH)
            assert await each.status() == 200


async def test_who_has_said_what_waits_to_be_parsed_makes_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_on = house.Guest._read_on

    def read_but_for_one(self: house.Guest) -> None:
        if b"marked" not in bytes(self._unread):
            read_on(self)

    monkeypatch.setattr(house.Guest, "_read_on", read_but_for_one)
    async with (
        running_proxy(max_connections=2) as proxy,
        client(proxy, HEALTH) as kept,
        client(proxy, HEALTH) as silent,
    ):
        assert (await kept.status(), await silent.status()) == (200, 200)
        await kept.say(b"GET /marked")
        async with client(proxy, HEALTH) as newcomer:
            assert await newcomer.status() == 200
        await silent.ended()


async def test_an_answer_that_is_taken_is_not_cut_off_by_the_idle_limit() -> None:
    """A part of it lies with the proxy, whose client reads nothing for longer than that."""
    async with fleet(idle_timeout_seconds=0.2) as (proxy, _, [decode]):
        for num_before, num_kib in enumerate(range(20, 200, 20)):
            decode.behaviour = Behaviour(body=b"x" * (num_kib << 10))
            async with client(proxy, ASKED, buffer=4096) as slow:
                await until_closed(proxy, "idle", num_before + 1)
                assert await slow.all() > num_kib << 10


LONG_ANSWER = Behaviour(body=b'{"choices": [{}], "usage": {}, "x": "%b"}' % (b"x" * 2_000_000))


@pytest.mark.parametrize("num_ahead", [1, 2])
async def test_who_takes_no_answer_makes_room(
    num_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(house, "SENDING_SECONDS", 0.0)
    async with fleet(max_connections=2) as (proxy, _, [decode]):
        decode.behaviour = LONG_ANSWER
        async with (
            client(proxy, ASKED * num_ahead, buffer=4096) as deaf,
            client(proxy, ASKED * num_ahead, buffer=4096) as other,
        ):
            for each in (deaf, other):
                assert await each.status() == 200

            async def is_served() -> bool:
                async with client(proxy, HEALTH) as third:
                    return await third.status() == 200

            await until(is_served, "one makes room")


async def test_who_takes_its_answer_makes_no_room() -> None:
    """Not at once, although nothing else is to be done for it."""
    async with fleet(max_connections=1) as (proxy, _, [decode]):
        decode.behaviour = LONG_ANSWER
        async with client(proxy, ASKED, buffer=4096) as slow:
            assert await slow.status() == 200
            await until(lambda: decode.received[0].ended == "answered", "the answer is there")
            for _ in range(3):
                async with client(proxy, HEALTH) as newcomer:
                    assert await newcomer.status() == 503
            assert await slow.all() > 1_000_000


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


@pytest.mark.parametrize("ends_by", ["a bad request", "its last answer"])
async def test_who_takes_a_part_of_the_end_does_not_stay_for_ever(
    ends_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much is left, also if that is too little for its writer to be told to wait."""
    monkeypatch.setattr(strict, "LINGER_SECONDS", 0.05)
    answers = [b"x" * (num_kib << 10) for num_kib in range(20, 600, 20)]
    asked = b"%bContent-Length: 2\r\n\r\n{}" % HEAD
    if ends_by == "its last answer":
        asked = asked.replace(b"Host: x", b"Host: x\r\nConnection: close")
    async with (
        fleet(client_timeout_seconds=0.2) as (proxy, _, [decode]),
        contextlib.AsyncExitStack() as clients,
    ):
        for answer in answers:
            decode.behaviour = Behaviour(body=answer)
            deaf = await clients.enter_async_context(client(proxy, asked, buffer=4096))
            assert await deaf.status() == 200
            await proxy.until_idle()
            if ends_by == "a bad request":
                await deaf.say(b"bad\r\n\r\n")

        async def are_gone() -> bool:
            return (await proxy.metrics())["p2p_proxy_connections"] <= 1

        await until(are_gone, "nobody is left")


async def test_who_waits_for_a_turn_at_a_stop_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = asyncio.Event()

    async def take(self: turns.Turns, origin: str = "") -> None:
        waiting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(turns.Turns, "take", take)
    config = ProxyConfig(
        host="127.0.0.1", port=0, registration_host="127.0.0.1", registration_port=0,
        shutdown_timeout_seconds=1.0,
    )  # fmt: skip
    async with contextlib.AsyncExitStack() as stack:
        async with serving(config) as server:
            port = server.servers[0].sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            writer.write(ASKED)
            await asyncio.wait_for(waiting.wait(), 20)
        answer = await asyncio.wait_for(reader.read(), 20)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"proxy_stopped" in answer


async def test_a_connection_does_not_stay_for_ever_after_its_client_has_said_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its transport waits until the client has taken what is written."""
    guests = list[house.Guest]()
    open_door = house.ClientHouse.open_door

    def opened(self: house.ClientHouse, **options: Any) -> house.Guest:
        guests.append(open_door(self, **options))
        return guests[-1]

    async with running_proxy(client_timeout_seconds=0.2) as proxy:
        monkeypatch.setattr(house.ClientHouse, "open_door", opened)
        async with client(proxy, HEALTH) as deaf:
            assert await deaf.status() == 200
            guests[0].eof_received()
            await until(lambda: closed(proxy, "stalled"), "it is closed")


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
    monkeypatch.setattr(turns, "LEAST_PER_SECOND", 0)
    async with (
        running_proxy(max_connections=500) as proxy,
        rounds_of(monkeypatch, house.ClientHouse, "open_door") as let_in,
    ):
        address = ("127.0.0.1", int(proxy.url.rpartition(":")[2]))
        crowd = [socket.create_connection(address) for _ in range(200)]
        for connection in crowd:
            connection.sendall(HEAD)
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


async def test_those_that_were_silent_for_too_long_are_closed_a_few_in_each_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        running_proxy(idle_timeout_seconds=0.5) as proxy,
        rounds_of(monkeypatch, house.ClientHouse, "close") as closed_in,
    ):
        monkeypatch.setattr(door, "LOOK_SECONDS", 2.0)
        crowd = [socket.create_connection(("127.0.0.1", proxy.port)) for _ in range(200)]
        await until(lambda: len(closed_in) >= len(crowd), "all are closed")
        assert max(Counter(closed_in).values()) <= 2 * door.ENDS_AT_ONCE
        for connection in crowd:
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
    for module in (house, turns):
        monkeypatch.setattr(module, "TURN_SECONDS", 1e-9)
    content = json.dumps({**ASKED_JSON, "prompt": "x" * 20_000}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in content) + b"0\r\n\r\n"
    async with (
        fleet() as (proxy, [prefill], _),
        rounds_of(monkeypatch, house.Guest, "on_body") as pieces,
    ):
        async with client(proxy, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks) as one:
            assert await one.status() == 200
        assert len(pieces) == len(content)
        assert max(Counter(pieces).values()) <= 2 * house.LEAST_SLICE_BYTES // 6 + 2
        assert prefill.received[0].json["prompt"] == "x" * 20_000


async def test_who_sends_bodies_in_crumbs_is_not_before_a_request_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All are of one address, and in each round one of them has its turn."""
    num_turns, crowd_size = 0, 40
    read_on = house.Guest._read_on

    def counted(self: house.Guest) -> None:
        nonlocal num_turns
        num_turns += 1
        read_on(self)

    async def crumble(one: BareClient) -> None:
        while True:
            await one.say(b"1\r\nx\r\n")
            await asyncio.sleep(0)

    async with running_proxy() as proxy, contextlib.AsyncExitStack() as clients:
        kept = await clients.enter_async_context(client(proxy, HEALTH))
        assert await kept.status() == 200
        monkeypatch.setattr(house.Guest, "_read_on", counted)
        monkeypatch.setattr(turns, "TURN_SECONDS", 1e-9)
        monkeypatch.setattr(turns, "LEAST_PER_SECOND", 0)
        begun = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
        crowd = [await clients.enter_async_context(client(proxy, begun)) for _ in range(crowd_size)]
        crumblers = [asyncio.ensure_future(crumble(one)) for one in crowd]
        try:
            await until(lambda: num_turns > 3 * crowd_size, "they are at it")
            for _ in range(5):
                before = num_turns
                await kept.say(HEALTH)
                assert await kept.line(b"HTTP/1.1 200 OK")
                assert num_turns - before < crowd_size
        finally:
            for each in crumblers:
                each.cancel()


async def test_a_crowd_that_is_inside_is_parsed_for_a_while_in_each_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        running_proxy() as proxy,
        rounds_of(monkeypatch, house.Guest, "on_headers_complete") as parsed,
    ):
        crowd = [socket.create_connection(("127.0.0.1", proxy.port)) for _ in range(100)]
        for connection in crowd:
            connection.sendall(HEALTH)
        await until_answered(crowd)
        monkeypatch.setattr(turns, "TURN_SECONDS", 1e-9)
        monkeypatch.setattr(turns, "LEAST_PER_SECOND", 0)
        parsed.clear()
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
