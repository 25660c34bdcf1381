"""The load that the long tests share, and what one instance alone says to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.compat.workload import Answer, Question
from tests.vllm.evidence import evidence_in
from tests.vllm.load import answers_of_one, questions_for


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Show beside a failure what the instances' logs say: "HTTP Error 500" explains nothing."""
    outcome: Any = yield
    report = outcome.get_result()
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    if report.failed and isinstance(folder, Path):
        for name, text in evidence_in(folder).items():
            report.sections.append((f"decisive lines of {name}", text))


@pytest.fixture(scope="session")
def load() -> list[Question]:
    """200 mixed requests to the tiny Llama."""
    return questions_for()


@pytest.fixture(scope="session")
def answers_alone(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., list[Answer]]:
    """What a single instance of a tensor parallel size says to our questions; asked once each."""
    known: dict[tuple[int, str], list[Answer]] = {}

    def answers(tp_size: int = 1, model: str = "llama") -> list[Answer]:
        if (tp_size, model) not in known:
            known[tp_size, model] = answers_of_one(
                questions_for(model),
                tmp_path_factory.mktemp("alone"),
                model=model,
                tp_size=tp_size,
            )
        return known[tp_size, model]

    return answers
