"""Plays the corpus of `tests/hostile/requests.py` on a proxy, directly or by way of a front."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping
from contextlib import suppress

from tests.hostile.requests import Attack
from tests.rigs.raw import NotHTTP, RawAnswer, RawClient, raw_client

PROBE = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
PATIENCE = 20.0
PAUSE_SECONDS = 0.01  # between the parts, so that they are parts also behind a front
SETTLED_SECONDS = 0.05  # for what a front answers


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


async def wrong_outcomes(port: int, attacks: Mapping[str, Attack]) -> dict[str, str]:
    """Play attacks directly; return those that were not answered as the corpus says."""
    wrong = {}
    for name, attack in attacks.items():
        try:
            async with raw_client(port) as client:
                got = await asyncio.wait_for(outcome(client, attack), PATIENCE)
        except (NotHTTP, asyncio.TimeoutError, ConnectionError) as error:
            wrong[name] = repr(error)
            continue
        if got != (attack.statuses, attack.is_open):
            wrong[name] = f"{got}, expected {attack.statuses}, {attack.is_open}"
    return wrong


async def play_behind(port: int, attack: Attack) -> None:
    """Send an attack to a front, whose answers are its own affair."""
    async with raw_client(port) as client:
        for part in attack.parts:
            await client.send(part)
            await asyncio.sleep(PAUSE_SECONDS)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(client.rest(), SETTLED_SECONDS)


async def ask(port: int, prompt: str) -> RawAnswer | None:
    """Send an honest request on a connection of its own."""
    body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 4}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    async with raw_client(port) as client:
        content = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        await client.send(head + content + body)
        return await asyncio.wait_for(client.answer(), PATIENCE)
