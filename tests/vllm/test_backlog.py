"""Requests queue on a decode instance of two slots for five leases, at default settings: none
fails, no prompt is computed again, memory is bounded, and prefill has its blocks back."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.members import Member, fetch_text
from p2p_engine.cli.tiny_model import TinyModel, ensure_tiny_model
from tests import marks
from tests.compat.fleet import BOOT_SECONDS, VLLM_ARGS
from tests.compat.workload import Answer, Question, ask, ask_all
from tests.support import eventually
from tests.vllm.load import ENVIRONMENT, check_nothing_held
from tests.vllm.observing import by_label, prompt_tokens

pytestmark = [marks.vllm, marks.slow, pytest.mark.timeout(3600)]

BACKLOG_SECONDS = float(os.environ.get("P2P_BACKLOG_SECONDS", "300"))
NUM_SLOTS = 2
NUM_QUEUED = 60
PROMPT_TOKENS = 400
BUSY_PROMPT = list(range(5, 15))
LOOK_SECONDS = 5.0


def questions() -> list[Question]:
    """Prompts that have no block in common."""
    common = {"model": str(ensure_tiny_model()), "max_tokens": 12, "temperature": 0}
    more = {"ignore_eos": True, "return_token_ids": True}
    return [
        Question(
            "/v1/completions",
            {
                **common,
                **more,
                "prompt": [5 + (7 * number + 3 * i * i) % 900 for i in range(length)],
            },
        )
        for number in range(NUM_QUEUED)
        for length in [PROMPT_TOKENS + number]
    ]


class Occupiers:
    """Long answers that go before whatever queues: more of them wait than there are slots."""

    def __init__(self, member: Member) -> None:
        self.num_asked = 0
        self._member = member
        self._stopping = threading.Event()
        self._pool = ThreadPoolExecutor(3 * NUM_SLOTS)
        self._threads = [self._pool.submit(self._work) for _ in range(3 * NUM_SLOTS)]

    def stop(self) -> None:
        """Ask no more; the errors of those that were asked are raised."""
        self._stopping.set()
        for thread in self._threads:
            thread.result()
        self._pool.shutdown()

    def _work(self) -> None:
        body = {
            "model": str(ensure_tiny_model()), "prompt": BUSY_PROMPT, "max_tokens": 300,
            "temperature": 0, "ignore_eos": True, "return_token_ids": True, "priority": -1,
        }  # fmt: skip
        while not self._stopping.is_set():
            self.num_asked += 1
            ask(self._member.url, Question("/v1/completions", body), timeout=600)


@pytest.fixture(params=["PUT_ASYNC", "GET"])
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(
        ensure_tiny_model(),
        send_type=request.param,
        vllm_args=VLLM_ARGS,
        env=ENVIRONMENT,
        log_dir=tmp_path,
        planned_instances=2,
    ) as made:
        made.start_proxy()
        made.start(MemberRole.PREFILL)
        made.start(
            MemberRole.DECODE,
            vllm_args=(f"--max-num-seqs={NUM_SLOTS}", "--scheduling-policy=priority"),
        )
        made.wait_ready(timeout=BOOT_SECONDS)
        yield made


def test_what_queues_for_five_leases_is_answered(fleet: Fleet) -> None:
    assert fleet.proxy is not None
    prefill, decode = fleet.instances
    asked = questions()
    occupiers = Occupiers(decode)
    eventually(lambda: by_label(decode, "vllm:num_requests_waiting", "")[""] > 0, 60)
    with ThreadPoolExecutor(NUM_QUEUED) as pool:
        one = partial(ask, fleet.proxy.url, timeout=BACKLOG_SECONDS + 600)
        answers = [pool.submit(one, question) for question in asked]
        most, num_early = watch(fleet, answers)
        occupiers.stop()
        said: list[Answer] = [answer.result() for answer in answers]
    report = {
        "seconds": BACKLOG_SECONDS, "answered early": num_early, "most live bytes": dict(most),
        "messages": {m.name: by_label(m, "vllm:p2p_messages", "")[""] for m in fleet.instances},
    }  # fmt: skip
    print(report)  # noqa: T201 - what was measured
    kv_bytes = TinyModel().kv_bytes_per_token(4) * NUM_QUEUED * (PROMPT_TOKENS + NUM_QUEUED + 32)
    assert max(most.values(), default=0) <= 1.1 * kv_bytes
    check_nothing_held(fleet.instances)
    for member in fleet.instances:
        assert not by_label(member, "vllm:p2p_expired_leases", "")[""]
        outcomes = by_label(member, "vllm:p2p_transfers", "outcome")
        assert all(name.endswith(" ok") for name in outcomes), outcomes
    tokens = prompt_tokens(decode)
    assert tokens["external_kv_transfer"] > 0
    assert tokens["local_compute"] == occupiers.num_asked * len(BUSY_PROMPT)
    eventually(lambda: not used_blocks(prefill), 30, "prefill has its blocks back")
    assert said == ask_all(prefill.url, asked, concurrency=NUM_SLOTS)


def watch(fleet: Fleet, answers: Sequence[Future[Answer]]) -> tuple[Counter[str], int]:
    """Wait; the most live bytes of each instance, and how many were answered meanwhile."""
    most: Counter[str] = Counter()
    ends_at = time.monotonic() + BACKLOG_SECONDS
    while time.monotonic() < ends_at:
        time.sleep(LOOK_SECONDS)
        for member in fleet.instances:
            live = sum(by_label(member, "vllm:p2p_live_bytes", "place").values())
            most[member.name] = max(most[member.name], live)
    return most, sum(answer.done() for answer in answers)


def used_blocks(member: Member) -> float:
    """What part of an instance's blocks is in use."""
    page = fetch_text(f"{member.url}/metrics") or ""
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "vllm:kv_cache_usage_perc"
    )
