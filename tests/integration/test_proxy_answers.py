"""What an instance answers, byte for byte: nothing of one answer reaches another client."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest

from tests.doubles.recorder import Recorded, echo, whole
from tests.rigs.proxies import RunningProxy, until
from tests.rigs.raw import raw_client
from tests.rigs.recorded import recorded

OTHER = whole(b'{"choices": [{"text": "nobody\'s"}]}')


def swollen(request: Recorded) -> bytes:
    """An answer, and another that nobody asked for."""
    return echo(request) + OTHER


def with_header(request: Recorded, *headers: bytes, status: bytes = b"200 OK") -> bytes:
    return whole(echo(request).partition(b"\r\n\r\n")[2], status, *headers)


def zipped(request: Recorded) -> bytes:
    body = gzip.compress(echo(request).partition(b"\r\n\r\n")[2])
    return whole(body, b"200 OK", b"Content-Encoding: gzip")


BROKEN = {
    "a status of 999": lambda r: with_header(r, status=b"999 Odd"),
    "a status of 600": lambda r: with_header(r, status=b"600 Odd"),
    "no HTTP": lambda r: b"SSH-2.0\r\n\r\n",
    "interim answers only": lambda r: b"HTTP/1.1 102 Processing\r\n\r\n" * 99 + echo(r),
    "chunks and a length": lambda r: with_header(r, b"Transfer-Encoding: chunked"),
    "two lengths": lambda r: with_header(r, b"Content-Length: 1"),
    "a control in a header": lambda r: with_header(r, b"X: a\x01b"),
    "a folded header": lambda r: with_header(r, b"X: a\r\n b"),
    "a large header": lambda r: with_header(r, b"X: " + b"y" * 100_000),
}


async def assert_own_answer(proxy: RunningProxy, prompt: str) -> None:
    """Ask, and get what was asked for."""
    status, body, _ = await proxy.ask({"model": "tiny", "prompt": prompt, "max_tokens": 1})
    assert (status, json.loads(body)["choices"][0]["text"]) == (200, prompt)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_answer_that_is_none_is_a_502(role: str) -> None:
    async with recorded(breaker_failures=99) as (proxy, prefill, decode):
        odd = prefill if role == "prefill" else decode
        for shape, answer in BROKEN.items():
            odd.answer = answer
            status, body, _ = await proxy.ask()
            code = json.loads(body)["error"]["code"]
            assert (shape, status, code) == (shape, 502, f"{role}_failed")
            odd.answer = echo
            await assert_own_answer(proxy, f"after {shape}")
        await proxy.until_idle()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_answer_that_nobody_asked_for_reaches_nobody(role: str) -> None:
    async with recorded() as (proxy, prefill, decode):
        odd = prefill if role == "prefill" else decode
        odd.answer = swollen
        for number in range(20):
            await assert_own_answer(proxy, f"number {number}")
        await proxy.until_idle()


async def test_an_answer_that_is_too_short_is_cut_and_ends_its_connection() -> None:
    async with recorded() as (proxy, _, decode):
        decode.closes = True
        decode.answer = lambda r: with_header(r).replace(b"Length: 1", b"Length: 91", 1)
        async with raw_client(proxy.port) as client:
            await client.send(asked("it"))
            answer = await client.answer()
            assert answer is not None
            assert answer.status == 502
        decode.answer, decode.closes = echo, False
        await assert_own_answer(proxy, "after it")
        await proxy.until_idle()


async def test_compressed_answers_pass_from_decode_and_not_from_prefill() -> None:
    async with recorded() as (proxy, prefill, decode):
        decode.answer = zipped
        await assert_own_answer(proxy, "compressed")  # the client library decompresses
        decode.answer, prefill.answer = echo, zipped
        status, body, _ = await proxy.ask()
        assert (status, json.loads(body)["error"]["code"]) == (502, "prefill_bad_answer")
        assert "accept-encoding" not in prefill.received[-1].headers


HEADERS = (
    b"X-Kept: a b",
    b"X-Bytes: \xff",
    b"X-Hop: mine",
    b"Connection: keep-alive, X-Hop",
    b"Keep-Alive: timeout=5",
    b"Set-Cookie: a=b",
    b"X-Accel-Redirect: /etc/passwd",
    b"Alt-Svc: h2=elsewhere",
    b"X-Content-Type-Options: none",
    b"Content-Security-Policy: default-src *",
)


async def test_headers_of_an_instance_that_are_not_for_the_client_stay() -> None:
    async with recorded() as (proxy, _, decode):
        decode.answer = lambda request: with_header(request, *HEADERS)
        async with raw_client(proxy.port) as client:
            await client.send(asked("headers"))
            answer = await asyncio.wait_for(client.answer(), 20)
            assert answer is not None
            assert set(answer.headers) == {
                "date", "content-type", "content-length", "x-kept", "x-request-id",
                "x-content-type-options", "content-security-policy",
            }  # fmt: skip
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["content-security-policy"].startswith("sandbox;")
        await assert_own_answer(proxy, "after it")


async def test_trailers_of_an_answer_are_no_headers() -> None:
    def trailing(request: Recorded) -> bytes:
        body = echo(request).partition(b"\r\n\r\n")[2]
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked"
        return b"%b\r\n\r\n%x\r\n%b\r\n0\r\nX-Late: y\r\n\r\n" % (head, len(body), body)

    async with recorded() as (proxy, _, decode):
        decode.answer = trailing
        status, _, headers = await proxy.ask()
        assert (status, "X-Late" in headers) == (200, False)


async def test_a_health_answer_without_an_end_costs_little() -> None:
    """It is read no further than it can matter."""
    async with recorded(probe_timeout_seconds=20.0) as (proxy, prefill, _):
        prefill.health = lambda _: whole(b"x" * (8 << 20))

        async def is_refused() -> bool:
            return (await proxy.states())[prefill.address] == "not_ready"

        await until(is_refused, "its answer is no answer")


def asked(prompt: str) -> bytes:
    """A request as bytes."""
    body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body
