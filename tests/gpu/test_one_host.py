"""On a real GPU with an NCCL of 2.30 or newer (GPU_NCCL=, the library's path): two ranks on it that
know that they are, in one process (T2a) and in two (T2b)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from p2p_engine.transports.nccl.library import Nccl, show_version
from tests import marks
from tests.gpu import checks
from tests.gpu.machine import Machine
from tests.gpu.peer import Processes
from tests.support import SeededRandom

pytestmark = [marks.gpu, marks.slow, pytest.mark.timeout(470)]
MIB = 1 << 20
FIRST_VERSION = 23003


@pytest.fixture(scope="module")
def one_host() -> Iterator[Processes]:
    path = os.environ.get("GPU_NCCL", "")
    if not path:
        pytest.skip("GPU_NCCL= names no library")
    version = Nccl(path).version
    if version < FIRST_VERSION:
        pytest.skip(f"NCCL {show_version(version)} is older than {show_version(FIRST_VERSION)}")
    with Processes(Machine(nccl=path, are_hosts=False)) as made:
        yield made


def test_one_host_one_process(
    one_host: Processes, rng: SeededRandom, record_property: Callable[[str, object], None]
) -> None:
    figures = checks.exchange_inside(
        one_host, count=1000, max_bytes=64 * MIB, seed=rng.initial_seed
    )
    record_property("figures", figures)


def test_one_host_two_processes(
    one_host: Processes, rng: SeededRandom, record_property: Callable[[str, object], None]
) -> None:
    figures = checks.exchange(
        one_host, "nccl", "PUT_ASYNC", count=2000, budget_bytes=8_000_000_000,
        seed=rng.initial_seed, kv_buffer_size=1 << 30, mem_pool_size_gb=1,
    )  # fmt: skip
    record_property("figures", figures)


def test_one_host_kills(
    one_host: Processes, record_property: Callable[[str, object], None]
) -> None:
    figures = checks.kill_peers(
        one_host, "nccl", kills=20, size=64 * MIB, kv_buffer_size=1 << 30, mem_pool_size_gb=0.5
    )
    record_property("figures", figures)
