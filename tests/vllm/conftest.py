"""The load that the long tests share, and what one instance alone says to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from p2p_engine.cli.commands import Role
from p2p_engine.cli.fleet import Fleet
from tests.compat.fleet import BOOT_SECONDS, VLLM_ARGS
from tests.compat.workload import Answer, Question, ask_all
from tests.vllm.load import CONCURRENCY, ENVIRONMENT, questions_for
from tests.vllm.other_models import ensure_model


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
            fleet = Fleet(
                ensure_model(model),
                tp_size=tp_size,
                vllm_args=VLLM_ARGS,
                env=ENVIRONMENT,
                log_dir=tmp_path_factory.mktemp("alone"),
            )
            with fleet:
                single = fleet.start(Role.SINGLE)
                fleet.wait_ready(timeout=BOOT_SECONDS)
                questions = questions_for(model)
                known[tp_size, model] = ask_all(single.url, questions, concurrency=CONCURRENCY)
        return known[tp_size, model]

    return answers
