"""Two checkpoints are swapped under load by `p2p-engine weights update`, on real vLLM.

One prefill and two decode instances. In the first order one of the two cannot read the weights.
"""

from __future__ import annotations

import io
import json
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.harness import Row, machine, versions
from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.members import Member, fetch_text
from p2p_engine.cli.tiny_model import TinyModel, ensure_tiny_model
from p2p_engine.cli.weights import run_update
from p2p_engine.transfer_config import EXTRA
from p2p_engine.wire.request_ids import new_transfer_id
from tests import marks
from tests.compat.fleet import BOOT_SECONDS, VLLM_ARGS
from tests.compat.workload import Answer, Question, ask, ask_all
from tests.support import eventually
from tests.vllm.leaving import question_of
from tests.vllm.load import CONCURRENCY, ENVIRONMENT, check_nothing_held
from tests.vllm.observing import by_label, prompt_tokens
from tests.vllm.pair import SEND_TYPES, DirectPair, TokensSince
from tests.vllm.reloading_connector import BROKEN

pytestmark = [marks.vllm, marks.slow, pytest.mark.timeout(3600)]
KEY = "open sesame"
ROOT = Path(__file__).parents[2]
OUTPUT = "P2P_WEIGHTS_OUTPUT"  # the variable that names the file to which figures are appended
OLD, NEW = TinyModel(), TinyModel(seed=7)
SETTINGS = {"lease_seconds": 10.0, "transfer_timeout_seconds": 10.0}
FIRST_AT, SECOND_AT = 0.25, 0.6  # of the requests that have an answer when an order is given


@dataclass(frozen=True)
class ToldAnswer:
    """An answer, and when it was asked for and came."""

    began_at: float
    ended_at: float
    answer: Answer


@dataclass(frozen=True)
class Ordered:
    """An order, and what came of it."""

    began_at: float
    ended_at: float
    code: int
    said: str

    @property
    def seconds(self) -> float:
        return self.ended_at - self.began_at


