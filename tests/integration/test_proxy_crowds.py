"""Connections that are many: a round of the loop reads a few of them, whoever speaks at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.http import client, house, reading, tls, turns
from tests.doubles.server import Behaviour
from tests.rigs.certificates import careless_context, needs_openssl
from tests.rigs.proxies import ASKED, fleet, running_proxy, serving_by_tls, until
from tests.rigs.rounds import rounds_of

pytestmark = pytest.mark.usefixtures("crowd_of_few")
HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
FEW = 20
MOST_IN_A_ROUND = round(reading.NUM_TURNS / reading.READ_TURN)


@pytest.fixture
def crowd_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "CROWD", FEW)


def speak(crowd: list[socket.socket], words: bytes = HEAD) -> None:
    for connection in crowd:
        connection.sendall(words)


async def answers(crowd: list[socket.socket]) -> list[bytes]:
    """The first line of the whole answer that each hears."""

    async def heard(connection: socket.socket) -> bytes:
        connection.setblocking(False)
        answer = b""
        while not answer.endswith(b"}"):
            piece = await asyncio.wait_for(loop.sock_recv(connection, 1 << 16), 20)
            assert piece, f"it ended after {answer!r}"
            answer += piece
        return answer.partition(b"\r\n")[0]

    loop = asyncio.get_running_loop()
    return await asyncio.gather(*map(heard, crowd))


@pytest.fixture
def open_crowd() -> Any:
    with contextlib.ExitStack() as stack:
        yield lambda port, count, host="127.0.0.1": [
            stack.enter_context(
                socket.create_connection(("127.0.0.1", port), source_address=(host, 0))
            )
            for _ in range(count)
        ]


OpenCrowd = Callable[..., list[socket.socket]]


async def test_a_round_reads_a_few_of_those_who_speak_at_once(
    open_crowd: OpenCrowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "LEAST_PER_SECOND", 0)
    async with running_proxy() as proxy:
        crowd = open_crowd(proxy.port, 200)
        speak(crowd)
        await answers(crowd)
        async with rounds_of(monkeypatch, house.Guest, "data_received") as read:
            speak(crowd)
            assert set(await answers(crowd)) == {b"HTTP/1.1 200 OK"}
        assert len(read) == len(crowd)
        assert max(Counter(read).values()) <= MOST_IN_A_ROUND


async def test_a_crowd_that_speaks_delays_nobody_from_elsewhere(
    open_crowd: OpenCrowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_proxy() as proxy:
        crowd, [one] = open_crowd(proxy.port, 200), open_crowd(proxy.port, 1, "127.0.0.2")
        for _ in range(2):  # the first to come rest after their second request
            speak([*crowd, one])
            await answers([*crowd, one])
        order = list[str]()
        take = house.Guest.data_received

        def noted(self: house.Guest, data: bytes) -> None:
            order.append(self._origin)
            take(self, data)

        monkeypatch.setattr(house.Guest, "data_received", noted)
        speak([one, *crowd])
        await answers([*crowd, one])
        assert order.index("127.0.0.2") < MOST_IN_A_ROUND


@needs_openssl
async def test_a_round_reads_a_few_of_those_who_speak_at_once_by_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "LEAST_PER_SECOND", 0)
    async with serving_by_tls(tmp_path) as port:
        context = careless_context()
        made = [asyncio.open_connection("127.0.0.1", port, ssl=context) for _ in range(100)]
        crowd = await asyncio.gather(*made)

        async def speak_and_hear() -> None:
            for _, writer in crowd:
                writer.write(HEAD)
            for reader, _ in crowd:
                await asyncio.wait_for(reader.readuntil(b"\r\n\r\n{"), 20)

        await speak_and_hear()
        async with rounds_of(monkeypatch, tls.TlsGuest, "buffer_updated") as read:
            await speak_and_hear()
        assert len(read) == len(crowd)
        assert max(Counter(read).values()) <= MOST_IN_A_ROUND
        for _, writer in crowd:
            writer.transport.abort()


async def test_a_round_reads_a_few_of_the_answers_that_come_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "LEAST_PER_SECOND", 0)
    async with fleet() as (proxy, [prefill], _):
        may_answer = asyncio.Event()
        prefill.behaviour = Behaviour(hold=may_answer)
        asked = [asyncio.ensure_future(proxy.ask(ASKED)) for _ in range(100)]
        await until(lambda: len(prefill.received) == len(asked), "all have come")
        async with rounds_of(monkeypatch, client._Connection, "buffer_updated") as read:
            may_answer.set()
            assert {status for status, *_ in await asyncio.gather(*asked)} == {200}
        assert len(read) >= 2 * len(asked)
        assert max(Counter(read).values()) <= max(FEW, 2 * MOST_IN_A_ROUND)


async def test_who_leaves_a_crowd_is_forgotten(open_crowd: OpenCrowd) -> None:
    async with running_proxy() as proxy:
        before = len(os.listdir("/proc/self/fd"))
        for words in (HEAD, HEAD[:20]):
            crowd = open_crowd(proxy.port, 100)
            speak(crowd, words)
            if words == HEAD:
                await answers(crowd)

            async def are_in(count: int = 100) -> bool:
                return (await proxy.metrics())["p2p_proxy_connections"] == count + 1

            await until(are_in, "all are in")
            for connection in crowd:
                connection.close()
            await until(lambda: are_in(0), "nobody is left")
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before + 1, "nothing is left")


async def test_who_has_spoken_in_a_crowd_makes_no_room(
    open_crowd: OpenCrowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has heard it yet: who is silent goes first, however late it was answered."""
    async with running_proxy(max_connections=42) as proxy:
        crowd = open_crowd(proxy.port, 40)
        for connection in crowd:  # one after the other: the first have been idle for the longest
            speak([connection])
            await answers([connection])
        monkeypatch.setattr(reading.Rest, "hear", lambda self: None)
        speak(crowd[:4])
        for _ in range(4):
            newcomers = open_crowd(proxy.port, 1)
            speak(newcomers)
            await answers(newcomers)
        await until(lambda: any(map(is_closed, crowd[4:])), "one made room")
        assert not any(map(is_closed, crowd[:4]))


