"""`p2p-engine bench`: runs the benchmarks of a checkout; they are not in the installed package."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from p2p_engine.errors import ConfigError

ROOT = Path(__file__).parents[2]


def benchmark_names(root: Path = ROOT) -> list[str]:
    """Return the names of this checkout's benchmarks; empty if the package is installed from a
    wheel."""
    return sorted(path.stem.removeprefix("bench_") for path in root.glob("benchmarks/bench_*.py"))


def run_bench(name: str, arguments: Sequence[str], root: Path = ROOT) -> int:
    """Run one benchmark and return its exit code; blocks until it ends.

    Raises:
        ConfigError: no benchmark has this name.
    """
    names = benchmark_names(root)
    if name not in names:
        known = f"one of {', '.join(names)}" if names else "none here: run it from a checkout"
        raise ConfigError(f"benchmark {name!r}: {known}")
    command = [sys.executable, "-m", f"benchmarks.bench_{name}", *arguments]
    return subprocess.run(command, cwd=root, check=False).returncode
