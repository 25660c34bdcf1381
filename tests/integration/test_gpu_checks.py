"""What tests/gpu runs on a real GPU, here on the double with small counts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.bench_gpu import GpuBench
from tests.doubles.gpu import GpuDouble
from tests.gpu import checks
from tests.gpu.machine import Machine
from tests.gpu.peer import Processes
from tests.support import SeededRandom

MIB = 1 << 20


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    path = GpuDouble().path
    with Processes(Machine(path, path)) as made:
        yield made


@pytest.mark.parametrize(
    ("transport", "send_type"),
    [("nccl", "PUT_ASYNC"), ("nccl", "GET"), ("cuda_ipc", "PUT_ASYNC"), ("cuda_ipc", "PUT")],
)
def test_transfers_each_way_at_once(
    processes: Processes, transport: str, send_type: str, rng: SeededRandom
) -> None:
    figures = checks.exchange(
        processes, transport, send_type, count=60, max_bytes=MIB, budget_bytes=8 * MIB,
        seed=rng.initial_seed, kv_buffer_size=4 * MIB, mem_pool_size_gb=0.01,
    )  # fmt: skip
    assert figures["transfers"] == 120


def test_transfers_between_engines_of_one_process(processes: Processes, rng: SeededRandom) -> None:
    figures = checks.exchange_inside(processes, count=20, max_bytes=MIB, seed=rng.initial_seed)
    assert figures["transfers"] == 40


def test_killed_peers(processes: Processes) -> None:
    figures = checks.kill_peers(
        processes, "nccl", kills=1, size=4 * MIB, connect_timeout_seconds=10
    )
    assert figures["lost_mib"] == 0


def test_memory_of_groups(processes: Processes) -> None:
    """Each process of the double sees what itself has taken: half, when both take the same."""
    figures = checks.group_memory(processes, 2, 3)
    assert figures["made_mib"] == figures["expected_mib"] / 2
    assert figures["lost_mib"] == 0


def test_groups_that_are_too_many(processes: Processes) -> None:
    figures = checks.evict_groups(processes, max_groups=4, more=2)
    assert figures["evicted"] == 2


def test_slow_producers(processes: Processes) -> None:
    assert checks.race_slow_producers(processes.machine, rounds=10, nbytes=MIB)["stale_bytes"] == 0


@pytest.mark.parametrize("part", ["pack", "pool", "push", "groups"])
def test_the_benchmark_runs(processes: Processes, part: str) -> None:
    bench = GpuBench(processes, total=4 * MIB, repetitions=1)
    rows = getattr(bench, part)()
    bench.close()
    assert rows
    assert all(row["what"] for row in rows)
