"""Instances come, stay while they beat and answer, and go; nothing else registers."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgpack  # type: ignore[import-untyped]
import pytest
import zmq
import zmq.asyncio

from p2p_engine import bounded
from p2p_engine.simulate.answers import events
from p2p_engine.wire.messages import PROTOCOL_VERSION
from p2p_engine.wire.request_ids import parse_proxy_id
from proxy.fleet.discovery import MAX_WARNED
from tests.doubles.server import Behaviour, ServerDouble
from tests.rigs.proxies import STREAMED, RunningProxy, fleet, running_proxy, until

if TYPE_CHECKING:
    from tests.support import SeededRandom

GOOD = {"type": "P", "http_address": "127.0.0.1:1", "zmq_address": "127.0.0.1:2"}
BAD_BEATS: dict[str, Any] = {
    "no map": [1, 2],
    "a missing key": {"type": "P", "http_address": "127.0.0.1:1"},
    "a wrong type": {**GOOD, "epoch": "one"},
    "an unknown role": {**GOOD, "type": "X"},
    "no role": {**GOOD, "type": ""},
    "no port": {**GOOD, "http_address": "127.0.0.1"},
    "a path": {**GOOD, "http_address": "127.0.0.1:80/evil"},
    "a user": {**GOOD, "http_address": "me@127.0.0.1:80"},
    "a line": {**GOOD, "zmq_address": "127.0.0.1:80\r\nX: y"},
    "an id inside": {**GOOD, "zmq_address": "a___decode_addr_b:80"},
    "port 0": {**GOOD, "zmq_address": "127.0.0.1:0"},
    "port 99999": {**GOOD, "zmq_address": "127.0.0.1:99999"},
    "a long name": {**GOOD, "model": "x" * 1000},
}


async def test_without_instances_the_missing_roles_are_named() -> None:
    async with (
        ServerDouble("P") as prefill,
        ServerDouble("PD", model="other") as both,
        running_proxy() as proxy,
    ):
        assert await missing(proxy) == ["prefill", "decode"]
        prefill.beat(proxy.registration_address)
        await proxy.until_ready(prefill)
        assert await missing(proxy) == ["decode"]
        both.beat(proxy.registration_address)
        await proxy.until_ready(both)
        assert await missing(proxy) == ["decode"]  # none of the prefill's model
        await proxy.until_idle()
        assert prefill.received == both.received == []


async def test_instances_of_both_roles_serve_each_other_and_share_the_decodes() -> None:
    release = asyncio.Event()
    async with ServerDouble("PD") as one, ServerDouble("PD") as other, running_proxy() as proxy:
        one.beat(proxy.registration_address)
        await proxy.until_ready(one)
        status, body, _ = await proxy.ask()
        assert (status, json.loads(body)["error"]["missing"]) == (503, ["decode"])
        other.beat(proxy.registration_address)
        await proxy.until_ready(one, other)
        one.behaviour = other.behaviour = Behaviour(hold_after=(1, release))
        answers = [asyncio.ensure_future(proxy.ask(STREAMED)) for _ in range(6)]

        async def are_shared() -> bool:
            counts = [await proxy.in_flight(double) for double in (one, other)]
            return counts == [{"prefill": 0, "decode": 3}] * 2

        await until(are_shared, "three decodes on each")
        release.set()
        for answer in answers:
            assert (await answer)[1] == b"".join(events(STREAMED))


async def test_old_and_new_instances_are_never_paired() -> None:
    async with (
        ServerDouble("P", protocol=None) as old_prefill,
        ServerDouble("D", protocol=None) as old_decode,
        fleet(1, 0) as (proxy, [prefill], _),
    ):
        old_decode.beat(proxy.registration_address)
        await until_known(proxy, old_decode)
        status, body, _ = await proxy.ask()
        assert (status, json.loads(body)["error"]["code"]) == (503, "no_instance")
        old_prefill.beat(proxy.registration_address)
        await proxy.until_ready(old_prefill, old_decode)
        # An old instance says no model: it is asked for what no other announces.
        status, _, _ = await proxy.ask({"model": "of the old", "prompt": "x"})
        assert status == 200
        assert (len(prefill.received), len(old_prefill.received)) == (0, 1)


@pytest.mark.parametrize("dispatch", ["sequential", "concurrent"])
async def test_each_leg_goes_to_the_data_parallel_rank_that_its_id_names(dispatch: str) -> None:
    """Several ranks behind one HTTP address: vLLM's server reads in a header which is meant."""
    settings = {"prefill_policy": "round_robin", "decode_policy": "round_robin"}
    async with (
        ServerDouble("P", dp_size=2) as prefill,
        ServerDouble("D", dp_size=3) as decode,
        ServerDouble("D") as single,
        running_proxy(dispatch=dispatch, **settings) as proxy,
    ):
        doubles = (prefill, decode, single)
        for double in doubles:
            double.beat(proxy.registration_address)
        names = {f"{prefill.http_address}#{rank}" for rank in range(2)}
        names |= {f"{decode.http_address}#{rank}" for rank in range(3)} | {single.http_address}

        async def are_ready() -> bool:
            shown = (await proxy.status())["instances"]
            return {i["name"] for i in shown if i["state"] == "ready"} == names

        await until(are_ready, f"{names} are ready")
        for _ in range(12):
            assert (await proxy.ask())[0] == 200
        decoded = [(double, leg) for double in (decode, single) for leg in double.received]
        assert len(decoded) == len(prefill.received) == 12
        for double, leg in [*((prefill, leg) for leg in prefill.received), *decoded]:
            named = parse_proxy_id(leg.headers["X-Request-Id"])
            assert named is not None
            address = named.prefill if double is prefill else named.decode
            assert address == double.rank_address(leg.rank)
            assert ("X-data-parallel-rank" in leg.headers) is (double is not single)
        assert Counter(leg.rank for leg in prefill.received) == {0: 6, 1: 6}
        assert Counter(leg.rank for leg in decode.received) == {0: 3, 1: 3, 2: 3}
        await proxy.until_idle()


