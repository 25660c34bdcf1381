"""What an import may load, seen from a fresh interpreter each time."""

from __future__ import annotations

import subprocess
import sys

import pytest

LOADED = "import sys; import {module}; print(*sys.modules, sep='\\n')"
HEAVY = {"cuda", "nixl", "pynvml", "vllm"}


def packages_loaded_by(module: str) -> set[str]:
    program = LOADED.format(module=module)
    listing = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(listing.stdout.split())


@pytest.mark.parametrize("module", ["proxy", "proxy.app", "p2p_engine.wire.messages"])
def test_the_proxy_starts_without_torch_and_without_the_engine(module: str) -> None:
    loaded = packages_loaded_by(module)
    assert not loaded & (HEAVY | {"mempool", "p2p_engine.engine", "torch"})


@pytest.mark.parametrize("module", ["mempool", "p2p_engine", "p2p_engine.engine", "p2p_engine.cli"])
def test_the_engine_loads_without_vllm_and_without_cuda(module: str) -> None:
    # builds of torch for CUDA load some of it themselves
    assert not (packages_loaded_by(module) - packages_loaded_by("torch")) & HEAVY


def test_public_names_load_on_first_use() -> None:
    loaded = packages_loaded_by("p2p_engine")
    assert not any(name.startswith("p2p_engine.") for name in loaded)


def test_importing_does_not_start_cuda() -> None:
    program = "import mempool, p2p_engine.engine, torch; print(torch.cuda.is_initialized())"
    listing = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert listing.stdout.strip() == "False"
