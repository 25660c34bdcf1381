"""Keys of clients, TLS, and requests that come back: a real proxy before recording instances."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from asyncio.sslproto import SSLProtocol
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from p2p_engine.errors import ConfigError
from proxy import ProxyConfig, create_app
from proxy.http import certificate, turns
from proxy.http.tls import TlsGuest
from tests.doubles.recorder import RecordingInstance
from tests.rigs.certificates import careless_context, client_hello, made_certificate, needs_openssl
from tests.rigs.proxies import running_proxy, serving, serving_by_tls, until
from tests.rigs.recorded import recorded

if TYPE_CHECKING:
    from proxy.app import ProxyApp

KEY, INSTANCE_KEY = "a-key-of-alice-0001", "the-instances-key"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Files of a client's key and of the instances' key."""
    (tmp_path / "clients").write_text(f"alice {KEY} in_flight=1\n")
    (tmp_path / "instance").write_text(INSTANCE_KEY + "\n")
    for name in ("clients", "instance"):
        (tmp_path / name).chmod(0o600)
    return {name: str(tmp_path / name) for name in ("clients", "instance")}


async def test_only_clients_with_a_key_may_ask(files: dict[str, str]) -> None:
    settings = {"client_keys_file": files["clients"], "instance_key_file": files["instance"]}
    async with recorded(**settings) as (proxy, prefill, decode):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"X-Api-Key": KEY}):
            status, body, _ = await proxy.ask(headers=headers)
            error = json.loads(body)["error"]
            assert (status, error["code"]) == (401, "invalid_api_key")
            assert error["type"] == "invalid_request_error"
            async with proxy.client.get(f"{proxy.url}/v1/models", headers=headers) as response:
                assert response.status == 401
        assert prefill.received == decode.received == []
        right = {"Authorization": f"Bearer {KEY}"}
        for _ in range(3):
            assert (await proxy.ask(headers=right))[0] == 200
        async with proxy.client.get(f"{proxy.url}/v1/models", headers=right) as response:
            assert response.status == 200
        seen = [*prefill.received, *decode.received]
        assert {each.headers["authorization"] for each in seen} == {
            b"Bearer " + INSTANCE_KEY.encode()
        }
        async with proxy.client.get(f"{proxy.url}/health") as response:
            assert response.status == 200  # for those who watch it


async def test_a_client_has_a_limit_of_its_own(
    files: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="proxy.access")
    async with recorded(client_keys_file=files["clients"]) as (proxy, prefill, _):
        right = {"Authorization": f"Bearer {KEY}"}
        release = asyncio.Event()
        prefill.hold = release
        first = asyncio.ensure_future(proxy.ask(headers=right))
        await until(lambda: prefill.received, "the first is in progress")
        status, body, headers = await proxy.ask(headers=right)
        assert (status, json.loads(body)["error"]["code"]) == (429, "client_limit")
        assert headers["Retry-After"]
        await until(lambda: "client_limit" in caplog.text, "its line is written")
        (line,) = [text for text in caplog.messages if "client_limit" in text]
        assert json.loads(line)["client"] == "alice"
        release.set()
        assert (await first)[0] == 200
        assert (await proxy.ask(headers=right))[0] == 200
        assert prefill.received[-1].headers.get("authorization") is None


async def test_a_request_that_comes_back_is_known() -> None:
    async with recorded() as (proxy, prefill, _):
        await proxy.ask()
        via = prefill.received[0].headers["via"].decode()
        assert via.startswith("1.1 p2p-proxy-")
        status, body, _ = await proxy.ask(headers={"Via": f"1.1 front, {via}, 1.0 other"})
        assert (status, json.loads(body)["error"]["code"]) == (508, "loop")
        assert (await proxy.ask(headers={"Via": "1.1 front"}))[0] == 200
        assert prefill.received[-1].headers["via"].decode() == f"1.1 front, {via}"


