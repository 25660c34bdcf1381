"""No request is two, and none is part of another: the corpus of `tests/hostile/requests.py`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping

import pytest

from tests.doubles.recorder import RecordingInstance
from tests.hostile import requests
from tests.hostile.requests import FIRST, SECOND, SMUGGLED, Attack
from tests.rigs.proxies import RunningProxy
from tests.rigs.raw import NotHTTP, RawClient, raw_client
from tests.rigs.recorded import recorded

PROBE = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
PATIENCE = 20.0
GROUPS = {
    name: getattr(requests, name)
    for name in (
        "LENGTHS", "ENCODINGS", "CHUNKS", "LINES", "VERSIONS", "TARGETS", "OTHER_PROTOCOLS",
        "EARLY",
    )
}  # fmt: skip


async def outcome(client: RawClient, attack: Attack) -> tuple[tuple[int, ...], bool]:
    """Send an attack; return the statuses of the answers, and whether the connection goes on."""
    first, *others = attack.parts
    statuses, method = [], first.lstrip().partition(b" ")[0].decode("latin-1")
    await client.send(first)
    if not attack.after:
        for part in others:
            await client.send(part)
    for number in itertools.count():
        if number == len(attack.statuses) and attack.is_open:
            await client.send(PROBE)
        answer = await client.answer(method if number < len(attack.statuses) else "GET")
        if answer is None:
            break
        statuses.append(answer.status)
        if number + 1 == attack.after:
            for part in others:
                await client.send(part)
    if attack.is_open and statuses[-1:] == [200]:
        return tuple(statuses[:-1]), True
    return tuple(statuses), False


async def wrong_outcomes(
    proxy: RunningProxy, decode: RecordingInstance, attacks: Mapping[str, Attack]
) -> dict[str, object]:
    """Play attacks; return what was wrong, by the attack's name."""
    wrong: dict[str, object] = {}
    for name, attack in attacks.items():
        try:
            async with raw_client(proxy.port) as client:
                got = await asyncio.wait_for(outcome(client, attack), PATIENCE)
        except (NotHTTP, TimeoutError, ConnectionResetError) as error:
            wrong[name] = repr(error)
            continue
        if got != (attack.statuses, attack.is_open):
            wrong[name] = f"{got}, expected {attack.statuses}, {attack.is_open}"
        prompt = f"victim of {name}"
        status, body, _ = await proxy.ask({"model": "tiny", "prompt": prompt, "max_tokens": 1})
        if status != 200 or prompt not in body.decode():
            wrong[f"{name}: the next client's"] = (status, body)
        seen = [(each.path, each.headers, each.body) for each in decode.received]
        decode.received.clear()
        if SMUGGLED in repr(seen):
            wrong[f"{name}: arrived"] = seen
    return wrong


@pytest.mark.parametrize("group", GROUPS)
async def test_each_request_has_one_answer_or_ends_its_connection(group: str) -> None:
    async with recorded() as (proxy, prefill, decode):
        assert await wrong_outcomes(proxy, decode, GROUPS[group]) == {}
        assert (prefill.faults, decode.faults) == ([], [])
        assert {each.json["prompt"] for each in prefill.received} <= {
            FIRST, SECOND, *(f"victim of {name}" for name in GROUPS[group]),
        }  # fmt: skip
        await proxy.until_idle()
