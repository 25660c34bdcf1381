"""On a real GPU, two processes on it (T1: libnccl over the loopback; T3: CUDA IPC): what is moved
each way at once arrives whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from p2p_engine.config import GPU_TRANSPORTS
from tests import marks
from tests.gpu import checks
from tests.gpu.peer import Processes
from tests.support import SeededRandom

pytestmark = [marks.gpu, marks.slow, pytest.mark.timeout(470)]
COUNT = 3334  # of each send mode: 10,000 in all
BUDGET_BYTES = 13_300_000_000


@pytest.mark.parametrize("send_type", ["PUT", "PUT_ASYNC", "GET"])
@pytest.mark.parametrize("transport", GPU_TRANSPORTS)
def test_exchange(
    processes: Processes,
    transport: str,
    send_type: str,
    rng: SeededRandom,
    record_property: Callable[[str, object], None],
) -> None:
    figures = checks.exchange(
        processes, transport, send_type, count=COUNT, budget_bytes=BUDGET_BYTES,
        seed=rng.initial_seed, kv_buffer_size=1 << 30, mem_pool_size_gb=1,
    )  # fmt: skip
    record_property("figures", {**figures, "seed": rng.initial_seed})
