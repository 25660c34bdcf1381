"""Instances that are paused: who gets requests meanwhile, and what is nobody's fault."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.doubles.server import DECODE, PREFILL, Behaviour, ServerDouble
from tests.doubles.weights import DoorsDouble
from tests.rigs.proxies import ASKED, MESSAGES, RESPONSES, STREAMED, running_proxy, until
from tests.rigs.weights_fleet import UPDATE, breakers_of, doors_of, until_queued, weights_fleet

NUM_FAILURES = 6  # of legs, with which a breaker would open


async def test_an_instance_that_is_paused_gets_no_requests_whoever_paused_it(
    admin_key: str,
) -> None:
    """A proxy that did not give the order, or has restarted in the middle of one, sees it."""
    async with weights_fleet(admin_key, 1, 2, queue_timeout_seconds=0.5) as fleet:
        paused, other_decode = fleet.decodes
        doors_of(paused).pause()
        await fleet.proxy.until_state(paused, "paused")
        async with running_proxy(**fleet.listed) as other:
            await other.until_ready(fleet.prefills[0], fleet.decodes[1])
            await other.until_state(paused, "paused")
            for _ in range(4):
                assert (await other.ask())[0] == 200
        assert not paused.received
        # If no other is left, a request waits.
        doors_of(other_decode).pause()
        await fleet.proxy.until_state(other_decode, "paused")
        status, said, _ = await fleet.proxy.ask()
        assert (status, json.loads(said)["error"]["code"]) == (503, "instance_paused")
        waiting = asyncio.create_task(fleet.proxy.ask())
        doors_of(paused).resume()
        assert (await waiting)[0] == 200


@pytest.mark.parametrize("asked", [ASKED, STREAMED])
@pytest.mark.parametrize("kind", [PREFILL, DECODE])
async def test_a_request_that_a_pause_refuses_waits_for_its_end(
    admin_key: str, kind: str, asked: dict[str, Any]
) -> None:
    """vLLM 0.33 answers 503 while it is paused; the proxy hears of the pause only by that."""
    async with weights_fleet(admin_key, probe_interval_seconds=30.0) as fleet:
        paused = doors_of({PREFILL: fleet.prefills, DECODE: fleet.decodes}[kind][0])
        paused.refuses = True
        paused.pause()
        asking = [asyncio.create_task(fleet.proxy.ask(asked)) for _ in range(2 * NUM_FAILURES)]

        async def all_wait() -> bool:
            return bool((await fleet.proxy.status())["requests_queued"] == len(asking))

        await until(all_wait, "all wait")
        paused.resume()
        answers = await asyncio.gather(*asking)
        assert {status for status, _, _ in answers} == {200}
        assert not any(b"error" in said for _, said, _ in answers)
        assert await breakers_of(fleet.proxy) == {"closed"}


async def test_who_answers_503_and_is_not_paused_is_to_blame(admin_key: str) -> None:
    async with weights_fleet(admin_key, 1, 2) as fleet:
        bad = fleet.decodes[0]
        bad.behaviour = Behaviour(status=503)
        doors_of(fleet.decodes[1]).faults["/is_paused"] = "500"  # it cannot say
        fleet.decodes[1].behaviour = Behaviour(status=503)
        answers = [await fleet.proxy.ask() for _ in range(NUM_FAILURES)]
        assert {status for status, _, _ in answers} == {503}
        assert {"open"} <= await breakers_of(fleet.proxy)
        for decode in fleet.decodes:
            assert (await fleet.proxy.states())[decode.http_address] == "ready"


async def test_a_door_that_fails_for_a_while_is_asked_again(admin_key: str) -> None:
    async with weights_fleet(admin_key) as fleet:
        doors = doors_of(fleet.decodes[0])
        doors.pause()
        await fleet.proxy.until_state(fleet.decodes[0], "paused")
        for status in ("429", "404"):
            doors.faults["/is_paused"] = status
            doors.asked.clear()
            await until(lambda: len(doors.asked) > 1, "it is asked again")
        assert (await fleet.proxy.states())[fleet.decodes[0].http_address] == "paused"
        doors.faults.clear()
        doors.resume()
        await fleet.proxy.until_ready(fleet.decodes[0])


async def test_a_request_waits_only_for_a_pause_of_its_model_and_of_the_missing_role(
    admin_key: str,
) -> None:
    async with weights_fleet(admin_key) as fleet, AsyncExitStack() as parts:
        others = [ServerDouble(k, model="other", doors=DoorsDouble()) for k in (PREFILL, DECODE)]
        for other in others:
            await parts.enter_async_context(other)
            other.beat(fleet.proxy.registration_address)
        await fleet.proxy.until_ready(*others)
        fleet.decodes[0].health_status = 500
        await fleet.proxy.until_state(fleet.decodes[0], "not_ready")
        for paused in (others[1], fleet.prefills[0]):
            doors_of(paused).pause()
            await fleet.proxy.until_state(paused, "paused")
            status, said, _ = await fleet.proxy.ask()
            assert (status, json.loads(said)["error"]["code"]) == (503, "no_instance")
        asking = asyncio.create_task(fleet.proxy.ask({**ASKED, "model": "other"}))
        await until_queued(fleet.proxy)
        doors_of(others[1]).resume()
        assert (await asking)[0] == 200


async def test_a_trainer_may_change_weights_by_itself_after_an_order(admin_key: str) -> None:
    async with weights_fleet(admin_key) as fleet:
        await fleet.update()
        doors = doors_of(fleet.decodes[0])
        doors.pause()
        await fleet.proxy.until_state(fleet.decodes[0], "paused")
        doors.label = "step-9"
        doors.resume()
        await fleet.proxy.until_ready(fleet.decodes[0])


async def test_an_overloaded_instance_costs_no_more_prefills_than_requests(admin_key: str) -> None:
    """It answers 503 and is not paused: whoever asks it meanwhile shares the question."""
    async with weights_fleet(admin_key) as fleet:
        [prefill], [decode] = fleet.prefills, fleet.decodes
        decode.behaviour = Behaviour(status=503)
        num_asked = 20
        asked = (fleet.proxy.ask() for _ in range(num_asked))
        assert {status for status, _, _ in await asyncio.gather(*asked)} == {503}
        assert len(prefill.received) <= num_asked
        assert doors_of(decode).asked.count("/is_paused") < num_asked


LOAD_FAILED = {"message": "Internal server error", "type": "InternalServerError", "code": 500}


@pytest.mark.parametrize("pauses", ["somebody else", "an order"])
async def test_decode_that_fails_while_prefill_is_paused_is_asked_again_later(
    admin_key: str, pauses: str
) -> None:
    """A pause withdraws prefill's KV, and decode answers 500, as vLLM's policy `fail` wants it."""
    async with weights_fleet(admin_key) as fleet:
        [prefill], [decode] = fleet.prefills, fleet.decodes
        hold, pause = asyncio.Event(), asyncio.Event()
        body = json.dumps({"error": LOAD_FAILED}).encode()
        decode.behaviour = Behaviour(hold=hold, status=500, body=body)
        asking = asyncio.create_task(fleet.proxy.ask())
        await until(lambda: decode.received, "decode loads")
        if pauses == "an order":
            doors_of(decode).slow["/pause"] = pause
            assert (await fleet.order("update", {**UPDATE, "ends": "abort"}))[0] == 200
            await until(lambda: doors_of(prefill).is_paused, "prefill is paused")
        else:
            doors_of(prefill).pause()
        hold.set()
        await until_queued(fleet.proxy)
        decode.behaviour = Behaviour()
        pause.set()
        if pauses == "somebody else":
            doors_of(prefill).resume()
        assert (await asking)[0] == 200
        assert await breakers_of(fleet.proxy) == {"closed"}


async def test_who_does_not_say_whether_it_is_paused_counts_as_paused(admin_key: str) -> None:
    """vLLM's engine core answers behind a change of weights, its HTTP server before."""
    async with weights_fleet(admin_key, probe_timeout_seconds=0.2) as fleet:
        [decode] = fleet.decodes
        doors, is_changed = doors_of(decode), asyncio.Event()
        doors.slow["/is_paused"], doors.refuses = is_changed, True
        doors.pause()
        asking = [asyncio.create_task(fleet.proxy.ask()) for _ in range(NUM_FAILURES)]
        await fleet.proxy.until_state(decode, "paused")
        async with running_proxy(probe_timeout_seconds=0.2, **fleet.listed) as other:
            await other.until_state(decode, "paused")
        doors.resume()
        is_changed.set()
        assert {status for status, _, _ in await asyncio.gather(*asking)} == {200}
        assert await breakers_of(fleet.proxy) == {"closed"}


