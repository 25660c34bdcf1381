"""The script that measures the structure finds what it counts."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from scripts.structure import (
    circles,
    imports_of,
    layer_of,
    measure,
    module_of,
    parsed,
    repeated_classes,
    unit_of,
)


@pytest.fixture(scope="module")
def files() -> dict[Path, ast.AST]:
    return parsed()


def test_a_circle_is_found_and_a_chain_is_none() -> None:
    chain = {"a": {"b"}, "b": {"c"}, "c": set[str]()}
    assert circles(chain) == []
    assert circles({**chain, "c": {"b"}}) == [{"b", "c"}]


def test_a_layer_counts_the_longest_way_down_and_ends_in_a_circle() -> None:
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": set[str]()}
    assert [layer_of(unit, graph) for unit in "abc"] == [3, 2, 1]
    assert layer_of("a", {"a": {"b"}, "b": {"a"}}) == 2


def test_imports_name_modules_not_what_is_in_them() -> None:
    code = "from p.wing import leaf, Name\nfrom p import *\nimport q.r\n"
    modules = dict.fromkeys(("p", "p.wing", "p.wing.leaf", "q.r"), ast.parse(""))
    assert set(imports_of(ast.parse(code), modules)) == {"p.wing.leaf", "p.wing", "p", "q.r"}
    assert unit_of("p.wing.leaf") == "p.wing"


def test_a_class_name_that_stands_twice_is_found() -> None:
    one, other = ast.parse("class A: ...\nclass B: ..."), ast.parse("class A: ...")
    assert repeated_classes({Path("one"): one, Path("other"): other}) == ["A"]


def test_everything_is_measured(files: dict[Path, ast.AST]) -> None:
    measured = measure(files)
    assert measured["circles"] == 0
    assert all(measured[name] > 10 for name in ("units", "layers", "edges", "readme_words"))


def test_no_test_file_imports_another(files: dict[Path, ast.AST]) -> None:
    """What tests share lies in a helper module, where a reader looks for it."""
    modules = {module_of(path): tree for path, tree in files.items()}
    tests = {name for name in modules if name.rpartition(".")[2].startswith("test_")}
    found = {name: tests & set(imports_of(modules[name], modules)) for name in modules}
    assert {name: others for name, others in found.items() if others} == {}
