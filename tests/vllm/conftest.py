"""The load that the long tests share, and what one instance alone says to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from p2p_engine.cli.commands import Role
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.tiny_model import ensure_tiny_model
from tests.compat.fleet import BOOT_SECONDS, VLLM_ARGS
from tests.compat.workload import Answer, Question, ask_all, mixed_questions
from tests.vllm.load import CONCURRENCY, ENVIRONMENT, NUM_REQUESTS


@pytest.fixture(scope="session")
def load() -> list[Question]:
    """200 mixed requests."""
    model = str(ensure_tiny_model())
    mixed = [question for seed in range(1000, 1020) for question in mixed_questions(model, seed)]
    return mixed[:NUM_REQUESTS]


@pytest.fixture(scope="session")
def answers_alone(
    load: list[Question], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], list[Answer]]:
    """What a single instance of a tensor parallel size says to `load`; asked once for each."""
    known: dict[int, list[Answer]] = {}

    def answers(tp_size: int = 1) -> list[Answer]:
        if tp_size not in known:
            fleet = Fleet(
                ensure_tiny_model(),
                tp_size=tp_size,
                vllm_args=VLLM_ARGS,
                env=ENVIRONMENT,
                log_dir=tmp_path_factory.mktemp("alone"),
            )
            with fleet:
                single = fleet.start(Role.SINGLE)
                fleet.wait_ready(timeout=BOOT_SECONDS)
                known[tp_size] = ask_all(single.url, load, concurrency=CONCURRENCY)
        return known[tp_size]

    return answers
