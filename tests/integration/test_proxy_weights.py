"""One order for the weights of a fleet, before stand-ins of vLLM that do as asked, and others."""

from __future__ import annotations

import asyncio
import io
import json
import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from p2p_engine.cli import weights as cli
from p2p_engine.errors import ConfigError
from proxy.fleet.weights import FleetWeights
from tests.doubles.server import DECODE, PREFILL, Behaviour, ServerDouble
from tests.doubles.weights import ABORTED, NEW, OLD, DoorsDouble
from tests.rigs.proxies import ASKED, STREAMED, running_proxy, until
from tests.rigs.weights_fleet import (
    KEY,
    LABEL,
    UPDATE,
    breakers_of,
    doors_of,
    until_asked,
    until_queued,
    weights_fleet,
)

NUM_FAILURES = 6  # of legs, with which a breaker would open


async def test_each_request_is_computed_with_the_old_weights_or_with_the_new_ones(
    admin_key: str,
) -> None:
    """Under load: none is refused, and both of its legs have the same weights."""
    async with weights_fleet(admin_key, 2, 2) as fleet:
        for double in fleet.all:
            double.behaviour = Behaviour(pace=0.001)
        is_over = asyncio.Event()

        async def client() -> list[int]:
            seen = []
            while not is_over.is_set():
                seen.append((await fleet.proxy.ask(STREAMED))[0])
            return seen

        clients = [asyncio.create_task(client()) for _ in range(8)]
        await until(lambda: all(doors_of(d).used for d in fleet.all), "all compute")
        order = await fleet.update()
        await until(lambda: all(NEW in doors_of(d).used.values() for d in fleet.all), "all go on")
        is_over.set()
        statuses = {status for seen in await asyncio.gather(*clients) for status in seen}
        assert statuses == {200}
        assert order["failed"] == {}
        assert set(order["steps"].values()) == {"done"}
        computed = {}
        for double in fleet.prefills:
            computed.update(doors_of(double).used)
        for double in fleet.decodes:
            for transfer, weights in doors_of(double).used.items():
                # Without prefill, while the two do not yet say that their weights are the same.
                assert weights == computed.get(transfer, weights)
        for double in fleet.all:
            doors = doors_of(double)
            assert (doors.weights, doors.label, doors.is_paused) == (NEW, LABEL, False)
        shown = (await fleet.proxy.status())["instances"]
        assert {instance["weights"] for instance in shown} == {LABEL}


FAULTS = {
    "/pause": ("500", "/pause: HTTP 500"),
    "/collective_rpc": ("500", "/collective_rpc: HTTP 500$"),
    "/reset_prefix_cache": ("hang", "/reset_prefix_cache: no answer within 2 s"),
    "/update_weight_version": ("lie", "/update_weight_version: it has default, not step-2"),
    "/weight_info": ("500", "/weight_info: HTTP 500"),
    "/resume": ("lie", "/resume: it is still paused"),
}


@pytest.mark.parametrize("path", FAULTS)
async def test_an_instance_that_fails_a_step_stays_paused_and_is_named(
    admin_key: str, path: str
) -> None:
    fault, expected = FAULTS[path]
    async with weights_fleet(admin_key, 1, 2) as fleet:
        bad, good = fleet.decodes
        address = bad.http_address
        doors_of(bad).faults[path] = fault
        order = await fleet.update(call_seconds=2.0 if fault == "hang" else 10.0)
        assert list(order["failed"]) == [address]
        assert fleet.all[0].http_address in order["steps"]
        said = order["failed"][address]
        assert re.match(expected, said)
        await fleet.proxy.until_state(bad, "paused")
        [shown] = [
            i for i in (await fleet.proxy.status())["instances"] if i["http_address"] == address
        ]
        assert shown["held"] == said
        assert "it broke" not in json.dumps(await fleet.proxy.status())
        before = len(bad.received)
        for _ in range(4):
            assert (await fleet.proxy.ask())[0] == 200
        assert len(bad.received) == before
        assert len(doors_of(good).used) >= 4
        # A later order succeeds.
        doors_of(bad).faults.clear()
        order = await fleet.update(label="step-3")
        assert order["failed"] == {}
        await fleet.proxy.until_ready(bad)


