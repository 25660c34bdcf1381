"""The kit for half an hour on a real GPU: every part of it on the double, with small counts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.doubles import cupy_arrays
from tests.doubles.gpu import GpuDouble
from tests.gpu import checks, kit
from tests.gpu.kit import PARTS, SMALL, Kit, run_part
from tests.gpu.machine import Machine
from tests.gpu.memory import GpuMemory

DOUBLE = GpuDouble()
MACHINE = Machine(
    DOUBLE.path, cupy="tests.doubles.cupy_arrays", driver=str(Path(DOUBLE.path).parent)
)
MINUTES = 8


def lines_of(folder: Path, part: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / f"{part}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def made() -> Iterator[Kit]:
    with Kit(MACHINE, SMALL, seed=1) as kit:
        yield kit


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PARTS)
def test_each_part_ends_with_its_figures(name: str, made: Kit, tmp_path: Path) -> None:
    failed = run_part(made, name, tmp_path, is_limited=False)
    machine, *steps, end = lines_of(tmp_path, name)
    assert not failed, steps
    assert machine["machine"]
    assert [line["step"] for line in steps] == list(PARTS[name].steps)
    assert all(line["figures"] for line in steps)
    assert end["failed"] == 0


def test_a_machine_without_cupy_says_so() -> None:
    machine = Machine(DOUBLE.path, cupy="not_a_module")
    says = "not installed: No module named 'not_a_module'"
    assert machine.describe()["cupy"] == says
    assert checks.send_arrays(machine, rounds=3, nbytes=8) == {"rounds": 0, "cupy": says}


def test_bytes_that_cupy_reads_otherwise_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, _ = Machine(DOUBLE.path).load()
    memory, piece = GpuMemory(cuda, 4096, 1, cupy_arrays), (5, 1000)
    source = memory.source(piece)
    sides = source.regions(0, 1), memory.sink(0, 1000).regions(source.manifest, 0, 1)
    here, there = (int(side.addresses[0]) for side in sides)
    cuda.copy(there, here, 1000, 0)
    cuda.synchronize(0)
    assert memory.holds(0, piece)
    monkeypatch.setattr(cupy_arrays, "asnumpy", lambda array: np.zeros(array.shape, np.uint8))
    assert not memory.holds(0, piece)
    memory.close()


def test_a_step_that_fails_does_not_keep_others_from_showing_what_they_can(
    made: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Kit) -> None:
        raise ValueError("the GPU is wet")

    part = kit.KitPart(10, {"one": fail, "two": lambda _: {"figure": 7}})
    monkeypatch.setitem(PARTS, "first", part)
    assert run_part(made, "first", tmp_path, is_limited=False) == 1
    _, one, two, _ = lines_of(tmp_path, "first")
    assert "the GPU is wet" in str(one["error"])
    assert two["figures"] == {"figure": 7}


def test_a_part_ends_in_time_whatever_stands_still(tmp_path: Path) -> None:
    """In a process of its own: pytest's own limit uses the same clock."""
    program = f"""
import sys, threading
from pathlib import Path
from tests.doubles.gpu import GpuDouble
from tests.gpu import kit
from tests.gpu.machine import Machine
path = GpuDouble().path
kit.PARTS["first"] = kit.KitPart(0.5, {{"stuck": lambda _: threading.Event().wait(60)}})
made = kit.Kit(Machine(path), kit.SMALL, 1)
sys.exit(7 if kit.run_part(made, "first", Path({str(tmp_path)!r})) == 1 else 1)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=50)
    assert done.returncode == 7
    assert lines_of(tmp_path, "first")[-1]["is_whole"] is False


def test_no_part_takes_longer_than_a_call_may() -> None:
    """Ten minutes, with what comes before; the first two go together."""
    assert all(part.seconds <= 60 * MINUTES for part in PARTS.values())
    assert list(PARTS)[:2] == ["first", "bytes"]
    assert PARTS["first"].seconds == 120
    assert PARTS["first"].seconds + PARTS["bytes"].seconds <= 540
