"""Which held requests are spilled, and for how long vLLM is told to wait for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from p2p_engine.connector.pressure import SPILL_SECONDS, Pressure
from tests.doubles.clock import Clock


def pressure_of(clock: Clock, free: int = 0) -> Pressure:
    made = Pressure(clock)
    pool: Any = SimpleNamespace(get_num_free_blocks=lambda: free)
    made.bind(pool)
    for index in range(4):
        made.hold(f"r{index}", 10)
    return made


@pytest.mark.parametrize(
    ("free", "wanted", "expected"),
    [(5, 5, 0), (5, 6, 1), (5, 15, 1), (5, 16, 2), (0, 1000, 4), (7, None, 1)],
)
def test_the_oldest_are_ordered_and_no_more_than_needed(
    free: int, wanted: int | None, expected: int
) -> None:
    pressure = pressure_of(Clock(), free)
    pressure.want(wanted)
    assert pressure.take_orders() == [f"r{index}" for index in range(expected)]
    assert pressure.take_orders() == []
    pressure.want(wanted)
    assert pressure.take_orders() == []  # what is ordered is on its way
    assert pressure.is_easing == (expected > 0)


def test_nobody_waits_longer_than_a_copy_can_take() -> None:
    clock = Clock(0.0)
    pressure = pressure_of(clock)
    pressure.want(1)
    clock.now = SPILL_SECONDS
    assert not pressure.is_easing
    pressure.want(1)
    assert pressure.take_orders() == ["r0", "r1"]  # another one may have more luck
    assert not pressure.is_easing  # but nobody counts on it
    pressure.release("r0")
    assert pressure.is_easing
    pressure.release("r1")
    assert not pressure.is_easing


def test_without_holds_or_a_pool_there_is_nothing_to_wait_for() -> None:
    pressure = Pressure(Clock())
    pressure.want()
    pressure.release("unknown")
    assert not pressure.is_easing
    assert pressure.take_orders() == []