async def test_without_a_decode_instance_a_request_is_refused_by_name(admin_key: str) -> None:
    async with weights_fleet(admin_key) as fleet:
        doors_of(fleet.decodes[0]).faults["/collective_rpc"] = "500"
        await fleet.update()
        status, said, headers = await fleet.proxy.ask()
        assert status == 503
        assert json.loads(said)["error"]["code"] == "no_instance"
        assert "no decode instance is ready" in said.decode()
        assert "Retry-After" in headers


async def test_an_instance_that_hangs_does_not_stop_the_others(admin_key: str) -> None:
    async with weights_fleet(admin_key, 1, 2) as fleet:
        doors_of(fleet.decodes[0]).faults["/collective_rpc"] = "hang"
        assert (await fleet.order("update", UPDATE))[0] == 200
        # It is answered while the order still runs.
        assert (await fleet.proxy.ask())[0] == 200
        shown = (await fleet.proxy.status())["weights"]["order"]
        assert shown["state"] == "updating"
        assert shown["steps"][fleet.decodes[0].http_address] == "/collective_rpc"


async def test_a_request_that_waits_too_long_is_told_of_the_order(admin_key: str) -> None:
    async with weights_fleet(admin_key, queue_timeout_seconds=0.2) as fleet:
        doors_of(fleet.decodes[0]).faults["/collective_rpc"] = "hang"
        assert (await fleet.order("update", UPDATE))[0] == 200
        status, said, headers = await fleet.proxy.ask()
        assert (status, json.loads(said)["error"]["code"]) == (503, "weights_update")
        assert LABEL in said.decode()
        assert "Retry-After" in headers


async def test_orders_that_cannot_be_are_refused_and_change_nothing(admin_key: str) -> None:
    async with weights_fleet(admin_key) as fleet:
        assert (await fleet.order("update", UPDATE, key="wrong"))[0] == 401
        for changed in (
            {"label": "default"}, {"label": "two words"}, {"label": ""}, {"label": "step-2\n"},
            {"ends": "soon"}, {"calls": [{"path": "/shutdown"}]}, {"other": 1},
            {"call_seconds": 0}, {"call_seconds": 1e9}, {"drain_seconds": 1e9},
        ):  # fmt: skip
            status, said = await fleet.order("update", {**UPDATE, **changed})
            assert (status, said["error"]["code"]) == (400, "invalid_request"), changed
        assert (await fleet.order("resume", {"instance": "10.0.0.9:1"}))[0] == 404
        async with ServerDouble(DECODE) as without:
            without.beat(fleet.proxy.registration_address)
            await fleet.proxy.until_ready(without)
            status, said = await fleet.order("update", UPDATE)
            assert (status, said["error"]["code"]) == (409, "no_doors")
            assert f"{without.http_address}: /is_paused: HTTP 404" in said["error"]["message"]
            await without.leave()
            await fleet.proxy.until_state(without, "")
        assert not any(path == "/pause" for d in fleet.all for path in doors_of(d).asked)
        doors_of(fleet.decodes[0]).faults["/collective_rpc"] = "hang"
        assert (await fleet.order("update", UPDATE))[0] == 200
        for path, asked in (
            ("update", UPDATE),
            ("label", {"label": "step-9"}),
            ("resume", {"instance": fleet.decodes[0].http_address}),
        ):
            status, said = await fleet.order(path, asked)
            assert (status, said["error"]["code"]) == (409, "order_running")
            assert LABEL in said["error"]["message"]


