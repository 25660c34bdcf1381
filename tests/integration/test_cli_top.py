"""`p2p-engine top` before a real proxy."""

from __future__ import annotations

import asyncio
import io
import re
from typing import Any

import pytest
from rich.console import Console

from p2p_engine.cli.top import Picture, TopEnded, render, run_top
from p2p_engine.errors import ConfigError
from tests.rigs.proxies import STREAMED, fleet

INSTANCE = {
    "name": "d:1", "roles": ["decode"], "state": "ready", "tokens_in_flight": 0,
    "in_flight": {"prefill": 0, "decode": 0}, "breaker": {"decode": "open"},
    "heartbeat_age_seconds": None, "events_sent": 0,
}  # fmt: skip


def picture_of(instance: dict[str, Any], *pairs: dict[str, Any], seconds: float = 1.0) -> Picture:
    """A picture of one instance."""
    return {
        "instances": [instance], "pairs": pairs, "recent": [], "seconds": seconds, "warning": "",
        "requests_in_flight": 0, "requests_queued": 0,
    }  # fmt: skip


def text_of(picture: Picture, before: Picture | None) -> str:
    """What stands in a file."""
    out = io.StringIO()
    Console(file=out, width=200).print(render(picture, before))
    return out.getvalue()


def shown(name: str, num_pictures: int = 1, *, is_terminal: bool = False) -> str:
    """What stands on a wide terminal, or in a file, afterwards."""
    out = io.StringIO()
    assert (
        run_top(name, num_pictures, Console(file=out, width=200, force_terminal=is_terminal)) == 0
    )
    return out.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True], ids=["file", "terminal"])
async def test_it_shows_instances_pairs_and_requests(is_terminal: bool) -> None:
    async with fleet(1, 2) as (proxy, [prefill], decodes):
        for _ in range(4):
            assert (await proxy.ask(STREAMED))[0] == 200
        await proxy.until_idle()
        text = await asyncio.to_thread(shown, proxy.url, 2, is_terminal=is_terminal)
    assert "3 of 3 instances ready, 0 requests in flight" in text
    for double in (prefill, *decodes):
        assert double.http_address in text
    assert f"{prefill.http_address} > " in text  # of the last requests
    assert text.count("3 of 3") >= 2


def test_what_an_instance_says_of_itself_writes_nothing_else() -> None:
    """Not even escape sequences, or marks of rich."""
    picture = picture_of({**INSTANCE, "name": "[red]\x1b[2J"})
    assert "[red]?[2J" in text_of(picture, None)


def test_rates_are_those_since_the_picture_before() -> None:
    def at(seconds: float, kv_bytes: int, num_events: int) -> Picture:
        pair = {"prefill": "p:1", "decode": "d:1", "requests": 0, "kv_bytes": kv_bytes}
        return picture_of({**INSTANCE, "events_sent": num_events}, pair, seconds=seconds)

    text = text_of(at(12.0, 5 << 20, 900), at(10.0, 3 << 20, 100))
    assert re.search(r"^p:1 +d:1 +0 +5\.0 MiB +1\.0 MiB", text, re.MULTILINE)
    assert re.search(r"^d:1 .* 400 ", text, re.MULTILINE)


async def test_a_proxy_that_ends_is_named() -> None:
    async with fleet(1, 1) as (proxy, _, _):
        watching = asyncio.create_task(asyncio.to_thread(shown, proxy.url, 0))
        async with proxy.client.get(f"{proxy.url}/status") as response:
            assert response.status == 200
    with pytest.raises(TopEnded, match=str(proxy.port)):
        await watching


def test_a_proxy_that_is_not_there_is_named(free_port: int) -> None:
    with pytest.raises(TopEnded) as caught:
        shown(f"127.0.0.1:{free_port},127.0.0.2:{free_port}")
    assert str(caught.value).splitlines() == [
        f"proxy 127.0.0.{number}:{free_port}: Connection refused" for number in (1, 2)
    ]
    with pytest.raises(ConfigError, match="nowhere"):
        shown("nowhere")


async def test_the_first_proxy_that_answers_is_shown(free_port: int) -> None:
    async with fleet(1, 1) as (proxy, _, _):
        text = await asyncio.to_thread(shown, f"127.0.0.1:{free_port},127.0.0.1:{proxy.port}")
    assert text.startswith(f"proxy 127.0.0.1:{free_port}: Connection refused\n2 of 2 instances")


# What somebody else says, and what is said of it.
OTHERS = {
    b"": "it broke the connection",
    b"no HTTP\r\n": "its answer is not HTTP",
    b"HTTP/1.0 404 Not Found\r\n\r\n": "HTTP 404 at /status/events",
    b"HTTP/1.0 200 OK\r\n\r\n": "it shows nothing at /status/events",
    b"HTTP/1.0 200 OK\r\n\r\ndata: x\n\n": "its answer is not what a proxy says",
    b"HTTP/1.0 200 OK\r\n\r\ndata: []\n\n": "it is no proxy of this release",
    b'HTTP/1.0 200 OK\r\n\r\ndata: {"instances": [{}]}\n\n': "it is no proxy of this release",
}


@pytest.mark.parametrize("answer", OTHERS, ids=OTHERS.values())
async def test_who_is_no_proxy_is_named_in_one_line(answer: bytes) -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(say, "127.0.0.1", 0) as server:
        name = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(TopEnded) as caught:
            await asyncio.to_thread(shown, name)
    assert str(caught.value) == f"proxy {name}: {OTHERS[answer]}"
