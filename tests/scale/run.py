"""Stand-ins are added, drained, stopped and killed at random while requests go on.

`make scale DURATION=600`. No request may fail because an instance came or left in good order. Of a
kill, only answers that had begun may be cut. In the end every count is zero, everywhere.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.process_tree import usage
from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.members import Member, fetch_text
from p2p_engine.cli.simulate import SimulatedFleet
from p2p_engine.transfer_config import EXTRA
from tests.scale.load import Outcomes, StreamLoad

RATE = 300.0
PAUSE_SECONDS = (1.0, 3.0)
SPARE = 1  # so many less than at the start, or more, of each role
READY_SECONDS = 600.0  # on a machine that others use as well
DRAIN_SECONDS = 30.0
# What was sent to an instance that is gone, or was never asked for, ends by these.
LEASES = {"lease_seconds": 15, "transfer_timeout_seconds": 15, "peer_timeout_seconds": 5}
COSTS = ("--prefill-tokens-per-second", "400000", "--token-ms", "4", "--kv-bytes-per-token", "64")


@dataclass
class Events:
    """What was done to the fleet, when."""

    began: float = field(default_factory=time.monotonic)
    done: list[tuple[float, str, str]] = field(default_factory=list)

    def add(self, what: str, member: Member) -> None:
        """Note it."""
        self.done.append((round(time.monotonic() - self.began, 2), what, member.name))

    def count(self) -> Counter[str]:
        """How often each was done."""
        return Counter(what for _, what, _ in self.done)


class Chaos:
    """Does one thing after the other to a fleet; blocks while it does."""

    def __init__(
        self, fleet: SimulatedFleet, sizes: dict[MemberRole, int], rng: random.Random
    ) -> None:
        self._fleet = fleet
        self._sizes = sizes
        self._rng = rng
        self.events = Events()

    def act(self) -> None:
        """Do something that leaves enough instances of each role."""
        role = self._rng.choice(list(self._sizes))
        members = [m for m in self._fleet.instances if m.plan and m.plan.role is role]
        if len(members) <= self._sizes[role] - SPARE:
            return self._add(role)
        leave: list[Callable[[Member], None]] = [self._drain, self._stop, self._kill]
        if len(members) < self._sizes[role] + SPARE and self._rng.random() < 0.5:
            return self._add(role)
        return self._rng.choice(leave)(self._rng.choice(members))

    def _add(self, role: MemberRole) -> None:
        member = self._fleet.start(role)
        self.events.add("add", member)
        self._fleet.wait_ready(member, timeout=READY_SECONDS)

    def _drain(self, member: Member) -> None:
        """As a careful operator does: no new request, then the end of the process."""
        self._fleet.order("remove", member)
        self.events.add("drain", member)
        wait_until(lambda: self._has_drained(member), DRAIN_SECONDS, f"{member.name} drains")
        self._fleet.kill(member)  # nothing of it is in use any more

    def _stop(self, member: Member) -> None:
        self.events.add("stop", member)
        self._fleet.stop(member)

    def _kill(self, member: Member) -> None:
        self.events.add("kill", member)
        self._fleet.kill(member)

    def _has_drained(self, member: Member) -> bool:
        return states(self._fleet).get(member.http_address) in ("drained", None)


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Block until the condition holds; asked seldom, because asking costs the proxy something.

    Raises:
        TimeoutError: it did not in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(0.1)


def unexplained(outcomes: Outcomes, events: Events) -> list[tuple[float, str]]:
    """The failures that no kill excuses: it only may cut answers that had begun."""
    kills = [when for when, what, _ in events.done if what == "kill"]
    return [
        (when, what)
        for when, what in outcomes.failures
        if what.startswith("early") or not any(0 <= when - kill + 0.5 < 3.0 for kill in kills)
    ]


def status(fleet: SimulatedFleet) -> dict[str, Any]:
    """What the proxy says."""
    assert fleet.proxy is not None
    content: dict[str, Any] = json.loads(fetch_text(f"{fleet.proxy.url}/status") or "{}")
    return content


def states(fleet: SimulatedFleet) -> dict[str, str]:
    """The state of each instance by its address."""
    return {i["http_address"]: i["state"] for i in status(fleet).get("instances", ())}


def leftovers(fleet: SimulatedFleet) -> list[str]:
    """Name every count that is not zero."""
    shown = status(fleet)
    found = [f"proxy: {name}={shown[name]}" for name in ("requests_in_flight", "requests_queued")
             if shown[name]]  # fmt: skip
    for instance in shown["instances"]:
        counts = {**instance["in_flight"], "tokens": instance["tokens_in_flight"]}
        found += [f"{instance['http_address']}: {n}={c}" for n, c in counts.items() if c]
    for member in fleet.instances:
        stats = json.loads(fetch_text(f"{member.url}/stats") or "{}")
        engine = stats["engine"]
        counts = {name: stats[name] for name in ("running", "open", "wrong")}
        counts |= {
            name: engine[name] for name in ("live_bytes", "open_transfers", "control_errors")
        }
        found += [f"{member.name}: {name}={count}" for name, count in counts.items() if count]
    return found


def usage_of(fleet: SimulatedFleet) -> dict[str, harness.Row]:
    """What each process of the fleet uses now, by its name."""
    found = {}
    for member in fleet.members:
        resident, threads, descriptors = usage(member.process.pid)
        mib = round(resident / (1 << 20), 1)
        found[member.name] = {"mib": mib, "threads": threads, "descriptors": descriptors}
    return found


async def run(
    fleet: SimulatedFleet, size: int, rate: float, seconds: float, seed: int, at_least: int = 0
) -> tuple[StreamLoad, Events]:
    """Load and disturb a fleet that is ready for so long, and until so many things were done to it;
    return what came of it when all is quiet again."""
    assert fleet.proxy is not None
    rng = random.Random(seed)
    load = StreamLoad(fleet.proxy.url, "simulated", rate, random.Random(rng.random()))
    chaos = Chaos(fleet, {MemberRole.PREFILL: size, MemberRole.DECODE: size}, rng)
    is_over = asyncio.Event()
    loading = asyncio.ensure_future(load.run(is_over))
    deadline, done = time.monotonic() + seconds, chaos.events.done
    while (time.monotonic() < deadline or len(done) < at_least) and not loading.done():
        await asyncio.sleep(rng.uniform(*PAUSE_SECONDS))
        await asyncio.to_thread(chaos.act)
    is_over.set()
    await loading
    return load, chaos.events


def start(fleet: SimulatedFleet, size: int) -> None:
    """Start the proxy and so many stand-ins of each role, and wait for them."""
    fleet.start_proxy()
    for role in (MemberRole.PREFILL, MemberRole.DECODE):
        for _ in range(size):
            fleet.start(role)
    fleet.wait_ready(timeout=READY_SECONDS)


def settle(fleet: SimulatedFleet) -> None:
    """Wait until every count is zero.

    Raises:
        TimeoutError: one is not.
    """
    wait_until(lambda: not leftovers(fleet), 60, "every count is zero")


def new_fleet(log_dir: Path) -> SimulatedFleet:
    """A fleet of quick stand-ins whose leases are short."""
    return SimulatedFleet(vllm_args=COSTS, transfer_config={EXTRA: LEASES}, log_dir=log_dir)


def main() -> int:
    """Run it, print and record what came of it; 0 when nothing failed that must not."""
    options = argparse.ArgumentParser("python -m tests.scale.run", description=__doc__)
    options.add_argument("--seconds", type=float, default=600.0)
    options.add_argument("--size", type=int, default=4, help="instances of each role (%(default)d)")
    options.add_argument("--rate", type=float, default=RATE, help="requests/s (%(default)g)")
    options.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(31))
    options.add_argument("--output", type=Path, default=harness.RESULTS / "scale.jsonl")
    options.add_argument("--log-dir", type=Path, default=Path(tempfile.mkdtemp(prefix="scale-")))
    chosen = options.parse_args()
    harness.progress(f"seed {chosen.seed}, logs in {chosen.log_dir}")
    with new_fleet(chosen.log_dir) as fleet:
        start(fleet, chosen.size)
        before = usage_of(fleet)
        load, events = asyncio.run(
            run(fleet, chosen.size, chosen.rate, chosen.seconds, chosen.seed)
        )
        settle(fleet)
        after = usage_of(fleet)
    outcomes = load.outcomes
    row = {"requests": outcomes.num_requests, "ok": outcomes.num_ok}
    wrong = unexplained(outcomes, events)
    row |= {"cut_by_a_kill": len(outcomes.failures) - len(wrong), "failed": len(wrong)}
    del chosen.log_dir
    details = {"events": events.done, "failures": outcomes.failures, "usage": [before, after]}
    harness.record([{**row, **events.count()}], chosen, details)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