async def test_an_order_is_for_one_model(admin_key: str) -> None:
    """A judge beside the policy that is trained: the policy's checkpoint is not its own."""
    async with weights_fleet(admin_key) as fleet, AsyncExitStack() as parts:
        judges = [ServerDouble(k, model="judge", doors=DoorsDouble()) for k in (PREFILL, DECODE)]
        for judge in judges:
            await parts.enter_async_context(judge)
            judge.beat(fleet.proxy.registration_address)
        await fleet.proxy.until_ready(*judges)
        for path, order in (("update", UPDATE), ("label", {"label": LABEL})):
            status, said = await fleet.order(path, order)
            assert (status, said["error"]["code"]) == (409, "several_models")
            assert "judge, tiny" in said["error"]["message"]
            status, said = await fleet.order(path, {**order, "model": "none"})
            assert (status, said["error"]["code"]) == (409, "no_instances")
        release = asyncio.Event()
        fleet.prefills[0].behaviour = judges[0].behaviour = Behaviour(hold=release)
        for_judge = {**ASKED, "model": "judge"}
        running = [asyncio.create_task(fleet.proxy.ask(a)) for a in (ASKED, for_judge)]
        both = (fleet.prefills[0], judges[0])
        await until(lambda: all(doors_of(d).running for d in both), "both run")
        assert (await fleet.order("update", {**UPDATE, "model": "tiny"}))[0] == 200
        running.append(asyncio.create_task(fleet.proxy.ask()))
        await until_queued(fleet.proxy)
        # The judge goes on, and the order does not wait for it.
        judges[0].behaviour = Behaviour()
        assert (await fleet.proxy.ask(for_judge))[0] == 200
        fleet.prefills[0].behaviour = Behaviour()
        release.set()
        order = await fleet.until_over()
        assert (order["model"], order["failed"]) == ("tiny", {})
        assert {status for status, _, _ in await asyncio.gather(*running)} == {200}
        label = {"label": "step-3", "model": "tiny"}
        status, said = await fleet.order("label", label)
        assert set(said["instances"]) == {double.http_address for double in fleet.all}
        for double in fleet.all:
            assert (doors_of(double).weights, doors_of(double).label) == (NEW, "step-3")
        for judge in judges:
            assert not {"/pause", "/update_weight_version"} & set(doors_of(judge).asked)
        # One that was added by hand without its model may be of either.
        async with ServerDouble(DECODE, doors=DoorsDouble()) as unnamed:
            added = {"type": "decode", "instance": unnamed.http_address}
            headers = {"X-Api-Key": KEY}
            assert (await fleet.proxy.ask(added, "/instances/add", headers=headers))[0] == 200
            status, said = await fleet.order("update", {**UPDATE, "model": "tiny"})
            assert (status, said["error"]["code"]) == (409, "several_models")


async def test_a_request_that_has_begun_ends_before_anything_is_paused(admin_key: str) -> None:
    async with weights_fleet(admin_key) as fleet:
        release = asyncio.Event()
        fleet.prefills[0].behaviour = Behaviour(hold=release)
        asking = asyncio.create_task(fleet.proxy.ask())
        await until(lambda: doors_of(fleet.prefills[0]).running, "prefill runs")
        assert (await fleet.order("update", UPDATE))[0] == 200
        late = asyncio.create_task(fleet.proxy.ask())
        await until_queued(fleet.proxy)
        shown = (await fleet.proxy.status())["weights"]["order"]
        assert (shown["state"], shown["steps"]) == ("stopping", {})
        release.set()
        assert (await asking)[0] == 200  # both of its legs
        assert (await fleet.until_over())["failed"] == {}
        assert (await late)[0] == 200
        assert sorted(doors_of(fleet.decodes[0]).used.values()) == [NEW, OLD]


async def test_no_leg_goes_to_an_instance_that_is_paused(admin_key: str) -> None:
    """Prefill ends its leg though it was told to abort it; decode is paused by then."""
    async with weights_fleet(admin_key, 2, 1) as fleet:
        release = asyncio.Event()
        for prefill in fleet.prefills:
            prefill.behaviour = Behaviour(hold=release)
        doors = doors_of(fleet.decodes[0])
        doors.slow["/collective_rpc"] = asyncio.Event()
        asking = asyncio.create_task(fleet.proxy.ask())
        running = await until(
            lambda: [p for p in fleet.prefills if doors_of(p).running], "prefill runs"
        )
        doors_of(running[0]).faults["/pause"] = "lie"
        assert (await fleet.order("update", {**UPDATE, "ends": "abort"}))[0] == 200
        await until_asked(doors, "/collective_rpc")
        release.set()
        await until_queued(fleet.proxy)
        assert not fleet.decodes[0].received
        doors.slow.pop("/collective_rpc").set()
        assert (await asking)[0] == 200
        assert list(doors.used.values()) == [NEW]


