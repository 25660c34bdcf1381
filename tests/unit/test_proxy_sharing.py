"""What many readers ask for is made seldom, and they wait for each other only."""

from __future__ import annotations

import asyncio

from proxy.http.memory import FREE_BYTES, BodyMemory, Keep
from proxy.http.sharing import BURST_SECONDS, MAX_SHARE, Pace, Shared
from tests.doubles.clock import Clock


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


async def test_a_few_begin_in_each_tick_and_the_others_in_order() -> None:
    pace, began = Pace(2), []

    async def begin(number: int) -> None:
        await pace.turn()
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
    one, two, small = Keep(memory), Keep(memory), Keep(memory)
    assert one.grow_to(FREE_BYTES + 400)
    assert one.grow_to(FREE_BYTES + 600)
    assert not two.grow_to(FREE_BYTES + 401)
    assert two.grow_to(FREE_BYTES + 400)
    assert small.grow_to(FREE_BYTES)
    assert memory.num_bytes == 1000
    one.free()
    one.free()
    assert memory.num_bytes == 400
    two.free()
    small.free()
    assert memory.num_bytes == 0
