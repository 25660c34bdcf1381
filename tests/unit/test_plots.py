"""Each benchmark has a page, and a picture on it that shows what is recorded."""

from __future__ import annotations

import re

import pytest

from benchmarks.harness import Row
from benchmarks.plots import PAGES, PLOTS, Dot, Plot, fingerprint

FOLDER = PAGES.parent
NAMES = sorted(path.stem.removeprefix("bench_") for path in FOLDER.glob("bench_*.py"))


def test_every_benchmark_has_a_page_and_a_picture() -> None:
    """Nothing is recorded of a GPU yet."""
    measured = set(NAMES) - {"gpu"}
    assert set(PLOTS) == measured
    assert {path.stem for path in PAGES.glob("*.md")} == measured


@pytest.mark.parametrize("name", PLOTS)
def test_a_picture_shows_the_run_on_record(name: str) -> None:
    """If it does not: make plots."""
    dots = PLOTS[name].dots(PLOTS[name].rows(name))
    picture = (PAGES / f"{name}.svg").read_text()
    assert f"<dc:description>{fingerprint(dots)}</dc:description>" in picture
    assert f"]({name}.svg)" in (PAGES / f"{name}.md").read_text()
    for dot in dots:
        assert dot.least <= dot.median <= dot.most


@pytest.mark.parametrize("name", PLOTS)
def test_a_page_says_how_it_is_run(name: str) -> None:
    text = (PAGES / f"{name}.md").read_text()
    assert f"```bash\nmake bench NAME={name}\n```" in text
    assert re.search(r"^## How", text, re.MULTILINE)


def test_samples_of_one_dot_are_rows_or_three_columns() -> None:
    rows: list[Row] = [
        {"case": "a", "who": "x", "ms_median": 2, "ms_min": 1, "ms_max": 4},
        {"case": "a", "who": "y", "ms": 3},
        {"case": "a", "who": "y", "ms": 5},
        {"case": "a", "who": "y", "ms": 9},
        {"case": "b", "who": "y"},
    ]
    assert Plot("ms", {"ms": ""}, "who", "case").dots(rows) == [
        Dot("a", "x", "", 2, 1, 4),
        Dot("a", "y", "", 5, 3, 9),
    ]
