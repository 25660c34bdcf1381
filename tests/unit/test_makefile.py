"""What `make` gives to the commands that it runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BYTECODE = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")


@pytest.mark.parametrize(
    ("environment", "given"),
    [
        ({"PYTHONDONTWRITEBYTECODE": "1"}, {"PYTHONPYCACHEPREFIX": f"{ROOT}/.venv/pycache"}),
        (
            {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": "/elsewhere"},
            {"PYTHONPYCACHEPREFIX": "/elsewhere"},
        ),
        ({"PYTHONPYCACHEPREFIX": "/elsewhere"}, {"PYTHONPYCACHEPREFIX": "/elsewhere"}),
        ({}, {}),
    ],
)
def test_bytecode_that_may_not_lie_beside_sources_is_kept_all_the_same(
    environment: dict[str, str], given: dict[str, str]
) -> None:
    rest = {name: value for name, value in os.environ.items() if name not in BYTECODE}
    shown = subprocess.run(
        ["make", "--no-print-directory", "--eval=show: ; @env", "show"],
        cwd=ROOT, env={**rest, **environment}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = dict(line.partition("=")[::2] for line in shown.stdout.splitlines())
    assert {name: lines[name] for name in BYTECODE if name in lines} == given
