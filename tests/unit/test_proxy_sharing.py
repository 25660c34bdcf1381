"""What many readers ask for is made seldom, and they wait for each other only."""

from __future__ import annotations

import asyncio
import os
import random
import tracemalloc
from collections import Counter
from functools import partial
from typing import Any, cast

import pytest

from proxy.http.asgi import ProxyRequest
from proxy.http.deadlines import Deadlines
from proxy.http.memory import (
    FREE_BYTES,
    KEPT_AT_ONCE,
    PIECE_BYTES,
    BodyMemory,
    Keep,
    Span,
)
from proxy.http.sharing import BURST_SECONDS, MAX_SHARE, Shared
from proxy.http.turns import MOST_AT_ONCE, TURN_SECONDS, Turns
from tests.doubles.clock import Clock
from tests.rigs.proxies import until


def test_few_readers_get_fresh_content_and_many_get_what_is_there() -> None:
    clock, num_made = Clock(), 0

    def make() -> bytes:
        nonlocal num_made
        num_made += 1
        clock.now += 0.01
        return b"%d" % num_made

    shared = Shared(make, clock)
    for number in range(5):
        assert shared.get() == b"%d" % (number + 1)
        clock.now += 1.0
    began, before = clock.now, num_made
    for _ in range(100_000):
        assert shared.get() == b"%d" % num_made
        clock.now += 0.0001
    spent = (num_made - before) * 0.01
    assert spent <= BURST_SECONDS + (clock.now - began) * MAX_SHARE + 0.01