@pytest.mark.parametrize("changed", [{"ends": "abort"}, {"drain_seconds": 0.3}])
async def test_what_does_not_end_is_aborted_and_begins_again(
    admin_key: str, changed: dict[str, Any]
) -> None:
    async with weights_fleet(admin_key) as fleet:
        release = asyncio.Event()
        fleet.decodes[0].behaviour = Behaviour(hold=release)
        asking = [asyncio.create_task(fleet.proxy.ask()) for _ in range(NUM_FAILURES)]
        await until(lambda: len(doors_of(fleet.decodes[0]).running) == NUM_FAILURES, "they run")
        assert (await fleet.order("update", {**UPDATE, **changed}))[0] == 200
        await until_asked(doors_of(fleet.decodes[0]), "/collective_rpc")
        release.set()
        assert (await fleet.until_over())["failed"] == {}
        assert {status for status, _, _ in await asyncio.gather(*asking)} == {200}
        assert await breakers_of(fleet.proxy) == {"closed"}  # nobody is to blame
        assert set(doors_of(fleet.decodes[0]).used.values()) == {NEW}


async def test_what_waits_in_vllm_is_aborted_before_it_goes_on(admin_key: str) -> None:
    """It may be the next token of a beam search, whose tokens before are of the old weights."""
    async with weights_fleet(admin_key) as fleet:
        [decode] = fleet.decodes
        doors = doors_of(decode)
        doors.slow["/weight_info"] = asyncio.Event()
        assert (await fleet.order("update", UPDATE))[0] == 200
        await until_asked(doors, "/weight_info")
        url = f"http://{decode.http_address}/v1/completions"

        async def next_token() -> dict[str, Any]:
            async with fleet.proxy.client.post(url, json=ASKED) as response:
                said: dict[str, Any] = await response.json()
                return said

        waiting = asyncio.create_task(next_token())
        await until(lambda: doors.running, "it waits")
        doors.slow.pop("/weight_info").set()
        assert (await fleet.until_over())["failed"] == {}
        assert await waiting == ABORTED
        assert not doors.used


async def test_what_another_proxy_has_running_is_aborted_where_vllm_cannot_wait_for_it(
    admin_key: str,
) -> None:
    async with weights_fleet(admin_key) as fleet:
        doors_of(fleet.decodes[0]).has_load = True
        assert (await fleet.update())["failed"] == {}
        assert (await fleet.proxy.ask())[0] == 200


async def test_prefill_is_paired_with_decode_of_the_same_weights(admin_key: str) -> None:
    """Who joins after an order gets requests when it has the label, or when nobody else is left:
    then it computes the prompts itself."""
    async with weights_fleet(admin_key) as fleet:
        await fleet.update()
        [prefill], [decode] = fleet.prefills, fleet.decodes
        async with ServerDouble(DECODE, doors=DoorsDouble(NEW, has_changed=True)) as late:
            late.beat(fleet.proxy.registration_address)
            await fleet.proxy.until_ready(late)
            for _ in range(4):
                assert (await fleet.proxy.ask())[0] == 200
            assert not late.received
            assert (await fleet.proxy.metrics())["p2p_proxy_unlike_weights"] == 0
            decode.health_status = 500
            await fleet.proxy.until_state(decode, "not_ready")
            num_prefilled = len(prefill.received)
            assert (await fleet.proxy.ask())[0] == 200
            assert len(prefill.received) == num_prefilled
            assert (await fleet.proxy.metrics())["p2p_proxy_unlike_weights"] == 1
            status, said = await fleet.order("label", {"label": "step-3"})
            assert status == 200
            assert set(said["instances"].values()) == {""}
            assert [doors_of(d).label for d in (*fleet.all, late)] == ["step-3"] * 3

            async def has_joined() -> bool:
                assert (await fleet.proxy.ask())[0] == 200
                return len(prefill.received) > num_prefilled

            await until(has_joined, "prefill has its weights")


