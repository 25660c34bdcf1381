"""A client that leaves, at whatever moment, leaves nothing behind."""

from __future__ import annotations

import asyncio
import io
import json
import socket
from typing import TYPE_CHECKING, Any

import pytest

from p2p_engine.simulate.answers import events
from proxy.app import ProxyApp
from proxy.http.turns import Turns
from proxy.request.forward import Forwarder
from tests.doubles.server import Behaviour, ServerDouble
from tests.rigs.proxies import (
    ASKED,
    COMPLETIONS,
    STREAMED,
    RunningProxy,
    fleet,
    running_proxy,
    until,
)

pytestmark = pytest.mark.usefixtures("crowd")

if TYPE_CHECKING:
    from tests.support import SeededRandom

HOUR = 3600.0
POSTED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
ABANDONED = 'p2p_proxy_requests_total{outcome="client_left",route="/v1/completions",status="%d"}'


async def abandon(answer: asyncio.Future[Any]) -> None:
    """Close the client's connection in the middle of its request."""
    answer.cancel()
    await asyncio.gather(answer, return_exceptions=True)


async def assert_abandoned(proxy: RunningProxy, *, status: int = 0) -> None:
    """Wait until nothing is in flight and the request is accounted for."""
    await proxy.until_idle()
    assert (await proxy.metrics())[ABANDONED % status] == 1


@pytest.mark.parametrize("dispatch", ["sequential", "concurrent"])
async def test_leaving_during_prefill_ends_what_runs(dispatch: str) -> None:
    async with fleet(dispatch=dispatch) as (proxy, [prefill], [decode]):
        prefill.behaviour = decode.behaviour = Behaviour(hang=True)
        answer = asyncio.ensure_future(proxy.ask())
        legs = [prefill] if dispatch == "sequential" else [prefill, decode]
        await until(lambda: all(double.received for double in legs), "the legs run")
        assert await proxy.in_flight(prefill) == {"prefill": 1, "decode": 0}
        assert await proxy.in_flight(decode) == {"prefill": 0, "decode": 1}
        await abandon(answer)
        for double in legs:
            await until_left(double)
        assert len(decode.received) == len(legs) - 1
        await assert_abandoned(proxy)


@pytest.mark.parametrize("asked", [ASKED, STREAMED], ids=["whole", "stream"])
async def test_leaving_while_decode_has_said_nothing(asked: dict[str, object]) -> None:
    async with fleet() as (proxy, [prefill], [decode]):
        decode.behaviour = Behaviour(hang=True)
        answer = asyncio.ensure_future(proxy.ask(asked))
        await until(lambda: decode.received, "decode runs")
        assert await proxy.in_flight(prefill) == {"prefill": 0, "decode": 0}
        await abandon(answer)
        await until_left(decode)
        await assert_abandoned(proxy)


async def post(proxy: RunningProxy, body: io.BytesIO) -> bytes:
    """Send a completion whose body is large."""
    async with proxy.client.post(proxy.url + COMPLETIONS, data=body) as response:
        return await response.read()


async def test_leaving_while_a_large_body_is_written_to_decode_releases_the_kv() -> None:
    asked = json.dumps({**ASKED, "prompt": "x" * (12 << 20)})  # more than the kernel takes
    async with fleet() as (proxy, _, [decode]):
        decode.behaviour = Behaviour(reads=asyncio.Event())
        sent = io.BytesIO(asked.encode())
        answer = asyncio.ensure_future(post(proxy, sent))
        await until(lambda: decode.num_begun, "decode is being asked")
        assert len(decode.kv) == 1
        decode.behaviour = Behaviour()
        await abandon(answer)
        await until(lambda: not decode.kv, "the KV is released")
        await assert_abandoned(proxy)


