"""One instance of a running fleet is killed in the middle of 50 requests: it takes nobody along."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from p2p_engine.cli.commands import Role
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.members import Member
from p2p_engine.cli.tiny_model import ensure_tiny_model
from tests import marks
from tests.compat.fleet import VLLM_ARGS
from tests.compat.workload import Answer, Question, ask, ask_all, mixed_questions

NUM_REQUESTS = 50
CONCURRENCY = 8
BOOT_SECONDS = 600.0
ERROR_SECONDS = 90.0  # the engine's deadline for KV, and some for a busy machine

pytestmark = [marks.vllm, marks.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    model = str(ensure_tiny_model())
    mixed = [question for seed in range(2000, 2005) for question in mixed_questions(model, seed)]
    return mixed[:NUM_REQUESTS]


@pytest.fixture(scope="module")
def expected(questions: list[Question], tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    with _fleet(tmp_path_factory.mktemp("single")) as fleet:
        single = fleet.start(Role.SINGLE)
        fleet.wait_ready(timeout=BOOT_SECONDS)
        return ask_all(single.url, questions, concurrency=CONCURRENCY)


@pytest.fixture(params=[Role.PREFILL, Role.DECODE])
def fleet_and_victim(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[Fleet, Member]]:
    """Two of the victim's kind and one of the other."""
    role: Role = request.param
    with _fleet(tmp_path) as fleet:
        fleet.start_proxy()
        fleet.start(Role.DECODE if role is Role.PREFILL else Role.PREFILL)
        fleet.start(role)
        victim = fleet.start(role)
        fleet.wait_ready(timeout=BOOT_SECONDS)
        yield fleet, victim


def test_the_others_go_on(
    fleet_and_victim: tuple[Fleet, Member], questions: list[Question], expected: list[Answer]
) -> None:
    fleet, victim = fleet_and_victim
    assert fleet.proxy is not None
    assert victim.plan is not None
    asker = Asker(fleet.proxy.url, kill_after=NUM_REQUESTS // 4, kill=lambda: fleet.kill(victim))
    outcomes = asker.ask_all(questions)

    failed = [outcome for outcome in outcomes if not isinstance(outcome[0], dict)]
    right = [got == want for (got, _), want in zip(outcomes, expected, strict=True)]
    assert right.count(True) == NUM_REQUESTS - len(failed), "an answer was wrong"
    assert len(failed) <= CONCURRENCY, f"more failed than were open: {failed}"
    for error, seconds in failed:
        assert isinstance(error, Exception)
        assert seconds < ERROR_SECONDS

    newcomer = fleet.start(victim.plan.role)
    fleet.wait_ready(newcomer, timeout=BOOT_SECONDS)
    assert ask_all(fleet.proxy.url, questions, concurrency=CONCURRENCY) == expected


class Asker:
    """Asks several at a time, and kills somebody when the first answers are there."""

    def __init__(self, url: str, *, kill_after: int, kill: Callable[[], None]) -> None:
        self._url = url
        self._kill_after = kill_after
        self._kill = kill
        self._lock = threading.Lock()
        self._num_answered = 0

    def ask_all(self, questions: Sequence[Question]) -> list[tuple[Answer | Exception, float]]:
        """Return each answer, or error, with the seconds that it took."""
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            return list(pool.map(self._ask, questions))

    def _ask(self, question: Question) -> tuple[Answer | Exception, float]:
        started = time.monotonic()
        try:
            answer: Answer | Exception = ask(self._url, question)
        except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
            # an error status, an error in the stream, a stream that is cut
            answer = error
        self._count()
        return answer, time.monotonic() - started

    def _count(self) -> None:
        with self._lock:
            self._num_answered += 1
            is_time = self._num_answered == self._kill_after
        if is_time:
            self._kill()


def _fleet(log_dir: Path) -> Fleet:
    return Fleet(
        ensure_tiny_model(),
        vllm_args=VLLM_ARGS,
        env={"VLLM_CPU_KVCACHE_SPACE": "1"},
        log_dir=log_dir,
        planned_instances=3,
    )
