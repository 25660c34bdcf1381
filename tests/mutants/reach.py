"""Which test files reach a line: each runs once under coverage, and what it reached is kept."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from coverage import CoverageData

from tests.mutants.tree import CopiedTree

DEADLINE_SECONDS = 900.0  # of one test file under coverage
STARTS_COVERAGE = "import coverage\n\ncoverage.process_startup()\n"
SETTINGS = """[run]
source = {source}
concurrency = thread,multiprocessing
parallel = true
data_file = {data}/reached
"""
Lines = dict[str, list[int]]


class ReachedLines:
    """What each test file reaches in the packages of a copy, and how long it takes.

    It is kept in `folder`, which belongs to one commit. Processes that the tests start count, too,
    unless they are killed. A test file that fails without any change is left out.
    """

    def __init__(self, tree: CopiedTree, folder: Path) -> None:
        self._tree = tree
        self._folder = folder
        packages = {path.parent.name for path in tree.root.glob("*/__init__.py")}
        self._packages = sorted(packages - {"tests"})
        self._files: dict[str, dict[str, Any]] = {}

    def record(self, tests: Sequence[str]) -> Iterator[str]:
        """Run the test files that are not on record, and yield each name behind its run."""
        for test in tests:
            kept = self._folder / "reach" / f"{test.replace('/', '+')}.json"
            if not kept.exists():
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps(self._look(test)))
                yield test
            self._files[test] = json.loads(kept.read_text())

    @property
    def left_out(self) -> list[str]:
        """The test files that are of no use here."""
        return [test for test, found in self._files.items() if found["failed"]]

    def of(self, path: str, lines: tuple[int, int]) -> list[tuple[str, float]]:
        """Return the test files that reach a statement, with their seconds, the quickest first."""
        wanted = range(lines[0], lines[1] + 1)
        found = [
            (test, file["seconds"])
            for test, file in self._files.items()
            if not file["failed"] and any(line in wanted for line in file["lines"].get(path, []))
        ]
        return sorted(found, key=lambda each: each[1])

    def _look(self, test: str) -> dict[str, Any]:
        """Run a test file under coverage; without it, if that fails: a test may trace by itself."""
        data = self._folder / "coverage"
        shutil.rmtree(data, ignore_errors=True)
        (data / "site").mkdir(parents=True)
        (data / "site" / "sitecustomize.py").write_text(STARTS_COVERAGE)
        settings = data / "settings"
        settings.write_text(SETTINGS.format(source=",".join(self._packages), data=data))
        environment = {"PYTHONPATH": str(data / "site"), "COVERAGE_PROCESS_START": str(settings)}
        run = self._tree.run([test], DEADLINE_SECONDS, environment)
        if run.failed:
            run = self._tree.run([test], DEADLINE_SECONDS)
        failed = run.failed or ("it took too long" if run.is_late else "")
        return {"seconds": run.seconds, "failed": failed, "lines": self._lines(data)}

    def _lines(self, data: Path) -> Lines:
        """Return what any process has reached, by path below the root of the copy."""
        reached: dict[str, set[int]] = {}
        for file in data.glob("reached.*"):
            found = CoverageData(str(file))
            found.read()
            for measured in found.measured_files():
                path = Path(measured)
                if path.is_relative_to(self._tree.root):
                    name = str(path.relative_to(self._tree.root))
                    reached.setdefault(name, set()).update(found.lines(measured) or ())
        return {name: sorted(lines) for name, lines in sorted(reached.items())}
