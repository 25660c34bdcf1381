"""Real vLLM instances end and start again, prefill and decode in turn, while requests go on.

Two of each behind the proxy. A turn ends one, by SIGKILL or SIGTERM, and starts its successor at
the same address; the next turn, the other role's, comes while that boots. Prefill goes through all
send modes, one instance by shared memory and the other one by TCP; of the two decode instances one
computes again what it could not load, the other one fails the request. At the end clients leave at
each stage. `make restarts TURNS=20`
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import machine, versions
from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.members import Member
from p2p_engine.transfer_config import EXTRA
from tests.compat.fleet import BOOT_SECONDS, VLLM_ARGS
from tests.compat.workload import Answer, Question
from tests.support import eventually
from tests.vllm.leaving import check_at_rest, leave_at_each_stage
from tests.vllm.load import ENVIRONMENT, Asked, VllmLoad, answers_of_one, questions_for
from tests.vllm.observing import by_label
from tests.vllm.other_models import ensure_model

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "restarts.jsonl"
SEND_TYPES = ("PUT_ASYNC", "PUT", "GET")
TRANSPORTS = ("shm", "tcp")  # of the first prefill instance, and of the second
POLICIES = ("recompute", "fail")  # of the first decode instance, and of the second
SERVED_SECONDS = 5.0  # from readiness to the first request that was served
NUM_BEFORE = 16  # right answers before each pair of turns
NUM_QUESTIONS = 48
NUM_CLIENTS = 4
SETTINGS = {"transfer_timeout_seconds": 30, "lease_seconds": 20}
ARGUMENTS = (
    *VLLM_ARGS,
    *("--no-enable-prefix-caching", "--max-num-batched-tokens=64", "--max-num-seqs=2"),
)


@dataclass(frozen=True)
class Turn:
    """Who ends and how; the send mode of a victim that is prefill, and of its successor."""

    role: MemberRole
    which: int
    is_killed: bool
    send_type: str
    next_send_type: str


def turn_of(number: int) -> Turn:
    """Prefill and decode in turn, the first and the second of each, killed and stopped."""
    pair = number // 2
    mode = pair // 2
    is_killed = (pair + pair // 2 + number) % 2 == 0
    modes = [SEND_TYPES[index % len(SEND_TYPES)] for index in (mode, mode + 1)]
    return Turn((MemberRole.PREFILL, MemberRole.DECODE)[number % 2], pair % 2, is_killed, *modes)


@dataclass(eq=False)
class Ended:
    """A victim, and what was seen of its end and of its successor."""

    turn: Turn
    num_open: int  # requests, when it ended
    ended_at: float
    ending_seconds: float
    successor: Member
    served_at: float = 0.0

    def has_served(self) -> bool:
        """Whether the successor is ready and has answered a request; notes when it first was so."""
        if self.successor.is_ready and not self.served_at and num_served(self.successor):
            self.served_at = time.monotonic()
        return self.served_at > 0

    def line(self) -> dict[str, Any]:
        """As JSON."""
        turn, ready_at = self.turn, self.successor.ready_at or 0.0
        return {
            "role": turn.role.value,
            "send_type": turn.send_type if turn.role is MemberRole.PREFILL else "",
            "transport": TRANSPORTS[turn.which] if turn.role is MemberRole.PREFILL else "",
            "policy": POLICIES[turn.which] if turn.role is MemberRole.DECODE else "",
            "signal": "SIGKILL" if turn.is_killed else "SIGTERM",
            "open": self.num_open,
            "ending_seconds": round(self.ending_seconds, 2),
            "boot_seconds": round(ready_at - self.ended_at, 2),
            "served_seconds": round(max(0.0, self.served_at - ready_at), 2),
        }


class Restarts:
    """One fleet, and a load on it; `lines` are what was seen, `broken` the promises that were."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._members: dict[MemberRole, list[Member]] = {}
        self.lines: list[dict[str, Any]] = []
        self.broken: list[str] = []

    def run(
        self,
        questions: Sequence[Question],
        expected: Sequence[Answer],
        turns: range,
        seconds: float = float("inf"),
    ) -> None:
        """Boot all, play the turns under load while there is time, then let clients leave."""
        deadline = time.monotonic() + seconds
        proxy = self._fleet.start_proxy()
        send_type = turn_of(turns.start).send_type
        for role in (MemberRole.PREFILL, MemberRole.DECODE):
            self._members[role] = [self._start(role, which, send_type) for which in (0, 1)]
        self._fleet.wait_ready(timeout=BOOT_SECONDS)
        load = VllmLoad(proxy.url, questions, expected, concurrency=NUM_CLIENTS)
        try:
            for number in turns[::2]:
                if time.monotonic() < deadline:
                    self._play((turn_of(number), turn_of(number + 1)), load)
        finally:
            load.stop()
        self.broken += [item.error or "wrong" for item in load.take() if not item.is_right]
        check_at_rest(self._fleet.instances)
        leave_at_each_stage(proxy, self._fleet.instances)

    def _start(
        self, role: MemberRole, which: int, send_type: str, successor_of: Member | None = None
    ) -> Member:
        if role is MemberRole.PREFILL:
            extra = {**SETTINGS, "transports": TRANSPORTS[which], "send_type": send_type}
            config: dict[str, Any] = {EXTRA: extra}
        else:
            config = {EXTRA: SETTINGS, "kv_load_failure_policy": POLICIES[which]}
        return self._fleet.start(role, transfer_config=config, successor_of=successor_of)

    def _play(self, turns: Sequence[Turn], load: VllmLoad) -> None:
        """One after the other ends; both successors boot at the same time."""
        load.wait_for(NUM_BEFORE, BOOT_SECONDS)
        before = load.take()
        ended = [self._end(turns[0], load)]
        load.wait_for(NUM_BEFORE // 4, BOOT_SECONDS)
        ended.append(self._end(turns[1], load))
        successors = [item.successor for item in ended]

        def all_served(_: object = None) -> bool:
            return sum(item.has_served() for item in ended) == len(ended)

        self._fleet.wait_ready(*successors, timeout=BOOT_SECONDS, on_look=all_served)
        eventually(all_served, 60, "the successors serve")
        self._judge(ended, [*before, *load.take()])

    def _end(self, turn: Turn, load: VllmLoad) -> Ended:
        victim = self._members[turn.role][turn.which]
        num_open, began_at = load.num_open, time.monotonic()
        (self._fleet.kill if turn.is_killed else self._fleet.stop)(victim)
        ended_at = time.monotonic()
        successor = self._start(turn.role, turn.which, turn.next_send_type, victim)
        self._members[turn.role][turn.which] = successor
        return Ended(turn, num_open, ended_at, ended_at - began_at, successor)

    def _judge(self, ended: Sequence[Ended], asked: Sequence[Asked]) -> None:
        """Only what was open when a victim ended may have failed; all others are right."""
        failed = [item for item in asked if item.error]
        gone_at = max(item.ended_at for item in ended)
        later = [item.error for item in failed if item.began_at > gone_at]
        wrong = [item.said for item in asked if not item.error and not item.is_right]
        victims = [item.line() for item in ended]
        num_open = sum(item.num_open for item in ended)
        line = {
            "victims": victims,
            "answered": len(asked) - len(failed),
            "wrong": len(wrong),
            "failed": dict(Counter(item.error for item in failed)),
            "failed_later": len(later),
            "slowest_seconds": round(max(item.ended_at - item.began_at for item in asked), 2),
        }
        print(json.dumps(line), flush=True)  # noqa: T201
        self.lines.append(line)
        if wrong:
            self.broken.append(f"wrong answers: {wrong}")
        if later:
            self.broken.append(f"failed though they came afterwards: {later}")
        if len(failed) > num_open:
            self.broken.append(f"{len(failed)} failed, {num_open} were open")
        slow = [item for item in victims if item["served_seconds"] > SERVED_SECONDS]
        if slow:
            self.broken.append(f"served late: {slow}")


def num_served(member: Member) -> int:
    """How many requests an instance has answered to the end."""
    return sum(by_label(member, "vllm:request_success", "").values())


def play(
    turns: range,
    questions: Sequence[Question],
    expected: Sequence[Answer],
    log_dir: Path,
    seconds: float = float("inf"),
) -> Restarts:
    """Play these turns, or as many as there is time for; what was seen."""
    fleet = Fleet(
        ensure_model("llama"),
        vllm_args=ARGUMENTS,
        env=ENVIRONMENT,
        log_dir=log_dir,
        planned_instances=4,
    )
    with fleet:
        restarts = Restarts(fleet)
        restarts.run(questions, expected, turns, seconds)
    return restarts


def known_answers(questions: Sequence[Question], kept: Path | None, log_dir: Path) -> list[Answer]:
    """What a single instance says; asked once, if there is a file to keep it in."""
    if kept is not None and kept.exists():
        known = json.loads(kept.read_text())
        return [{int(index): tokens for index, tokens in answer.items()} for answer in known]
    answers = answers_of_one(questions, log_dir)
    if kept is not None:
        kept.write_text(json.dumps(answers))
    return answers


def main() -> None:
    """Play, and append what was seen; exit code 1 when a promise was broken."""
    parser = argparse.ArgumentParser("python -m tests.vllm.restarts", description=__doc__)
    parser.add_argument("--turns", type=int, default=20, help="restarts, an even number")
    parser.add_argument("--first", type=int, default=0, help="to go on: the number of the first")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none later")
    parser.add_argument("--answers", type=Path, help="where a single instance's are kept")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    log_dir = Path(tempfile.mkdtemp(prefix="restarts-"))
    print(f"logs in {log_dir}", flush=True)  # noqa: T201
    turns = range(options.first, options.first + options.turns)
    questions = questions_for()[:NUM_QUESTIONS]
    expected = known_answers(questions, options.answers, log_dir)
    seen = play(turns, questions, expected, log_dir, options.seconds)
    line = {
        "command": f"make restarts TURNS={options.turns} FIRST={options.first}",
        "machine": machine(),
        "versions": versions(),
        "broken": seen.broken,
        "rows": seen.lines,
    }
    with options.output.open("a") as file:
        file.write(json.dumps(line) + "\n")
    for text in seen.broken:
        print(text)  # noqa: T201
    raise SystemExit(bool(seen.broken))


if __name__ == "__main__":
    main()
