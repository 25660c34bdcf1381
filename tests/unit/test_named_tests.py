"""Tables of documents that name tests of ours: each row names some, and they exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEST = re.compile(r"`(tests/[\w/]+\.py):(test_\w+)`")
DEFECTS = [
    line.split(" | ")
    for line in (ROOT / "docs" / "defects.md").read_text().splitlines()
    if re.match(r"\| (#|C\d|N\d|router)", line)
]
GROUNDS = ("model", "processes", "simulated runner", "stand-in GPU", "real vLLM")
LONG_ONLY = "`make test-vllm` only"
PROMISES = [
    line.strip("| ").split(" | ")
    for section in (ROOT / "docs" / "tests.md").read_text().split("\n## ")[1:]
    for line in section.splitlines()
    if line.startswith("| ") and not line.startswith("| what")
]


def names_in(path: str) -> set[str]:
    """Name the functions of a file, and what it assigns: hypothesis' state machines are classes."""
    tree = ast.parse((ROOT / path).read_text())
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    names = {node.name for node in ast.walk(tree) if isinstance(node, functions)}
    return names | {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def test_every_defect_has_one_row() -> None:
    found = {name for row in DEFECTS for name in re.split(r"[|, ]+", row[0]) if name}
    assert {f"C{number}" for number in range(1, 25)} <= found
    assert {f"N{number}" for number in range(1, 11)} <= found
    assert len([name for name in found if "#" in name]) > 40


@pytest.mark.parametrize("row", DEFECTS, ids=lambda row: row[0].strip("| "))
def test_every_defect_names_tests_that_exist(row: list[str]) -> None:
    named = TEST.findall(row[-1])
    assert named
    assert [name for path, name in named if name not in names_in(path)] == []


@pytest.mark.parametrize("row", PROMISES, ids=lambda row: row[0])
def test_every_promise_says_on_what_ground_which_test_holds_it(row: list[str]) -> None:
    _, ground, tests = row
    assert set(ground.split(", ")) <= {*GROUNDS, LONG_ONLY}
    named = TEST.findall(tests)
    assert named or "`make " in tests
    texts = [(ROOT / path).read_text() for path, _ in named]
    is_long = named and all(re.search(r"marks\.vllm\b", text) for text in texts)
    assert (LONG_ONLY in ground) == bool(is_long)
    assert [name for path, name in named if name not in names_in(path)] == []


def test_every_promise_has_a_part_of_the_page() -> None:
    page = (ROOT / "docs" / "tests.md").read_text()
    parts = re.findall(r"^## (.+)$", page, re.MULTILINE)
    assert parts == [
        "Never wrong",
        "Never stuck",
        "Fast",
        "At home",
        "Mutants",
        "What no test of ours can see",
    ]
    assert set(GROUNDS) == set(re.findall(r"^\| ([\w -]+) \|", page.split("\n## ")[0], re.M)) - {
        "ground"
    }