async def test_who_was_silent_at_first_and_has_no_doors_gets_requests() -> None:
    async with AsyncExitStack() as parts:
        prefill, decode = ServerDouble(PREFILL), ServerDouble(DECODE, doors=DoorsDouble())
        doors, is_ready = doors_of(decode), asyncio.Event()
        doors.slow["/is_paused"], doors.faults["/is_paused"] = is_ready, "404"
        for double in (prefill, decode):
            await parts.enter_async_context(double)
        proxy = await parts.enter_async_context(running_proxy(probe_timeout_seconds=0.2))
        for double in (prefill, decode):
            double.beat(proxy.registration_address)
        await proxy.until_state(decode, "paused")
        is_ready.set()
        await proxy.until_ready(decode)


# What vLLM 0.33 says in a stream of these APIs that comes while it is paused.
REFUSALS: dict[str, list[tuple[str, Any]]] = {
    MESSAGES: [
        ("error", {"type": "error", "error": {"type": "overloaded_error", "message": "paused"}})
    ],
    RESPONSES: [
        ("response.created", {"type": "response.created", "response": {"status": "in_progress"}}),
        ("response.in_progress", {"type": "response.in_progress", "response": {}}),
        ("error", {"code": "503", "message": "paused", "sequence_number": 2, "type": "error"}),
    ],
}
STREAMS: dict[str, dict[str, Any]] = {
    MESSAGES: {"messages": [{"role": "user", "content": "once"}], "max_tokens": 8},
    RESPONSES: {"input": "once", "max_output_tokens": 8, "store": False},
}


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_a_stream_of_each_api_that_a_pause_refuses_waits_for_its_end(
    admin_key: str, path: str
) -> None:
    async with weights_fleet(admin_key, probe_interval_seconds=30.0) as fleet:
        doors = doors_of(fleet.decodes[0])
        events = [f"event: {name}\ndata: {json.dumps(said)}\n\n" for name, said in REFUSALS[path]]
        doors.refuses, doors.refusal = True, "".join(events)
        doors.pause()
        asked = {"model": "tiny", "stream": True, **STREAMS[path]}
        asking = asyncio.create_task(fleet.proxy.ask(asked, path))
        await until_queued(fleet.proxy)
        doors.resume()
        status, said, _ = await asking
        assert status == 200
        assert b"event: error" not in said
        assert await breakers_of(fleet.proxy) == {"closed"}


async def test_a_response_is_read_on_to_the_first_event_that_tells(admin_key: str) -> None:
    """Whatever the pieces in which its events come, and however long the first of them is."""
    *begun, refused = [
        f"event: {name}\ndata: {json.dumps(said)}\n\n".encode()
        for name, said in REFUSALS[RESPONSES]
    ]
    generated = b'event: response.output_text.delta\ndata: {"code":503}\n\n'
    asked = {"model": "tiny", "stream": True, **STREAMS[RESPONSES]}
    pieces = [bytes([each]) for each in b"".join(begun)]
    async with weights_fleet(admin_key, max_retries=0) as fleet:
        [decode] = fleet.decodes
        decode.behaviour = Behaviour(pieces=[*pieces, generated, refused])
        _, said, _ = await fleet.proxy.ask(asked, RESPONSES)
        assert said.startswith(b"".join(pieces) + generated)
        long = begun[0].replace(b"in_progress", b"x" * 100_000)
        decode.behaviour = Behaviour(pieces=[long, generated])
        _, said, _ = await fleet.proxy.ask(asked, RESPONSES)
        assert said.startswith(long + generated)
