"""The tables and the plot of the last run of `make bench NAME=serving`, from its raw lines.

usage: python -m benchmarks.serving_report [--results FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, Row, show

REFERENCE = "alone"
COPY, CACHED = "copy", "cached"
PLOT = Path(__file__).parents[1] / "docs" / "serving.svg"
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


def draw(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the time to the first token, by length and way, as stacked legs."""
    plt: Any = importlib.import_module("matplotlib.pyplot")
    rows = rows_of(lines, "request")
    lengths, ways = lengths_of(rows), ways_of(rows)
    plt.rcParams |= {"svg.hashsalt": "serving", "svg.fonttype": "none", "font.size": 9}
    figure, axes = plt.subplots(1, len(lengths), figsize=(3.4 * len(lengths), 3.2), sharey=True)
    for axis, tokens in zip(axes if len(lengths) > 1 else [axes], lengths, strict=True):
        for place, who in enumerate(ways):
            _bar(axis, place, rows, tokens, who)
        axis.set_title(f"{tokens:,} tokens")
        axis.set_xlabel("ms to the first token")
        axis.set_yticks(range(len(ways)), ways)
        axis.spines[["top", "right"]].set_visible(False)
    axes_of_first = axes[0] if len(lengths) > 1 else axes
    axes_of_first.invert_yaxis()
    names = {"prefill's leg": "C0", "decode's leg": "C1", "not divided": "C7"}
    bars = [plt.Rectangle((0, 0), 1, 1, color=color) for color in names.values()]
    figure.legend(bars, names, loc="lower center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _bar(axis: Any, place: int, rows: Sequence[Row], tokens: int, who: str) -> None:
    """Draw one way: its legs, and from the least to the most as a line."""
    first = values_of(rows, "first_ms", tokens=tokens, who=who)
    if not first:
        return
    middle = statistics.median(first)
    prefill = _median(values_of(rows, "prefill_ms", tokens=tokens, who=who), 1)
    if prefill is None:
        axis.barh(place, middle, color="C7")
    else:
        axis.barh(place, prefill, color="C0")
        axis.barh(place, middle - prefill, left=prefill, color="C1")
    axis.plot([min(first), max(first)], [place, place], color="black", linewidth=1)


def main() -> None:
    """Print and draw the last run."""
    parser = argparse.ArgumentParser("python -m benchmarks.serving_report")
    parser.add_argument("--results", type=Path, default=RESULTS / "serving.jsonl")
    parser.add_argument("--plot", type=Path, default=PLOT)
    options = parser.parse_args()
    lines = lines_of(options.results)
    last = [line for line in lines if line["run"] == lines[-1]["run"]]
    show_report(last)
    draw(last, options.plot)


if __name__ == "__main__":
    main()
