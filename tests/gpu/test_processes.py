"""On a real GPU, two processes on it: T1 (libnccl over the loopback) and T3 (CUDA IPC)."""

from __future__ import annotations

import pytest

from tests import marks
from tests.gpu.peer import GpuPeer
from tests.support import SeededRandom

pytestmark = [marks.gpu, marks.slow, pytest.mark.timeout(480)]
MIB = 1 << 20
SETTINGS = {"device": "cuda:0", "kv_buffer_size": 1 << 30, "mem_pool_size_gb": 1,
            "connect_timeout_seconds": 60}  # fmt: skip


@pytest.mark.parametrize("transport", ["nccl", "cuda_ipc"])
def test_both_directions_at_once(transport: str, rng: SeededRandom) -> None:
    settings = {**SETTINGS, "transports": transport}
    sizes = [int(2 ** rng.uniform(0, 24)) for _ in range(200)]
    with GpuPeer(1, settings) as one, GpuPeer(2, settings) as two:
        there, back = list(range(200)), list(range(1000, 1200))
        for _ in range(2):  # both are told, then both are heard
            one.tell("send", there, sizes, two.address)
            two.tell("send", back, sizes, one.address)
            assert (one.answer(), two.answer()) == (200, 200)
            one.tell("receive", back, sizes, two.address)
            two.tell("receive", there, sizes, one.address)
            assert (one.answer(), two.answer()) == (0, 0)
            there, back = [n + 5000 for n in there], [n + 5000 for n in back]


@pytest.mark.parametrize("transport", ["nccl", "cuda_ipc"])
def test_a_killed_peer_costs_its_own_transfers_only(transport: str) -> None:
    settings = {**SETTINGS, "transports": transport, "peer_timeout_seconds": 3}
    with GpuPeer(1, settings) as survivor:
        for number in range(3):
            with GpuPeer(2 + number, settings) as victim:
                seeds = [number * 100 + i for i in range(10)]
                survivor.ask("send", seeds, [32 * MIB] * 10, victim.address)
                victim.process.kill()
            with GpuPeer(20 + number, settings) as other:
                seed = 10_000 + number
                survivor.ask("send", [seed], [8 * MIB], other.address)
                assert other.ask("receive", [seed], [8 * MIB], survivor.address) == 0
