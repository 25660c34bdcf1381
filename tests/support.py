"""What tests share beside fixtures: waiting on conditions, seeded randomness, leak snapshots."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from tests.doubles.gpu import GpuDouble

T = TypeVar("T")
PROC = Path("/proc/self")

# Codes of the proxy that are made from the names of Quart's errors;
# tests/integration/test_proxy_failures.py asks for them.
CODES_OF_QUART = ("not_found", "method_not_allowed")


def eventually(condition: Callable[[], T], timeout: float = 10.0, what: str = "") -> T:
    """Wait until `condition` is true and return its value.

    Raises:
        AssertionError: when it is still false after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: {what or condition}")
        time.sleep(0.002)
    return value


@contextlib.contextmanager
def all_given_back(double: GpuDouble) -> Iterator[None]:
    """Wait, at the end, until a GPU holds no more than at the beginning. An earlier test's streams
    may have been on their way out then."""
    before = double.held()

    def is_given_back() -> bool:
        if all(count <= before[name] for name, count in double.held().items()):
            return True
        gc.collect()  # events hang on errors and their frames
        return False

    yield
    eventually(is_given_back, what=f"{double.held()} is more than {before}")


class SeededRandom(random.Random):
    """A random source that shows its seed wherever pytest shows it."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.initial_seed = seed
        self.numpy = np.random.default_rng(seed)

    def __repr__(self) -> str:
        """Say how to run the same again."""
        return f"SeededRandom(P2P_TEST_SEED={self.initial_seed})"


def records_of(logger: logging.Logger, caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return what came from one logger: threads of an earlier test may still say their last."""
    return [record for record in caplog.records if record.name == logger.name]


def held_resources() -> set[str]:
    """Name everything that this process holds and that a close() must give back.

    Threads that bear the program's own name are left out: OpenMP starts such ones at will.
    """
    gc.collect()
    return _threads() | _descriptors() | _memory_files() | _children() | _of_the_gpu()


def _threads() -> set[str]:
    main_name = (PROC / "comm").read_text()
    tasks = {task.name: _text(task / "comm") for task in (PROC / "task").iterdir()}
    native = {f"native thread {tid} {name}" for tid, name in tasks.items() if name != main_name}
    return native | {f"thread {thread.ident} {thread.name}" for thread in threading.enumerate()}


def _descriptors() -> set[str]:
    held = set()
    for descriptor in (PROC / "fd").iterdir():
        try:
            held.add(f"descriptor {descriptor.name} {os.readlink(descriptor)}")
        except FileNotFoundError:  # the one that listed the folder
            continue
    return held


def _memory_files() -> set[str]:
    lines = (PROC / "maps").read_text().splitlines()
    return {f"mapping {line}" for line in lines if "/memfd:" in line}


def _children() -> set[str]:
    tasks = (PROC / "task").iterdir()
    return {f"child {pid}" for task in tasks for pid in _text(task / "children").split()}


def _of_the_gpu() -> set[str]:
    """What the double of GPUs counts: every single one has a name."""
    held = GpuDouble.loaded.held() if GpuDouble.loaded is not None else {}
    return {f"gpu {name} {number}" for name, count in held.items() for number in range(count)}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the thread ended while we looked
        return ""
