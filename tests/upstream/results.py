"""What the runs of upstream's tests came to: read from pytest's reports, printed as one table."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True)
class Result:
    """How one test ended; `control` is how it ended for a connector whose hooks raise."""

    suite: str
    test: str
    outcome: str
    detail: str = ""
    control: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether it failed, or proves nothing because it passes for a broken connector too."""
        return self.outcome == FAILED or (self.outcome == self.control == PASSED)


def read_report(path: Path) -> list[Result]:
    """Read a JUnit report of pytest."""
    cases = ElementTree.parse(path).getroot().iter("testcase")
    return [_read_case(case) for case in cases]


def with_control(results: Iterable[Result], control: Iterable[Result]) -> list[Result]:
    """Join the results of a run with those of the control run of the same tests."""
    ends = {(result.suite, result.test): result.outcome for result in control}
    return [
        Result(
            result.suite,
            result.test,
            result.outcome,
            result.detail,
            ends.get((result.suite, result.test), ""),
        )
        for result in results
    ]


def table(results: Sequence[Result], title: str) -> str:
    """Lay the closing table out: one line for each test, and one below it for its remark."""
    lines = [title, f"{'outcome':<9}{'if hooks raise':<16}test"]
    for result in results:
        test = f"{result.suite}::{result.test}"
        lines.append(f"{result.outcome:<9}{result.control or '-':<16}{test}")
        if result.detail:
            lines.append(f"{'':<25}  {result.detail}")
    counts = Counter(result.outcome for result in results)
    return "\n".join([*lines, ", ".join(f"{counts[name]} {name}" for name in counts)])


def _read_case(case: ElementTree.Element) -> Result:
    suite = case.get("classname", "").rpartition(".")[2]
    name = case.get("name", "")
    for kind, outcome in (("failure", FAILED), ("error", FAILED), ("skipped", SKIPPED)):
        mark = case.find(kind)
        if mark is not None:
            return Result(suite, name, outcome, mark.get("message", "").strip().split("\n")[0])
    return Result(suite, name, PASSED)