async def test_a_heartbeat_alone_brings_no_request() -> None:
    async with ServerDouble("P") as starting, fleet(1, 1) as (proxy, [prefill], _):
        starting.health_status = 503
        starting.beat(proxy.registration_address)
        await until(lambda: starting.health_count, "it was asked")
        for _ in range(4):
            assert (await proxy.ask())[0] == 200
        assert (len(prefill.received), len(starting.received)) == (4, 0)
        starting.health_status = 200
        await proxy.until_ready(starting)
        for _ in range(4):
            assert (await proxy.ask())[0] == 200
        assert starting.received


async def test_one_that_joins_late_gets_its_share() -> None:
    async with ServerDouble("D") as late, fleet(1, 1) as (proxy, [prefill], [decode]):
        for _ in range(5):
            await proxy.ask()
        late.beat(proxy.registration_address)
        await proxy.until_ready(late)
        for _ in range(6):
            await proxy.ask()
        # Its share from now on, not all that the others have had before.
        assert (len(prefill.received), len(decode.received), len(late.received)) == (11, 8, 3)


async def test_silence_ends_an_instance_but_not_its_streams() -> None:
    release = asyncio.Event()
    async with fleet(1, 2) as (proxy, _, [one, other]):
        one.behaviour = other.behaviour = Behaviour(hold_after=(2, release))
        async with proxy.post(STREAMED) as response:
            await response.content.readany()
            serving, idle = (one, other) if one.received else (other, one)
            await serving.fall_silent()
            await proxy.until_state(serving, "gone")
            idle.behaviour = Behaviour()
            for _ in range(3):
                assert (await proxy.ask())[0] == 200
            assert (len(serving.received), len(idle.received)) == (1, 3)
            assert await proxy.in_flight(serving) == {"prefill": 0, "decode": 1}

            serving.beat(proxy.registration_address)  # it was only held up
            await proxy.until_state(serving, "ready")
            assert await proxy.in_flight(serving) == {"prefill": 0, "decode": 1}
            await serving.fall_silent()
            release.set()
            await response.read()
        await proxy.until_state(serving, "")


async def test_a_farewell_takes_effect_at_once() -> None:
    async with ServerDouble("D") as leaving, fleet(1, 1) as (proxy, _, [decode]):
        leaving.beat(proxy.registration_address)
        await proxy.until_ready(leaving)
        await leaving.leave()
        await proxy.until_state(leaving, "")
        for _ in range(3):
            assert (await proxy.ask())[0] == 200
        assert len(decode.received) == 3


