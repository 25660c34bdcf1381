"""The worker half as vLLM's two model runners drive it, on the double of a GPU: strided caches,
forwards that have not run yet when their hooks are called. tests/gpu runs the same on CUDA."""

from __future__ import annotations

import subprocess
import sys

import pytest

from p2p_engine import SendMode
from p2p_engine.config import GPU_TRANSPORTS
from tests.doubles.gpu import GpuDouble
from tests.gpu.machine import Machine
from tests.gpu.recorded import STEPS
from tests.gpu.replay import replay

DOUBLE = GpuDouble()  # before any test looks at the threads that there are
pytestmark = pytest.mark.usefixtures("no_leaks")
MIB = 1 << 20


@pytest.mark.parametrize("preempts", [False, True], ids=["", "preempted"])
@pytest.mark.parametrize("send_type", SendMode)
@pytest.mark.parametrize("order", STEPS)
def test_recorded_steps(
    order: str, send_type: SendMode, preempts: bool, free_ports: list[int]
) -> None:
    transport = GPU_TRANSPORTS[list(STEPS).index(order) % 2]
    settings = Machine(DOUBLE.path).settings(
        transport, kv_buffer_size=MIB, mem_pool_size_gb=0.01, retry_seconds=0.1
    )
    replay(settings, order, send_type, free_ports, preempts=preempts)


def test_no_vllm_is_needed() -> None:
    """A GPU machine may have none."""
    blocked = "import sys; sys.modules['vllm'] = None; import tests.gpu.replay"
    subprocess.run([sys.executable, "-c", blocked], check=True)
