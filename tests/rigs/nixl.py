"""NIXL as the tests use it: over UCX's TCP, which needs no hardware."""

from __future__ import annotations

import functools
import importlib.util
import os

import pytest

from p2p_engine.transports.nixl.library import NixlAgent, load_nixl

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


def lose_writes(monkeypatch: pytest.MonkeyPatch, min_bytes: int) -> None:
    """Drop what agents write in pieces of at least so many bytes, and report success."""
    write, is_complete, release = NixlAgent.write, NixlAgent.is_complete, NixlAgent.release
    lost = -1  # a handle

    def lossy(agent: NixlAgent, source: int, destination: int, nbytes: int, peer: str) -> int:
        return lost if nbytes >= min_bytes else write(agent, source, destination, nbytes, peer)

    def is_lossy_complete(agent: NixlAgent, handle: int) -> bool:
        return handle == lost or is_complete(agent, handle)

    def release_lossy(agent: NixlAgent, handle: int) -> None:
        if handle != lost:
            release(agent, handle)

    monkeypatch.setattr(NixlAgent, "write", lossy)
    monkeypatch.setattr(NixlAgent, "is_complete", is_lossy_complete)
    monkeypatch.setattr(NixlAgent, "release", release_lossy)
