"""A proxy that stood still takes nobody for late because of it; by an injected clock."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from proxy.http.deadlines import AT_ONCE, Deadlines
from proxy.http.stall import StallWatch
from tests.doubles.clock import Clock
from tests.rigs.proxies import until


async def test_an_absence_is_told_once_and_a_late_look_is_none() -> None:
    clock = Clock()
    absences: list[float] = []
    looks = 0

    def look() -> float:
        nonlocal looks
        looks += 1
        return clock()

    watch = StallWatch(look, absences.append)
    watch.start()
    try:
        for step in (0.9, 12.0, 0.9):
            clock.now += step
            before = looks
            await until(lambda seen=before: looks > seen, "it looks")  # type: ignore[misc]
    finally:
        watch.close()
    assert absences == [12.0]


async def test_of_absences_in_a_row_only_the_first_is_excused() -> None:
    clock, absences, looks = Clock(), list[float](), 0

    def look() -> float:
        nonlocal looks
        looks += 1
        return clock()

    watch = StallWatch(look, absences.append)
    watch.start()
    try:
        for step in (12.0, 1.1, 7.0, 0.2, 3.0):
            clock.now += step
            before = looks
            await until(lambda seen=before: looks > seen, "it looks")  # type: ignore[misc]
    finally:
        watch.close()
    assert absences == [12.0, 3.0]


async def test_a_deadline_passes_though_nobody_is_ever_there_for_long() -> None:
    clock, passed = Clock(), []
    deadlines = Deadlines(clock)
    deadlines.add(5.0, lambda: passed.append("over"))
    for _ in range(6):
        clock.now += 1.1
        await until(lambda: deadlines._ticked_at == clock.now, "it has ticked")
    assert passed == ["over"]


async def test_a_deadline_is_not_put_off_by_an_absence_that_it_did_not_see() -> None:
    clock, passed = Clock(), []
    deadlines = Deadlines(clock)
    deadlines.add(100.0, lambda: passed.append("long"))
    clock.now += 12.0
    deadlines.add(1.0, lambda: passed.append("short"))  # by what came in the absence
    await until(lambda: deadlines._ticked_at == clock.now, "it has ticked")
    clock.now += 0.9
    await until(lambda: deadlines._ticked_at == clock.now, "it has ticked")
    clock.now += 0.2
    await until(lambda: deadlines._ticked_at == clock.now, "it has ticked")
    assert passed == ["short"]
    deadlines.pending[0].cancel()


async def test_a_deadline_does_not_pass_while_nobody_was_there() -> None:
    clock, passed = Clock(), []
    deadlines = Deadlines(clock)
    deadlines.add(5.0, lambda: passed.append("short"))
    deadlines.add(20.0, lambda: passed.append("long"))
    clock.now += 12.0
    await until(lambda: deadlines._ticked_at == clock.now, "it has ticked")
    assert passed == []
    for _ in range(6):
        clock.now += 0.9
        await until(lambda: deadlines._ticked_at == clock.now, "it has ticked")
    assert passed == ["short"]
    while deadlines.pending:
        clock.now += 0.9
        await until(lambda: deadlines._ticked_at == clock.now, "it has ticked")
    assert passed == ["short", "long"]
    assert 132.0 <= clock.now < 134.0


async def test_a_few_deadlines_pass_before_other_work_has_its_turn() -> None:
    clock, passed, in_each_round = Clock(), 0, list[int]()
    deadlines, loop = Deadlines(clock), asyncio.get_running_loop()

    def expire() -> None:
        nonlocal passed
        passed += 1

    def look() -> None:
        in_each_round.append(passed)
        if passed < 100:
            loop.call_soon(look)

    for _ in range(100):
        deadlines.add(0.5, expire)
    clock.now += 0.6
    look()
    await until(lambda: passed == 100, "all have passed")
    look()
    steps = [later - before for before, later in itertools.pairwise(in_each_round)]
    assert max(steps) <= 2 * AT_ONCE
    assert deadlines.pending == []


class Looked(float):
    """A time that counts how often it is compared."""

    count = 0

    def __add__(self, other: float) -> Looked:
        return Looked(float(self) + other)

    def __lt__(self, other: float) -> bool:
        Looked.count += 1
        return float(self) < float(other)

    def __ge__(self, other: float) -> bool:
        Looked.count += 1
        return float(self) >= float(other)


async def test_a_tick_looks_at_no_deadline_that_waits_behind_another() -> None:
    clock, passed = Clock(), 0

    def expire() -> None:
        nonlocal passed
        passed += 1

    deadlines = Deadlines(lambda: Looked(clock.now))
    for seconds in (100.0, 200.0):
        for _ in range(1000):
            deadlines.add(seconds, expire)
    for _ in range(3):
        deadlines.add(0.5, expire)
    clock.now += 0.6
    Looked.count = 0
    await until(lambda: passed == 3, "the short ones have passed")
    assert Looked.count < 30
    for deadline in deadlines.pending:
        deadline.cancel()
    assert deadlines.pending == []


async def test_a_deadline_that_raises_stops_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    passed = list[str]()

    def fail() -> None:
        raise ValueError("of a test")

    deadlines = Deadlines()
    deadlines.add(0.0, fail)
    deadlines.add(0.01, lambda: passed.append("other"))
    await until(lambda: passed, "the other has passed")
    assert "of a test" in caplog.text
