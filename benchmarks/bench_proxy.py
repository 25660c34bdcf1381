"""The cost of a router: direct calls and routers before the same light instances, in one run.

The router has a core of its own; the instances and the load share another one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import harness, routers
from benchmarks.light_instance import HOST, MODEL
from benchmarks.load_client import Client, Wrong, ask_at_rate, keep_asking, stream
from benchmarks.routers import Ports, RouterProcess, running
from p2p_engine.cli.ports import PortPlan

PROMPT_BYTES = 2048
RATE = 200.0
NUM_STREAMS = 250
STREAM_TOKENS = 200
DIRECT = "direct"
# Routers that find the instances by heartbeats; for others, unread heartbeats would pile up.
REGISTRATION = ("ours", "vllm-router")


@dataclass
class Contender:
    """One way to have a request answered. `process` is None for the direct one."""

    name: str
    addresses: list[str]
    process: RouterProcess | None = None
    measured: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    # Requests that it did not answer in some round; such a round is not measured.
    failures: list[str] = field(default_factory=list)

    def client(self, **changes: Any) -> Client:
        """Return a client; directly, a prefill leg comes before the decode leg."""
        body = json.dumps(
            {"model": MODEL, "prompt": "x" * PROMPT_BYTES, "max_tokens": 8, **changes}
        ).encode()
        return Client(self.addresses, [body] * len(self.addresses))

    def cpu_seconds(self) -> float:
        """Return the CPU time that its process has used so far."""
        return self.process.cpu_seconds() if self.process else 0.0


async def closed_loop(contender: Contender, concurrency: int, seconds: float) -> None:
    """Measure latencies and, of routers, what the processor spends on a request."""
    before = contender.cpu_seconds()
    began = asyncio.get_running_loop().time()
    with contextlib.closing(contender.client()) as client:
        latencies = await keep_asking(client, concurrency, seconds)
    elapsed = asyncio.get_running_loop().time() - began
    note(contender, f"c{concurrency}", latencies)
    contender.measured[f"c{concurrency}_per_s"].append(len(latencies) / elapsed)
    if contender.process and concurrency > 1:
        spent = contender.cpu_seconds() - before
        contender.measured["cpu_s_per_1000"].append(1000 * spent / len(latencies))
        contender.measured["per_s_and_core"].append(len(latencies) / spent)


async def open_loop(contender: Contender, seconds: float) -> None:
    """Measure latencies at a rate that leaves everything nearly idle."""
    with contextlib.closing(contender.client()) as client:
        note(contender, f"r{RATE:g}", await ask_at_rate(client, RATE, seconds))


async def streams(contender: Contender, seconds: float) -> None:
    """Measure how many events of many streams pass."""
    if contender.process is None:
        return
    before = contender.cpu_seconds()
    began = asyncio.get_running_loop().time()
    client = contender.client(stream=True, max_tokens=STREAM_TOKENS)
    with contextlib.closing(client):
        rate = await stream(client, NUM_STREAMS, seconds)
    spent = contender.cpu_seconds() - before
    elapsed = asyncio.get_running_loop().time() - began
    contender.measured["chunks_per_s"].append(rate)
    contender.measured["chunks_per_s_and_core"].append(rate * elapsed / spent)


def note(contender: Contender, load: str, latencies: list[float]) -> None:
    """Keep the median and the 99th percentile, in milliseconds."""
    cuts = statistics.quantiles(latencies, n=100)
    contender.measured[f"{load}_p50"].append(1000 * cuts[49])
    contender.measured[f"{load}_p99"].append(1000 * cuts[98])


def rows(contenders: list[Contender]) -> list[harness.Row]:
    """One row for each; latencies in ms, less those of the direct calls in the same run."""
    direct = next(c for c in contenders if c.name == DIRECT)
    table = []
    for contender in contenders:
        row: harness.Row = {"router": contender.name}
        for name, values in contender.measured.items():
            is_latency = name.endswith(("_p50", "_p99"))
            if is_latency and contender is not direct:
                added = statistics.median(values) - statistics.median(direct.measured[name])
                row |= {f"{name}_added_ms": round(added, 3)}
            else:
                digits = 3 if is_latency or "cpu" in name else 0
                row |= {name + "_ms" * is_latency: round(statistics.median(values), digits)}
        if contender.process:
            row["peak_mib"] = round(contender.process.peak_mib())
        if contender.failures:
            row["failures"] = contender.failures
        table.append(row)
    return table


def plan(ports: PortPlan, names: list[str]) -> dict[str, Ports]:
    """Ports for each router; the instances are the same for all."""
    prefill, decode = ((ports.take(), ports.take()) for _ in range(2))
    take = ports.take
    return {name: Ports(take(), take(), take(), prefill, decode) for name in names}


async def measure(contenders: list[Contender], options: argparse.Namespace) -> None:
    """Let them take turns, round by round; the first round does not count."""
    seconds = options.seconds
    loads: Mapping[str, Callable[[Contender], Any]] = {
        "one at a time": partial(closed_loop, concurrency=1, seconds=seconds),
        "64 at a time": partial(closed_loop, concurrency=64, seconds=seconds),
        f"{RATE:g} a second": partial(open_loop, seconds=seconds),
        f"{NUM_STREAMS} streams": partial(streams, seconds=seconds),
    }
    for number in range(options.repetitions + 1):
        for name, load in loads.items():
            for contender in contenders:
                harness.progress(f"round {number}: {name}, {contender.name}")
                try:
                    await load(contender)
                except Wrong as error:  # LiteLLM refuses many streams that come at once
                    harness.progress(f"not answered, {name}, by {contender.name}: {error}")
                    contender.failures.append(f"{name}: {error}")
        if number == 0:
            for contender in contenders:
                contender.measured.clear()


def main() -> None:
    """Measure all and record it."""
    parser = harness.arguments("proxy", __doc__ or "", repetitions=3)
    known = ["ours", "vllm-router", "smg", "litellm"]
    parser.add_argument("--routers", nargs="*", choices=known, default=known)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each load (%(default)s)")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    router_core, other_core = cores[0], cores[-1]
    os.sched_setaffinity(0, {other_core})
    folder = Path(tempfile.mkdtemp(prefix="bench-proxy-"))
    with PortPlan(HOST) as ports, contextlib.ExitStack() as stack:
        planned = plan(ports, options.routers)
        some = next(iter(planned.values()))
        instances = [*some.prefill, *some.decode]
        command = [sys.executable, "-m", "benchmarks.light_instance", *map(str, instances)]
        heard = [str(its.registration) for name, its in planned.items() if name in REGISTRATION]
        command += ["--registration-ports", *heard]
        first = f"http://{HOST}:{instances[0]}"
        stack.enter_context(running(command, other_core, folder / "instances.log", first))
        contenders = [Contender(DIRECT, [f"{HOST}:{p[0]}" for p in (some.prefill, some.decode)])]
        commands: dict[str, Callable[[Ports], list[str]]] = {
            "ours": routers.ours,
            "vllm-router": routers.vllm_router,
            "smg": routers.smg,
            "litellm": partial(routers.litellm, folder=folder),
        }
        for name, its in planned.items():
            harness.progress(f"starting {name}")
            url = f"http://{HOST}:{its.http}"
            log = folder / f"{name}.log"
            try:
                process = stack.enter_context(running(commands[name](its), router_core, log, url))
            except RuntimeError as error:
                harness.progress(f"left out: {error}")
                continue
            contenders.append(Contender(name, [f"{HOST}:{its.http}"], process))
        uvloop.run(measure(contenders, options))
        harness.record(rows(contenders), options)


if __name__ == "__main__":
    main()