async def test_leaving_in_the_middle_of_a_stream() -> None:
    async with fleet() as (proxy, _, [decode]):
        decode.behaviour = Behaviour(hang_after=2)
        async with proxy.post(STREAMED) as response:
            assert await response.content.readany()
            assert await proxy.in_flight(decode) == {"prefill": 0, "decode": 1}
            response.close()
        await until_left(decode)
        await assert_abandoned(proxy, status=200)


async def test_leaving_while_still_sending_the_request() -> None:
    async with fleet() as (proxy, [prefill], _):
        host, port = proxy.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")

        async def is_counted() -> bool:
            return bool((await proxy.status())["requests_in_flight"] == 1)

        await until(is_counted, "the request has begun")
        writer.close()
        await assert_abandoned(proxy)
        assert prefill.received == []


async def test_a_client_that_takes_nothing_loses_its_stream() -> None:
    async with fleet(client_timeout_seconds=0.3) as (proxy, _, [decode]):
        decode.behaviour = Behaviour(pieces=[b"x" * 65536] * 1000)
        host, port = proxy.url.removeprefix("http://").split(":")
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, (host, int(port)))
            body = b'{"stream": true}'
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            await loop.sock_sendall(client, head.encode() + body)
            await until_left(decode)
            # It was held back by the client's pace, not read ahead into the proxy's memory.
            assert decode.received[0].pieces_sent < 600
            await proxy.until_idle()
        samples = await proxy.metrics()
        assert any('outcome="client_stalled"' in name for name in samples)


@pytest.mark.parametrize("dispatch", ["sequential", "concurrent"])
async def test_leaving_at_any_moment_leaves_no_count_and_no_leg(
    dispatch: str, rng: SeededRandom
) -> None:
    async with fleet(2, 2, dispatch=dispatch) as (proxy, prefills, decodes):
        for double in decodes:
            double.behaviour = Behaviour(pace=0.002)

        async def come_and_go() -> None:
            answer = asyncio.ensure_future(proxy.ask(rng.choice([ASKED, STREAMED])))
            await asyncio.wait([answer], timeout=rng.uniform(0.0, 0.1))
            await abandon(answer)

        for _ in range(20):
            await asyncio.gather(*(come_and_go() for _ in range(20)))
        await proxy.until_idle()
        doubles = (*prefills, *decodes)
        await until(
            lambda: all(r.ended for double in doubles for r in double.received), "all legs ended"
        )
        assert (await proxy.ask(STREAMED))[1] == b"".join(events(STREAMED))


async def until_left(double: ServerDouble) -> None:
    """Wait until the instance has noticed that nobody waits for its last answer."""
    await until(
        lambda: double.received and double.received[-1].ended == "left", "the leg has ended"
    )


def test_a_proxy_that_was_stopped_leaves_nothing_behind(no_leaks: None) -> None:
    async def serve_and_stop() -> None:
        async with fleet() as (proxy, _, _):
            assert (await proxy.ask(STREAMED))[0] == 200

    asyncio.run(serve_and_stop())


@pytest.mark.parametrize(
    ("owner", "turns", "asked"),
    [(ProxyApp, "_pages_starts", b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n"),
     (Forwarder, "_starts", POSTED)],
    ids=["page", "completion"],
)  # fmt: skip
async def test_who_leaves_while_it_waits_for_its_turn_frees_its_place(
    owner: type, turns: str, asked: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, make = Turns(1, seconds=HOUR), owner.__init__  # type: ignore[misc]

    def made(self: Any, *arguments: Any) -> None:
        make(self, *arguments)
        setattr(self, turns, line)

    monkeypatch.setattr(owner, "__init__", made)
    async with running_proxy() as proxy:
        before = len(asyncio.all_tasks())
        crowd = [socket.create_connection(("127.0.0.1", proxy.port)) for _ in range(20)]
        for connection in crowd:
            connection.sendall(asked)
        await until(lambda: len(asyncio.all_tasks()) >= before + 19, "they wait")
        for connection in crowd:
            connection.close()
        await until(lambda: len(asyncio.all_tasks()) <= before, "nobody waits")
        assert line._lines == {}
