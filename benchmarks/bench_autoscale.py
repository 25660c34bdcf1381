"""Is a fleet that follows the proxy's requests in flight large enough, and no larger?

A calm load, four times as much, and calm again go through a real proxy to stand-ins, which come and
go as Kubernetes would let them. Prompts take a tenth of a second each, one after the other, so the
higher load needs two instances of each role. Beside it: a fleet that stays as small as it began,
and one that is always as large as the others may become.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.harness import Row, arguments, progress, record
from p2p_engine.cli.autoscale import AutoscaleOptions, Autoscaler
from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.replicas import read_ranges
from p2p_engine.cli.simulate import SimulatedFleet
from tests.scale.load import StreamLoad

CALM, FACTOR = 4.0, 4
MOST = 4
COSTS = ("--prefill-tokens-per-second", "5120", "--token-ms", "20", "--token-ms-per-request", "10")
# A fleet's name, how many instances of each role it starts with, and what it follows.
FLEETS = {
    "stays at 1 and 1": (1, ""),
    "follows, targets 1 and 2": (1, f"prefill=1:{MOST}:1,decode=1:{MOST}:2"),
    "follows, targets 4 and 4": (1, f"prefill=1:{MOST}:4,decode=1:{MOST}:4"),
    f"stays at {MOST} and {MOST}": (MOST, ""),
}
POLL_SECONDS = 0.1
ROLES = (MemberRole.PREFILL, MemberRole.DECODE)


class RandomLoad(StreamLoad):
    """Requests that come independently of each other, as clients' do."""

    def pause(self) -> float:
        """Return the seconds from one request to the next."""
        return self._rng.expovariate(self.rate)


class FleetRecord:
    """What is done to a fleet, and how many of each role it has; all with the seconds since the
    start."""

    def __init__(self, fleet: SimulatedFleet) -> None:
        self._fleet = fleet
        self._began = self._seen = time.monotonic()
        self.acts: list[tuple[float, str]] = []
        self.sizes: list[tuple[float, list[int]]] = []
        self.instance_seconds = 0.0

    def note(self, act: str) -> None:
        """Note what is done."""
        progress(act)
        self.acts.append((round(time.monotonic() - self._began, 1), act))

    def look(self) -> None:
        """Count the instances, those that start or drain as well."""
        now = time.monotonic()
        roles = Counter(member.plan.role for member in self._fleet.instances if member.plan)
        sizes = [roles[role] for role in ROLES]
        self.instance_seconds += sum(sizes) * (now - self._seen)
        self._seen = now
        if not self.sizes or self.sizes[-1][1] != sizes:
            self.sizes.append((round(now - self._began, 1), sizes))


async def play(
    fleet: SimulatedFleet, load: StreamLoad, scaling: AutoscaleOptions, phases: Sequence[float]
) -> FleetRecord:
    """Let the load rise and fall; return what was done meanwhile."""
    seen, is_over = FleetRecord(fleet), asyncio.Event()
    scaler = Autoscaler(fleet, partial(fleet.order, "remove"), scaling, seen.note)
    loading = asyncio.ensure_future(load.run(is_over))
    for number, seconds in enumerate(phases):
        load.rate = CALM * (FACTOR if number % 2 else 1)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            await asyncio.to_thread(scaler.step)
            seen.look()
            await asyncio.sleep(POLL_SECONDS)
    is_over.set()
    await loading
    return seen


def measure(
    name: str, scaling: AutoscaleOptions, phases: Sequence[float], seed: int
) -> tuple[Row, FleetRecord]:
    """Play the load to one fleet."""
    with SimulatedFleet(vllm_args=COSTS, log_dir=Path(tempfile.mkdtemp())) as fleet:
        fleet.start_proxy()
        for role in ROLES * FLEETS[name][0]:
            fleet.start(role)
        fleet.wait_ready(timeout=120)
        assert fleet.proxy is not None
        load = RandomLoad(fleet.proxy.url, "simulated", CALM, random.Random(seed))
        seen = asyncio.run(play(fleet, load, scaling, phases))
    outcomes, acts = load.outcomes, Counter(act.split()[0] for _, act in seen.acts)
    row: Row = {"fleet": name, "requests": outcomes.num_requests, "failed": len(outcomes.failures)}
    row |= {"added": acts["adds"], "drained": acts["stopped"]}
    row["most"] = [max(sizes[role] for _, sizes in seen.sizes) for role in range(len(ROLES))]
    row["instance_seconds"] = round(seen.instance_seconds)
    high = [took for when, took in outcomes.first_tokens if phases[0] <= when < sum(phases[:2])]
    for case, taken in ("", [took for _, took in outcomes.first_tokens]), ("high_", high):
        cuts = statistics.quantiles(taken, n=100)
        row |= {f"{case}p50_ms": round(1000 * cuts[49]), f"{case}p99_ms": round(1000 * cuts[98])}
    return row, seen


def main() -> None:
    """Play the same load to every fleet."""
    options = arguments("autoscale", __doc__, repetitions=1)
    options.add_argument("--interval", type=float, default=5.0, help="seconds (%(default)g)")
    options.add_argument("--window", type=float, default=30.0, help="seconds (%(default)g)")
    options.add_argument(
        "--phases", type=float, nargs=3, default=[30.0, 90.0, 60.0], metavar="SECONDS",
        help="of the calm load, the high one and the calm one (%(default)s)",
    )  # fmt: skip
    chosen = options.parse_args()
    rows, details = [], {}
    for turn, name in itertools.product(range(chosen.repetitions), FLEETS):
        progress(name)
        scaling = AutoscaleOptions(read_ranges(FLEETS[name][1]), chosen.interval, chosen.window)
        row, seen = measure(name, scaling, chosen.phases, chosen.seed + turn)
        rows.append(row)
        details[f"{name}, {turn}"] = {"sizes": seen.sizes, "acts": seen.acts}
    record(rows, chosen, {"fleets": details})


if __name__ == "__main__":
    main()
