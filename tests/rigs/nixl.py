"""NIXL as the tests use it: over UCX's TCP, which needs no hardware."""

from __future__ import annotations

import functools
import importlib.util
import os

import pytest

from p2p_engine.transports.nixl.library import load_nixl

UCX_TLS = "tcp"


@functools.cache
def prepare_nixl() -> None:
    """Skip a test where NIXL is not installed. Else load it, with the threads and descriptors that
    UCX keeps for good, before anybody looks for leaks. Child processes inherit the setting."""
    if importlib.util.find_spec("nixl") is None:
        pytest.skip("NIXL is not installed: make nixl")
    os.environ["UCX_TLS"] = UCX_TLS
    os.environ["UCX_MEM_MMAP_HOOK_MODE"] = "none"  # other tests' threads are running
    load_nixl()