async def test_a_new_epoch_is_a_new_instance() -> None:
    async with fleet(1, 1) as (proxy, _, [decode]):
        decode.behaviour = Behaviour(hang=True)
        answer = asyncio.ensure_future(proxy.ask())
        await until(lambda: decode.received, "decode runs")
        assert (await proxy.in_flight(decode))["decode"] == 1
        decode.epoch, decode.health_status = 2, 503
        await decode.beat_once()

        async def is_reborn() -> bool:
            shown = [i for i in (await proxy.status())["instances"] if i["epoch"] == 2]
            return bool(shown) and shown[0]["state"] == "not_ready"

        await until(is_reborn, "the new incarnation starts from nothing")
        assert await proxy.in_flight(decode) == {"prefill": 0, "decode": 0}
        answer.cancel()
        await proxy.until_idle()


async def test_after_junk_the_log_still_names_who_is_wrong(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "WARNING_SECONDS", 0.0)
    async with running_proxy() as proxy:
        beats = [{**GOOD, "type": "pD", "http_address": f"h:{port}"} for port in range(1, 100)]
        honest = {**GOOD, "type": "pD", "http_address": "honest:1"}
        beats += [honest, honest]
        await send(proxy.registration_address, *([msgpack.packb(beat)] for beat in beats))
        await until_refused(proxy, "malformed", len(beats))
    assert len([text for text in caplog.messages if "http='honest:1'" in text]) == 1