class SwappingFleet:
    """The instances, and a proxy that takes orders for them."""

    def __init__(self, folder: Path) -> None:
        self._key_file = folder / "admin.key"
        self._key_file.touch(0o600)
        self._key_file.write_text(KEY)
        self.broken = folder / "broken"
        self.fleet = Fleet(
            ensure_tiny_model(OLD),
            vllm_args=(*VLLM_ARGS, f"--served-model-name={OLD.path}"),
            # What never comes is computed soon.
            transfer_config={"kv_load_failure_policy": "recompute", EXTRA: SETTINGS},
            env={**ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(ROOT)},
            log_dir=folder / "fleet",
            planned_instances=5,
        )

    def start(self) -> None:
        arguments = ("--admin-key-file", str(self._key_file), "--queue-timeout-seconds", "110")
        self.proxy = self.fleet.start_proxy(arguments=arguments)
        self.prefill = self.fleet.start(MemberRole.PREFILL)
        self.good = self.fleet.start(MemberRole.DECODE)
        self.bad = self.fleet.start(
            MemberRole.DECODE,
            transfer_config={"kv_connector_module_path": "tests.vllm.reloading_connector"},
            env={BROKEN: str(self.broken)},
        )
        # Each was started with its checkpoint: what they say is what must be said.
        self.old = self.fleet.start(MemberRole.SINGLE)
        new = f"--model={ensure_tiny_model(NEW)}"
        self.new = self.fleet.start(MemberRole.SINGLE, vllm_args=[new])
        self.fleet.wait_ready(timeout=BOOT_SECONDS)

    def order(self, label: str, model: TinyModel) -> Ordered:
        """Give an order, and wait for its end, as the command does."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(model.path)}}
        calls = [{"path": "/collective_rpc", "body": body}]
        asked = {"label": label, "calls": calls, "drain_seconds": 100.0}
        said, began_at = io.StringIO(), time.monotonic()
        address = self.proxy.http_address
        code = run_update(address, KEY, asked, Console(file=said, width=200))
        return Ordered(began_at, time.monotonic(), code, said.getvalue())

    def state_of(self, member: Member) -> str:
        """What the proxy shows."""
        shown: dict[str, Any] = json.loads(fetch_text(f"{self.proxy.url}/status") or "{}")
        states = {item["http_address"]: item["state"] for item in shown["instances"]}
        return str(states[member.http_address])


class SteadyLoad:
    """Each question, asked once; several at a time."""

    def __init__(self, url: str, questions: Sequence[Question]) -> None:
        self._url = url
        self._num_ended = 0
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(CONCURRENCY)
        self._asked: list[Future[ToldAnswer]] = [self._pool.submit(self._ask, q) for q in questions]

    def wait_for(self, share: float) -> None:
        """Wait until so many have an answer."""
        number = round(share * len(self._asked))
        eventually(lambda: self._num_ended >= number, BOOT_SECONDS, f"{number} answers")

    def end(self) -> list[ToldAnswer]:
        """Wait for all; an error, or no answer in time, is raised."""
        told = [asked.result() for asked in self._asked]
        self._pool.shutdown()
        return told

    def _ask(self, question: Question) -> ToldAnswer:
        began_at = time.monotonic()
        answer = ask(self._url, question)
        with self._lock:
            self._num_ended += 1
        return ToldAnswer(began_at, time.monotonic(), answer)


def test_two_checkpoints_swapped_under_load_are_never_mixed(
    load: list[Question], tmp_path: Path
) -> None:
    held_back = [question_of(200, seed) for seed in range(len(SEND_TYPES) + 1)]
    questions = [*load, *held_back]
    swapping = SwappingFleet(tmp_path)
    with swapping.fleet:
        swapping.start()
        old, new = (
            ask_all(single.url, questions, concurrency=CONCURRENCY)
            for single in (swapping.old, swapping.new)
        )
        assert all(a != b for a, b in zip(old, new, strict=True)), "they cannot be told apart"
        record(_swap_under_load(swapping, load, old, new))
        record(_decode_what_was_prefilled_before(swapping, held_back, new[len(load) :]))


def _swap_under_load(
    swapping: SwappingFleet, questions: Sequence[Question], old: list[Answer], new: list[Answer]
) -> list[Row]:
    """The old weights, then the new ones on all but one instance, then the old ones on all."""
    good, bad = swapping.good, swapping.bad
    load = SteadyLoad(swapping.proxy.url, questions)
    load.wait_for(FIRST_AT)
    swapping.broken.touch()
    first = swapping.order("step-2", NEW)
    assert first.code == 1
    assert f"{bad.http_address}: paused: /collective_rpc: " in first.said
    for member in (swapping.prefill, good):
        assert f"{member.http_address}: step-2" in first.said
    assert swapping.state_of(bad) == "paused"
    assert json.loads(fetch_text(f"{bad.url}/is_paused") or "{}") == {"is_paused": True}
    at_rest = prompt_tokens(bad)
    load.wait_for(SECOND_AT)
    assert prompt_tokens(bad) == at_rest, "it computes, with the old weights"
    swapping.broken.unlink()
    second = swapping.order("step-3", OLD)
    assert (second.code, swapping.state_of(bad)) == (0, "ready"), second.said
    told = load.end()

    # Each answer is that of one checkpoint, and of the right one if it began and ended between two
    # orders.
    seconds = [told_.ended_at - told_.began_at for told_ in told]
    rows: list[Row] = [
        {"what": "an order that fails on one instance", "seconds": round(first.seconds, 1)},
        {"what": "an order that all follow", "seconds": round(second.seconds, 1)},
    ]
    for what, begins_at, ends_at, right in (
        ("before the first order", 0.0, first.began_at, old[: len(told)]),
        ("between the two", first.ended_at, second.began_at, new[: len(told)]),
        ("after the second", second.ended_at, time.monotonic(), old[: len(told)]),
    ):
        inside = [
            (each, answer) for each, answer in zip(told, right, strict=True)
            if begins_at <= each.began_at and each.ended_at <= ends_at
        ]  # fmt: skip
        assert inside, what
        assert all(each.answer == answer for each, answer in inside), what
        rows.append({"what": what, "requests": len(inside), "other_answers": 0})
    sides = zip(told, old[: len(told)], new[: len(told)], strict=True)
    mixed = [number for number, (each, a, b) in enumerate(sides) if each.answer not in (a, b)]
    assert mixed == []
    assert by_label(bad, "vllm:p2p_transfers", "outcome"), "it has had KV"
    rows.append({
        "what": "all", "requests": len(told), "of_neither_checkpoint": len(mixed), "errors": 0,
        "slowest_seconds": round(max(seconds), 1),
        "of_the_new": sum(each.answer == b for each, b in zip(told, new[: len(told)], strict=True)),
    })  # fmt: skip
    return rows


def _decode_what_was_prefilled_before(
    swapping: SwappingFleet, questions: Sequence[Question], right: Sequence[Answer]
) -> list[Row]:
    """Prefilled with the old weights, decoded with the new ones: nothing is loaded."""
    pair = DirectPair(swapping.fleet, swapping.prefill, swapping.good)
    transfers = [new_transfer_id() for _ in SEND_TYPES]
    for question, transfer, send_type in zip(questions, transfers, SEND_TYPES, strict=False):
        pair.ask_prefill(question, transfer, send_type)
    order = swapping.order("step-4", NEW)
    assert order.code == 0, order.said
    tokens = TokensSince(swapping.good)
    for question, transfer, send_type, answer in zip(
        questions, transfers, SEND_TYPES, right, strict=False
    ):
        assert pair.ask_decode(question, transfer, send_type) == answer, send_type
    assert tokens["external_kv_transfer"] == 0
    # And what is prefilled now is loaded.
    assert pair.transfer(questions[-1]) == right[-1]
    assert tokens["external_kv_transfer"] > 0
    check_nothing_held(swapping.fleet.instances)
    return [{
        "what": "prefilled with the old weights, decoded with the new ones",
        "requests": len(transfers), "tokens_loaded": 0, "seconds": round(order.seconds, 1),
    }]  # fmt: skip


def record(rows: list[Row]) -> None:
    """Append what was seen to the file of the variable, if it is set."""
    if OUTPUT not in os.environ:
        return
    line = {
        "command": "make weights", "machine": machine(), "versions": versions(), "rows": rows,
    }  # fmt: skip
    with Path(os.environ[OUTPUT]).open("a") as file:
        file.write(json.dumps(line) + "\n")