@pytest.mark.parametrize(
    "at_start", ["checkpoint-0123456789abcdef", "accepted", "unknown-89abcdef01234567", "step-1"]
)
async def test_who_has_its_weights_from_its_start_is_not_named_as_those_that_changed(
    admin_key: str, at_start: str
) -> None:
    """It was started again, and a label would only hide that it has its checkpoint's weights;
    however they are called: a reset, as that of a pause, has taken away their first name."""
    async with weights_fleet(admin_key, 1, 2) as fleet:
        restarted = fleet.decodes[0]
        # Of weights that nobody has changed, a label is taken.
        status, said = await fleet.order("label", {"label": LABEL})
        assert (status, set(said["instances"].values())) == (200, {""})
        doors_of(restarted).label, doors_of(restarted).has_changed = at_start, False
        restarted.epoch += 1
        await restarted.beat_once()

        async def is_heard() -> bool:
            shown = (await fleet.proxy.status())["instances"]
            return (at_start, "ready") in {(i["weights"], i["state"]) for i in shown}

        await until(is_heard, "the proxy knows the one that was started again")
        status, said = await fleet.order("label", {"label": "step-3"})
        assert status == 200
        why = said["instances"].pop(restarted.http_address)
        expected = f"its weights, {at_start}, are those of its start, and those of others"
        assert why == f"{expected} have changed"
        assert set(said["instances"].values()) == {""}
        assert [doors_of(d).label for d in fleet.decodes] == [at_start, "step-3"]
        # An order changes them first; so may a trainer, by a method of the workers.
        assert (await fleet.update())["failed"] == {}
        status, said = await fleet.order("label", {"label": "step-4"})
        assert set(said["instances"].values()) == {""}


async def test_what_waited_for_an_order_need_not_wait_for_heartbeats(admin_key: str) -> None:
    """Else decode would compute all of it, because its name is not that of prefill yet."""
    async with weights_fleet(admin_key) as fleet:
        doors_of(fleet.decodes[0]).on_label = None
        assert (await fleet.update())["failed"] == {}
        assert (await fleet.proxy.ask())[0] == 200
        assert (await fleet.order("label", {"label": "step-3"}))[0] == 200
        assert (await fleet.proxy.ask())[0] == 200
        assert len(fleet.prefills[0].received) == 2
        assert (await fleet.proxy.metrics())["p2p_proxy_unlike_weights"] == 0


async def test_only_one_order_label_or_resume_runs(admin_key: str) -> None:
    """An order that began while vLLM was being resumed would change weights that compute."""
    async with weights_fleet(admin_key) as fleet:
        resume = ("resume", {"instance": fleet.decodes[0].http_address})
        orders = {"/resume": resume, "/update_weight_version": ("label", {"label": "step-9"})}
        for path, first in orders.items():
            doors = doors_of(fleet.decodes[0])
            doors.asked.clear()
            doors.slow[path] = asyncio.Event()
            running = asyncio.create_task(fleet.order(*first))
            await until_asked(doors, path)
            for order in (("update", UPDATE), ("label", {"label": "step-8"}), resume):
                status, said = await fleet.order(*order)
                assert (status, said["error"]["code"]) == (409, "order_running")
            doors.slow.pop(path).set()
            assert (await running)[0] == 200
        assert (await fleet.update())["failed"] == {}


async def test_no_door_is_shown_a_key(admin_key: str, tmp_path: Path) -> None:
    """vLLM asks for none there, and whoever registers would have it."""
    instance_key = tmp_path / "instance.key"
    instance_key.touch(0o600)
    instance_key.write_text("of the instances")
    async with weights_fleet(admin_key, instance_key_file=str(instance_key)) as fleet:
        assert (await fleet.update())["failed"] == {}
        assert (await fleet.proxy.ask())[0] == 200
        for double in fleet.all:
            assert doors_of(double).keys == {""}
            assert double.received[-1].headers["Authorization"] == "Bearer of the instances"


