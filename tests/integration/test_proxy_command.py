"""`python -m proxy` as people run it: its own process, uvicorn's fast loop, signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any

import aiohttp
import pytest

from p2p_engine.errors import ConfigError
from p2p_engine.simulate.answers import events
from proxy.config import ProxyConfig
from proxy.main import check_listeners
from tests.doubles.server import Behaviour, ServerDouble
from tests.rigs.proxies import STREAMED, RunningProxy, until

pytestmark = pytest.mark.timeout(240)  # each starts up to three interpreters


class Command:
    """A proxy process and all that it has printed so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.printed = ""
        self._reader = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.printed += line.decode()

    async def shown(self, pattern: str) -> str:
        """Wait for a line and return what stands in the pattern's group."""
        match = await until(
            lambda: re.search(pattern, self.printed), f"{pattern!r} is printed", timeout=60.0
        )
        text: str = match[1]
        return text

    async def ended(self) -> int:
        """Wait for its end and return its exit status."""
        status = await asyncio.wait_for(self.process.wait(), 60)
        await self._reader
        return status


@asynccontextmanager
async def command(*options: str) -> AsyncIterator[Command]:
    """Run `python -m proxy`; it is killed at the end if it still runs."""
    local = ("--host", "127.0.0.1", "--registration-host", "127.0.0.1")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "proxy", *local, *options,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    running = Command(process)
    try:
        yield running
    finally:
        if process.returncode is None:
            process.kill()
        await running.ended()


@asynccontextmanager
async def served(*options: str) -> AsyncIterator[tuple[Command, RunningProxy, Any]]:
    """Run the command with one instance of each role, and a client."""
    ports = ("--port", "0", "--registration-port", "0", "--shutdown-timeout-seconds", "1")
    async with (
        ServerDouble("P") as prefill,
        ServerDouble("D") as decode,
        command(*ports, *options) as running,
        aiohttp.ClientSession() as client,
    ):
        url = await running.shown(r"running on (http://\S+)")
        proxy = RunningProxy(url, client)
        for double in (prefill, decode):
            double.beat(await running.shown(r"registration address=(\S+)"))
        await proxy.until_ready(prefill, decode)
        yield running, proxy, (prefill, decode)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_it_serves_and_stops_when_told(signum: signal.Signals) -> None:
    async with served() as (running, proxy, (prefill, decode)):
        status, body, _ = await proxy.ask(STREAMED, headers={"X-Request-Id": "mine"})
        assert (status, body) == (200, b"".join(events(STREAMED)))
        line = json.loads(await running.shown(r"(\{\"time\".*\})"))
        assert {line[name] for name in ("route", "status", "outcome", "client_id", "tries")} == {
            "/v1/completions", 200, "ok", "mine", 1,
        }  # fmt: skip
        assert re.fullmatch("[0-9a-f]{32}", line["transfer_id"])
        assert (line["prefill"], line["decode"]) == (prefill.http_address, decode.http_address)
        times = [line[f"{stage}_ms"] for stage in ("queue", "prefill", "first_byte", "total")]
        assert times == sorted(times)
        assert line["bytes"] == len(body)
        assert str(STREAMED["prompt"]) not in running.printed
        running.process.send_signal(signum)
        assert await running.ended() == 0
        assert "Traceback" not in running.printed


async def test_a_client_that_leaves_is_noticed_under_uvloop() -> None:
    async with served() as (_, proxy, (_, decode)):
        decode.behaviour = Behaviour(hang_after=1)
        async with proxy.post(STREAMED) as response:
            await response.content.readany()
            response.close()
        await until(lambda: decode.received[0].ended == "left", "decode was told")
        await proxy.until_idle()


async def test_streams_that_do_not_end_do_not_keep_it_from_stopping() -> None:
    async with served() as (running, proxy, (_, decode)):
        decode.behaviour = Behaviour(hang_after=1)
        async with proxy.post(STREAMED) as response:
            await response.content.readany()
            running.process.terminate()
            assert await running.ended() == 0
        await until(lambda: decode.received[0].ended == "left", "decode was told")
        assert re.search(r'"status":200,"outcome":"proxy_stopped".*"bytes":[1-9]', running.printed)
        assert "Traceback" not in running.printed
        assert "never retrieved" not in running.printed
        assert "destroyed" not in running.printed


async def test_who_has_no_answer_when_it_stops_is_told_so() -> None:
    async with served() as (running, proxy, (_, decode)):
        decode.behaviour = Behaviour(hang=True)
        asked = asyncio.ensure_future(proxy.ask(STREAMED))
        await until(lambda: decode.received, "decode runs")
        running.process.terminate()
        status, body, headers = await asked
        assert (status, b"proxy_stopped" in body, "Retry-After" in headers) == (503, True, True)
        assert await running.ended() == 0
        assert re.search(r'"status":503,"outcome":"proxy_stopped"', running.printed)
        assert "client_left" not in running.printed
        assert "ASGI callable" not in running.printed
        assert "Traceback" not in running.printed


