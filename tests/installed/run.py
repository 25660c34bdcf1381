"""Install the wheels of dist/ on every Python of this machine, and use them there.

`python -m tests.installed.run` makes two environments for each: an instance's, without Quart, in
which torch stands for vLLM, and a proxy's, without torch. Neither finds a compiler.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from p2p_engine.cli.commands import proxy_command
from p2p_engine.cli.fleet import Fleet
from tests.compat.environments import ROOT, install_torch

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
NAME = "p2p-kv-engine"
_STEP_SECONDS = 900.0


class Environment:
    """A new virtual environment in which only its own programs are found."""

    def __init__(self, interpreter: str, folder: Path) -> None:
        """Make it."""
        self.bin = folder / "bin"
        self.python = self.bin / "python"
        subprocess.run([interpreter, "-m", "venv", "--without-pip", str(folder)], check=True)

    def install(self, requirement: str) -> None:
        """Install our wheel and what it needs, from wheels only."""
        arguments = ["pip", "install", "--quiet", "--no-build", "--find-links", str(ROOT / "dist")]
        only_here = ["--reinstall-package", NAME, requirement]
        uv = [sys.executable, "-m", "uv", *arguments, "--python", str(self.python), *only_here]
        subprocess.run(uv, check=True, timeout=_STEP_SECONDS)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment to its end."""
        return subprocess.run(
            [str(self.bin / command[0]), *command[1:]], env=self.variables, cwd=self.bin,
            capture_output=True, text=True, check=False, timeout=_STEP_SECONDS,
        )  # fmt: skip

    @property
    def variables(self) -> dict[str, str]:
        """The environment's variables: no other folder has programs."""
        return {"PATH": str(self.bin)}


def try_instance(environment: Environment) -> str:
    """Let another process move bytes, a tensor if there is torch; the proxy says what it lacks."""
    environment.install(NAME)
    outcomes = [_use(environment, "native.py")]
    try:
        install_torch(environment.python)
    except subprocess.CalledProcessError:
        outcomes.append("no torch for CPUs is to be had here")
    else:
        outcomes.append(_use(environment, "exchange.py"))
    refused = environment.run("p2p-engine", "proxy")
    assert refused.returncode == 1
    assert "p2p-kv-engine[proxy]" in refused.stderr, refused.stderr
    return "; ".join(outcomes)


def _use(environment: Environment, program: str) -> str:
    ended = environment.run("python", "-I", str(Path(__file__).with_name(program)))
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


class InstalledProxy(Fleet):
    """Our launcher with the proxy of another environment."""

    def __init__(self, python: Path) -> None:
        """Plan it; nothing is started yet."""
        self._python = python
        super().__init__("no model", planned_instances=1, env={"PYTHONSAFEPATH": "1"})

    def _proxy_command(
        self, port: int, registration_port: int, arguments: Sequence[str]
    ) -> list[str]:
        _, *command = proxy_command(self._host, port, registration_port, arguments)
        return [str(self._python), *command]


def try_proxy(environment: Environment) -> str:
    """Start the proxy where torch is not."""
    environment.install(f"{NAME}[proxy]")
    assert environment.run("python", "-c", "import torch").returncode == 1
    with InstalledProxy(environment.python) as fleet:
        fleet.wait_ready(fleet.start_proxy())
    return "the proxy is ready without torch"


def find(version: str) -> str | None:
    """Return this Python, if it is here and starts."""
    path = shutil.which(f"python{version}")
    works = path is not None and subprocess.run([path, "-V"], capture_output=True).returncode == 0
    return path if works else None


def main() -> None:
    """Try every Python, and say which were not there."""
    for version in PYTHONS:
        interpreter = find(version)
        if interpreter is None:
            print(f"Python {version}: not on this machine")  # noqa: T201
            continue
        for attempt in (try_proxy, try_instance):
            with tempfile.TemporaryDirectory() as folder:
                outcome = attempt(Environment(interpreter, Path(folder)))
            print(f"Python {version}: {outcome}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
