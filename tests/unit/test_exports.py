"""What `__all__` promises: sorted, complete, and there."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

PACKAGES = ("mempool", "p2p_engine", "p2p_engine.cli", "p2p_engine.connector", "proxy")


def load(name: str) -> ModuleType:
    if name == "p2p_engine.connector":
        pytest.importorskip("vllm")
    return importlib.import_module(name)


@pytest.mark.parametrize("name", PACKAGES)
def test_exports_are_sorted_and_there(name: str) -> None:
    package = load(name)
    assert package.__all__ == sorted(set(package.__all__))
    assert [export for export in package.__all__ if not hasattr(package, export)] == []


@pytest.mark.parametrize("name", PACKAGES)
def test_a_name_that_is_not_exported_is_an_attribute_error(name: str) -> None:
    package = load(name)
    with pytest.raises(AttributeError, match="no_such_name"):
        package.no_such_name  # noqa: B018
