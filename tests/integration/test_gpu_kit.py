"""The kit for half an hour on a real GPU: every part of it on the double, with small counts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles.gpu import GpuDouble
from tests.gpu import kit
from tests.gpu.kit import PARTS, SMALL, Kit, run_part
from tests.gpu.machine import Machine

DOUBLE = GpuDouble()
MACHINE = Machine(DOUBLE.path, driver=str(Path(DOUBLE.path).parent))
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
