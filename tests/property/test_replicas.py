"""ReplicaRule, beside what Kubernetes' controller does step by step, for any load and clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import example, given
from hypothesis import strategies as st

from p2p_engine.cli.replicas import TOLERANCE, ReplicaRange, ReplicaRule

WINDOW_SECONDS = 30.0
targets = st.sampled_from([0.5, 1.0, 4.0, 64.0])
loads = st.integers(0, 40) | st.integers(0, 2000)


@st.composite
def ranges(draw: st.DrawFn) -> ReplicaRange:
    """Draw the limits of a role."""
    least = draw(st.integers(1, 9))
    return ReplicaRange(least, draw(st.integers(least, 20)), draw(targets))


readings = st.lists(st.tuples(st.floats(0.0, 40.0), loads), min_size=1, max_size=60)


@dataclass
class Controller:
    """The controller as it is written: a ratio, a list of recommendations, two limits."""

    limits: ReplicaRange
    recommendations: list[tuple[float, int]] = field(default_factory=list)

    def decide(self, current: int, usage: float, now: float) -> int:
        """Return the new number of replicas; `current` is within the limits."""
        ratio = usage / (self.limits.target * current)
        is_within = abs(1.0 - ratio) <= TOLERANCE
        replicas = current if is_within else math.ceil(usage / self.limits.target)
        if not self.recommendations:
            self.recommendations.append((now, current))
        lower, upper = replicas, replicas
        for when, recommended in self.recommendations:
            if when > now - WINDOW_SECONDS:
                upper = max(upper, recommended)
        self.recommendations.append((now, replicas))
        stable = current
        if stable < lower:
            stable = lower
        if stable > upper:
            stable = upper
        slowed = max(stable, current - 1)
        return min(max(slowed, self.limits.least), self.limits.most)


def played(limits: ReplicaRange, given: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Let a rule follow some readings, each so long after the last one; return when it wanted how
    many."""
    rule, now, current = ReplicaRule(limits, WINDOW_SECONDS), 0.0, limits.least
    history = []
    for pause, in_flight in given:
        now += pause
        current = rule.decide(current, in_flight, now)
        history.append((now, current))
    return history


@given(ranges(), readings)
@example(ReplicaRange(1, 11, 4.0), [(0.0, 37), (0.0, 44)])  # at the tolerance, but for rounding
def test_it_decides_as_the_controller(limits: ReplicaRange, given: list[tuple[float, int]]) -> None:
    controller, now, current = Controller(limits), 0.0, limits.least
    for (pause, in_flight), (_, decided) in zip(given, played(limits, given), strict=True):
        now += pause
        current = controller.decide(current, in_flight, now)
        assert decided == current


@given(ranges(), readings)
def test_it_stays_within_its_limits_and_removes_one_at_a_time(
    limits: ReplicaRange, given: list[tuple[float, int]]
) -> None:
    before = limits.least
    for _, number in played(limits, given):
        assert max(limits.least, before - 1) <= number <= limits.most
        before = number


@given(ranges(), readings)
def test_none_is_removed_that_was_wanted_within_the_window(
    limits: ReplicaRange, given: list[tuple[float, int]]
) -> None:
    history = played(limits, given)
    wanted = [
        (now, math.ceil(in_flight / limits.target))
        for (now, _), (_, in_flight) in zip(history, given, strict=True)
    ]
    for index, (now, number) in enumerate(history[1:], start=1):
        if number < history[index - 1][1]:
            recent = [many for when, many in wanted[: index + 1] if now - WINDOW_SECONDS < when]
            assert max(recent) <= number
            assert now - history[0][0] >= WINDOW_SECONDS


@given(ranges(), loads)
def test_a_load_that_stays_is_met_by_a_number_that_stays(
    limits: ReplicaRange, in_flight: int
) -> None:
    history = [number for _, number in played(limits, [(WINDOW_SECONDS, in_flight)] * 60)]
    assert len(set(history[30:])) == 1
    enough = min(max(math.ceil(in_flight / limits.target), limits.least), limits.most)
    assert abs(history[-1] - enough) <= math.ceil(TOLERANCE * limits.most)
