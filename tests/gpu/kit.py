"""What a GPU is asked to show in half an hour: parts of at most eight minutes, ordered by worth.

`python -m tests.gpu.kit --out FOLDER first bytes` runs two of them. Each writes FOLDER/PART.jsonl:
a line for the machine, then one for each step as it ends, with its figures or why it failed. A part
that has time left makes rounds of its steps. tests/integration/test_gpu_kit.py runs every part on
the double, with small counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_gpu import PARTS as RATES
from benchmarks.bench_gpu import GpuBench
from p2p_engine import SendMode
from p2p_engine.config import GPU_TRANSPORTS
from tests.gpu import checks
from tests.gpu.machine import Machine
from tests.gpu.peer import Processes
from tests.gpu.recorded import STEPS
from tests.gpu.replay import replay
from tests.ports import free_port

MIB = 1 << 20
LEAST_SECONDS = 20.0  # that must be left for another round


@dataclass(frozen=True)
class Sizes:
    """How much of each; the defaults are for a GPU."""

    transfers: int = 500  # of each side in a round
    max_bytes: int = 64 * MIB
    budget_bytes: int = 2_000_000_000
    buffer_bytes: int = 1 << 30
    pool_gb: float = 1.0
    kills: int = 5
    rounds: int = 1000  # of slow producers
    groups: int = 64
    replays: int = 2 * len(STEPS) * len(SendMode)
    bench_bytes: int = 256 * MIB
    repetitions: int = 10


SMALL = Sizes(20, MIB, 4 * MIB, 4 * MIB, 0.01, 1, 5, 3, 1, 4 * MIB, 1)


class Kit:
    """The steps, on one machine."""

    def __init__(self, machine: Machine, sizes: Sizes, seed: int) -> None:
        self.machine = machine
        self.sizes = sizes
        self.seed = seed  # another one in each round
        self.processes = Processes(machine)

    def __enter__(self) -> Kit:
        return self

    def __exit__(self, *_: object) -> None:
        self.processes.close()

    def copies(self) -> Any:
        """Scattered regions on the device, and to and from host memory."""
        return checks.copy_regions(self.machine, nbytes=self.sizes.max_bytes, seed=self.seed)

    def to_itself(self) -> Any:
        """One rank of NCCL."""
        return checks.send_to_itself(self.machine)

    def slow_producers(self, share: float = 1.0) -> Any:
        """Copies behind work that has not been done."""
        rounds = max(1, int(self.sizes.rounds * share))
        figures = checks.race_slow_producers(self.machine, rounds=rounds, nbytes=MIB)
        assert not figures["stale_bytes"], figures
        return figures

    def arrays(self) -> Any:
        """Arrays of cupy's, where it is installed."""
        rounds = max(1, self.sizes.rounds // 20)
        figures = checks.send_arrays(self.machine, rounds=rounds, nbytes=MIB)
        assert not figures.get("wrong_bytes"), figures
        return figures

    def exchange(self, transport: str, send_type: str, share: float = 1.0) -> Any:
        """Transfers each way between two processes."""
        sizes = self.sizes
        return checks.exchange(
            self.processes, transport, send_type, count=max(1, int(sizes.transfers * share)),
            max_bytes=sizes.max_bytes, budget_bytes=int(sizes.budget_bytes * share),
            seed=self.seed, kv_buffer_size=sizes.buffer_bytes, mem_pool_size_gb=sizes.pool_gb,
        )  # fmt: skip

    def exchange_inside(self) -> Any:
        """The same in one process, whose kernels run at the same time."""
        return checks.exchange_inside(
            self.processes, count=self.sizes.transfers, max_bytes=self.sizes.max_bytes,
            seed=self.seed,
        )  # fmt: skip

    def connector(self) -> Any:
        """The worker half, in every order in which vLLM's model runners call it."""
        plays = [(order, mode, preempts) for preempts in (False, True) for order in STEPS
                 for mode in SendMode]  # fmt: skip
        settings = self.machine.settings(
            "cuda_ipc", kv_buffer_size=4 * MIB, mem_pool_size_gb=0.01, retry_seconds=0.1
        )
        for order, mode, preempts in plays[: self.sizes.replays]:
            replay(settings, order, mode, [free_port(), free_port()], preempts=preempts)
        return {"replays": len(plays[: self.sizes.replays])}

    def kills(self, transport: str) -> Any:
        """Peers that die in the middle of transfers."""
        sizes = self.sizes
        figures = checks.kill_peers(
            self.processes, transport, kills=sizes.kills, size=sizes.max_bytes,
            kv_buffer_size=max(16 * MIB, sizes.buffer_bytes), mem_pool_size_gb=sizes.pool_gb,
        )  # fmt: skip
        return _with_goals(figures, error_seconds=4.0, service_seconds=2.0, lost_mib=8.0)

    def group(self, channels: int) -> Any:
        """What a group takes."""
        figures = checks.group_memory(self.processes, channels)
        return {**figures, "goal": "made_mib is expected_mib, within 2"}

    def groups(self) -> Any:
        """Many groups, and more than are kept."""
        figures = checks.group_memory(self.processes, 2, self.sizes.groups)
        more = checks.evict_groups(self.processes, max_groups=self.sizes.groups, more=2)
        return {**_with_goals(figures, used_mib=1434.0, lost_mib=16.0), "evicted": more}

    def rates(self, part: str) -> Any:
        """A part of the benchmark; its rows."""
        bench = GpuBench(
            self.processes, total=self.sizes.bench_bytes, repetitions=self.sizes.repetitions
        )
        try:
            return {"rows": getattr(bench, part)()}
        finally:
            bench.close()


@dataclass(frozen=True)
class KitPart:
    """Steps, and the seconds that they may take together."""

    seconds: float
    steps: dict[str, Callable[[Kit], Any]]
    makes_rounds: bool = False


_EXCHANGES = {
    f"exchange {transport} {mode}": partial(Kit.exchange, transport=transport, send_type=mode)
    for mode in ("PUT_ASYNC", "GET", "PUT")
    for transport in GPU_TRANSPORTS
}
PARTS = {
    # Everything that the rest needs.
    "first": KitPart(120, {
        "copies": Kit.copies,
        "NCCL to itself": Kit.to_itself,
        "slow producers": partial(Kit.slow_producers, share=0.05),
        **{name: partial(call, share=0.1) for name, call in _EXCHANGES.items() if "ASYNC" in name},
        "arrays of cupy's": Kit.arrays,
    }),
    # Never wrong: every byte that arrives is compared.
    "bytes": KitPart(420, {
        "connector": Kit.connector,
        "slow producers": Kit.slow_producers,
        **_EXCHANGES,
    }, makes_rounds=True),
    # Never stuck: peers are killed, and memory is given back.
    "faults": KitPart(480, {
        **{f"kills {each}": partial(Kit.kills, transport=each) for each in GPU_TRANSPORTS},
        **{f"group of {each}": partial(Kit.group, channels=each) for each in (1, 2, 4, 8, 16)},
        "groups": Kit.groups,
    }, makes_rounds=True),
    # Fast: beside the machine's own limits.
    "rates": KitPart(480, {each: partial(Kit.rates, part=each) for each in RATES}),
    # Two ranks that know that they share a GPU: with an NCCL of 2.30 or newer (GPU_NCCL=).
    "one_host": KitPart(300, {
        "in one process": Kit.exchange_inside,
        "in two": partial(Kit.exchange, transport="nccl", send_type="PUT_ASYNC"),
    }),
}  # fmt: skip


class OutOfTime(BaseException):
    """The part's seconds are over."""


def run_part(kit: Kit, name: str, folder: Path, *, is_limited: bool = True) -> int:
    """Run a part and write its file; returns how many steps have failed."""
    part, start, num_failed, number = PARTS[name], time.monotonic(), 0, 0
    folder.mkdir(parents=True, exist_ok=True)

    def left() -> float:
        return part.seconds - (time.monotonic() - start)

    with open(folder / f"{name}.jsonl", "w") as file:

        def write(**line: Any) -> None:
            print(json.dumps(line), file=file, flush=True)
            print(f"{name}: {json.dumps(line)[:300]}", flush=True)  # noqa: T201

        write(part=name, at=time.strftime("%Y-%m-%d %H:%M", time.gmtime()), **_described(kit))
        with contextlib.suppress(OutOfTime), _alarm(part.seconds if is_limited else 0):
            while number == 0 or (part.makes_rounds and is_limited and left() > LEAST_SECONDS):
                for step, call in part.steps.items():
                    before = time.monotonic()
                    outcome = _try(kit, call)
                    num_failed += "error" in outcome
                    write(step=step, round=number, seed=kit.seed,
                          seconds=round(time.monotonic() - before, 1), **outcome)  # fmt: skip
                number, kit.seed = number + 1, kit.seed + 1
        write(part=name, failed=num_failed, is_whole=number > 0, rounds=number,
              seconds=round(time.monotonic() - start, 1))  # fmt: skip
    return num_failed + (number == 0)


def _try(kit: Kit, call: Callable[[Kit], Any]) -> dict[str, Any]:
    try:
        return {"figures": call(kit)}
    except Exception:  # noqa: BLE001  # the other steps still have something to show
        kit.processes.close()
        return {"error": traceback.format_exc()[-3000:]}


def _described(kit: Kit) -> dict[str, Any]:
    try:
        return {"machine": kit.machine.describe()}
    except Exception:  # noqa: BLE001  # what it lacks is the first thing to know
        return {"machine": None, "error": traceback.format_exc()[-3000:]}


def _with_goals(figures: dict[str, Any], **goals: float) -> dict[str, Any]:
    missed = [name for name, goal in goals.items() if abs(figures[name]) > goal]
    return {**figures, "goals": goals, "missed": missed}


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise OutOfTime after so long, in whatever waits; 0: never."""
    if not seconds:
        yield
        return

    def ring(*_: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def main() -> None:
    """Run parts, one after the other."""
    parser = argparse.ArgumentParser("python -m tests.gpu.kit")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="%(default)s")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    nccl, cuda = os.environ.get("GPU_NCCL", ""), torch.cuda
    parts = options.parts or [name for name in PARTS if name != "one_host" or nccl]
    cuda.init()  # type: ignore[no-untyped-call]
    num_failed = 0
    for name in parts:
        is_one_host = name == "one_host"
        machine = Machine(nccl=nccl if is_one_host else "", are_hosts=not is_one_host)
        with Kit(machine, Sizes(), options.seed) as kit:
            num_failed += run_part(kit, name, options.out)
    sys.exit(1 if num_failed else 0)


if __name__ == "__main__":
    main()
