"""The marks of the test suite, each defined once: `from tests import marks`, then `@marks.vllm`."""

from __future__ import annotations

import pytest

MEANINGS = {
    "gpu": "needs a CUDA device",
    "slow": "takes more than ten seconds",
    "vllm": "boots real vLLM servers; run by `make test-vllm`",
    "vllm_core": "the few real vLLM tests that `make test` runs",
}

gpu = pytest.mark.gpu
slow = pytest.mark.slow
vllm = pytest.mark.vllm
vllm_core = pytest.mark.vllm_core
