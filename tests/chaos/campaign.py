"""Plays rounds until the time is over: python -m tests.chaos.campaign --seconds 60 --seed 1.

Each round is decided by the seed and its number, and is one line of JSON in the record. A record
that is there is gone on with, after its last number. The exit status is 1 after a broken promise.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.chaos.faults import FAULTS, Fault
from tests.chaos.parent import ChaosChild
from tests.chaos.round import Round, RoundResult
from tests.chaos.steps import STEPS, TURNS, Step
from tests.chaos.turn_round import TurnRound
from tests.processes import start_fork_server

TRANSPORTS = ("shm", "tcp")


def plan(seed: int) -> Iterator[tuple[str, Fault, Step]]:
    """Every transport with every fault at every step, in an order of the seed's, for ever."""
    source = random.Random(seed)
    everything = [
        (transport, fault, step)
        for transport, fault, step in itertools.product(TRANSPORTS, FAULTS, STEPS)
        if transport in fault.transports and (step.work in TURNS or not fault.is_of_turns)
    ]
    while True:
        source.shuffle(everything)
        yield from everything


class Campaign:
    """Rounds, several side by side, each worker with survivors of its own."""

    def __init__(
        self, seed: int, first: int, end: float, at_least: int, record: Path | None, only: str
    ) -> None:
        self._seed = seed
        self._end = end
        self._at_least = at_least
        self._rounds = (
            (number, item)
            for number, item in enumerate(plan(seed))
            if only in f"{item[1].name} at {item[2]}"
        )
        for _ in range(first):
            next(self._rounds)
        self._lock = threading.Lock()
        self._file = record.open("a") if record is not None else None
        self.results: list[RoundResult] = []

    def work(self) -> None:
        """Play rounds until the end."""
        survivors: dict[str, ChaosChild] = {}
        try:
            while time.monotonic() < self._end or len(self.results) < self._at_least:
                with self._lock:
                    number, (transport, fault, step) = next(self._rounds)
                if transport not in survivors:
                    survivors[transport] = ChaosChild(transport)
                survivor = survivors[transport]
                kind = TurnRound if step.work in TURNS else Round
                result = kind(number, transport, fault, step, survivor, self._seed).run()
                if result.violations:  # what it left must not be the next round's fault
                    survivors.pop(transport).close()
                self._note(result)
        finally:
            for survivor in survivors.values():
                survivor.close()

    def _note(self, result: RoundResult) -> None:
        with self._lock:
            self.results.append(result)
            if self._file is not None:
                self._file.write(json.dumps({"seed": self._seed, **result.line()}) + "\n")
                self._file.flush()
            if result.violations:
                print(json.dumps(result.line()), file=sys.stderr)  # noqa: T201

    def close(self) -> None:
        """Close the record."""
        if self._file is not None:
            self._file.close()


def last_number(record: Path, seed: int) -> int:
    """How many rounds of this seed the record has."""
    if not record.exists():
        return 0
    lines = (json.loads(line) for line in record.read_text().splitlines())
    return max((line["number"] + 1 for line in lines if line["seed"] == seed), default=0)


def run(
    seconds: float,
    seed: int,
    jobs: int,
    record: Path | None = None,
    only: str = "",
    at_least: int = 0,
) -> list[RoundResult]:
    """Play rounds for so many seconds, and at least so many; at most one round more."""
    start_fork_server("tests.chaos.child")
    first = last_number(record, seed) if record is not None else 0
    campaign = Campaign(seed, first, time.monotonic() + seconds, at_least, record, only)
    try:
        with ThreadPoolExecutor(jobs) as pool:
            for worker in [pool.submit(campaign.work) for _ in range(jobs)]:
                worker.result()
    finally:
        campaign.close()
    return campaign.results


def main() -> int:
    """Run a campaign from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=4, help="rounds side by side")
    parser.add_argument("--record", type=Path)
    parser.add_argument(
        "--only", default="", help="rounds that have this in 'FAULT at ROLE: EVENT (PLAY)'"
    )
    options = parser.parse_args()
    results = run(options.seconds, options.seed, options.jobs, options.record, options.only)
    broken = [result for result in results if result.violations]
    hit = sum(result.hit for result in results)
    print(  # noqa: T201
        f"{len(results)} rounds, seed {options.seed}: {hit} at their step, "
        f"{len(broken)} with a broken promise"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
