"""Tells which mutants the tests notice: python -m tests.mutants.campaign --seed 1 --count 50.

The seed orders all mutants of the packages, and the first COUNT of them are tried, each with the
test files that reach its line, the quickest first. It works in a copy of the last commit, in
build/mutants. What the tests reach there, and each trial, is kept for the commit, so that a
campaign which was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.harness import RESULTS, Row, append, progress, show
from tests.mutants.mutations import ModuleMutations, Mutation, is_python
from tests.mutants.reach import ReachedLines
from tests.mutants.tree import CopiedTree

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "p2p_engine/send", "p2p_engine/receive", "p2p_engine/peers", "p2p_engine/control",
    "p2p_engine/connector", "proxy",
)  # fmt: skip
TESTS = ("tests/unit", "tests/property", "tests/contract", "tests/integration", "tests/vllm")
# A test file may take so many seconds more than without the change, and so many times as long.
GRACE_SECONDS = 30.0
FACTOR = 5.0


def deadline_of(seconds: float) -> float:
    """Return the deadline of a test file that takes so many seconds without any change."""
    return GRACE_SECONDS + FACTOR * seconds


class MutantCampaign:
    """Trials of mutants of one commit of a repository."""

    def __init__(
        self,
        repository: Path,
        folder: Path,
        packages: Sequence[str],
        tests: Sequence[str],
        deadline_of: Callable[[float], float] = deadline_of,
    ) -> None:
        self._folder = folder / _commit(repository)
        self._packages = packages
        self._tests = list(tests)
        self._deadline_of = deadline_of
        self._tree = CopiedTree(repository, self._folder)
        self._reach = ReachedLines(self._tree, self._folder)
        self._kept = self._folder / "trials.jsonl"

    @property
    def left_out(self) -> list[str]:
        """The test files that fail without any change."""
        return self._reach.left_out

    def run(self, seed: int, count: int) -> list[Row]:
        """Return the trials of a seed's first mutants; those on record are not repeated."""
        tests = list(_python_files(self._tree.root, self._tests, "test_*"))
        for test in self._reach.record(tests):
            progress(f"recorded what {test} reaches")
        tried = self._tried()
        rows: list[Row] = []
        for path, mutation, source in self._mutants(seed):
            if len(rows) == count:
                break
            name = f"{path}:{mutation.begin}:{mutation.text}"
            if name not in tried:
                tried[name] = self._try(path, mutation, source)
                line = {"mutant": name, "tests": self._tests, "row": tried[name]}
                with self._kept.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                progress(f"{len(rows) + 1} of {count}: {name} {tried[name]['outcome']}")
            rows.append(tried[name])
        return rows

    def _tried(self) -> dict[str, Row]:
        """Return the trials on record by mutant, of those with the same tests."""
        text = self._kept.read_text() if self._kept.exists() else ""
        lines = map(json.loads, text.splitlines())
        return {line["mutant"]: line["row"] for line in lines if line["tests"] == self._tests}

    def _mutants(self, seed: int) -> Iterator[tuple[str, Mutation, str]]:
        """Yield path, mutation and mutated source in the order of a seed."""
        sources = {
            path: (self._tree.root / path).read_text()
            for path in _python_files(self._tree.root, self._packages, "*")
        }
        every = [
            (path, mutation)
            for path, source in sources.items()
            for mutation in ModuleMutations(source)
        ]
        random.Random(seed).shuffle(every)
        for path, mutation in every:
            mutated = mutation.apply(sources[path])
            if is_python(mutated):
                yield path, mutation, mutated

    def _try(self, path: str, mutation: Mutation, source: str) -> Row:
        """Run the test files that reach a mutant until a test fails, twice, or takes too long."""
        files = self._reach.of(path, mutation.lines)
        row: Row = {
            "file": path, "line": mutation.lines[0], "function": mutation.function,
            "change": mutation.what, "outcome": "survived", "test": "", "test_files": len(files),
        }  # fmt: skip
        with self._tree.put(path, source):
            for test, seconds in files:
                deadline = self._deadline_of(seconds)
                run = self._tree.run([test], deadline)
                if run.failed:  # once may be load
                    again = self._tree.run([run.failed], deadline)
                    run = again if again.is_late or not again.failed else run
                if run.is_late or run.failed:
                    outcome = "timeout" if run.is_late else "killed"
                    return {**row, "outcome": outcome, "test": run.failed or test}
        return row


def _commit(repository: Path) -> str:
    """Return the short name of the last commit."""
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    found = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
    return found.stdout.strip()


def _python_files(root: Path, places: Sequence[str], pattern: str) -> Iterator[str]:
    """Yield the Python files of this pattern among files and folders, as paths below the root."""
    for place in places:
        path = root / place
        files = [path] if path.is_file() else sorted(path.rglob(f"{pattern}.py"))
        yield from (str(file.relative_to(root)) for file in files)


def main() -> int:
    """Run a campaign from the command line."""
    parser = argparse.ArgumentParser("python -m tests.mutants.campaign", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the order (%(default)s)")
    parser.add_argument("--count", type=int, default=50, help="mutants to try (%(default)s)")
    parser.add_argument("--packages", nargs="+", default=list(PACKAGES), help="folders or files")
    parser.add_argument("--tests", nargs="+", default=list(TESTS), help="folders or files")
    parser.add_argument("--output", type=Path, default=RESULTS / "mutants.jsonl")
    options = parser.parse_args()
    campaign = MutantCampaign(ROOT, ROOT / "build" / "mutants", options.packages, options.tests)
    rows = campaign.run(options.seed, options.count)
    show(rows)
    totals = Counter(row["outcome"] for row in rows)
    append(rows, options, {"totals": totals, "left_out": campaign.left_out})
    print(dict(totals), "left out:", campaign.left_out)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
