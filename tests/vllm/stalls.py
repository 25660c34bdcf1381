"""Decode instances boot and load their first KV beside busy processes, and who stands still, why?

One prefill instance, pulled from by a decode instance of two ranks that starts afresh each turn, on
a machine whose cores are busy. When no request ends for STILL_SECONDS, the stacks of all threads of
all instances are written down, with what Linux says of each: how long it ran, and how long it was
ready to run and was not (/proc/PID/task/TID/schedstat). A thread that waits for us shows its stack;
one that waits for a core shows its second figure. `make stalls TURNS=50`
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import machine, versions
from benchmarks.process_tree import descendants
from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.members import Member
from tests.compat.fleet import BOOT_SECONDS, VLLM_ARGS
from tests.compat.workload import Answer, Question
from tests.stacks import DUMP_SECONDS, stacks
from tests.vllm.evidence import evidence_in
from tests.vllm.load import CONCURRENCY, ENVIRONMENT, VllmLoad, answers_of_one, questions_for
from tests.vllm.other_models import ensure_model

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "stalls.jsonl"
STILL_SECONDS = 5.0
NUM_QUESTIONS = 48
TURN_SECONDS = 600.0
NUM_FRAMES = 3  # the innermost ones, and as many of vLLM


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Let so many processes compute as other work on the machine would."""
    work = "while True: sum(range(100_000))"
    command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-c", work]
    others = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def thread_times(pid: int) -> dict[str, dict[str, Any]]:
    """Return each thread's state, its seconds on a core, and those in which it waited for one."""
    found = {}
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            name, state = (task / "comm").read_text().strip(), (task / "stat").read_text()
            ran, waited, _ = (task / "schedstat").read_text().split()
        except OSError:
            continue  # it has ended
        found[f"{name} {task.name}"] = {
            "state": state.rpartition(")")[2].split()[0],
            "ran": int(ran) / 1e9,
            "waited": int(waited) / 1e9,
        }
    return found


class Watcher:
    """Notices that nothing ends, and writes down once a standstill what every thread is at."""

    def __init__(self, load: VllmLoad, members: Sequence[Member], folder: Path) -> None:
        """Start to watch."""
        self._load = load
        self._members = list(members)
        self._folder = folder
        self._stopping = threading.Event()
        self.stalls: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._stopping.set()
        self._thread.join(2 * DUMP_SECONDS)

    def _watch(self) -> None:
        ended, since, is_noted = self._load.num_ended, time.monotonic(), False
        while not self._stopping.wait(0.25):
            now = time.monotonic()
            if self._load.num_ended != ended:
                if is_noted:
                    self.stalls[-1]["seconds"] = round(now - since, 1)
                ended, since, is_noted = self._load.num_ended, now, False
            elif not is_noted and now - since >= STILL_SECONDS:
                is_noted = True
                self.stalls.append(self._note(now - since))

    def _note(self, seconds: float) -> dict[str, Any]:
        pids = {
            f"{member.name} {pid}": pid
            for member in self._members
            for pid in descendants(member.process.pid)
        }
        before = {name: thread_times(pid) for name, pid in pids.items()}
        began_at = time.monotonic()
        dumps = {name: stacks(pid) for name, pid in pids.items()}
        span = time.monotonic() - began_at
        after = {name: thread_times(pid) for name, pid in pids.items()}
        path = self._folder / f"stacks-{time.strftime('%H%M%S')}.txt"
        path.write_text("\n".join(f"==== {name}\n{dump}" for name, dump in dumps.items()))
        return {
            "seconds": round(seconds, 1),
            "span": round(span, 1),
            "starved": starved(before, after, span),
            "active": {name: found for name, dump in dumps.items() if (found := active(dump))},
        }


def active(dump: str) -> dict[str, list[str]]:
    """Return where each thread is that computes or spins: its innermost frames and those of vLLM,
    by its name."""
    found = {}
    for block in dump.split("\nThread ")[1:]:
        title, *frames = map(str.strip, block.splitlines())
        if "(active" in title:
            name = title.partition('"')[2].rstrip('"')
            of_vllm = [frame for frame in frames[NUM_FRAMES:] if "(vllm/" in frame]
            found[name] = frames[:NUM_FRAMES] + of_vllm[:NUM_FRAMES]
    return found


