"""The tables of the last run of `make bench NAME=serving`, from its raw lines.

usage: python -m benchmarks.serving_report [--results FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, Row, show

REFERENCE = "alone"
COPY, CACHED = "copy", "cached"
LEGS = ("prefill_ms", "decode_ms", "first_ms")


def lines_of(path: Path, run: int | None = None) -> list[dict[str, Any]]:
    """Return the recorded stages of all runs, or of one."""
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines()]
    return [line for line in lines if run is None or line["run"] == run]


def add_stage_options(parser: argparse.ArgumentParser, stages: Iterable[str]) -> None:
    """Add the options by which stages are chosen."""
    known = list(stages)
    parser.add_argument("--stages", nargs="+", choices=known, default=known)
    parser.add_argument("--resume", action="store_true", help="go on with the last run")


def chosen_stages(
    parser: argparse.ArgumentParser, options: argparse.Namespace, *, again: bool = False
) -> tuple[int, list[str]]:
    """Return the number of a run and the stages to play in it: those that were not, or `again`.

    The parser reports it if the stage that all are compared with is not among them.
    """
    lines = lines_of(options.output)
    run = max((line["run"] for line in lines), default=0) + (not options.resume or not lines)
    played = {line["stage"] for line in lines if line["run"] == run}
    todo = [name for name in options.stages if again or name not in played]
    if REFERENCE not in (*played, *todo):
        parser.error(f"the stage {REFERENCE!r} comes first: the others are compared with it")
    return run, todo


def rows_of(lines: Iterable[Mapping[str, Any]], what: str) -> list[Row]:
    """Return all rows of one kind."""
    return [row for line in lines for row in line["rows"] if row["what"] == what]


def values_of(rows: Iterable[Row], key: str, **where: object) -> list[float]:
    """Return one column of the measured rows that match."""
    chosen = (row for row in rows if all(row.get(name) == value for name, value in where.items()))
    return [row[key] for row in chosen if row["round"] and row.get(key) is not None]


def ways_of(rows: Iterable[Row]) -> list[str]:
    """Return the names of the ways, in the order in which they were measured."""
    return list(dict.fromkeys(row["who"] for row in rows))


def lengths_of(rows: Iterable[Row]) -> list[int]:
    """Return the lengths of the prompts."""
    return sorted({row["tokens"] for row in rows})


def _shown(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{statistics.median(values):.0f} [{min(values):.0f}-{max(values):.0f}]"


def leg_rows(lines: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Median, least and most of each leg, by length and way, and whether all tokens are right."""
    rows = rows_of(lines, "request")
    found = []
    for tokens in lengths_of(rows):
        for who in ways_of(rows):
            mine = [row for row in rows if row["who"] == who and row["tokens"] == tokens]
            if not mine:
                continue
            row: Row = {"tokens": tokens, "way": who}
            row |= {leg: _shown(values_of(mine, leg)) for leg in LEGS}
            cpu = ("prefill_cpu_s", "decode_cpu_s")
            row |= {name: _median(values_of(mine, name), 3) for name in cpu}
            same = [item["same"] for item in mine if "same" in item]
            found.append({**row, "same": f"{sum(same)}/{len(same)}" if same else ""})
    return found


def goal_rows(lines: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The decode leg beside what nobody can beat: the prompt in D's own cache, and the copy."""
    requests, cached, copies = (rows_of(lines, what) for what in ("request", CACHED, COPY))
    found = []
    for tokens in lengths_of(cached):
        at_hand = _median(values_of(cached, "decode_ms", tokens=tokens), 1) or 0.0
        copy = _median(values_of(copies, "decode_ms", tokens=tokens), 1) or 0.0
        row: Row = {"tokens": tokens, "in D's cache": at_hand, "copy": copy}
        for who in ("PUT_ASYNC", "PUT", "GET"):
            leg = _median(values_of(requests, "decode_ms", tokens=tokens, who=who), 1)
            if leg is not None:
                row |= {who: leg, f"{who} over": round(leg - at_hand - copy, 1)}
        found.append(row)
    return found


def _median(values: Sequence[float], digits: int) -> float | None:
    return round(statistics.median(values), digits) if values else None


def _without(rows: Iterable[Row], *names: str) -> list[Row]:
    return [{name: row[name] for name in row if name not in names} for row in rows]


def show_report(lines: Sequence[Mapping[str, Any]]) -> None:
    """Print all tables."""
    for title, rows in (
        ("Legs, in ms", leg_rows(lines)),
        ("The decode leg beside its limit, in ms", goal_rows(lines)),
        ("Gaps of another answer on D while prompts are loaded", rows_of(lines, "beside")),
        ("Many at a time", rows_of(lines, "together")),
        ("Cores taken while idle", rows_of(lines, "idle")),
        ("Failures", rows_of(lines, "failure")),
    ):
        if rows:
            print(f"\n{title}")
            show(_without(rows, "what"))


def main() -> None:
    """Print the last run."""
    parser = argparse.ArgumentParser("python -m benchmarks.serving_report")
    parser.add_argument("--results", type=Path, default=RESULTS / "serving.jsonl")
    options = parser.parse_args()
    lines = lines_of(options.results)
    show_report([line for line in lines if line["run"] == lines[-1]["run"]])


if __name__ == "__main__":
    main()
