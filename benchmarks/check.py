"""`make bench-check`: are we slower? Ratios of the quick benchmarks beside the committed ones.

A ratio compares two contenders of one run, so it depends less on the machine than a rate does. It
is worse if it is beyond the worst that was committed by more than its tolerance: how far the
measurements beneath it lay from their median, on the bad side, then or now.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import RESULTS, Row, progress, show

LEAST_TOLERANCE, MOST_TOLERANCE = 1.5, 4.0
LIMIT_SECONDS = 300.0  # of one benchmark


@dataclass(frozen=True)
class RatioGate:
    """A ratio of one benchmark, and the columns with the measurements beneath it."""

    benchmark: str
    ratio: str
    spread: str  # prefix of the columns median, min and max
    higher_is_better: bool
    repetitions: int = 3
    contenders: tuple[str, ...] = ()  # only these; (): all

    def rows(self, rows: Sequence[Row]) -> dict[tuple[object, ...], Row]:
        """Return the rows that have the ratio, by what they are about."""
        return {
            tuple(value for value in row.values() if isinstance(value, str | int)): row
            for row in rows
            if self.ratio in row and (not self.contenders or row["contender"] in self.contenders)
        }

    def tolerance(self, rows: Sequence[Row]) -> float:
        """Return by which factor the ratio may be worse."""
        spreads = [self._spread(row) for row in rows]
        return min(MOST_TOLERANCE, max(LEAST_TOLERANCE, *spreads))

    def _spread(self, row: Row) -> float:
        median, least, most = (row[self.spread + name] for name in ("median", "min", "max"))
        worst, best = (median, least) if self.higher_is_better else (most, median)
        return float(worst / best) if best else MOST_TOLERANCE

    def judge(self, new: Sequence[Row], committed: Sequence[Sequence[Row]]) -> list[Row]:
        """Compare a run with the committed ones, row by row."""
        before = [self.rows(rows) for rows in committed]
        found = []
        for name, row in self.rows(new).items():
            olds = [rows[name] for rows in before if name in rows]
            if not olds or all(old[self.ratio] == row[self.ratio] == 1 for old in olds):
                continue  # new, or what the others are compared with
            ratios, tolerance = [old[self.ratio] for old in olds], self.tolerance([row, *olds])
            if self.higher_is_better:
                allowed = min(ratios) / tolerance
                is_worse = row[self.ratio] < allowed
            else:
                allowed = max(ratios) * tolerance
                is_worse = row[self.ratio] > allowed
            found.append({
                "benchmark": self.benchmark, "case": ", ".join(map(str, name)),
                self.ratio: row[self.ratio], "committed": ratios[-1],
                "allowed": round(allowed, 4), "": "WORSE" if is_worse else "",
            })  # fmt: skip
        return found


GATES = (
    RatioGate("plan", "plan_of_copy", "plan_ms_", higher_is_better=False),
    RatioGate("pool", "pool is", "", higher_is_better=True),
    RatioGate("open", "ratio", "us_", higher_is_better=False),
    RatioGate("encryption", "over_plain", "us_", higher_is_better=False, repetitions=7),
    RatioGate(
        "transfer", "of_copy_now", "gb_per_s_", higher_is_better=True, contenders=("shm", "tcp")
    ),
)  # fmt: skip


def rows_in(path: Path) -> list[list[Row]]:
    """Return the rows of each recorded run."""
    return [json.loads(line)["rows"] for line in path.read_text().splitlines()]


def measure(gate: RatioGate, folder: Path) -> list[Row]:
    """Run a benchmark and return its rows; blocks for LIMIT_SECONDS at most.

    Raises:
        subprocess.SubprocessError: it failed, or took too long.
    """
    output = folder / f"{gate.benchmark}.jsonl"
    command = [sys.executable, "-m", f"benchmarks.bench_{gate.benchmark}"]
    command += ["--repetitions", str(gate.repetitions), "--output", str(output)]
    subprocess.run(command, check=True, timeout=LIMIT_SECONDS, stdout=subprocess.DEVNULL)
    return rows_in(output)[-1]


def main() -> None:
    """Measure all, print what is compared, and exit with 1 if anything is worse."""
    num_worse = 0
    with tempfile.TemporaryDirectory(prefix="bench-check-") as folder:
        for gate in GATES:
            progress(gate.benchmark)
            committed = rows_in(RESULTS / f"{gate.benchmark}.jsonl")
            verdicts = gate.judge(measure(gate, Path(folder)), committed)
            show(verdicts)
            num_worse += sum(bool(row[""]) for row in verdicts)
    sys.exit(f"{num_worse} ratios are worse than allowed" if num_worse else 0)


if __name__ == "__main__":
    main()
