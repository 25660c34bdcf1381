"""On a real GPU: peers that are killed in the middle of a transfer, fifty times."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from p2p_engine.config import GPU_TRANSPORTS
from tests import marks
from tests.gpu import checks
from tests.gpu.peer import Processes

pytestmark = [marks.gpu, marks.slow, pytest.mark.timeout(470)]
MIB = 1 << 20


@pytest.mark.parametrize("transport", GPU_TRANSPORTS)
def test_kills(
    processes: Processes, transport: str, record_property: Callable[[str, object], None]
) -> None:
    figures = checks.kill_peers(
        processes, transport, kills=50, size=64 * MIB, kv_buffer_size=1 << 30, mem_pool_size_gb=0.5
    )
    goals = {"error_seconds": 4.0, "service_seconds": 2.0, "lost_mib": 8}
    record_property("figures", {**figures, "goals": goals})
    assert all(abs(figures[name]) <= goal for name, goal in goals.items())
