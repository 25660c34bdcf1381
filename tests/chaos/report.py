"""What campaigns came to: python -m tests.chaos.report RECORD... prints docs/faults.md's tables.

With --output, one JSON line of the same figures is appended there.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.harness import machine
from tests.chaos.steps import STEPS, TURNS

Line: TypeAlias = dict[str, Any]


def seconds_of(lines: Iterable[Line], key: str) -> str:
    """Median and worst, or nothing."""
    values = [line[key] for line in lines if line[key] is not None]
    return f"{statistics.median(values):.2f}, {max(values):.2f}" if values else ""


def by_fault(lines: Sequence[Line]) -> list[Line]:
    """One row for each fault and transport."""
    groups: dict[tuple[str, str], list[Line]] = defaultdict(list)
    for line in lines:
        groups[line["fault"], line["transport"]].append(line)
    return [
        {
            "fault": fault,
            "transport": transport,
            "rounds": len(group),
            "at their step": sum(line["hit"] for line in group),
            "broken promises": sum(bool(line["violations"]) for line in group),
            "detect s (median, worst)": seconds_of(group, "detect_seconds"),
            "recover s (median, worst)": seconds_of(group, "recover_seconds"),
        }
        for (fault, transport), group in sorted(groups.items())
    ]


def by_step(lines: Sequence[Line]) -> list[Line]:
    """One row for each step: how many rounds laid their fault there."""
    hits = Counter(line["step"] for line in lines if line["hit"])
    kinds = {(line["step"], line["fault"]) for line in lines if line["hit"]}
    each = Counter(step for step, _ in kinds)
    played = {line["step"] for line in lines}
    return [
        {"step": str(step), "rounds at it": hits[str(step)], "kinds of fault": each[str(step)]}
        for step in STEPS
        if str(step) in played
    ]


def by_work(lines: Sequence[Line]) -> list[Line]:
    """One row for each play of a turn."""
    groups: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        groups[line.get("work", "")].append(line)
    return [
        {
            "turn": work,
            "rounds": len(groups[work]),
            "at their step": sum(line["hit"] for line in groups[work]),
            "broken promises": sum(bool(line["violations"]) for line in groups[work]),
            "ends": dict(sum((Counter(line["outcomes"]) for line in groups[work]), Counter())),
            "others served": sum(line["others"] for line in groups[work]),
        }
        for work in TURNS
        if work in groups
    ]


def totals(lines: Sequence[Line]) -> Line:
    """The figures of everything."""
    outcomes: Counter[str] = Counter()
    for line in lines:
        outcomes.update(line["outcomes"])
    broken = [violation for line in lines for violation in line["violations"]]
    return {
        "rounds": len(lines),
        "seeds": sorted({line["seed"] for line in lines}),
        "at their step": sum(line["hit"] for line in lines),
        "bytes moved and compared": sum(line["moved_bytes"] for line in lines),
        "wrong bytes": sum("wrong bytes" in violation for violation in broken),
        "stuck": outcomes.pop("stuck", 0),
        "left over": sum("left on" in violation for violation in broken),
        "rounds with a broken promise": sum(bool(line["violations"]) for line in lines),
        "ends of transfers": dict(outcomes.most_common()),
    }


def show(rows: Sequence[Line]) -> None:
    """Print a table of Markdown."""
    columns = list(rows[0])
    print("| " + " | ".join(columns) + " |")  # noqa: T201
    print("|" + "---|" * len(columns))  # noqa: T201
    for row in rows:
        print("| " + " | ".join(str(row[name]) for name in columns) + " |")  # noqa: T201
    print()  # noqa: T201


def main() -> None:
    """Print, and append if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    lines = [json.loads(text) for path in options.records for text in path.read_text().splitlines()]
    total, faults, steps = totals(lines), by_fault(lines), by_step(lines)
    turns = by_work(lines)
    show([{"figure": key, "value": value} for key, value in total.items()])
    for rows in filter(None, (turns, faults, steps)):
        show(rows)
    if options.output is not None:
        with options.output.open("a") as file:
            figures = {"machine": machine(), "totals": total, "faults": faults, "turns": turns,
                       "steps": steps}  # fmt: skip
            file.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
