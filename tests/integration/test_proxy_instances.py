"""Instances that somebody lists, adds, drains and removes; and several proxies before them."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from p2p_engine.simulate.answers import events
from proxy.fleet.tries import TRIES_OF_ONE
from tests.doubles.server import Behaviour, ServerDouble
from tests.rigs.proxies import STREAMED, RunningProxy, fleet, running_proxy, until

KEY = "open sesame"


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "admin.key"
    path.write_text(KEY + "\n")
    path.chmod(0o600)
    return str(path)


async def order(
    proxy: RunningProxy, verb: str, body: Any, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    """Send an order with the key, unless other headers are given."""
    sent = {"X-Api-Key": KEY} if headers is None else headers
    url = f"{proxy.url}/instances/{verb}"
    async with proxy.client.post(url, data=json.dumps(body), headers=sent) as response:
        return response.status, await response.json()


@asynccontextmanager
async def silent(*kinds: str) -> AsyncIterator[list[ServerDouble]]:
    """Run instances that send no heartbeats."""
    doubles = [ServerDouble(kind) for kind in kinds]
    for double in doubles:
        await double.start()
    try:
        yield doubles
    finally:
        for double in doubles:
            await double.stop()


async def test_the_log_has_every_order(key_file: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with silent("D") as (decode,), running_proxy(admin_key_file=key_file) as proxy:
        name = decode.http_address
        await order(proxy, "add", {"instance": name, "type": "decode"})
        await order(proxy, "remove", {"instance": name}, headers={"X-Api-Key": "wrong"})
        await order(proxy, "remove", {"instance": name})
    orders = [text for text in caplog.messages if " by=" in text]
    assert orders == [
        f"instance added http={name} by=127.0.0.1",
        f"instance removed http={name} by=127.0.0.1 drain=True",
    ]


@pytest.mark.parametrize("dispatch", ["sequential", "concurrent"])
@pytest.mark.parametrize("knows_kv", [True, False])
async def test_listed_instances_need_no_heartbeat(knows_kv: bool, dispatch: str) -> None:
    async with silent("P", "D") as (prefill, decode):
        listed = {
            name: double.http_address + (f"@{double.zmq_address}" if knows_kv else "")
            for name, double in (("prefill", prefill), ("decode", decode))
        }
        async with running_proxy(dispatch=dispatch, **listed) as proxy:
            await proxy.until_ready(prefill, decode)
            assert (await proxy.ask(STREAMED))[1] == b"".join(events(STREAMED))
            first, second = prefill.received[0], decode.received[0]
            identifier = first.headers["X-Request-Id"]
            assert identifier == second.headers["X-Request-Id"]
            assert bool(re.fullmatch("[0-9a-f]{32}", identifier)) is not knows_kv
            told = first.json["kv_transfer_params"]
            assert (told["remote_port"] is not None) is knows_kv
            # Decode learns it from us, or from prefill's answer.
            answered = second.json["kv_transfer_params"]
            assert answered["transfer_id"] == told["transfer_id"] == identifier[-32:]
            assert f"{answered['remote_host']}:{answered['remote_port']}" == prefill.zmq_address
            await proxy.until_idle()


async def test_a_listed_instance_that_does_not_answer_gets_nothing() -> None:
    async with silent("P", "D") as (prefill, decode):
        prefill.health_status = 503
        listed = {"both": f"{prefill.http_address},{decode.http_address}"}
        async with running_proxy(**listed) as proxy:
            await proxy.until_ready(decode)
            assert (await proxy.ask())[0] == 503
            prefill.health_status = 200
            await proxy.until_ready(prefill)
            assert (await proxy.ask())[0] == 200


@pytest.mark.parametrize("form", ["instance", "instances", "list"])
async def test_an_instance_is_added_and_removed(form: str, key_file: str) -> None:
    async with silent("D") as [new], fleet(1, 0, admin_key_file=key_file) as (proxy, _, _):
        assert (await proxy.ask())[0] == 503
        address: Any = [new.http_address] if form == "list" else new.http_address
        key = "instance" if form == "instance" else "instances"
        body = {"type": "decode", key: address, "zmq_address": new.zmq_address, "model": "tiny"}
        status, answer = await order(proxy, "add", body)
        assert (status, answer["message"]) == (
            200,
            f"Added {new.http_address} to decode_instances.",
        )
        await proxy.until_ready(new)
        assert (await proxy.ask())[0] == 200
        status, answer = await order(proxy, "remove", {key: address})
        assert status == 200
        [shown] = answer["instances"]
        assert (shown["instance"], shown["state"]) == (new.http_address, "drained")
        assert new.http_address not in await proxy.states()
        assert (await proxy.ask())[0] == 503


async def test_an_instance_changes_its_role_when_what_it_does_has_ended(key_file: str) -> None:
    """A role that it keeps goes on meanwhile, and no request fails."""
    release = asyncio.Event()
    async with silent(*["PD"] * 3) as doubles:
        one, other, third = doubles
        listed = ",".join(f"{double.http_address}@{double.zmq_address}" for double in doubles)
        async with running_proxy(admin_key_file=key_file, both=listed) as proxy:
            await proxy.until_ready(*doubles)

            async def change(double: ServerDouble, to: str) -> list[str]:
                status, answer = await order(
                    proxy, "role", {"instance": double.http_address, "type": to}
                )
                assert status == 200
                roles: list[str] = answer["instances"][0]["roles"]
                return roles

            for double, role in ((one, "prefill"), (other, "decode"), (third, "prefill")):
                assert await change(double, role) == [role]
            other.behaviour = Behaviour(hold_after=(1, release))
            async with proxy.post(STREAMED) as response:
                first = await response.content.readany()
                assert len(other.received) == 1
                assert await change(other, "prefill") == []
                assert await change(third, "decode") == ["decode"]
                assert (await proxy.ask())[0] == 200
                assert len(other.received) == 1
                release.set()
                assert first + await response.read() == b"".join(events(STREAMED))
            await proxy.until_idle()
            assert await change(other, "prefill") == ["prefill"]
            assert await change(one, "decode") == ["decode"]
            other.behaviour = Behaviour()
            for _ in range(4):
                assert (await proxy.ask())[0] == 200
            assert len(other.received) == 5  # every prompt
            assert await change(one, "both") == ["prefill", "decode"]


async def test_a_role_that_an_instance_was_not_started_for_is_refused(key_file: str) -> None:
    async with fleet(1, 1, admin_key_file=key_file) as (proxy, [prefill], _):
        name = prefill.http_address
        for body, expected in (
            ({"instance": name, "type": "decode"}, (409, "role_not_announced")),
            ({"instance": name, "type": "both"}, (409, "role_not_announced")),
            ({"instance": name, "type": "drums"}, (400, "invalid_request")),
            ({"instance": "127.0.0.1:1", "type": "both"}, (404, "unknown_instance")),
        ):
            status, answer = await order(proxy, "role", body)
            assert (status, answer["error"]["code"]) == expected
        status, _ = await order(proxy, "role", {"instance": name, "type": "prefill"})
        assert status == 200
        assert (await proxy.ask())[0] == 200
        assert (await order(proxy, "role", {}, headers={}))[0] == 401


async def test_draining_lets_what_runs_end_and_begins_nothing(key_file: str) -> None:
    release = asyncio.Event()
    async with fleet(1, 2, admin_key_file=key_file) as (proxy, _, [one, other]):
        one.behaviour = other.behaviour = Behaviour(hold_after=(1, release))
        async with proxy.post(STREAMED) as response:
            first = await response.content.readany()
            leaving, staying = (one, other) if one.received else (other, one)
            staying.behaviour = Behaviour()
            _, answer = await order(proxy, "remove", {"instance": leaving.http_address})
            assert answer["instances"][0]["state"] == "draining"
            for _ in range(4):
                assert (await proxy.ask())[0] == 200
            assert (len(leaving.received), len(staying.received)) == (1, 4)
            await leaving.beat_once()  # its heartbeats do not bring it back
            assert (await proxy.states())[leaving.http_address] == "draining"
            release.set()
            assert first + await response.read() == b"".join(events(STREAMED))
        await proxy.until_state(leaving, "drained")
        status, _ = await order(proxy, "add", {"instance": leaving.http_address})
        assert status == 200
        assert (await proxy.states())[leaving.http_address] == "ready"
        await order(proxy, "remove", {"instance": leaving.http_address})
        leaving.epoch = 2
        await leaving.beat_once()  # but a restart does
        await proxy.until_state(leaving, "ready")


async def test_a_drain_has_a_deadline(key_file: str) -> None:
    async with fleet(1, 1, admin_key_file=key_file) as (proxy, _, [decode]):
        decode.behaviour = Behaviour(hang_after=1)
        async with proxy.post(STREAMED) as response:
            await response.content.readany()
            body = {"instance": decode.http_address, "timeout_seconds": 0.05}
            await order(proxy, "remove", body)
            await proxy.until_state(decode, "drained")
            assert (await proxy.in_flight(decode))["decode"] == 1  # it is not cut


@pytest.mark.parametrize(
    ("verb", "more", "named"),
    [
        ("add", {"zmq_adress": "127.0.0.1:2"}, "zmq_adress"),
        ("remove", {"drian": False}, "drian"),
        ("remove", {"timeout_seconds": -1}, "timeout_seconds"),
    ],
)
async def test_orders_that_say_what_nobody_knows_are_refused_by_name(
    verb: str, more: dict[str, Any], named: str, key_file: str
) -> None:
    async with fleet(1, 1, admin_key_file=key_file) as (proxy, _, [decode]):
        body = {"type": "decode", "instance": decode.http_address, **more}
        status, answer = await order(proxy, verb, body)
        assert (status, answer["error"]["code"]) == (400, "invalid_request")
        assert named in answer["error"]["message"]
        assert (await proxy.status())["instances"][1]["state"] == "ready"


async def test_orders_need_the_key(key_file: str) -> None:
    body = {"type": "decode", "instance": "127.0.0.1:1"}
    async with running_proxy(admin_key_file=key_file) as proxy:
        for headers in ({}, {"X-Api-Key": "x"}, {"Authorization": "Bearer x"}, {"X-Api-Key": "é"}):
            for verb in ("add", "remove"):
                status, answer = await order(proxy, verb, body, headers)
                assert (status, answer["error"]["code"]) == (401, "unauthorized")
        assert (await proxy.status())["instances"] == []
        assert (await order(proxy, "add", body, {"Authorization": f"Bearer {KEY}"}))[0] == 200
    async with running_proxy() as proxy:
        status, answer = await order(proxy, "add", body)
        assert (status, answer["error"]["code"]) == (403, "admin_disabled")


OF_A_PAGE = {"X-Api-Key": KEY, "Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-Fetch-Site": "same-origin", "Origin": "https://front"}, 404),
        ({"Sec-Fetch-Site": "none"}, 404),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "OWN"}, 404),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://["}, 403),
        ({"Origin": "OWN", "Content-Type": "text/plain"}, 403),
        ({"Origin": "OWN", "Content-Type": "application/x-www-form-urlencoded"}, 403),
        ({"Content-Type": "text/plain"}, 404),  # no browser
    ],
)
async def test_no_page_of_another_site_gives_orders(
    headers: dict[str, str], status: int, key_file: str
) -> None:
    async with running_proxy(admin_key_file=key_file) as proxy:
        sent = {**OF_A_PAGE, **{k: v.replace("OWN", proxy.url) for k, v in headers.items()}}
        got, answer = await order(proxy, "remove", {"instance": "127.0.0.1:9"}, sent)
        assert got == status
        assert (answer["error"]["code"] == "cross_site") is (status == 403)


async def test_wrong_keys_are_counted(key_file: str) -> None:
    async with running_proxy(admin_key_file=key_file) as proxy:
        codes = []
        for number in range(TRIES_OF_ONE + 3):
            _, answer = await order(proxy, "remove", {}, {"X-Api-Key": f"guess {number}"})
            codes.append(answer["error"]["code"])
        assert codes == ["unauthorized"] * TRIES_OF_ONE + ["too_many_tries"] * 3


async def test_addresses_that_no_instance_has_are_not_added(key_file: str, free_port: int) -> None:
    async with running_proxy(admin_key_file=key_file, port=free_port) as proxy:
        for address in ("169.254.169.254:80", f"127.0.0.1:{free_port}", "[fe80::1]:80"):
            status, answer = await order(proxy, "add", {"type": "both", "instance": address})
            assert (status, answer["error"]["code"]) == (400, "invalid_address")


@pytest.mark.parametrize(
    ("verb", "body", "status"),
    [
        ("add", [], 400),
        ("add", {"type": "decode"}, 400),
        ("add", {"type": "router", "instance": "127.0.0.1:1"}, 400),
        ("add", {"instance": "127.0.0.1:1"}, 400),
        ("add", {"type": "decode", "instance": "127.0.0.1"}, 400),
        ("add", {"type": "decode", "instance": "127.0.0.1:1/x"}, 400),
        ("add", {"type": "decode", "instance": "169.254.169.254:80"}, 400),
        ("add", {"type": "decode", "instance": "127.0.0.1:1", "zmq_address": "evil:1"}, 400),
        ("add", {"type": "decode", "instances": [f"127.0.0.1:{p}" for p in range(1, 9)]}, 409),
        ("remove", {"instance": "127.0.0.1:9"}, 404),
        ("remove", {}, 400),
    ],
)
async def test_orders_that_cannot_be_are_explained(
    verb: str, body: Any, status: int, key_file: str
) -> None:
    limits: dict[str, Any] = {"allowed_addresses": "127.0.0.1", "max_instances": 4}
    async with running_proxy(admin_key_file=key_file, **limits) as proxy:
        got, answer = await order(proxy, verb, body)
        assert (got, answer["error"]["type"]) == (status, "invalid_request_error")


async def test_one_that_begins_to_beat_lives_by_its_heartbeats(key_file: str) -> None:
    async with silent("D") as [new], fleet(1, 0, admin_key_file=key_file) as (proxy, _, _):
        await order(proxy, "add", {"type": "decode", "instance": new.http_address})
        await proxy.until_ready(new)
        new.beat(proxy.registration_address)

        async def beats() -> bool:
            shown = {i["http_address"]: i for i in (await proxy.status())["instances"]}
            return shown[new.http_address]["heartbeat_age_seconds"] is not None

        await until(beats, "a heartbeat has come")
        await new.leave()
        await proxy.until_state(new, "")


async def test_proxies_tell_each_other_of_heartbeats() -> None:
    """Both know all instances, whichever proxy these beat to, and no beat goes round in circles."""
    async with ServerDouble("P") as prefill, ServerDouble("D") as decode, running_proxy() as second:
        async with running_proxy(peers=second.registration_address) as first:
            for double in (prefill, decode):
                double.beat(first.registration_address)
            for proxy in (first, second):
                await proxy.until_ready(prefill, decode)
                assert (await proxy.ask(STREAMED))[1] == b"".join(events(STREAMED))
        assert (await second.ask())[0] == 200  # the other is gone: it lives on for three beats
