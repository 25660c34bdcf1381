"""The load that the long tests share, and what one instance alone says to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.compat.workload import Answer, Question
from tests.vllm.load import answers_of_one, questions_for


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
