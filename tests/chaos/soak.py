"""Two processes under load for long: python -m tests.chaos.soak --seconds 1200.

All send modes, sizes at random, both transports in turn, now and then an abort. Every 5 s the
resident memory, the threads and the descriptors of both are read; the slopes are those of straight
lines through what was read after the first fifth (least squares); "resident MB" are some of these
readings, in order. Before that, many small transfers fill what is remembered of those that have
ended.

With --links, one of each pair has that many links to a crowd (tests/chaos/crowd.py) after a tenth
of the time: polite peers, mute ones, names that do not resolve; and strangers do harm to both. The
ratio is that of medians, for each size and mode of transfer: beside the crowd, over before it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.harness import machine
from benchmarks.process_tree import usage
from p2p_engine import SendMode
from p2p_engine.bounded import MAX_ENTRIES
from tests.chaos.crowd import UNRESOLVABLE, Crowd
from tests.chaos.parent import ChaosChild, settings
from tests.processes import ChildError, start_fork_server
from tests.stacks import stacks
from tests.support import eventually

SAMPLE_SECONDS = 5.0
SIZES = [1, 4096, 100_000, 1_000_000, 2_000_000]
BATCH = 128
MEET_SECONDS = 5.0  # between two rounds of dialling those that never answer
LINK_SECONDS = 300.0


def sample(process: ChaosChild) -> tuple[int, int, int]:
    """Resident bytes, threads, descriptors, of a process that has nothing under way."""
    process.ask("trim")
    return usage(process.pid)


class Soak:
    """Both processes of one transport, and what was read of them."""

    def __init__(self, transport: str, seed: int, num_links: int = 0) -> None:
        self.transport = transport
        self._random = random.Random(f"{transport}{seed}")
        config = settings(transport)
        if num_links:  # a ping to each every 2.5 s, as with the defaults
            config = dataclasses.replace(
                config, peer_timeout_seconds=10.0, connect_timeout_seconds=5.0,
                transfer_timeout_seconds=4.0, lease_seconds=4.0, retry_seconds=0.5,
            )  # fmt: skip
        self._pair = (ChaosChild(transport, config=config), ChaosChild(transport, config=config))
        self._num_links = num_links
        self._crowd: Crowd | None = None
        self._met_at = 0.0
        self._meetings = itertools.count()
        self._times: dict[tuple[bool, int, str], list[float]] = defaultdict(list)
        self.fewest_links = num_links
        self._count = 0
        self._start = time.monotonic()
        self._sampled_at = 0.0
        self._rows: list[tuple[float, ...]] = []
        self.outcomes: dict[str, int] = {}
        self.moved_bytes = self.num_wrong = 0

    def fill(self) -> None:
        """Fill the memories of what has ended: they are bounded, and would look like growth."""
        for _ in range(MAX_ENTRIES // BATCH):
            for sender, receiver in (self._pair, self._pair[::-1]):
                self._move(sender, receiver, BATCH, 1, SendMode.PUT_ASYNC)

    def gather(self, seed: int) -> None:
        """Let the crowd come, link to all of it, and let the strangers begin."""
        self._crowd = crowd = Crowd(self._num_links, [p.control for p in self._pair], seed)
        for first in range(0, self._num_links, BATCH):  # all at once take longer than they may
            few = crowd.polite[first : first + BATCH]
            num_links = self._links() + len(few)
            self._meet(few, LINK_SECONDS)
            eventually(lambda n=num_links: self._links() >= n, LINK_SECONDS)  # type: ignore[misc]
        crowd.harm()

    def _links(self) -> int:
        return int(self._pair[0].ask("num_links"))

    def _meet(self, addresses: list[str], seconds: float) -> None:
        names = [f"meeting {next(self._meetings)}" for _ in addresses]
        self._pair[0].ask("meet", names, addresses, seconds)

    def step(self) -> None:
        """Four transfers, one way or the other."""
        if self._crowd is not None and time.monotonic() - self._met_at > MEET_SECONDS:
            self._met_at = time.monotonic()
            self._meet([*self._crowd.mute, *UNRESOLVABLE], MEET_SECONDS)
            self.fewest_links = min(self.fewest_links, self._links())
        sender, receiver = self._random.sample(self._pair, 2)
        nbytes, mode = self._random.choice(SIZES), self._random.choice(list(SendMode))
        began_at = time.monotonic()
        self._move(sender, receiver, 4, nbytes, mode)
        self._times[self._crowd is not None, nbytes, mode.value].append(time.monotonic() - began_at)
        if time.monotonic() - self._sampled_at > SAMPLE_SECONDS:
            self._sampled_at = time.monotonic()
            readings = [value for process in self._pair for value in sample(process)]
            self._rows.append((self._sampled_at - self._start, *readings))

    def _move(
        self, sender: ChaosChild, receiver: ChaosChild, count: int, nbytes: int, mode: SendMode
    ) -> None:
        names = [f"{self._count}-{i}" for i in range(count)]
        self._count += 1
        calls: list[tuple[ChaosChild, str, tuple[Any, ...]]] = [
            (sender, "send", (names, nbytes, receiver.control, mode.value, True)),
            (receiver, "receive", (names, nbytes, sender.control, mode.value)),
        ]
        if mode != SendMode.PUT and self._random.random() < 0.5:
            calls.reverse()
        for process, command, arguments in calls:
            process.tell(command, *arguments)
        for process, _, _ in calls:
            process.answer()
        if self._random.random() < 0.02:
            self._random.choice(self._pair).ask("cancel")
        for process in (sender, receiver):
            process.tell("finish", 10.0)
        for process in (sender, receiver):
            for _, word, is_right, _ in process.answer():
                self.outcomes[word] = self.outcomes.get(word, 0) + 1
                self.num_wrong += not is_right
                self.moved_bytes += nbytes if process is receiver and word == "ok" else 0

    def result(self) -> dict[str, Any]:
        """Slopes for each hour, of both processes, and the first and last readings."""
        rows = np.array(self._rows[len(self._rows) // 5 :], float)
        names = [f"{who} {what}" for who in ("first", "second")
                 for what in ("resident bytes", "threads", "descriptors")]  # fmt: skip
        slopes = np.polyfit(rows[:, 0] / 3600, rows[:, 1:], 1)[0]
        return {
            "transport": self.transport,
            "seconds": round(rows[-1, 0]),
            "transfers": sum(self.outcomes.values()) // 2,
            "outcomes": self.outcomes,
            "moved_bytes": self.moved_bytes,
            "wrong": self.num_wrong,
            "slope per hour": dict(zip(names, slopes.round(1).tolist(), strict=True)),
            "resident MB": [
                [round(value / 1e6) for value in row]
                for row in rows[:: len(rows) // 12 or 1, (1, 4)]
            ],
            "at a fifth": rows[0, 1:].astype(int).tolist(),
            "at the end": rows[-1, 1:].astype(int).tolist(),
            **(self._beside_the_crowd() if self._num_links else {}),
        }

    def _beside_the_crowd(self) -> dict[str, Any]:
        """How much longer the same transfers take there, and the links that were kept."""
        ratios = {
            f"{nbytes} {mode}": round(median(times) / median(self._times[False, nbytes, mode]), 2)
            for (is_crowded, nbytes, mode), times in sorted(self._times.items())
            if is_crowded and self._times[False, nbytes, mode]
        }
        return {"links": self._num_links, "fewest links": self.fewest_links, "ratios": ratios,
                "median ratio": median(ratios.values())}  # fmt: skip

    def stacks(self) -> str:
        """What all threads of both are at."""
        return "\n".join(stacks(process.pid) for process in self._pair if not process.has_ended())

    def close(self) -> None:
        """End both, and the crowd."""
        if self._crowd is not None:
            self._crowd.close()
        for process in self._pair:
            process.close()


def play(soaks: list[Soak], seconds: float) -> None:
    """Let the pairs of both transports take turns."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for soak in soaks:
            soak.step()


def main() -> int:
    """Run, print, append; 1 when a byte was wrong or something was stuck."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--links", type=int, default=0, help="of one engine, to a crowd")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--unfilled", action="store_true", help="for a quick try")
    options = parser.parse_args()
    start_fork_server("tests.chaos.child")
    soaks = [Soak(transport, options.seed, options.links) for transport in ("shm", "tcp")]
    try:
        for soak in soaks if not options.unfilled else ():
            soak.fill()
        quiet = options.seconds / 10 if options.links else options.seconds
        play(soaks, quiet)
        if options.links:
            for soak in soaks:
                soak.gather(options.seed)
            play(soaks, options.seconds - quiet)
        results = [soak.result() for soak in soaks]
    except ChildError:
        for soak in soaks:
            print(soak.stacks(), file=sys.stderr)  # noqa: T201
        raise
    finally:
        for soak in soaks:
            soak.close()
    line = json.dumps({"machine": machine(), "seed": options.seed, "results": results})
    print(line)  # noqa: T201
    if options.output is not None:
        with options.output.open("a") as file:
            file.write(line + "\n")
    return int(any(soak.num_wrong or "stuck" in soak.outcomes for soak in soaks))


if __name__ == "__main__":
    sys.exit(main())