async def test_two_proxies_that_take_each_other_for_instances(free_ports: list[int]) -> None:
    one, two = free_ports
    async with (
        RecordingInstance() as decode,
        running_proxy(port=one, prefill=f"127.0.0.1:{two}", decode=decode.address) as first,
        running_proxy(port=two, prefill=f"127.0.0.1:{one}", decode=decode.address) as second,
    ):

        async def are_ready() -> bool:
            states = [*(await first.states()).values(), *(await second.states()).values()]
            return states == ["ready"] * 4

        await until(are_ready, "each takes the other for ready")
        status, body, _ = await first.ask()
        assert (status, json.loads(body)["error"]["code"]) == (502, "prefill_failed")
        assert decode.received == []


async def shown_certificate(port: int) -> bytes:
    """Connect by TLS; return the certificate that the proxy shows."""
    context = careless_context()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert (await reader.read(-1)).startswith(b"HTTP/1.1 200 OK")
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    assert isinstance(shown, bytes)
    return shown


@needs_openssl
async def test_tls_and_keys_are_read_again_at_a_hangup(
    tmp_path: Path, files: dict[str, str]
) -> None:
    one, two = (made_certificate(tmp_path, name) for name in ("one", "two"))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "proxy", "--host", "127.0.0.1", "--port", "0",
        "--registration-host", "127.0.0.1", "--registration-port", "0",
        "--tls-cert", one["tls_cert"], "--tls-key", one["tls_key"],
        "--client-keys-file", files["clients"], stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        port = int(await said(process.stderr, r"running on https://127.0.0.1:(\d+)"))
        first = await shown_certificate(port)
        for old, new in zip(one.values(), two.values(), strict=True):
            shutil.copy(new, old)
        process.send_signal(signal.SIGHUP)
        await said(process.stderr, "read again$")
        second = await shown_certificate(port)
        assert first != second
        for path in (one["tls_key"], files["clients"]):
            shutil.copy(__file__, path)
        process.send_signal(signal.SIGHUP)
        for setting in ("client_keys_file", "tls_key"):
            await said(process.stderr, f"not read again: .*{setting}")
        assert await shown_certificate(port) == second
        process.terminate()
        _, rest = await process.communicate()
        assert b"certificate read again" not in rest
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


@needs_openssl
async def test_handshakes_are_connections_with_a_limit_of_time(tmp_path: Path) -> None:
    certificate: dict[str, Any] = dict(made_certificate(tmp_path, "one"))
    config = ProxyConfig(
        host="127.0.0.1", port=0, registration_host="127.0.0.1", registration_port=0,
        max_connections=4, head_timeout_seconds=1.0, **certificate,
    )  # fmt: skip
    async with serving(config) as server, contextlib.AsyncExitStack() as clients:
        port = server.servers[0].sockets[0].getsockname()[1]
        guests = cast("ProxyApp", server.config.app).house
        half = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        for _, writer in half:
            clients.callback(writer.close)
            writer.write(b"\x16\x03\x01")
        await until(lambda: guests.num_guests == 4, "all are counted")
        assert await shown_certificate(port)
        assert await ended(half[0][0])  # it made room
        for reader, _ in half[1:]:
            assert await ended(reader)
        await until(lambda: guests.num_guests == 0, "none is left")
        assert await shown_certificate(port)


@needs_openssl
async def test_a_handshake_that_makes_room_frees_its_descriptor_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, ask = list[TlsGuest](), turns.Turns.ask

    def asked(self: turns.Turns, origin: str, who: Any, work: Any, **options: Any) -> None:
        if isinstance(who, TlsGuest):  # and its turn never comes
            waiting.append(who)
        else:
            ask(self, origin, who, work, **options)

    monkeypatch.setattr(turns.Turns, "ask", asked)
    limits = dict.fromkeys(("idle_timeout_seconds", "head_timeout_seconds"), 100.0)
    crowd = list[socket.socket]()
    async with serving_by_tls(tmp_path, max_connections=4, **limits) as port:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(30):
            crowd.append(socket.create_connection(("127.0.0.1", port)))
            crowd[-1].sendall(client_hello())
            await until(lambda: len(waiting) == len(crowd), "it waits for its turn")

        def num_kept() -> int:
            return len(os.listdir("/proc/self/fd")) - before - len(crowd)

        await until(lambda: num_kept() <= 4, "the others are closed")
        for connection in crowd:
            connection.close()


