"""On a real GPU: the worker half as vLLM's two model runners drive it. No vLLM is needed."""

from __future__ import annotations

import pytest

from p2p_engine import SendMode
from tests import marks
from tests.gpu.machine import Machine
from tests.gpu.recorded import STEPS
from tests.gpu.replay import replay

pytestmark = [marks.gpu, pytest.mark.timeout(120)]


@pytest.mark.parametrize("preempts", [False, True], ids=["", "preempted"])
@pytest.mark.parametrize("send_type", SendMode)
@pytest.mark.parametrize("order", STEPS)
def test_connector(order: str, send_type: SendMode, preempts: bool, free_ports: list[int]) -> None:
    settings = Machine().settings("cuda_ipc", kv_buffer_size=1 << 28, mem_pool_size_gb=0.1)
    replay(settings, order, send_type, free_ports, preempts=preempts)
