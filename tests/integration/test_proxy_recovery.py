"""What fails before the first byte is tried elsewhere, and what nobody will use is let go of."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest

from p2p_engine.simulate.answers import completion, events
from p2p_engine.wire.messages import PROTOCOL_VERSION
from proxy.fleet.upstream import Upstream
from tests.doubles.server import Behaviour, ServerDouble
from tests.rigs.proxies import ASKED, STREAMED, RunningProxy, fleet, until

ID_LENGTH = 32


def transfer_ids(double: ServerDouble) -> list[str]:
    """Return the transfer id of each request that an instance got."""
    return [received.headers["X-Request-Id"][-ID_LENGTH:] for received in double.received]


async def test_a_probe_that_raises_is_made_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_raised, get = 0, Upstream.get

    async def raising(self: Upstream, *arguments: Any, **options: Any) -> tuple[int, bytes]:
        nonlocal num_raised
        if num_raised < 4:
            num_raised += 1
            raise RuntimeError("nobody expected this")
        return await get(self, *arguments, **options)

    monkeypatch.setattr(Upstream, "get", raising)
    async with fleet() as (proxy, _, _):
        assert (await proxy.ask(ASKED))[0] == 200
    assert num_raised == 4
    assert "nobody expected this" in caplog.text


@pytest.mark.parametrize("dispatch", ["sequential", "concurrent"])
@pytest.mark.parametrize(
    "failure", [Behaviour(reset=True), Behaviour(status=503), Behaviour(status=502)]
)
async def test_a_failed_prefill_is_done_by_another(failure: Behaviour, dispatch: str) -> None:
    async with fleet(2, 2, dispatch=dispatch) as (proxy, [bad, good], decodes):
        bad.behaviour = failure
        for asked in (ASKED, STREAMED, ASKED, STREAMED):
            status, body, _ = await proxy.ask(asked)
            assert status == 200
            if asked is STREAMED:
                assert body == b"".join(events(STREAMED))
            else:
                assert json.loads(body) == completion(ASKED, None)
        assert bad.received
        assert not set(transfer_ids(bad)) & set(transfer_ids(good))
        if dispatch == "sequential":
            tried = [transfer_id for double in decodes for transfer_id in transfer_ids(double)]
            assert sorted(tried) == sorted(transfer_ids(good))
        await proxy.until_idle()
        assert (await proxy.metrics())["p2p_proxy_retries_total"] == len(bad.received)


async def test_a_decode_that_is_gone_is_replaced_with_a_prefill_of_its_own() -> None:
    async with fleet(1, 2, probe_interval_seconds=60.0) as (proxy, [prefill], [gone, stays]):
        await gone.stop_serving()
        for _ in range(3):
            assert (await proxy.ask())[0] == 200
        assert transfer_ids(stays) == [i for i in transfer_ids(prefill) if i in transfer_ids(stays)]
        assert len(set(transfer_ids(prefill))) == len(prefill.received) == 4
        await proxy.until_idle()


@pytest.mark.parametrize("asked", [ASKED, STREAMED], ids=["whole", "stream"])
async def test_kv_that_does_not_arrive_is_computed_by_another_prefill(
    asked: dict[str, object],
) -> None:
    """Decode says 500 of it, time and again, and stays in use."""
    async with fleet(2, 1, breaker_failures=2) as (proxy, [lost, good], [decode]):
        lost.behaviour = Behaviour(body=b'{"choices": [{}], "kv_transfer_params": {"lost": true}}')
        decode.fails_if = lambda sent: "lost" in sent.get("kv_transfer_params", {})
        for _ in range(8):
            assert (await proxy.ask(asked))[0] == 200
        assert lost.received
        assert len(good.received) == 8
        assert set((await breakers(proxy, decode)).values()) == {"closed"}
        await good.leave()
        await until(lambda: only(proxy, lost, decode), "one prefill is left")
        decode.fails_if = lambda _: True
        for _ in range(4):
            status, body, _ = await proxy.ask(asked)
            error = json.loads(body)["error"]
            assert (status, error["code"]) == (500, "decode_failed")
            assert "load failed" in error["message"]
        assert set((await breakers(proxy, decode)).values()) == {"closed"}


@pytest.mark.parametrize("asked", [ASKED, STREAMED], ids=["whole", "stream"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_what_a_stopping_instance_does_not_compute_is_done_by_another(
    role: str, asked: dict[str, object]
) -> None:
    """It answers 200, without a token, to what comes before its last heartbeat is heard."""
    async with fleet(2, 2) as (proxy, prefills, decodes):
        stopping = (prefills if role == "prefill" else decodes)[0]
        whole = b'{"choices":[{"index":0,"text":"","finish_reason":"abort"}],"usage":null}'
        stopping.behaviour = Behaviour(body=whole)
        if role == "decode" and asked is STREAMED:
            stopping.behaviour = Behaviour(pieces=[b"data: " + whole + b"\n\n"])
        right = b"".join(events(STREAMED)) if asked is STREAMED else completion(ASKED, None)
        for _ in range(4):
            status, body, _ = await proxy.ask(asked)
            assert (status, body if asked is STREAMED else json.loads(body)) == (200, right)
        assert stopping.received
        await proxy.until_idle()


async def test_a_stream_that_breaks_before_its_first_event_is_done_by_another() -> None:
    async with fleet(1, 2) as (proxy, _, [broken, good]):
        broken.behaviour = Behaviour(cut_after=0)
        for _ in range(4):
            assert (await proxy.ask(STREAMED))[:2] == (200, b"".join(events(STREAMED)))
        assert broken.received
        assert len(good.received) == 4
        await proxy.until_idle()


async def only(proxy: RunningProxy, *doubles: ServerDouble) -> bool:
    """Tell whether these are all that the proxy knows."""
    return set(await proxy.states()) == {double.http_address for double in doubles}


async def test_tries_are_limited_and_the_last_failure_is_told() -> None:
    async with fleet(4, 1, max_retries=1) as (proxy, prefills, [decode]):
        for double in prefills:
            double.behaviour = Behaviour(status=503)
        status, body, headers = await proxy.ask()
        assert (status, json.loads(body)["error"]["code"]) == (503, "prefill_failed")
        assert headers["Retry-After"]
        assert sum(len(double.received) for double in prefills) == 2
        assert decode.received == []
        await proxy.until_idle()


@pytest.mark.parametrize("status", [400, 404, 429, 501])
async def test_what_is_due_to_the_request_is_tried_once(status: int) -> None:
    async with fleet(2, 1) as (proxy, prefills, _):
        for double in prefills:
            double.behaviour = Behaviour(status=status, body=b"{}")
        await proxy.ask()
        assert sum(len(double.received) for double in prefills) == 1


async def test_what_two_prefills_fail_at_is_due_to_the_request() -> None:
    async with fleet(3, 1, breaker_failures=1) as (proxy, prefills, _):
        for double in prefills:
            double.behaviour = Behaviour(status=500)
        for number in range(4):
            assert (await proxy.ask())[0] == 502
            assert sum(len(double.received) for double in prefills) == 2 * (number + 1)
        for double in prefills:
            assert set((await breakers(proxy, double)).values()) == {"closed"}


async def test_a_prefill_that_fails_at_what_another_can_do_is_passed_over() -> None:
    """It answers 500 to all, while its `/health` says that it is well."""
    async with fleet(2, 1, breaker_failures=3) as (proxy, [broken, good], _):
        broken.behaviour = Behaviour(status=500)
        for _ in range(8):
            assert (await proxy.ask())[0] == 200
        assert len(broken.received) == 3
        assert (await breakers(proxy, broken))["prefill"] == "open"
        assert (await breakers(proxy, good))["prefill"] == "closed"


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_who_falls_silent_has_used_up_the_request_s_time(role: str) -> None:
    """No other pair is tried: the client would wait for the same limit once more."""
    limit = "prefill" if role == "prefill" else "first_byte"
    settings: dict[str, Any] = {f"{limit}_timeout_seconds": 0.3}
    async with fleet(2, 2, **settings) as (proxy, prefills, decodes):
        silent = prefills if role == "prefill" else decodes
        for double in silent:
            double.behaviour = Behaviour(hang=True)
        status, body, _ = await proxy.ask(STREAMED)
        assert (status, json.loads(body)["error"]["code"]) == (504, f"{role}_timeout")
        assert sum(len(double.received) for double in silent) == 1


async def test_nothing_is_tried_again_after_the_first_byte() -> None:
    async with fleet(2, 2) as (proxy, prefills, decodes):
        for double in decodes:
            double.behaviour = Behaviour(cut_after=1)
        status, body, _ = await proxy.ask(STREAMED)
        assert status == 200
        assert body.count(b'"error":') == 1
        assert body.startswith(events(STREAMED)[0])
        assert sum(len(double.received) for double in (*prefills, *decodes)) == 2


@pytest.mark.parametrize("protocol", [PROTOCOL_VERSION, None])
async def test_kv_that_decode_refuses_to_use_is_let_go_of(protocol: int | None) -> None:
    """Its own refusal came before it looked for KV: it is asked for one token in its place."""
    async with fleet(protocol=protocol) as (proxy, [prefill], [decode]):
        decode.behaviour = Behaviour(status=400, body=b'{"error": "max_tokens"}')
        status, body, _ = await proxy.ask({**STREAMED, "max_tokens": 0})
        assert (status, body) == (400, b'{"error": "max_tokens"}')
        await until(lambda: len(decode.received) == 2, "the KV was let go of")
        refused, release = decode.received
        assert release.headers["X-Request-Id"] == refused.headers["X-Request-Id"]
        assert (release.json["max_tokens"], release.json["stream"]) == (1, False)
        assert release.json.get("kv_transfer_params") == refused.json.get("kv_transfer_params")
        assert len(prefill.received) == 1
        await proxy.until_idle()
        await until_counted(proxy, 'p2p_proxy_releases_total{result="refused"}')


async def test_kv_that_decode_uses_is_not_let_go_of() -> None:
    async with fleet(dispatch="concurrent") as (proxy, _, [decode]):
        for _ in range(3):
            assert (await proxy.ask())[0] == 200
        await proxy.until_idle()
        assert len(decode.received) == 3


async def test_a_prompt_that_is_too_long_is_the_clients_fault() -> None:
    said = {"error": {"message": "This model's maximum context length is 4096 tokens."}}
    long = Behaviour(status=500, body=json.dumps(said).encode())
    async with fleet(1, 1) as (proxy, [prefill], [decode]):
        prefill.behaviour = long
        for _ in range(10):
            status, body, _ = await proxy.ask()
            error = json.loads(body)["error"]
            assert (status, error["code"]) == (400, "context_length_exceeded")
            assert error["message"] == said["error"]["message"]
        prefill.behaviour, decode.behaviour = Behaviour(), long
        assert (await proxy.ask())[0] == 400
        assert await breakers(proxy, prefill) == {"prefill": "closed", "decode": "closed"}


async def test_client_errors_leave_the_breaker_closed() -> None:
    async with fleet() as (proxy, [prefill], [decode]):
        for double in (prefill, decode):
            double.behaviour = Behaviour(status=400, body=b"{}")
            for _ in range(20):
                assert (await proxy.ask())[0] == 400
            assert set((await breakers(proxy, double)).values()) == {"closed"}
            double.behaviour = Behaviour()


async def test_a_failing_instance_is_passed_over_until_one_probe_succeeds() -> None:
    async with fleet(2, 1, breaker_failures=3, breaker_seconds=0.3) as (proxy, [bad, _], _):
        bad.behaviour = Behaviour(reset=True)
        answers = Counter([(await proxy.ask())[0] for _ in range(12)])
        assert len(bad.received) >= 3
        assert (await breakers(proxy, bad))["prefill"] in ("open", "half_open")
        assert answers[200] == 12
        bad.behaviour = Behaviour()

        async def is_closed() -> bool:
            assert (await proxy.ask())[0] == 200
            return (await breakers(proxy, bad))["prefill"] == "closed"

        await until(is_closed, "one probe closes the breaker")


async def test_an_open_breaker_means_no_instance_and_not_busy() -> None:
    async with fleet(breaker_failures=1, breaker_seconds=60.0) as (proxy, [prefill], [decode]):
        prefill.behaviour = Behaviour(reset=True)
        assert (await proxy.ask())[0] == 502
        status, body, headers = await proxy.ask()
        assert (status, json.loads(body)["error"]["missing"]) == (503, ["prefill"])
        assert 50 < int(headers["Retry-After"]) <= 60
        assert decode.received == []


@pytest.mark.parametrize("status", [500, 501])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_what_may_be_due_to_the_request_opens_no_breaker(role: str, status: int) -> None:
    async with fleet(breaker_failures=2) as (proxy, [prefill], [decode]):
        double = prefill if role == "prefill" else decode
        double.behaviour = Behaviour(status=status)
        for _ in range(6):
            assert (await proxy.ask())[0] in (500, 501, 502)
        assert set((await breakers(proxy, double)).values()) == {"closed"}
        double.behaviour = Behaviour()
        assert (await proxy.ask())[0] == 200


async def test_an_answer_of_prefill_that_is_too_long_opens_no_breaker() -> None:
    """Its length may be due to the request: to its number of choices and prompts."""
    async with fleet(breaker_failures=2, max_body_bytes=4096) as (proxy, [prefill], [decode]):
        prefill.behaviour = Behaviour(body=json.dumps(completion(ASKED)).encode() + b" " * 5000)
        for _ in range(6):
            status, body, _ = await proxy.ask()
            assert (status, json.loads(body)["error"]["code"]) == (502, "prefill_bad_answer")
        await until(lambda: len(decode.received) == 6, "decode takes the KV for nobody")
        assert {each.json["max_tokens"] for each in decode.received} == {1}
        prefill.behaviour = Behaviour()
        assert (await proxy.ask())[0] == 200


async def test_busy_and_nobody_there_are_told_apart() -> None:
    release = asyncio.Event()
    limits = {"max_in_flight_per_instance": 2, "max_queued": 1}
    async with fleet(**limits) as (proxy, [prefill], [decode]):
        decode.behaviour = Behaviour(hold=release)
        running = [asyncio.ensure_future(proxy.ask()) for _ in range(2)]
        await until(lambda: len(decode.received) == 2, "all room is taken")
        queued = asyncio.ensure_future(proxy.ask())

        async def is_queued() -> bool:
            return bool((await proxy.status())["requests_queued"])

        await until(is_queued, "one waits")
        status, body, headers = await proxy.ask()
        assert (status, json.loads(body)["error"]["code"]) == (429, "queue_full")
        assert headers["Retry-After"]
        assert len(prefill.received) == 2
        release.set()
        assert [(await answer)[0] for answer in (*running, queued)] == [200] * 3
        await proxy.until_idle()


async def test_leaving_the_queue_leaves_nothing_behind() -> None:
    async with fleet(max_in_flight=1) as (proxy, [prefill], _):
        prefill.behaviour = Behaviour(hang=True)
        first, second = (asyncio.ensure_future(proxy.ask()) for _ in range(2))

        async def is_queued() -> bool:
            return bool((await proxy.status())["requests_queued"])

        await until(is_queued, "one waits")
        for answer in (first, second):
            answer.cancel()
        await proxy.until_idle()
        assert (await proxy.status())["requests_queued"] == 0
        assert len(prefill.received) == 1


async def breakers(proxy: RunningProxy, double: ServerDouble) -> dict[str, str]:
    """Return the states of an instance's breakers by role."""
    shown = {i["http_address"]: i["breaker"] for i in (await proxy.status())["instances"]}
    states: dict[str, str] = shown[double.http_address]
    return states


async def until_counted(proxy: RunningProxy, name: str) -> None:
    """Wait until a counter is not zero."""

    async def is_counted() -> bool:
        return bool((await proxy.metrics()).get(name, 0))

    await until(is_counted, f"{name} has counted")
