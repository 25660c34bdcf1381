"""What a log record keeps: text. An error would keep its frames, and what memory those hold."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import p2p_engine

ROOT = Path(p2p_engine.__file__).parent
ERRORS = {"error", "failure"}


def kept_errors(source: str) -> Iterator[int]:
    """The lines on which a logger is given an error itself, not its text."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or not ast.unparse(call.func).startswith("logger."):
            continue
        for given in call.args[1:]:
            name = ast.unparse(given).rpartition(".")[2]
            if isinstance(given, ast.Name | ast.Attribute) and name in ERRORS:
                yield given.lineno


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: path.stem)
def test_loggers_are_given_the_text_of_an_error(path: Path) -> None:
    assert not list(kept_errors(path.read_text()))


def test_an_error_that_is_given_is_found() -> None:
    assert list(kept_errors("logger.info('%s %s', name, error)")) == [1]
    assert list(kept_errors("logger.info('%s', loading.error)")) == [1]
    assert not list(kept_errors("logger.info('%s', str(error))"))
