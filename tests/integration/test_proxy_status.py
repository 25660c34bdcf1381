"""The status page, what feeds it, and the dashboard."""

from __future__ import annotations

import asyncio
import json
import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest

from proxy.app import create_app
from proxy.config import ProxyConfig
from proxy.status import MAX_VIEWERS
from tests.doubles.server import Behaviour, ServerDouble
from tests.rigs.proxies import STREAMED, RunningProxy, fleet, running_proxy, until

DASHBOARD = Path(__file__).parents[2] / "grafana" / "p2p-proxy.json"


async def picture(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """Return the next event of a stream."""
    line = await response.content.readuntil(b"\n\n")
    content: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
    return content


async def test_the_page_needs_nothing_from_elsewhere() -> None:
    async with running_proxy() as proxy, proxy.client.get(f"{proxy.url}/") as response:
        page = await response.text()
        assert (response.status, response.content_type) == (200, "text/html")
        policy = response.headers["Content-Security-Policy"]
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    hashes = [b64encode(sha256(script.encode()).digest()).decode() for script in scripts]
    assert f"script-src 'sha256-{hashes[0]}'; " in policy
    assert len(hashes) == page.count("<script") == 1
    assert {"default-src 'none'", "frame-ancestors 'none'"} <= set(policy.split("; "))
    assert not re.search(r"(?:src|href)=\"(?!data:)|https?://|@import| on\w+=\"", page)
    assert not re.search(r"(?:inner|outer)HTML|insertAdjacent|document\.write|eval|Function", page)
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page


async def test_no_name_of_an_instance_ends_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In the stream of events, in the metrics and in the log."""
    model = "</script>\r\n\r\ndata: {}\n\u2028\x1b[2J\x00" + 'quo"te\\'
    async with running_proxy() as proxy, ServerDouble("D", model=model) as decode:
        decode.beat(proxy.registration_address)
        await proxy.until_ready(decode)
        async with proxy.client.get(f"{proxy.url}/status/events") as response:
            shown = await picture(response)
        assert shown["instances"][0]["model"] == model
        assert all(name.startswith("p2p_proxy_") for name in await proxy.metrics() if "{" in name)
    joined = [record for record in caplog.records if "instance joined" in record.getMessage()]
    assert joined
    assert all(record.getMessage().isprintable() for record in joined)


async def test_events_show_what_runs_and_what_has_ended() -> None:
    release = asyncio.Event()
    async with fleet() as (proxy, [prefill], [decode]):
        assert (await proxy.ask())[0] == 200
        decode.behaviour = Behaviour(hold_after=(1, release))
        async with proxy.post(STREAMED) as running:
            await running.content.readany()
            async with proxy.client.get(f"{proxy.url}/status/events") as response:
                assert response.content_type == "text/event-stream"
                seen = await picture(response)
                assert seen["pairs"] == [
                    {
                        "prefill": prefill.http_address,
                        "decode": decode.http_address,
                        "requests": 1,
                        "kv_bytes": 0,  # its heartbeats do not say what a token takes
                    }
                ]
                [ended] = seen["recent"]
                assert (ended["status"], ended["outcome"]) == (200, "ok")
                assert str(STREAMED["prompt"]) not in json.dumps(seen)
                shown = {i["http_address"]: i for i in seen["instances"]}[decode.http_address]
                assert (shown["state"], shown["events_sent"]) == ("ready", 1)
                release.set()
                await running.read()

                async def has_ended() -> bool:  # an older picture may be on its way
                    return len((await picture(response))["recent"]) == 2

                await until(has_ended, "both have ended")


async def test_kv_is_counted_by_pair() -> None:
    answer = b'{"choices": [{}], "usage": {"prompt_tokens": 100}}'
    async with ServerDouble("P") as prefill, fleet(0, 2) as (proxy, _, decodes):
        prefill.behaviour = Behaviour(body=answer)
        prefill.kv_bytes_per_token = 1000
        prefill.beat(proxy.registration_address)
        await proxy.until_ready(prefill)
        await proxy.ask()
        await proxy.ask({**STREAMED, "n": 3, "temperature": 1})
        async with proxy.client.get(f"{proxy.url}/status/events") as response:
            pairs = (await picture(response))["pairs"]
        assert {pair["prefill"] for pair in pairs} == {prefill.http_address}
        assert {pair["decode"] for pair in pairs} == {double.http_address for double in decodes}
        assert [pair["kv_bytes"] for pair in pairs] == [300_000, 100_000]


async def test_viewers_are_bounded_and_leave_no_trace() -> None:
    async with running_proxy() as proxy:
        url = f"{proxy.url}/status/events"
        viewers = [await proxy.client.get(url) for _ in range(MAX_VIEWERS)]
        for viewer in viewers:
            await picture(viewer)
        async with proxy.client.get(url) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (
                429,
                "too_many_viewers",
            )
        for viewer in viewers:
            viewer.close()
        await until(lambda: can_view(proxy), "there is room for another viewer")


async def can_view(proxy: RunningProxy) -> bool:
    async with proxy.client.get(f"{proxy.url}/status/events") as response:
        return response.status == 200


async def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    async with fleet() as (proxy, _, _):
        await proxy.ask()
        async with proxy.client.get(f"{proxy.url}/metrics") as response:
            text = await response.text()
    declared = set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))
    asked = set(re.findall(r"p2p_proxy_\w+", DASHBOARD.read_text()))
    assert {name.removesuffix("_bucket") for name in asked} <= declared


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_no_page_reads_the_body_of_a_request(method: str) -> None:
    """What is not asked for waits in the server, which holds 64 KiB of it at the most."""
    app = create_app(ProxyConfig(registration_host="127.0.0.1"))
    assert "/status/events" in app._pages
    for path in app._pages:
        sent = list[dict[str, Any]]()

        async def receive() -> Any:
            raise AssertionError("the body is read")

        async def send(message: Any, sent: list[dict[str, Any]] = sent) -> None:
            sent.append(message)

        scope: dict[str, Any] = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": [],
            "client": None,
        }
        serving = asyncio.ensure_future(app(cast("Any", scope), receive, send))
        await until(lambda sent=sent: len(sent) >= 2, "it answers")  # type: ignore[misc]
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        assert sent[0]["status"] in (200, 500)  # discovery does not run
        assert not serving.cancelled() or (method, path) == ("GET", "/status/events")