async def test_an_operator_resumes_an_instance_by_name(admin_key: str) -> None:
    async with weights_fleet(admin_key) as fleet:
        [decode] = fleet.decodes
        doors_of(decode).faults["/collective_rpc"] = "500"
        await fleet.update()
        await fleet.proxy.until_state(decode, "paused")
        # By itself, vLLM's door is not enough: it has the old weights.
        doors_of(decode).resume()
        num_probes = decode.health_count
        await until(lambda: decode.health_count > num_probes + 3, "it is probed")
        assert (await fleet.proxy.states())[decode.http_address] == "paused"
        doors_of(decode).pause()
        assert (await fleet.order("resume", {"instance": decode.http_address}))[0] == 200
        await fleet.proxy.until_ready(decode)
        assert (await fleet.proxy.ask())[0] == 200
        assert doors_of(decode).weights == OLD


@pytest.mark.parametrize("goes_while", ["it is changed", "it has failed"])
async def test_an_instance_that_failed_is_held_though_its_heartbeats_were_lost(
    admin_key: str, goes_while: str
) -> None:
    async with weights_fleet(admin_key, 1, 2) as fleet:
        bad, _ = fleet.decodes
        doors = doors_of(bad)
        doors.faults["/collective_rpc"] = "500"
        doors.slow["/collective_rpc"] = asyncio.Event()
        assert (await fleet.order("update", UPDATE))[0] == 200
        await until_asked(doors, "/collective_rpc")
        if goes_while == "it has failed":
            doors.slow.pop("/collective_rpc").set()
            await fleet.until_over()
        doors.resume()  # by somebody else
        await bad.fall_silent()
        await fleet.proxy.until_state(bad, "")
        bad.beat(fleet.proxy.registration_address)
        await fleet.proxy.until_state(bad, "paused")
        if goes_while == "it is changed":
            doors.slow.pop("/collective_rpc").set()
            assert list((await fleet.until_over())["failed"]) == [bad.http_address]
        for _ in range(4):
            assert (await fleet.proxy.ask())[0] == 200
        assert not bad.received
        doors.faults.clear()
        assert (await fleet.order("resume", {"instance": bad.http_address}))[0] == 200
        await fleet.proxy.until_ready(bad)


async def run(command: Any, *told: Any) -> tuple[int, list[str]]:
    """Return the exit code, and the lines that a command says."""
    said = io.StringIO()
    console = Console(file=said, width=200)
    code = await asyncio.to_thread(lambda: command(*told, console))
    return code, sorted(said.getvalue().splitlines())


async def test_the_command_waits_for_the_end_and_names_who_failed(admin_key: str) -> None:
    async with weights_fleet(admin_key, 1, 2) as fleet:
        name = f"127.0.0.1:{fleet.proxy.port}"
        code, said = await run(cli.run_update, name, "wrong", UPDATE)
        assert (code, said) == (1, [f"{name}: the admin key is missing or wrong"])
        doors_of(fleet.decodes[0]).faults["/collective_rpc"] = "500"
        code, said = await run(cli.run_update, name, KEY, UPDATE)
        assert code == 1
        bad, *good = fleet.decodes[0], fleet.decodes[1], fleet.prefills[0]
        assert [line for line in said if line.startswith(f"{bad.http_address}: paused: ")]
        assert {f"{each.http_address}: {LABEL}" for each in good} <= set(said)
        doors_of(bad).faults.clear()
        code, said = await run(cli.run_resume, name, KEY, bad.http_address)
        assert (code, said) == (0, [f"Resumed {bad.http_address}."])
        code, _ = await run(cli.run_update, name, KEY, {**UPDATE, "label": "step-3"})
        assert code == 0
        doors_of(bad).faults["/update_weight_version"] = "lie"
        code, said = await run(cli.run_label, name, KEY, "step-4", "")
        assert code == 1
        why = "/update_weight_version: it has step-3, not step-4"
        assert f"{bad.http_address}: {why}" in said
        places = ",".join(each.http_address for each in good)
        code, said = await run(cli.run_label_directly, places, "step-5")
        assert (code, said) == (0, sorted(f"{each.http_address}: step-5" for each in good))
        code, said = await run(cli.run_label_directly, bad.http_address, "step-5")
        assert (code, said) == (1, [f"{bad.http_address}: it has step-3, not step-5"])


