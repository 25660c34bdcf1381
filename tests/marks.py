"""The marks of the test suite, each defined once: `from tests import marks`, then `@marks.vllm`."""

from __future__ import annotations

import pytest

from p2p_engine.config import HOST_TRANSPORTS, TRANSPORT_NAMES

MEANINGS = {
    "slow": "takes more than ten seconds",
    "vllm": "boots real vLLM servers; run by `make test-vllm`",
    "vllm_core": "the few real vLLM tests that `make test` runs",
}

slow = pytest.mark.slow
vllm = pytest.mark.vllm
vllm_core = pytest.mark.vllm_core

# Those between GPUs run on the double of them.
every_transport = pytest.mark.parametrize("transport", TRANSPORT_NAMES)
between_processes = pytest.mark.parametrize("transport", TRANSPORT_NAMES[1:])
every_host_transport = pytest.mark.parametrize("transport", HOST_TRANSPORTS)

# Tests of vLLM's scheduler and our connector over a simulated model.
simulated_vllm = [
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
    pytest.mark.timeout(180),  # the first one waits until vLLM has looked at the model's class
]
