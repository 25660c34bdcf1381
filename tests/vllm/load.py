"""How the long tests load their instances, and what must hold afterwards."""

from __future__ import annotations

import http.client
import itertools
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeAlias

from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.members import Member
from tests.compat.fleet import BOOT_SECONDS, VLLM_ARGS
from tests.compat.workload import Answer, Question, ask, ask_all, mixed_questions
from tests.support import eventually
from tests.vllm.observing import by_label, holds_nothing, prompt_tokens
from tests.vllm.other_models import ensure_model

NUM_REQUESTS = 200
CONCURRENCY = 8


ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1"}


def decodes(members: Sequence[Member]) -> list[Member]:
    """Those that only decode."""
    return [m for m in members if m.plan is not None and m.plan.role is MemberRole.DECODE]


def landed_bytes(members: Sequence[Member]) -> Counter[str]:
    """KV bytes that have arrived on these, by place."""
    return sum((by_label(m, "vllm:p2p_landed_bytes", "place") for m in members), Counter())


@lru_cache
def questions_for(model: str = "llama") -> list[Question]:
    """200 mixed requests to the tiny Llama, 100 to another of our models."""
    path = str(ensure_model(model))
    mixed = [question for seed in range(1000, 1020) for question in mixed_questions(path, seed)]
    return mixed[: NUM_REQUESTS if model == "llama" else NUM_REQUESTS // 2]


def check_transferred(
    members: Sequence[Member], questions: Sequence[Question], *, has_window: bool = False
) -> None:
    """All KV was transferred: decode computed each prompt's last token alone.

    vLLM counts that one where it was not transferred, too: with a window, or the only one.
    """
    tokens = sum((prompt_tokens(member) for member in decodes(members)), Counter())
    counts = [item.num_prompts if has_window else item.num_lone_tokens for item in questions]
    assert tokens["external_kv_transfer"] > 0
    assert tokens["local_compute"] == sum(counts)


def check_nothing_held(members: Sequence[Member]) -> None:
    """Live bytes are back at zero everywhere."""
    for member in members:
        eventually(partial(holds_nothing, member), 30, f"{member.name} holds nothing")


def answers_of_one(
    questions: Sequence[Question], log_dir: Path, *, model: str = "llama", tp_size: int = 1
) -> list[Answer]:
    """What a single instance, started for it, says to these questions."""
    fleet = Fleet(
        ensure_model(model),
        tp_size=tp_size,
        vllm_args=VLLM_ARGS,
        env=ENVIRONMENT,
        log_dir=log_dir,
    )
    with fleet:
        single = fleet.start(MemberRole.SINGLE)
        fleet.wait_ready(timeout=BOOT_SECONDS)
        return ask_all(single.url, questions, concurrency=CONCURRENCY)


Said: TypeAlias = "Answer | Exception"


@dataclass(frozen=True)
class Asked:
    """One request, and what came of it."""

    began_at: float
    ended_at: float
    said: Said
    is_right: bool

    @property
    def error(self) -> str:
        """The name of what it ended with instead of an answer, or ""."""
        if not isinstance(self.said, Exception):
            return ""
        code = getattr(self.said, "code", "")
        return f"{type(self.said).__name__} {code}".strip()


class VllmLoad:
    """Asks without a pause, several at a time, the same questions again and again; compares."""

    def __init__(
        self,
        url: str,
        questions: Sequence[Question],
        expected: Sequence[Answer],
        *,
        concurrency: int,
    ) -> None:
        """Start to ask."""
        self._url = url
        self._pairs = itertools.cycle(zip(questions, expected, strict=True))
        self._lock = threading.Lock()
        self._asked: list[Asked] = []
        self._num_open = self._num_ended = 0
        self._stopping = threading.Event()
        self._pool = ThreadPoolExecutor(concurrency)
        self._workers = [self._pool.submit(self._work) for _ in range(concurrency)]

    @property
    def num_open(self) -> int:
        """How many wait for their answers now."""
        return self._num_open

    @property
    def num_ended(self) -> int:
        """How many have had an answer or an error so far."""
        return self._num_ended

    def take(self) -> list[Asked]:
        """Return what has ended since the last time."""
        with self._lock:
            taken, self._asked = self._asked, []
        return taken

    def wait_for(self, num_right: int, timeout: float) -> None:
        """Wait until so many right answers are waiting to be taken."""
        eventually(lambda: sum(item.is_right for item in list(self._asked)) >= num_right, timeout)

    def stop(self) -> None:
        """Ask no more, and wait for what is open; errors of our own are raised."""
        self._stopping.set()
        for worker in self._workers:
            worker.result()
        self._pool.shutdown()

    def _work(self) -> None:
        while not self._stopping.is_set():
            with self._lock:
                question, right = next(self._pairs)
                self._num_open += 1
            began_at = time.monotonic()
            try:
                said: Said = ask(self._url, question)
                if isinstance(said, dict) and not all(said.values()):
                    raise ValueError("no token")  # vLLM, asked while it drains
            except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
                said = error  # an error status, an error in the stream, a stream that is cut
            with self._lock:
                self._num_open -= 1
                self._num_ended += 1
                self._asked.append(Asked(began_at, time.monotonic(), said, said == right))
            if isinstance(said, Exception):
                self._stopping.wait(0.1)