async def test_a_few_begin_in_each_so_many_seconds_and_the_others_in_order() -> None:
    slow, began = Turns(2, seconds=0.01), list[int]()

    async def begin(number: int) -> None:
        await slow.take()
        began.append(number)

    tasks = [asyncio.ensure_future(begin(number)) for number in range(7)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert began == [0, 1]
    tasks[3].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert began == [0, 1, 2, 4, 5, 6]


def test_bodies_are_counted_beyond_the_first_bytes_of_each() -> None:
    memory = BodyMemory(1000)
    one, two, small = (Keep.new(memory, 1 << 20) for _ in range(3))
    assert one.add(b"x" * FREE_BYTES)
    assert one.add(b"x" * 400)
    assert one.add(b"x" * 200)
    assert not two.add(b"x" * (FREE_BYTES + 401))
    assert small.add(b"x" * FREE_BYTES)
    assert memory.num_bytes == 600
    also = one.again()
    one.free()
    one.free()
    assert memory.num_bytes == 600
    also.free()
    assert memory.num_bytes == 0
    assert not small.add(b"x" * 1001)
    small.free()
    two.free()


async def test_a_large_body_lies_in_a_file_and_is_read_in_pieces() -> None:
    memory = BodyMemory(1 << 30)
    body = random.Random(1).randbytes(3 * PIECE_BYTES)
    one, two = Keep.new(memory, len(body)), Keep.new(memory, len(body))
    for start in range(0, len(body), 100_000):
        assert one.add(body[start : start + 100_000])
        assert two.add(body[::-1][start : start + 100_000])
    first, second = one.content(), two.content()
    assert isinstance(first, Span)
    assert isinstance(second, Span)
    assert b"".join([piece async for piece in first.pieces()]) == body
    assert b"".join([piece async for piece in second.pieces()]) == body[::-1]
    part = first.part(100, 500_000)
    assert len(part) == 499_900
    assert b"".join([piece async for piece in part.pieces()]) == body[100:500_000]
    one.free()
    with pytest.raises(RuntimeError, match="nobody keeps"):
        first.read(0, 1)
    await until(lambda: memory.num_bytes == len(body) - FREE_BYTES, "its pages are given back")
    assert os.fstat(memory.file).st_blocks * 512 <= len(body) + (64 << 10)
    assert second.read(0, 100) == body[::-1][:100]
    two.free()
    await until(lambda: not memory.num_bytes, "all pages are given back")
    assert os.fstat(memory.file).st_blocks == 0
    memory.close()
    memory.close()


async def test_crumbs_take_little_more_than_their_bytes() -> None:
    memory = BodyMemory(1 << 30)
    keep = Keep.new(memory, 1 << 20)
    tracemalloc.start()
    try:
        for _ in range(FREE_BYTES):
            assert keep.add(b"x")
        assert tracemalloc.get_traced_memory()[0] < 2 * FREE_BYTES
    finally:
        tracemalloc.stop()
    assert keep.content() == b"x" * FREE_BYTES
    keep.free()


async def test_bodies_of_a_crowd_delay_one_from_elsewhere_by_a_turn_each() -> None:
    memory, deadlines = BodyMemory(1 << 30), Deadlines()
    body, num_turns = random.Random(1).randbytes(20 * KEPT_AT_ONCE), 0

    async def crowd() -> None:
        nonlocal num_turns
        while True:
            await memory.turns.take("crowd")
            num_turns += 1

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    tasks = [asyncio.ensure_future(crowd()) for _ in range(200)]
    scope = {"path": "/", "headers": [], "state": {}, "client": ("192.0.2.1", 1)}
    handler = asyncio.current_task()
    assert handler is not None
    request = ProxyRequest(cast("Any", scope), receive, handler, memory)
    await asyncio.sleep(0)
    before = num_turns
    assert len(await request.body(len(body), 60.0, deadlines)) == len(body)
    assert num_turns - before < 4 * 20
    for task in tasks:
        task.cancel()
    request.ends.close()
    await asyncio.gather(*tasks, return_exceptions=True)
    memory.close()


async def test_origins_take_turns() -> None:
    turns, moved = Turns(), list[str]()

    async def move(origin: str) -> None:
        await turns.take(origin)
        moved.append(origin)

    await asyncio.gather(*(move(origin) for origin in "aaaaabcc"))
    assert "".join(moved) == "aabcacaa"  # the first need not wait


async def test_who_comes_is_first_and_who_goes_on_is_last() -> None:
    turns, worked = Turns(), list[str]()
    await turns.take()
    for name in ("one", "two", "three"):
        turns.ask("", name, partial(worked.append, name), goes_on=name == "two")
    turns.ask("", "gone", partial(worked.append, "gone"))
    turns.leave("", "gone")
    turns.leave("", "gone")
    await until(lambda: len(worked) == 3, "all have worked")
    assert worked == ["three", "one", "two"]


async def test_a_turn_counts_the_time_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, turns, rounds = Clock(), Turns(10, least=0), list[int]()
    monkeypatch.setattr("proxy.http.turns.time.perf_counter", clock)
    monkeypatch.setattr("proxy.http.turns.LEAST_PER_SECOND", 0)

    def work() -> None:
        rounds.append(num_rounds)
        clock.now += 2 * TURN_SECONDS

    num_rounds = 0
    assert [turns.do_now(work) for _ in range(7)] == [True] * 5 + [False] * 2
    for number in range(12):
        turns.ask("", number, work)
    while len(rounds) < 17:
        num_rounds += 1
        await asyncio.sleep(0)
    assert list(Counter(rounds).values()) == [5, 5, 5, 2]


async def test_more_have_their_turn_in_long_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for per_second, expected in ((0, 1), (1 << 40, 1 + MOST_AT_ONCE)):
        monkeypatch.setattr("proxy.http.turns.LEAST_PER_SECOND", per_second)
        turns, loop, worked = Turns(), asyncio.get_running_loop(), list[int]()
        await turns.take()
        for number in range(100):
            turns.ask("", number, partial(worked.append, number))
        before = loop.time()
        while loop.time() == before:
            pass
        await asyncio.sleep(0)
        assert len(worked) == expected


async def test_one_piece_is_moved_in_each_round_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("proxy.http.turns.LEAST_PER_SECOND", 0)
    turns, rounds, moved = Turns(), 0, list[int]()

    def count() -> None:
        nonlocal rounds
        rounds += 1
        if len(moved) < 50:
            asyncio.get_running_loop().call_soon(count)

    async def move() -> None:
        for _ in range(10):
            await turns.take()
            moved.append(rounds)

    asyncio.get_running_loop().call_soon(count)
    left = asyncio.ensure_future(move())
    movers = [asyncio.ensure_future(move()) for _ in range(5)]
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.gather(*movers)
    assert max(Counter(moved).values()) <= 2
    assert await asyncio.gather(left, return_exceptions=True)