async def test_who_has_spoken_in_a_crowd_is_not_closed_for_its_silence(
    open_crowd: OpenCrowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_proxy(idle_timeout_seconds=0.3) as proxy:
        crowd = open_crowd(proxy.port, 40)
        for _ in range(2):
            speak(crowd)
            await answers(crowd)
        hear, deaf = reading.Rest.hear, list[reading.Rest]()
        monkeypatch.setattr(reading.Rest, "hear", lambda self: deaf.append(self))
        speak(crowd[:4])
        await until(lambda: all(map(is_closed, crowd[4:])), "the silent ones are closed")
        monkeypatch.setattr(reading.Rest, "hear", hear)
        for each in deaf:
            each.hear()
        assert set(await answers(crowd[:4])) == {b"HTTP/1.1 200 OK"}


@needs_openssl
async def test_a_part_of_a_record_ends_no_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By TLS, what comes may hold nothing that is read as HTTP."""
    origins, ask = set[str](), turns.Turns.ask

    def noted(self: turns.Turns, origin: str, who: Any, work: Any, **options: Any) -> None:
        if isinstance(who, reading.Rest):
            origins.add(origin)
        ask(self, origin, who, work, **options)

    monkeypatch.setattr(turns.Turns, "ask", noted)
    limits = dict.fromkeys(("idle_timeout_seconds", "head_timeout_seconds"), 2.0)
    async with serving_by_tls(tmp_path, **limits) as port:
        context = careless_context()
        made = [asyncio.open_connection("127.0.0.1", port, ssl=context) for _ in range(2 * FEW)]
        crowd = await asyncio.gather(*made)
        for piece in (b"\x17", b"\x03", b"\x03"):
            for _, writer in crowd:
                with contextlib.suppress(OSError):  # a busy machine: the limit has passed
                    os.write(writer.get_extra_info("socket").fileno(), piece)
            await asyncio.sleep(0.05)
        for reader, writer in crowd:
            with contextlib.suppress(OSError):
                assert await asyncio.wait_for(reader.read(), 20) == b""
            writer.transport.abort()
        assert origins == {"127.0.0.1"}


def is_closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