def starved(before: dict[str, Any], after: dict[str, Any], span: float) -> dict[str, float]:
    """Return the share of a span in which a thread wanted a core and had none, if above 0.1."""
    shares = {
        f"{process} / {thread}": (times["waited"] - before[process][thread]["waited"]) / span
        for process, threads in after.items()
        for thread, times in threads.items()
        if thread in before.get(process, {})
    }
    return {name: round(share, 2) for name, share in shares.items() if share > 0.1}


def play(
    turns: int,
    num_busy: int,
    num_answers: int,
    seconds: float,
    questions: Sequence[Question],
    expected: Sequence[Answer],
    log_dir: Path,
) -> list[dict[str, Any]]:
    """Restart decode `turns` times, or as often as `seconds` allow, and ask until so many answers
    have come; one row for each."""
    deadline = time.monotonic() + seconds
    rows: list[dict[str, Any]] = []
    model = ensure_model("llama")
    fleet = Fleet(model, send_type="GET", vllm_args=VLLM_ARGS, env=ENVIRONMENT, log_dir=log_dir)
    with fleet:
        proxy = fleet.start_proxy()
        prefill = fleet.start(MemberRole.PREFILL)
        decode = fleet.start(MemberRole.DECODE, vllm_args=["--tensor-parallel-size=2"])
        fleet.wait_ready(timeout=BOOT_SECONDS)
        for turn in range(turns):
            if time.monotonic() >= deadline:
                break
            if turn:
                fleet.kill(decode)
                decode = fleet.start(
                    MemberRole.DECODE, vllm_args=["--tensor-parallel-size=2"], successor_of=decode
                )
                fleet.wait_ready(decode, timeout=BOOT_SECONDS)
            with busy(num_busy):
                members = [prefill, decode]
                rows.append(ask(proxy.url, num_answers, questions, expected, members, log_dir))
            print(json.dumps(rows[-1]), flush=True)  # noqa: T201
    return rows


def ask(
    url: str,
    num_answers: int,
    questions: Sequence[Question],
    expected: Sequence[Answer],
    members: Sequence[Member],
    log_dir: Path,
) -> dict[str, Any]:
    """Ask until enough is answered, watched; what came of it."""
    load = VllmLoad(url, questions, expected, concurrency=CONCURRENCY)
    watcher = Watcher(load, members, log_dir)
    late = ""
    try:
        load.wait_for(num_answers, TURN_SECONDS)
    except AssertionError as error:
        late = str(error)
    finally:
        watcher.stop()
        load.stop()
    asked = load.take()
    errors = [item.error for item in asked if item.error]
    wrong = sum(not item.error and not item.is_right for item in asked)
    slowest = max((item.ended_at - item.began_at for item in asked), default=0.0)
    if errors or wrong or late:
        print(json.dumps(evidence_in(log_dir), indent=1), flush=True)  # noqa: T201
    row = {"answered": len(asked) - len(errors), "wrong": wrong, "errors": errors, "late": late}
    return {**row, "slowest": round(slowest, 1), "stalls": watcher.stalls}


def main() -> None:
    """Play, append what was seen, and end with 1 when a request failed or was answered wrongly."""
    parser = argparse.ArgumentParser("python -m tests.vllm.stalls", description=__doc__)
    parser.add_argument("--turns", type=int, default=50, help="starts of the decode instance")
    parser.add_argument("--busy", type=int, default=16, help="processes that compute beside it")
    parser.add_argument("--answers", type=int, default=24, help="in each turn")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none later")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    log_dir = Path(tempfile.mkdtemp(prefix="stalls-"))
    print(f"logs in {log_dir}", flush=True)  # noqa: T201
    questions = questions_for()[:NUM_QUESTIONS]
    expected = answers_of_one(questions, log_dir / "alone", tp_size=2)
    rows = play(
        options.turns, options.busy, options.answers, options.seconds, questions, expected, log_dir
    )
    line = {
        "command": f"make stalls TURNS={options.turns} BUSY={options.busy} "
        f"ANSWERS={options.answers}",
        "machine": machine(),
        "versions": versions(),
        "rows": rows,
    }
    with options.output.open("a") as file:
        file.write(json.dumps(line) + "\n")
    raise SystemExit(any(row["errors"] or row["wrong"] or row["late"] for row in rows))


if __name__ == "__main__":
    main()
