"""Fixtures and marks for every test."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import logging
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from p2p_engine.config import GPU_TRANSPORTS
from p2p_engine.connector import file_times
from tests import marks, ports
from tests.doubles.gpu import GpuDouble
from tests.processes import start_fork_server
from tests.rigs.nixl import prepare_nixl
from tests.support import SeededRandom, eventually, held_resources


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks."""
    for name, meaning in marks.MEANINGS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run, and say why; load the double of GPUs, which stays,
    before anybody looks for leaks. Let pytest see our log, which is vLLM's to set up under vLLM."""
    logging.disable(logging.NOTSET)
    for package in ("p2p_engine", "proxy"):
        logging.getLogger(package).propagate = True
        logging.getLogger(package).setLevel(logging.INFO)
    names = {mark.name for mark in item.iter_markers()}
    if names & {"vllm", "vllm_core"} and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    parameters = [*item.callspec.params.values()] if hasattr(item, "callspec") else []
    if any(value.startswith(GPU_TRANSPORTS) for value in parameters if isinstance(value, str)):
        GpuDouble()
    if "nixl" in parameters:
        prepare_nixl()


@pytest.fixture(scope="session", autouse=True)
def vllm_begins_last() -> Iterator[None]:
    """A simulated vLLM begins behind all that a test writes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_times, "_process_began", lambda _: float("inf"))
        yield


@pytest.fixture
def rng() -> SeededRandom:
    """Return a random source; `P2P_TEST_SEED=` repeats the seed that a failed test printed."""
    seed = os.environ.get("P2P_TEST_SEED") or random.SystemRandom().getrandbits(32)
    source = SeededRandom(int(seed))
    print(source)  # noqa: T201  # pytest shows it only when the test fails
    return source


@pytest.fixture
def free_port() -> int:
    """Return a port of 127.0.0.1 on which nothing listens."""
    return ports.free_port()


@pytest.fixture
def free_ports() -> list[int]:
    """Return two of them."""
    return [ports.free_port(), ports.free_port()]


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves a thread, descriptor, memory file or child process behind."""
    before = held_resources()
    gc.freeze()  # what is older cannot be this test's, and the next collection is quick
    yield
    try:
        eventually(lambda: held_resources() <= before)
    except AssertionError:
        pytest.fail(f"not given back: {sorted(held_resources() - before)}")


@pytest.fixture(params=["few connections", "a crowd"])
def crowd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the proxy read each connection in turns, as it does in a crowd; and not."""
    if request.param == "a crowd":
        monkeypatch.setattr("proxy.http.reading.CROWD", -1)


@pytest.fixture(scope="session")
def fork_server() -> None:
    """Have what makes child processes before leaks are looked for."""
    start_fork_server()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model of which vLLM reads the configuration only."""
    from tests.doubles.vllm_config import write_model_config  # needs vLLM

    return write_model_config(tmp_path_factory.mktemp("model"))


@pytest.fixture
def pair_settings() -> dict[str, Any]:
    """Return what the pairs of `make_pair` have in common; a file of tests may have its own."""
    return {}


@pytest.fixture
def make_pair(model: Path, pair_settings: dict[str, Any]) -> Iterator[Callable[..., Any]]:
    """Make pairs of simulated instances, which are closed after the test."""
    from tests.doubles.pair import Pair  # needs vLLM

    with contextlib.ExitStack() as pairs:

        def make(
            prefill: dict[str, Any] | None = None,
            decode: dict[str, Any] | None = None,
            **settings: Any,
        ) -> Pair:
            sides = {
                name: {**pair_settings.get(name, {}), **(given or {})}
                for name, given in (("prefill", prefill), ("decode", decode))
            }
            return pairs.enter_context(
                contextlib.closing(Pair(model, **{**pair_settings, **settings, **sides}))
            )

        yield make
