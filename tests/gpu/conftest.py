"""Keeps what the tests of this folder have found in one file, whichever are run at a time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.machine import Machine
from tests.gpu.peer import Processes

RESULTS = Path(__file__).parents[2] / "build" / "gpu-tests.json"
FOLDER = "tests/gpu/"

_found: dict[str, dict[str, Any]] = {}


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    """Two processes on the GPU that are two hosts to NCCL (T1, T3)."""
    with Processes(Machine()) as made:
        yield made


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note the outcome of a test here, why it was skipped or failed, and its figures."""
    if not report.nodeid.startswith(FOLDER) or (report.when != "call" and report.passed):
        return
    reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longreprtext
    _found[report.nodeid.removeprefix(FOLDER)] = {
        "outcome": report.outcome,
        "seconds": round(report.duration, 1),
        "at": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        **({} if report.passed else {"reason": str(reason)[-500:]}),
        **dict(report.user_properties),
    }


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write them, beside those that are there."""
    if _found:
        known = json.loads(RESULTS.read_text())["tests"] if RESULTS.exists() else {}
        RESULTS.parent.mkdir(exist_ok=True)
        told = {"machine": Machine().describe(), "tests": {**known, **_found}}
        RESULTS.write_text(json.dumps(told, indent=1) + "\n")
