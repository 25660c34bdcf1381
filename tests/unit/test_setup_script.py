"""`make setup` on a machine that lacks something: one line says how to mend it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = (
    "basename",
    "bash",
    "cat",
    "dirname",
    "echo",
    "find",
    "flock",
    "make",
    "sha256sum",
    "sort",
    "xargs",
)


@pytest.fixture
def bare_machine(tmp_path: Path) -> Path:
    """Make a checkout whose `bin` folder has a shell's tools but neither Python nor a compiler."""
    for folder in ("bin", "csrc", "scripts"):
        (tmp_path / folder).mkdir()
    for name in ("pyproject.toml", "scripts/setup.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "setup.py").touch()
    for tool in TOOLS:
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool) or f"/usr/bin/{tool}")
    return tmp_path


def set_up(machine: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", machine / "scripts" / "setup.sh"],
        env={"PATH": str(machine / "bin"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_one_apt_line_names_all_that_is_missing(bare_machine: Path) -> None:
    outcome = set_up(bare_machine)
    assert outcome.returncode == 1
    lines = [line.strip() for line in outcome.stderr.splitlines() if "apt" in line]
    assert lines == [
        "apt install -y gcc libc6-dev python3 python3-venv python3-dev libnuma1",
    ]
    assert not (bare_machine / ".venv").exists()


def test_only_what_is_missing_is_named(bare_machine: Path) -> None:
    (bare_machine / "bin" / "python3").symlink_to(sys.executable)
    line = next(line for line in set_up(bare_machine).stderr.splitlines() if "apt" in line)
    assert line.split()[3:] == ["gcc", "libc6-dev"]


def test_a_python_that_is_too_old_is_named(bare_machine: Path) -> None:
    python = bare_machine / "bin" / "python3.9"
    python.write_text(
        '#!/usr/bin/env bash\n[ "$1" = -V ] && echo Python 3.9.2\n[[ "$2" != *3,\\ 13* ]]'
    )
    python.chmod(0o755)
    (bare_machine / "bin" / "cc").symlink_to(shutil.which("true") or "/bin/true")
    outcome = set_up(bare_machine, PYTHON="python3.9")
    assert outcome.returncode == 1
    assert "python3.9 is Python 3.9.2; name a Python from 3.10 to 3.13" in outcome.stderr