@pytest.mark.parametrize("wrong", BAD_BEATS)
async def test_a_bad_heartbeat_is_counted_named_and_dropped(
    wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_proxy() as proxy:
        await send(proxy.registration_address, *[[msgpack.packb(BAD_BEATS[wrong])]] * 3)
        await until_refused(proxy, "malformed", 3)
        assert (await proxy.status())["instances"] == []
    lines = [text for text in caplog.messages if "heartbeat refused: http=" in text]
    assert len(lines) == 1


async def test_the_log_names_each_sender_and_a_bounded_number_of_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_proxy() as proxy:
        beats = [{**GOOD, "type": "pD", "http_address": f"h:{port}"} for port in range(1, 200)]
        beats[:0] = [beats[0], {**beats[0], "type": "Dp"}]
        await send(proxy.registration_address, *([msgpack.packb(beat)] for beat in beats))
        await until_refused(proxy, "malformed", len(beats))
    lines = [text for text in caplog.messages if "heartbeat refused: http='h:" in text]
    assert MAX_WARNED <= len(lines) <= MAX_WARNED + 2  # then one in ten seconds
    assert "http='h:1': type is 'pD'; allowed: P, D or PD" in lines[0]
    assert "http='h:1': type is 'Dp'" in lines[1]
    assert "http='h:2': type is 'pD'" in lines[2]


async def test_the_status_shows_what_an_instance_says_is_wrong_there() -> None:
    async with running_proxy() as proxy:
        for text in ("no KV has moved for 60 s", ""):
            said = {"warning": text, "accept_differences": text and "dtype, hf.rope_parameters"}
            beat = {**GOOD, "protocol": PROTOCOL_VERSION, **said}
            await send(proxy.registration_address, [msgpack.packb(beat)])

            async def is_shown(said: dict[str, str] = said) -> bool:
                [shown] = (await proxy.status())["instances"]
                return {name: shown[name] for name in said} == said

            await until(is_shown, f"the status says {said}")


async def test_garbage_never_stops_discovery(rng: SeededRandom) -> None:
    async with ServerDouble("P") as prefill, running_proxy() as proxy:
        messages = [
            [rng.randbytes(rng.randint(0, 300)) for _ in range(rng.randint(1, 4))]
            for _ in range(500)
        ]
        packed = msgpack.packb({**GOOD, "deep": 0})
        deep = packed[:-1] + b"\x91" * 60_000 + b"\xc0"
        await send(proxy.registration_address, *messages, [deep], [packed[:-1]], [b""])
        host, port = proxy.registration_address.split(":")
        for noise in (
            b"GET / HTTP/1.1\r\n\r\n",
            rng.randbytes(4096),
            b"\xff" + b"\0" * 8 + b"\x7f",
        ):
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(noise)
        await send(proxy.registration_address, [b"x" * (1 << 20)])  # over the limit: cut by ZMQ
        await until_refused(proxy, "malformed")
        await until_metric(proxy, "dropped_frames")
        prefill.beat(proxy.registration_address)
        await proxy.until_ready(prefill)
        async with proxy.client.get(f"{proxy.url}/health") as response:
            assert await response.json() == {"status": "ok", "prefill": 1, "decode": 0}
        assert len((await proxy.status())["instances"]) == 1


async def test_a_name_that_no_host_can_have_is_never_ready(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with ServerDouble("P") as prefill, running_proxy() as proxy:
        impossible = {**GOOD, "http_address": "a..b:80", "interval": 0.1}
        await send(proxy.registration_address, [msgpack.packb({**impossible, "protocol": 1})])
        prefill.beat(proxy.registration_address)
        await proxy.until_ready(prefill)
        await until(lambda: "instance gone http=a..b:80" in caplog.text, "it is forgotten")


async def test_the_log_says_why_an_instance_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with fleet(2, 1) as (proxy, [leaves, falls_silent], _):
        await leaves.leave()
        await falls_silent.fall_silent()
        await proxy.until_state(leaves, "")
        await proxy.until_state(falls_silent, "")
        told = f"instance gone http={leaves.http_address} reason=it left"
        await until(lambda: told in caplog.text, "it has left")
        told = f"instance gone http={falls_silent.http_address} reason=no heartbeat for"
        await until(lambda: told in caplog.text, "it was silent")


async def test_incarnations_that_follow_fast_are_watched_one_at_a_time() -> None:
    async with ServerDouble("P") as prefill, running_proxy() as proxy:
        prefill.beat(proxy.registration_address)
        for prefill.epoch in range(2, 300):
            await prefill.beat_once()

        async def is_last_ready() -> bool:
            shown = (await proxy.status())["instances"]
            return [(i["epoch"], i["state"]) for i in shown] == [(299, "ready")]

        await until(is_last_ready, "the last incarnation is ready")
        watches = [t for t in asyncio.all_tasks() if "Readiness._watch" in repr(t)]
        assert len(watches) == 1


async def test_the_number_of_instances_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    async with running_proxy(max_instances=10) as proxy:
        beats = [{**GOOD, "http_address": f"127.0.0.1:{port}"} for port in range(1, 31)]
        await send(proxy.registration_address, *([msgpack.packb(beat)] for beat in beats))
        await until_refused(proxy, "registry_full", 20)
        assert "refused: 127.0.0.1:11: 10 instances" in caplog.text
        assert len((await proxy.status())["instances"]) == 10


async def missing(proxy: RunningProxy) -> list[str]:
    """Ask in vain and return the roles that the answer names."""
    status, body, headers = await proxy.ask()
    error = json.loads(body)["error"]
    assert (status, error["code"], error["type"]) == (503, "no_instance", "server_error")
    assert headers["Content-Type"] == "application/json"
    assert all(role in error["message"] for role in error["missing"])
    named: list[str] = error["missing"]
    return named


async def send(address: str, *messages: list[bytes]) -> None:
    """Send messages from one DEALER and close it when they are out."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(f"tcp://{address}")
        for message in messages:
            await dealer.send_multipart(message)
        dealer.close(linger=1000)


async def until_refused(proxy: RunningProxy, reason: str, count: int = 1) -> None:
    """Wait until so many frames were dropped for this reason."""

    async def is_refused() -> bool:
        name = f'p2p_proxy_heartbeats_total{{result="{reason}"}}'
        return (await proxy.metrics()).get(name, 0) >= count

    await until(is_refused, f"{count} frames dropped: {reason}")


async def until_metric(proxy: RunningProxy, name: str, least: int = 1) -> None:
    """Wait until a number of the proxy's has grown."""

    async def has_grown() -> bool:
        return (await proxy.metrics()).get(f"p2p_proxy_{name}", 0) >= least

    await until(has_grown, f"{name} is {least} or more")


async def until_known(proxy: RunningProxy, double: ServerDouble) -> None:
    """Wait until the proxy has heard of an instance."""

    async def is_known() -> bool:
        return double.http_address in await proxy.states()

    await until(is_known, f"{double.http_address} is known")