async def ended(reader: asyncio.StreamReader) -> bool:
    """Wait for the end of a connection on which nothing is said."""
    with contextlib.suppress(ConnectionResetError):  # what it said may not have been read
        return await asyncio.wait_for(reader.read(), 20) == b""
    return True


async def said(lines: asyncio.StreamReader, pattern: str) -> str:
    """Read lines until one has a pattern; return its group, or all of it."""
    while line := (await asyncio.wait_for(lines.readline(), 30)).decode().rstrip():
        if match := re.search(pattern, line):
            return match[match.lastindex or 0]
    raise AssertionError(f"it ended before it said {pattern}")


@needs_openssl
def test_a_python_without_the_tls_that_is_needed_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificate, "OLDEST_PYTHON", (99,))
    with pytest.raises(ConfigError, match="server in front"):
        certificate.Certificate(*made_certificate(tmp_path, "one").values())


def test_without_a_certificate_nothing_needs_that_tls() -> None:
    code = "import proxy.main, sys; sys.exit('proxy.http.tls' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@needs_openssl
def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    one, two = (made_certificate(tmp_path, name) for name in ("one", "two"))
    wrong: tuple[dict[str, Any], ...] = (
        {**one, "tls_key": two["tls_key"]},
        {**one, "tls_key": ""},
        {**one, "tls_cert": str(tmp_path / "nothing")},
    )
    for settings in wrong:
        with pytest.raises(ConfigError, match="tls_"):
            create_app(ProxyConfig(**settings))


@needs_openssl
async def test_of_many_who_say_hello_at_once_one_is_heard_in_each_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_begun, heard, num_rounds = 0, list[int](), 0
    do_handshake = SSLProtocol._do_handshake  # type: ignore[attr-defined]

    def counted(self: Any) -> None:
        nonlocal num_begun
        if self._incoming.pending > 1:
            heard.append(num_rounds)
        num_begun += not self._incoming.pending
        do_handshake(self)

    def count() -> None:
        nonlocal num_rounds
        num_rounds += 1
        loop.call_soon(count)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(SSLProtocol, "_do_handshake", counted)
    monkeypatch.setattr(turns, "LEAST_PER_SECOND", 0)
    async with serving_by_tls(tmp_path) as port:
        crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(50)]
        words = client_hello()
        for connection in crowd:
            connection.sendall(words[:1])
        await until(lambda: num_begun == len(crowd), "all are let in")
        loop.call_soon(count)
        for connection in crowd:
            connection.sendall(words[1:])
        await until(lambda: len(heard) == len(crowd), "all are heard")
        assert max(Counter(heard).values()) <= 2
        for connection in crowd:
            connection.setblocking(False)
            assert await asyncio.wait_for(loop.sock_recv(connection, 1), 20) == b"\x16"
            connection.close()


@needs_openssl
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0], ids=["no", "half a", "a whole"])
async def test_a_handshake_that_stands_still_ends(share: float, tmp_path: Path) -> None:
    limits = dict.fromkeys(("idle_timeout_seconds", "head_timeout_seconds"), 0.3)
    async with serving_by_tls(tmp_path, **limits) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        words = client_hello()
        writer.write(words[: round(share * len(words))])
        answer = await asyncio.wait_for(reader.read(-1), 20)
        assert bool(answer) == (share == 1.0)
        writer.close()
