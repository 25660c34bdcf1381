"""`make plots`: one picture for each benchmark, of a run in results/, beside its page.

A dot is a median, the line behind it reaches from the least to the most. A picture names the run
that it shows, so that a test can tell when it is out of date.

usage: python -m benchmarks.plots [NAME ...]
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import RESULTS, Row, spread

PAGES = Path(__file__).parent / "pages"
SUFFIXES = ("median", "min", "max")
PANEL_INCHES, ROW_INCHES, FRAME_INCHES = 3.4, 0.2, 0.8
PANELS_IN_A_ROW = 4


class Dot(NamedTuple):
    """A measured figure, and where it is drawn."""

    panel: str
    label: str
    series: str
    median: float
    least: float
    most: float


@dataclass(frozen=True)
class Plot:
    """What is drawn of a benchmark's rows.

    Rows with the same panel and label are the samples of one dot, unless a row has the columns
    median, min and max of a value.
    """

    unit: str
    values: Mapping[str, str]  # column, or the beginning of its three columns: name of the series
    label: str | Callable[[Row], object]
    panel: str | Callable[[Row], object] = ""  # "": a panel for all
    keep: Callable[[Row], bool] = lambda row: True
    apart: bool = False  # each series has a panel of its own
    logarithmic: bool = False
    run: int = -1  # the line of the file; with `staged`, the number that its lines bear, or -1
    staged: bool = False  # a run has a line for each stage

    def rows(self, name: str) -> list[Row]:
        """Return the rows of the run."""
        lines = list(map(json.loads, (RESULTS / f"{name}.jsonl").read_text().splitlines()))
        if not self.staged:
            return list(lines[self.run]["rows"])
        run = lines[-1]["run"] if self.run < 0 else self.run
        chosen = [line for line in lines if line["run"] == run]
        return [
            {"stage": ", ".join(filter(None, (line["stage"], line.get("note")))), **row}
            for line in chosen
            for row in line["rows"]
        ]

    def dots(self, rows: Sequence[Row]) -> list[Dot]:
        """Return what is drawn of these rows, in their order."""
        found: dict[tuple[str, str, str], list[float]] = {}
        for row in filter(self.keep, rows):
            for column, series in self.values.items():
                samples = _samples(row, column)
                panel = str(_cell(row, self.panel)) if self.panel else ""
                if samples:
                    place = (series if self.apart else panel, str(_cell(row, self.label)), series)
                    found.setdefault(place, []).extend(samples)
        return [Dot(*place, *_three(samples)) for place, samples in found.items()]


def _cell(row: Row, column: str | Callable[[Row], object]) -> object:
    return column(row) if callable(column) else row.get(column, "")


def _samples(row: Row, column: str) -> list[float]:
    three = [row.get(f"{column}_{suffix}".lstrip("_")) for suffix in SUFFIXES]
    if None not in three:
        return [float(value) for value in three if value is not None]
    value = row.get(column)
    return [] if value is None else [float(value)]


def _three(samples: Sequence[float]) -> tuple[float, float, float]:
    cells = spread(samples, digits=6)
    return cells["median"], cells["min"], cells["max"]


def _is_measured(row: Row) -> bool:
    return row.get("what") in {"request", "turn"} and bool(row["round"])


PLOTS = {
    "transfer": Plot("GB/s", {"gb_per_s": ""}, "contender", "case"),
    "nixl": Plot("GB/s", {"gb_per_s": ""}, "contender", "case"),
    "request": Plot(
        "ms", {"ms": ""}, "case", lambda row: f"{row['transport']}, {row['tokens']} tokens",
        keep=lambda row: row["chunk_tokens"] == 2048 and row["tokens"] in {32, 1000, 10000},
    ),
    "chunks": Plot("ms of processor time for 1 GiB", {"cpu_ms_per_gib": ""}, "chunks", "transport"),
    "plan": Plot(
        "ms", {"plan_ms": "plan", "first_plan_ms": "plan right after a copy", "copy_ms": "copy"},
        "case", logarithmic=True,
    ),
    "open": Plot("µs of processor time", {"us": ""}, "open", "operation"),
    "pool": Plot(
        "", {"": ""}, lambda row: row["case"].removesuffix(", 1024 KiB"),
        lambda row: f"{row['what']}, {row['unit']}",
        keep=lambda row: row["what"] in {"pair", "fill"} or "1024 KiB" in row["case"],
    ),
    "checksum": Plot(
        "time with checksums over time without", {"seconds_with_over_without": ""},
        lambda row: f"{row['transport']}, {row['block_kib']} KiB",
    ),
    "encryption": Plot(
        "µs", {"us": ""}, lambda row: f"{row['case']}, {row['variant']}", logarithmic=True
    ),
    "fairness": Plot(
        "", {
            "jain_index_median": "Jain's index",
            "least_over_fair_share": "least over a fair share",
            "most_over_fair_share": "most over a fair share",
        }, "case",
    ),
    "links": Plot(
        "", {
            "rss_kib_each": "KiB for each peer",
            "descriptors_each": "descriptors for each peer",
            "idle_share": "share of a core, idle",
        }, "case", apart=True, run=1,
    ),
    "rates": Plot(
        "GB/s", {"limit_gb_s": "limit", "idle": "idle", "busy": "busy", "held": "held"}, "link",
        logarithmic=True,
    ),
    "layerwise": Plot(
        "ms", {"prefill_ms": "prefill's leg", "decode_ms": "decode's leg"},
        lambda row: "layerwise" if row["layerwise"] else "without",
        lambda row: f"{row['gbit_per_second']:g} Gb/s" if row["gbit_per_second"] else "no limit",
        logarithmic=True,
    ),
    "windows": Plot(
        "GB/s", {"gb_per_s": ""}, "contender",
        lambda row: f"round trip {row['round_trip_ms']:g} ms",
    ),
    "proxy": Plot(
        "", {
            "per_s_and_core": "requests/s and core",
            "c1_p50_added_ms": "ms added, one at a time",
            "c64_p50_added_ms": "ms added, 64 at a time",
            "r200_p99_added_ms": "ms added at 200/s, p99",
        }, "router", apart=True,
    ),
    "fleet": Plot(
        "", {
            "frames_per_rank": "messages for each rank",
            "cpu_ms_per_rank": "ms of processor time for each rank",
            "median_ms": "ms for a prompt",
        }, lambda row: f"{row['instances']}, {row['case']}", apart=True, logarithmic=True, run=0,
    ),
    "routing": Plot(
        "ms to the first token", {"first_token_ms": "mean", "p99_ms": "p99"}, "policy", "case",
        keep=lambda row: row["case"] != "cost",
    ),
    "autoscale": Plot(
        "", {"p50_ms": "ms, median", "p99_ms": "ms, p99", "instance_seconds": "instance seconds"},
        "fleet", apart=True, logarithmic=True,
    ),
    "serving": Plot(
        "ms to the first token", {"first_ms": ""}, "who",
        lambda row: f"{row['tokens']:,} tokens", keep=_is_measured, staged=True,
    ),
    "chat": Plot(
        "ms to the first token", {"first_ms": ""}, "stage", lambda row: f"turn {row['turn']}",
        keep=_is_measured, staged=True, run=1,
    ),
}  # fmt: skip


def fingerprint(dots: Sequence[Dot]) -> str:
    """Name what a picture shows."""
    return hashlib.sha256(repr(dots).encode()).hexdigest()[:16]


def draw(name: str, plot: Plot, dots: Sequence[Dot], path: Path) -> None:
    """Write the picture. Equal dots give equal files."""
    plt: Any = importlib.import_module("matplotlib.pyplot")
    plt.rcParams |= {"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9}
    panels = list(dict.fromkeys(dot.panel for dot in dots))
    columns = min(PANELS_IN_A_ROW, len(panels))
    lines = math.ceil(len(panels) / columns)
    most = max(len({dot.label for dot in dots if dot.panel == panel}) for panel in panels)
    size = (1.5 + PANEL_INCHES * columns, lines * (FRAME_INCHES + ROW_INCHES * (most + 1)))
    figure, grid = plt.subplots(lines, columns, figsize=size, squeeze=False)
    for axis, panel in zip(_axes(grid), panels, strict=False):
        _draw_panel(axis, plot, panel, [dot for dot in dots if dot.panel == panel])
    for axis in list(_axes(grid))[len(panels) :]:
        axis.remove()
    figure.tight_layout()
    handles, series = grid[0][0].get_legend_handles_labels()
    if not plot.apart and len(series) > 1:
        figure.legend(handles, series, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=4)
    about = {"Date": None, "Description": fingerprint(dots)}
    figure.savefig(path, metadata=about, bbox_inches="tight")
    plt.close(figure)


def _axes(grid: Sequence[Sequence[Any]]) -> Iterator[Any]:
    for line in grid:
        yield from line


def _draw_panel(axis: Any, plot: Plot, panel: str, dots: Sequence[Dot]) -> None:
    labels = list(dict.fromkeys(dot.label for dot in dots))
    series = list(dict.fromkeys(dot.series for dot in dots))
    for place, name in enumerate(series):
        mine = [dot for dot in dots if dot.series == name]
        rows = [labels.index(dot.label) for dot in mine]
        ends = ([dot.least for dot in mine], [dot.most for dot in mine])
        axis.hlines(rows, *ends, color=f"C{place}", linewidth=1, alpha=0.6)
        axis.plot([dot.median for dot in mine], rows, "o", color=f"C{place}", ms=4, label=name)
    if plot.logarithmic and max(dot.most for dot in dots) > 10 * min(dot.least for dot in dots):
        axis.set_xscale("log")
    else:
        axis.set_xlim(left=0)
    axis.set_ylim(len(labels) - 0.5, -0.5)
    axis.set_yticks(range(len(labels)), labels)
    axis.set_title(panel)
    axis.set_xlabel(plot.unit)
    axis.grid(axis="x", alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Draw all, or those that are named."""
    parser = argparse.ArgumentParser("python -m benchmarks.plots")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PLOTS))
    for name in parser.parse_args().names or PLOTS:
        plot = PLOTS[name]
        draw(name, plot, plot.dots(plot.rows(name)), PAGES / f"{name}.svg")


if __name__ == "__main__":
    main()