@pytest.mark.parametrize("is_reset", [False, True], ids=["end", "reset"])
@pytest.mark.parametrize("size", [2, 100_000], ids=["small", "large"])
async def test_a_client_that_leaves_behind_a_second_request_is_noticed_under_uvloop(
    size: int, *, is_reset: bool
) -> None:
    """The second one comes later: until the first is answered, it is not read."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    async with served() as (_, proxy, (_, decode)):
        decode.behaviour = Behaviour(hang=True)
        with socket.create_connection(("127.0.0.1", proxy.port)) as client:
            client.sendall(head % 2 + b"{}")
            await until(lambda: decode.received, "the first is in progress")
            client.setblocking(False)
            client.send(head % size + b"{" * size)
            await asyncio.sleep(0.1)  # the proxy has seen its head
            if is_reset:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await until(lambda: decode.received[0].ended == "left", "decode was told")
        await proxy.until_idle()
        assert len(decode.received) == 1


async def test_a_log_that_nobody_reads_keeps_nobody_waiting(free_port: int) -> None:
    reader, writer = os.pipe()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "proxy", "--host", "127.0.0.1", "--port", str(free_port),
        "--registration-host", "127.0.0.1", "--registration-port", "0", stderr=writer,
    )  # fmt: skip
    os.close(writer)
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{free_port}") as client:

            async def serves() -> bool:
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    async with client.get("/health") as answer:
                        return answer.status == 200
                return False

            await until(serves, "it serves", timeout=60.0)
            for _ in range(600):  # their lines are more than a pipe takes
                async with client.post("/v1/completions", json={"prompt": "x"}) as answer:
                    assert answer.status == 503
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(reader)


async def test_a_port_that_is_taken_ends_the_command() -> None:
    async with served() as (running, proxy, _):
        registration = await running.shown(r"registration address=\S+:(\d+)")
        taken = proxy.url.rpartition(":")[2]
        for options in (
            ("--port", taken, "--registration-port", "0"),
            ("--port", "0", "--registration-port", registration),
        ):
            async with command(*options) as second:
                assert await second.ended() == 2
                (line,) = second.printed.splitlines()
                assert re.search("cannot listen on 127.0.0.1:[0-9]+: Address already in use", line)


@pytest.mark.parametrize("option", ["--host", "--registration-host"])
@pytest.mark.parametrize(
    "host", ["192.0.2.9", "no.such.host.invalid", "a..b", "x" * 64 + ".invalid"]
)
async def test_a_host_that_is_not_here_is_told_in_one_line(option: str, host: str) -> None:
    async with command("--port", "0", "--registration-port", "0", option, host) as running:
        assert await running.ended() == 2
        (line,) = running.printed.splitlines()
        setting = option.strip("-").replace("-", "_")
        assert re.search(f"{setting}: cannot listen on {host}:0: ", line)


LOCAL: dict[str, Any] = {
    "host": "127.0.0.1",
    "port": 0,
    "registration_host": "127.0.0.1",
    "registration_port": 0,
}


@pytest.mark.parametrize("key", ["host", "registration_host"])
def test_no_host_means_every_address(key: str) -> None:
    check_listeners(ProxyConfig(**{**LOCAL, key: ""}))


def test_a_port_of_the_other_family_is_free() -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        check_listeners(ProxyConfig(**{**LOCAL, "host": "::", "port": port}))
        both = {"registration_host": "::", "registration_port": port}  # it listens for both
        with pytest.raises(ConfigError, match=r"registration_host: cannot listen on :::"):
            check_listeners(ProxyConfig(**{**LOCAL, **both}))


@pytest.mark.parametrize("other", ["127.0.0.1", "0.0.0.0"])
def test_one_port_cannot_be_both(other: str, free_port: int) -> None:
    ports = {"port": free_port, "registration_port": free_port}
    with pytest.raises(ConfigError, match=r"registration_host: cannot listen on .* in use"):
        check_listeners(ProxyConfig(**{**LOCAL, **ports, "registration_host": other}))
    check_listeners(ProxyConfig(**{**LOCAL, **ports, "registration_host": "127.0.0.2"}))


@pytest.mark.parametrize(
    ("options", "named"),
    [(("--max-queued", "-1"), "max_queued"), (("--max-queued", "x"), "--max-queued"),
     (("--max-quued", "1"), "--max-quued")],
)  # fmt: skip
async def test_a_setting_that_cannot_be_is_told_in_one_line(
    options: tuple[str, str], named: str
) -> None:
    async with command(*options) as running:
        assert await running.ended() == 2
        (line,) = running.printed.splitlines()
        assert named in line


async def test_the_log_has_one_clock() -> None:
    async with served() as (running, proxy, _):
        assert (await proxy.ask())[0] in (200, 503)
        await running.shown(r'("outcome")')
        times = re.findall(r"20\d\d-\d\d-\d\dT[\d:.]+\S{6}", running.printed)
        assert len(times) >= len(running.printed.splitlines())
        assert {datetime.fromisoformat(each).utcoffset() for each in times} == {timedelta(0)}
