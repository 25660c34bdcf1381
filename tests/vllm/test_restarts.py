"""Instances that are killed or stopped under load, and come back, take nobody along; nor do clients
that leave. `make restarts` does it at length."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import marks
from tests.compat.workload import Answer, Question
from tests.vllm.restarts import NUM_QUESTIONS, play

pytestmark = [marks.vllm, marks.slow, pytest.mark.timeout(1800)]


def test_the_others_go_on(
    load: list[Question], answers_alone: Callable[[], list[Answer]], tmp_path: Path
) -> None:
    questions, expected = load[:NUM_QUESTIONS], answers_alone()[:NUM_QUESTIONS]
    seen = play(range(4), questions, expected, tmp_path)
    assert not seen.broken, seen.lines
