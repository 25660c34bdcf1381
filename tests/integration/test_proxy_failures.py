"""Whatever goes wrong at an instance ends in an answer, and a failed prefill in no decode."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import patch

import aiohttp
import pytest

from p2p_engine.simulate.answers import events
from tests.doubles.server import Behaviour
from tests.rigs.proxies import ASKED, STREAMED, fleet, until
from tests.rigs.recorded import recorded

REFUSAL = b'{"error": {"message": "no", "code": 4}}'
# What prefill does, and what the client then sees: its status and our code, or prefill's own body.
PREFILL_FAILURES = {
    "400": (Behaviour(status=400, body=REFUSAL), 400, REFUSAL),
    "401": (Behaviour(status=401, body=REFUSAL), 401, REFUSAL),
    "404": (Behaviour(status=404, body=REFUSAL), 404, REFUSAL),
    "429": (Behaviour(status=429, body=REFUSAL), 429, REFUSAL),
    "500": (Behaviour(status=500, body=REFUSAL), 502, "prefill_failed"),
    "503": (Behaviour(status=503), 503, "prefill_failed"),
    "504": (Behaviour(status=504), 504, "prefill_failed"),
    "redirect": (Behaviour(status=307, headers={"Location": "/health"}), 502, "prefill_failed"),
    "reset": (Behaviour(reset=True), 502, "prefill_failed"),
    "timeout": (Behaviour(hang=True), 504, "prefill_timeout"),
    "no json": (Behaviour(body=b"<html>"), 502, "prefill_bad_answer"),
    "no object": (Behaviour(body=b"[]"), 502, "prefill_bad_answer"),
    "no choices": (Behaviour(body=b'{"choices": []}'), 502, "prefill_bad_answer"),
    "bad params": (
        Behaviour(body=b'{"choices": [{}], "kv_transfer_params": 3}'),
        502,
        "prefill_bad_answer",
    ),
    "too long": (Behaviour(body=b" " * 5000), 502, "prefill_bad_answer"),
}


def limits(failure: str) -> dict[str, Any]:
    """The settings of a proxy that meets this failure, and no other."""
    return {"prefill_timeout_seconds": 0.2 if failure == "timeout" else 60, "max_body_bytes": 4096}


@pytest.mark.parametrize("asked", [ASKED, STREAMED], ids=["whole", "stream"])
@pytest.mark.parametrize("failure", PREFILL_FAILURES)
async def test_no_decode_without_its_prefill(failure: str, asked: dict[str, object]) -> None:
    behaviour, status, expected = PREFILL_FAILURES[failure]
    async with fleet(**limits(failure)) as (proxy, [prefill], [decode]):
        prefill.behaviour = behaviour
        got, body, headers = await proxy.ask(asked, headers={"X-Request-Id": "mine"})
        assert got == status
        assert headers["X-Request-Id"] == "mine"
        if isinstance(expected, bytes):
            assert body == expected
        else:
            error = json.loads(body)["error"]
            assert (error["code"], error["type"]) == (expected, "server_error")
            assert "prefill instance" in error["message"]
            assert "127.0.0.1" not in error["message"]
        assert decode.received == []
        await proxy.until_idle()
        assert await outcomes(proxy.metrics()) == {
            "prefill_refused" if isinstance(expected, bytes) else expected
        }


@pytest.mark.parametrize("failure", PREFILL_FAILURES)
async def test_concurrent_decode_is_withheld_and_cancelled(failure: str) -> None:
    behaviour, status, _ = PREFILL_FAILURES[failure]
    async with fleet(dispatch="concurrent", **limits(failure)) as (proxy, [prefill], [decode]):
        prefill.behaviour = behaviour
        decode.behaviour = Behaviour(hang=True)
        got, _, _ = await proxy.ask()
        assert got == status
        await until(lambda: all(r.ended == "left" for r in decode.received), "decode has ended")
        await proxy.until_idle()


async def test_a_retry_after_of_prefill_reaches_the_client() -> None:
    async with fleet() as (proxy, [prefill], _):
        prefill.behaviour = Behaviour(status=429, headers={"Retry-After": "7"}, body=REFUSAL)
        _, _, headers = await proxy.ask()
        assert headers["Retry-After"] == "7"


async def test_a_dead_prefill_is_not_asked_again_until_it_is_back() -> None:
    async with fleet(probe_interval_seconds=60.0) as (proxy, [prefill], [decode]):
        port = prefill.port
        await prefill.stop_serving()
        status, body, _ = await proxy.ask()
        assert (status, json.loads(body)["error"]["code"]) == (502, "prefill_failed")
        status, body, headers = await proxy.ask()
        assert (status, json.loads(body)["error"]["missing"]) == (503, ["prefill"])
        assert headers["Retry-After"] == "3"
        assert decode.received == []
        await prefill.start(port)


async def test_an_idle_connection_that_closes_as_we_write_is_no_failure() -> None:
    async with fleet() as (proxy, [prefill], [decode]):
        for double in (prefill, decode):
            double.behaviour = Behaviour(reset_reused=True)
        with patch("proxy.fleet.upstream.RACE_SECONDS", 20.0):
            for _ in range(10):
                status, _, _ = await proxy.ask()
                assert status == 200
        metrics = await proxy.metrics()
        assert metrics['p2p_proxy_resends_total{role="prefill"}'] >= 1
        assert metrics['p2p_proxy_resends_total{role="decode"}'] >= 1


async def test_a_connection_that_breaks_while_it_is_worked_on_is_no_such_case() -> None:
    """Asked again, decode would look for KV that is used up."""
    async with fleet() as (proxy, _, [decode]):
        assert (await proxy.ask())[0] == 200
        decode.behaviour = Behaviour(hang=True)
        answer = asyncio.ensure_future(proxy.ask())
        await until(lambda: len(decode.received) == 2, "decode is at work")
        with patch("proxy.fleet.upstream.RACE_SECONDS", 0.0):
            decode.break_connections()
            assert (await answer)[0] == 502
        assert len(decode.received) == 2


async def test_a_fresh_connection_that_breaks_is_not_tried_again() -> None:
    async with fleet() as (proxy, [prefill], [decode]):
        decode.behaviour = Behaviour(reset=True)
        status, body, _ = await proxy.ask()
        assert (status, json.loads(body)["error"]["code"]) == (502, "decode_failed")
        assert (len(prefill.received), len(decode.received)) == (1, 1)


@pytest.mark.parametrize("stage", ["headers", "first byte", "gap", "whole"])
async def test_a_silent_decode_ends_in_time(stage: str) -> None:
    long = dict.fromkeys(("first_byte", "gap", "response"), 60.0)
    limited = {"headers": "first_byte", "first byte": "first_byte", "whole": "response"}
    long[limited.get(stage, stage)] = 1.0 if stage == "gap" else 0.2  # two events come before it
    settings: dict[str, Any] = {f"{name}_timeout_seconds": long[name] for name in long}
    async with fleet(**settings) as (proxy, _, [decode]):
        decode.behaviour = {
            "headers": Behaviour(hang=True),
            "first byte": Behaviour(hang_after=0),
            "gap": Behaviour(hang_after=2),
            "whole": Behaviour(hang=True),
        }[stage]
        status, body, _ = await proxy.ask(ASKED if stage == "whole" else STREAMED)
        if stage != "gap":
            assert status == 504
            assert json.loads(body)["error"]["code"] == "decode_timeout"
        else:
            sent = b"".join(events(STREAMED)[:2])
            assert (status, body[: len(sent)]) == (200, sent)
            assert error_event(body[len(sent) :]) == "decode_timeout"
        await until(lambda: decode.received[0].ended == "left", "decode was told")
        await proxy.until_idle()


async def test_a_slow_but_steady_stream_is_not_cut() -> None:
    """It takes longer than any of its silences may."""
    names = ("first_byte", "gap", "client")
    settings: dict[str, Any] = {f"{name}_timeout_seconds": 3.0 for name in names}
    async with fleet(**settings) as (proxy, _, [decode]):
        decode.behaviour = Behaviour(pace=0.4)
        assert (await proxy.ask(STREAMED))[1] == b"".join(events(STREAMED))


async def test_a_cut_stream_ends_in_one_error_event_and_no_repeat() -> None:
    async with fleet() as (proxy, _, [decode]):
        half = events(STREAMED)[2][:9]
        decode.behaviour = Behaviour(pieces=[*events(STREAMED)[:2], half, b"never"], cut_after=3)
        status, body, _ = await proxy.ask(STREAMED)
        sent = b"".join(events(STREAMED)[:2]) + half
        assert (status, body[: len(sent)]) == (200, sent)
        assert error_event(body[len(sent) :]) == "decode_failed"
        assert len(decode.received) == 1
        await proxy.until_idle()
        assert await outcomes(proxy.metrics()) == {"decode_failed"}


async def test_a_cut_answer_that_is_no_stream_breaks_the_connection() -> None:
    """A client must not take half a JSON document for a whole one."""

    async with fleet() as (proxy, _, [decode]):
        decode.behaviour = Behaviour(
            pieces=[b'{"half": '], cut_after=1, headers={"Content-Length": "20"}
        )
        with pytest.raises(aiohttp.ClientPayloadError):
            await proxy.ask(STREAMED)
        await proxy.until_idle()


async def test_a_cut_stream_that_is_compressed_breaks_the_connection() -> None:
    """Plain text in the middle of a compressed stream would only be rubbish."""
    async with fleet() as (proxy, _, [decode]):
        headers = {"Content-Encoding": "unknown-to-the-client"}
        decode.behaviour = Behaviour(pieces=[b"\x1f\x8b", b""], cut_after=1, headers=headers)
        with pytest.raises(aiohttp.ClientPayloadError):
            await proxy.ask(STREAMED)
        await proxy.until_idle()


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'"x"', b"{", b'{"a": NaN}', b'{"a": 1} x', b"\xff{}", b'{"a":' + b"[" * 100_000],
    ids=["empty", "array", "string", "open", "nan", "rest", "bytes", "deep"],
)
async def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    async with fleet() as (proxy, [prefill], [decode]):
        async with proxy.client.post(f"{proxy.url}/v1/completions", data=body) as response:
            assert response.status == 400
            error = (await response.json())["error"]
        assert (error["code"], error["type"]) == ("invalid_json", "invalid_request_error")
        assert prefill.received == decode.received == []
        await proxy.until_idle()


async def test_limits_on_the_request_are_answered_in_json() -> None:
    async with fleet(max_body_bytes=1000, client_timeout_seconds=1.0) as (proxy, [prefill], _):
        status, body, _ = await proxy.ask({**ASKED, "prompt": "x" * 2000})
        assert (status, json.loads(body)["error"]["code"]) == (413, "bad_body")

        enough = asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield b"{"
            await enough.wait()

        async with proxy.client.post(f"{proxy.url}/v1/completions", data=slow()) as response:
            assert response.status == 408
            assert (await response.json())["error"]["code"] == "bad_body"
            enough.set()
        assert prefill.received == []
        await proxy.until_idle()
        assert await outcomes(proxy.metrics()) == {"bad_body"}


async def test_unknown_paths_and_methods_are_answered_in_json() -> None:
    async with fleet() as (proxy, _, _):
        async with proxy.client.get(f"{proxy.url}/v1/nothing") as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, "not_found")
        async with proxy.client.get(f"{proxy.url}/v1/completions") as response:
            assert response.status == 405
            assert (await response.json())["error"]["code"] == "method_not_allowed"


def error_event(rest: bytes) -> str:
    """Return the code in the one event that ends a cut stream."""
    lines = [line for line in rest.split(b"\n") if line]
    assert len(lines) == 1
    assert rest.startswith(b"\n\ndata: ")
    assert rest.endswith(b"\n\n")
    code: str = json.loads(lines[0].removeprefix(b"data: "))["error"]["code"]
    return code


async def outcomes(metrics: object) -> set[str]:
    """Return the outcomes of all requests that ended."""
    samples: dict[str, float] = await metrics  # type: ignore[misc]
    names = [name for name in samples if name.startswith("p2p_proxy_requests_total{")]
    return {name.split('outcome="')[1].split('"')[0] for name in names}


async def test_a_request_whose_answer_has_begun_is_not_sent_again() -> None:
    async with recorded() as (proxy, prefill, decode):
        assert (await proxy.ask())[0] == 200
        for instance, role in ((decode, "decode"), (prefill, "prefill")):
            asked, instance.closes = instance.answer, True
            before = len(instance.received)
            instance.answer = lambda _: b"HTTP/1.1 2"
            status, body, _ = await proxy.ask()
            assert (status, json.loads(body)["error"]["code"]) == (502, f"{role}_failed")
            assert len(instance.received) == before + 1
            instance.answer, instance.closes = asked, False
