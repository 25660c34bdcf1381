"""Common parts of all benchmarks: alternating repetitions, the machine in words, results.

One run prints a table and appends one JSON line (command, machine, versions, seed, rows) to
benchmarks/results/NAME.jsonl.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("p2p-kv-engine", "torch", "numpy", "pyzmq", "msgspec", "nixl")

Row: TypeAlias = dict[str, Any]
Name = TypeVar("Name")


def arguments(name: str, description: str, *, repetitions: int) -> argparse.ArgumentParser:
    """Make a parser with what every benchmark takes."""
    parser = argparse.ArgumentParser(f"python -m benchmarks.bench_{name}", description=description)
    parser.add_argument("--repetitions", type=int, default=repetitions, help="rounds (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of all random choices (%(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS / f"{name}.jsonl")
    return parser


def alternate(
    contenders: Mapping[Name, Callable[[], float]], repetitions: int
) -> dict[Name, list[float]]:
    """Run every contender once per round, so that other load on the machine affects all alike.

    A contender returns its measurement, in any unit. The first round is a warm-up and does not
    count.
    """
    samples: dict[Name, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run()
    for _ in range(repetitions):
        for name, run in contenders.items():
            samples[name].append(run())
    return samples


def spread(samples: Iterable[float], prefix: str = "", digits: int = 3) -> Row:
    """Return median, min and max as the columns of a row."""
    values = sorted(samples)
    cells = {"median": statistics.median(values), "min": values[0], "max": values[-1]}
    return {f"{prefix}{name}": round(value, digits) for name, value in cells.items()}


def ratio(samples: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of samples / others, taken round by round."""
    return round(statistics.median(a / b for a, b in zip(samples, others, strict=True)), 3)


def machine() -> Row:
    """Describe the machine in words that name neither it nor its place."""
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages * page_bytes / 2**30),
        "kernel": platform.release().split("-")[0],
        "load_1m": round(os.getloadavg()[0], 1),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter here."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def record(
    rows: Sequence[Row], options: argparse.Namespace, details: Mapping[str, Any] | None = None
) -> None:
    """Print the rows and append them to options.output as one JSON line, with these details."""
    show(rows)
    append(rows, options, details)


def append(
    rows: Sequence[Row], options: argparse.Namespace, details: Mapping[str, Any] | None = None
) -> None:
    """Append the rows to options.output as one JSON line, with these details."""
    spec = sys.modules["__main__"].__spec__
    name = spec.name if spec is not None else "?"
    line = {
        "command": " ".join(["python", "-m", name, *_settings(options)]),
        "machine": machine(),
        "versions": versions(),
        "seed": options.seed,
        "rows": list(rows),
        **(details or {}),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("a") as file:
        file.write(json.dumps(line) + "\n")


def show(rows: Sequence[Row]) -> None:
    """Print rows as a table; a column is as wide as its widest cell."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = [columns, *([str(row.get(name, "")) for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
    for line in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def progress(text: str) -> None:
    """Say on stderr what is being measured."""
    print(f"… {text}", file=sys.stderr, flush=True)


def _settings(options: argparse.Namespace) -> list[str]:
    words: list[str] = []
    for name, value in sorted(vars(options).items()):
        if name != "output":
            values = value if isinstance(value, list) else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return words


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
