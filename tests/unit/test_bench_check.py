"""`make bench-check` says that a ratio is worse only if the committed runs and the spread do."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.check import GATES, RatioGate, rows_in
from benchmarks.harness import RESULTS

HIGHER = RatioGate("rates", "of_limit", "gb_", higher_is_better=True)
LOWER = RatioGate("costs", "over_plain", "us_", higher_is_better=False)


def row(case: str, least: float = 9.0, most: float = 11.0, **ratio: float) -> dict[str, Any]:
    spread = {"median": 10.0, "min": least, "max": most}
    return {"case": case, **{p + k: v for p in ("gb_", "us_") for k, v in spread.items()}, **ratio}


def worse(
    gate: RatioGate, new: list[dict[str, Any]], *committed: list[dict[str, Any]]
) -> list[str]:
    return [item["case"] for item in gate.judge(new, committed) if item[""]]


@pytest.mark.parametrize(("ratio", "is_worse"), [(0.7, False), (0.5, True), (3.0, False)])
def test_higher_is_better(ratio: float, is_worse: bool) -> None:
    committed = [row("a", of_limit=0.9)]
    assert bool(worse(HIGHER, [row("a", of_limit=ratio)], committed)) == is_worse


@pytest.mark.parametrize(("ratio", "is_worse"), [(1.4, False), (1.6, True), (0.1, False)])
def test_lower_is_better(ratio: float, is_worse: bool) -> None:
    committed = [row("a", over_plain=1.0)]
    assert bool(worse(LOWER, [row("a", over_plain=ratio)], committed)) == is_worse


def test_the_worst_committed_run_counts() -> None:
    committed = [[row("a", over_plain=3.0)], [row("a", over_plain=1.0)]]
    assert worse(LOWER, [row("a", over_plain=4.4)], *committed) == []
    assert worse(LOWER, [row("a", over_plain=4.6)], *committed) == ["a"]


def test_a_wide_spread_allows_more_up_to_a_bound() -> None:
    committed = [row("a", over_plain=1.0, most=20.0), row("b", over_plain=1.0, most=900.0)]
    new = [row("a", over_plain=1.9), row("b", over_plain=3.9)]
    assert worse(LOWER, new, committed) == []
    new = [row("a", over_plain=2.1), row("b", over_plain=4.1)]
    assert worse(LOWER, new, committed) == ["a", "b"]


def test_references_and_new_cases_are_not_judged() -> None:
    committed = [row("plain", over_plain=1.0)]
    new = [row("plain", over_plain=1.0), row("new", over_plain=99.0)]
    assert LOWER.judge(new, [committed]) == []


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.benchmark)
def test_every_gate_finds_its_committed_rows(gate: RatioGate) -> None:
    runs = rows_in(RESULTS / f"{gate.benchmark}.jsonl")
    verdicts = gate.judge(runs[-1], runs)
    assert verdicts
    assert not any(item[""] for item in verdicts)
