"""The table of known defects: each has a row, each row names tests of ours, and they exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "defects.md").read_text()
ROWS = [line.split(" | ") for line in PAGE.splitlines() if re.match(r"\| (#|C\d|N\d|router)", line)]
TEST = re.compile(r"`(tests/[\w/]+\.py):(test_\w+)`")


def test_every_defect_has_one_row() -> None:
    found = {name for row in ROWS for name in re.split(r"[|, ]+", row[0]) if name}
    assert {f"C{number}" for number in range(1, 25)} <= found
    assert {f"N{number}" for number in range(1, 11)} <= found
    assert len([name for name in found if "#" in name]) > 40


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip("| "))
def test_every_row_names_tests_that_exist(row: list[str]) -> None:
    named = TEST.findall(row[-1])
    assert named
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text())
        functions = ast.FunctionDef | ast.AsyncFunctionDef
        names = {node.name for node in ast.walk(tree) if isinstance(node, functions)}
        names |= {  # hypothesis' state machines are classes
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        assert name in names, path
