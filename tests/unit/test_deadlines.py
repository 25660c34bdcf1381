"""The page of all deadlines is the code's: every limit of time has its row, with its value."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from p2p_engine.config import EngineConfig
from proxy.config import ProxyConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deadlines.md").read_text()
ENGINE, PROXY = PAGE.split("## The proxy")
OWN_CLOCKS = ("cli", "simulate")  # commands of a person, who sees how long they take
NOT_WAITS = {"proxy/observe/metrics.py:_SECONDS"}  # histogram buckets


def keys_in(section: str) -> dict[str, float]:
    return {
        key: float(text) for key, text in re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", section, re.M)
    }


@pytest.mark.parametrize(
    ("section", "config"), [(ENGINE, EngineConfig), (PROXY, ProxyConfig)], ids=["engine", "proxy"]
)
def test_every_setting_of_time_is_there_with_its_default(section: str, config: Any) -> None:
    fields = {field.name: field.default for field in dataclasses.fields(config)}
    assert keys_in(section) == {key: fields[key] for key in fields if key.endswith("_seconds")}


def constants() -> Iterator[tuple[str, object]]:
    """Every constant of time in the engine and the proxy, as "path:NAME", and its value."""
    for package in ("p2p_engine", "proxy"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT)
            if name.parts[1] in OWN_CLOCKS:
                continue
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    target = node.targets[0].id
                    if target.endswith("SECONDS") and not target.endswith("MILLISECONDS"):
                        yield f"{name}:{target}", ast.literal_eval(node.value)


def test_every_constant_of_time_is_there_with_its_value() -> None:
    told = dict(re.findall(r"^\| `([\w./]+\.py:\w+)` \| ([^|]+) \|", PAGE, re.MULTILINE))
    true = {name: value for name, value in constants() if name not in NOT_WAITS}
    assert set(told) == set(true)
    for name, value in true.items():
        numbers = tuple(float(number) for number in re.findall(r"[\d.]+", told[name]))
        assert numbers == (value if isinstance(value, tuple) else (value,)), name
