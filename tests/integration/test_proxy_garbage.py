"""Circles of references: the proxy looks for them seldom, so what ends must leave none."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop

from proxy.http.tls import TlsGuest
from tests.doubles.collector import CollectorDouble
from tests.doubles.server import Behaviour, ServerDouble
from tests.rigs.certificates import careless_context, client_hello, needs_openssl
from tests.rigs.proxies import (
    ASKED,
    STREAMED,
    RunningProxy,
    fleet,
    running_proxy,
    serving_by_tls,
    until,
)

ROUNDS = 30
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"
OWN = ("proxy", "uvicorn", "uvloop", "httptools", "opentelemetry.sdk.trace")


async def come_and_go(proxy: RunningProxy) -> None:
    """Ask well and badly; leave before the request is whole, after the answer, and within it."""
    for asked in (ASKED, STREAMED, {"bad": 1}):
        await proxy.ask(asked)
    for words, heard in ((HEALTH, b"}"), (HALF, b"")):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(words)
        if heard:
            await asyncio.wait_for(reader.readuntil(heard), 20)
        writer.transport.abort()
    async with proxy.post(STREAMED) as answer:
        answer.close()


TWO_HOSTS = HEALTH.replace(b"Host: x", b"Host: x\r\nHost: y")
NO_HTTP = b"\x16\x03\x01 no HTTP\r\n\r\n"


async def fail(proxy: RunningProxy, prefill: ServerDouble, decode: ServerDouble) -> None:
    """Ask where a leg fails, or there is none, or what is asked is not clear."""
    for leg in (prefill, decode):
        for behaviour in (
            Behaviour(reset=True), Behaviour(status=500), Behaviour(body=b"no JSON"),
            Behaviour(cut_after=1), Behaviour(hang=True),
        ):  # fmt: skip
            leg.behaviour = behaviour
            for asked in (ASKED, STREAMED):
                with contextlib.suppress(aiohttp.ClientError):
                    await proxy.ask(asked)
        leg.behaviour = Behaviour()
    for words in (TWO_HOSTS, NO_HTTP):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(words)
        assert b" 400 " in await asyncio.wait_for(reader.readline(), 20)
        writer.transport.abort()


async def come_and_go_by_tls(port: int) -> None:
    """Ask, and leave: with an end that is said, and without."""
    context = careless_context()
    for ends_well in (True, False):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        writer.write(HEALTH)
        await asyncio.wait_for(reader.readuntil(b"}"), 20)
        if ends_well:
            writer.close()
        else:
            writer.transport.abort()
    for words, is_answered in ((client_hello(), False), (HEALTH, True)):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(words)
        if is_answered:  # by an end
            await asyncio.wait_for(reader.read(), 20)
        writer.transport.abort()


async def left_behind(
    come: Callable[[], Awaitable[None]],
    settle: Callable[[], Awaitable[object]],
    num_times: int = ROUNDS,
) -> Counter[str]:
    """Come often; return what only the collector finds afterwards, by type."""
    await come()
    await settle()
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(num_times):
            await come()
        await settle()
        gc.collect()
        found = Counter(map(named, gc.garbage))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    return Counter({name: count for name, count in found.items() if name.startswith(OWN)})


def named(found: Any) -> str:
    return f"{type(found).__module__}.{type(found).__qualname__}"


def run(play: Coroutine[Any, Any, Counter[str]]) -> Counter[str]:
    """Run on the loop that the proxy's command has."""
    with contextlib.closing(uvloop.new_event_loop()) as loop:
        return loop.run_until_complete(play)


def test_what_fails_leaves_no_circles() -> None:
    limits = ("prefill", "first_byte", "response", "gap")
    short: dict[str, Any] = {f"{limit}_timeout_seconds": 0.2 for limit in limits}

    async def play() -> Counter[str]:
        async with (
            fleet(breaker_failures=1 << 20, max_retries=1, **short) as (proxy, [prefill], [decode]),
            running_proxy() as empty,
        ):

            async def come() -> None:
                assert (await empty.ask(ASKED))[0] == 503
                await fail(proxy, prefill, decode)

            return await left_behind(come, proxy.until_idle, num_times=3)

    assert not run(play())


@pytest.mark.parametrize("are_spans_sent", [False, True], ids=["", "with spans"])
def test_requests_and_connections_leave_no_circles(are_spans_sent: bool) -> None:
    async def play() -> Counter[str]:
        with CollectorDouble() as collector:
            url = collector.url if are_spans_sent else ""
            async with fleet(otlp_traces_endpoint=url) as (proxy, _, _):
                found = await left_behind(lambda: come_and_go(proxy), proxy.until_idle)
            assert bool(collector.spans) == are_spans_sent
            return found

    assert not run(play())


@needs_openssl
def test_connections_by_tls_leave_no_circles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_here = 0
    come, leave = TlsGuest.connection_made, TlsGuest.connection_lost

    def came(self: TlsGuest, transport: asyncio.BaseTransport) -> None:
        nonlocal num_here
        num_here += 1
        come(self, transport)

    def left(self: TlsGuest, error: Exception | None) -> None:
        nonlocal num_here
        num_here -= 1
        leave(self, error)

    monkeypatch.setattr(TlsGuest, "connection_made", came)
    monkeypatch.setattr(TlsGuest, "connection_lost", left)

    async def play() -> Counter[str]:
        async with serving_by_tls(tmp_path) as port:
            settle = partial(until, lambda: num_here == 0, "all have left")
            return await left_behind(partial(come_and_go_by_tls, port), settle)

    assert not run(play())