@pytest.mark.parametrize("num_left", [1, 2])
async def test_who_leaves_before_its_turn_has_failed_the_order(
    admin_key: str, num_left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with weights_fleet(admin_key) as fleet:
        is_drained = asyncio.Event()

        async def drain(*_: Any) -> None:
            await is_drained.wait()

        monkeypatch.setattr(FleetWeights, "_drain", drain)
        name = f"127.0.0.1:{fleet.proxy.port}"
        running = asyncio.create_task(run(cli.run_update, name, KEY, UPDATE))

        async def is_stopping() -> bool:
            order = (await fleet.proxy.status())["weights"]["order"]
            return bool(order) and order["state"] == "stopping"

        await until(is_stopping, "the order has been taken")
        leaving = fleet.all[:num_left]
        for gone in leaving:
            await gone.leave()
            await fleet.proxy.until_state(gone, "")
        is_drained.set()
        code, said = await running
        assert code == 1
        assert {f"{gone.http_address}: it left during the drain" for gone in leaving} <= set(said)
        assert len((await fleet.until_over())["failed"]) == num_left


async def test_a_fault_of_the_proxy_itself_fails_an_order_for_all(
    admin_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with weights_fleet(admin_key) as fleet:

        async def fault(*_: Any) -> None:
            raise ValueError("a fault")

        monkeypatch.setattr(FleetWeights, "_drain", fault)
        failed = (await fleet.update())["failed"]
        assert set(failed) == {double.http_address for double in fleet.all}
        assert all("internal error of the proxy: ValueError" in why for why in failed.values())


async def test_a_command_finds_the_end_of_its_order_behind_another_one(admin_key: str) -> None:
    """Two trainers, whose models one proxy serves."""
    async with weights_fleet(admin_key) as fleet:
        doors, name = doors_of(fleet.decodes[0]), f"127.0.0.1:{fleet.proxy.port}"
        doors.slow["/collective_rpc"] = asyncio.Event()
        first = asyncio.create_task(run(cli.run_update, name, KEY, UPDATE))
        await until_asked(doors, "/collective_rpc")
        doors.slow.pop("/collective_rpc").set()
        await fleet.until_over()
        await fleet.update(label="step-3")
        code, said = await first
        assert (code, f"{fleet.decodes[0].http_address}: {LABEL}" in said) == (0, True)


async def test_a_proxy_that_ends_in_the_middle_leaves_instances_paused_and_the_command_says_so(
    admin_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_SILENCE_SECONDS", 0.2)
    async with weights_fleet(admin_key) as fleet:
        doors_of(fleet.decodes[0]).faults["/collective_rpc"] = "hang"
        async with running_proxy(admin_key_file=admin_key, **fleet.listed) as dying:
            await dying.until_ready(*fleet.all)
            told = (f"127.0.0.1:{dying.port}", KEY, UPDATE)
            waiting = asyncio.create_task(run(cli.run_update, *told))
            await until(lambda: "/collective_rpc" in doors_of(fleet.decodes[0]).asked, "it hangs")
        code, said = await waiting
        assert code == 1
        assert "stay paused: repeat the order" in "".join(said)
        assert doors_of(fleet.decodes[0]).is_paused
        await fleet.proxy.until_state(fleet.decodes[0], "paused")
        doors_of(fleet.decodes[0]).faults.clear()
        assert (await fleet.update())["failed"] == {}
        await fleet.proxy.until_ready(*fleet.all)


def test_calls_are_read_from_the_command_line() -> None:
    assert cli.read_calls(["/start_weight_update", '/update_weights {"update_info": {}}']) == [
        {"path": "/start_weight_update", "body": {}},
        {"path": "/update_weights", "body": {"update_info": {}}},
    ]
    for wrong in ("/update_weights {", "/update_weights []"):
        with pytest.raises(ConfigError):
            cli.read_calls([wrong])
