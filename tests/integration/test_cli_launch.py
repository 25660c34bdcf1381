"""`p2p-engine launch` with our real proxy and doubles of vLLM, from start to clean end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from p2p_engine.cli.fleet import FleetInterrupted
from p2p_engine.cli.members import fetch_text
from p2p_engine.cli.ports import PortPlan
from p2p_engine.cli.simulate import SimulatedFleet
from tests.doubles.fleet import MEMBER_DOUBLE
from tests.processes import is_alive, parent_of
from tests.support import eventually

SECONDS = 80.0  # a double is up in two, but the machine may be busy with others' tests
pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).parents[2]
LAUNCH = [sys.executable, "-c", "from p2p_engine.cli import main; main()", "launch"]


class Launch:
    """A running launch command, and everything that it has said."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.log_dir = folder / "logs"
        self.output = folder / "output"
        with PortPlan("127.0.0.1") as ports:
            self.port, registration_port = ports.take(), ports.take()
        command = [*LAUNCH, "--model", "tiny", "--port", str(self.port)]
        command += ["--registration-port", str(registration_port), "--log-dir", str(self.log_dir)]
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [*command, *arguments], stdout=output, stderr=output, env=_environment(folder)
            )

    @property
    def status_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/status"

    def wait_for(self, words: str) -> None:
        eventually(lambda: words in self.said(), timeout=SECONDS, what=f"{words!r} is said")

    def said(self) -> str:
        return self.output.read_text()

    def processes(self) -> list[int]:
        """All processes that name our log folder or ports, or that a process of ours started."""
        children: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # others' processes end while we look
                if entry.name.isdecimal() and is_alive(int(entry.name)):
                    children.setdefault(parent_of(int(entry.name)), []).append(int(entry.name))
        found = [self.process.pid]
        for pid in found:
            found += children.get(pid, [])
        return found


def _environment(folder: Path) -> dict[str, str]:
    """Put our double where `python -m vllm.entrypoints.openai.api_server` finds it first."""
    package = folder / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for path in (package, *package.parents[:2]):
        (path / "__init__.py").touch()
    (package / "api_server.py").write_text(
        f"import runpy\nrunpy.run_path({MEMBER_DOUBLE[-1]!r}, run_name='__main__')\n"
    )
    return {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "COLUMNS": "200"}


@pytest.fixture
def begin(tmp_path: Path, no_leaks: None) -> Iterator[Callable[..., Launch]]:
    """Run launch commands, and leave none behind when a test fails."""
    launches: list[Launch] = []

    def begin(*arguments: str) -> Launch:
        folder = tmp_path / str(len(launches))
        folder.mkdir()
        launches.append(Launch(folder, *arguments))
        return launches[-1]

    yield begin
    for launch in launches:
        launch.process.kill()
        launch.process.wait(SECONDS)


@pytest.fixture
def start(begin: Callable[..., Launch]) -> Callable[..., Launch]:
    """Run launch commands that come to serve."""

    def start(*arguments: str) -> Launch:
        launch = begin(*arguments)
        launch.wait_for("Ctrl-C stops all")
        return launch

    return start


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_launch_serves_and_stops_cleanly(
    start: Callable[..., Launch], number: signal.Signals
) -> None:
    launch = start("--prefill", "2", "--decode", "1")
    status = json.loads(fetch_text(launch.status_url) or "")
    roles = sorted(role for instance in status["instances"] for role in instance["roles"])
    processes = launch.processes()
    assert roles == ["decode", "prefill", "prefill"]
    assert len(processes) >= 1 + 2 * 4  # the launcher; a warden and a member, four times
    launch.process.send_signal(number)
    assert launch.process.wait(SECONDS) == 0
    assert not any(is_alive(pid) for pid in processes)
    assert f"ask:  curl http://127.0.0.1:{launch.port}/v1/completions" in launch.said()
    assert launch.said().endswith("stopped\n")


def test_launch_killed_leaves_nothing(start: Callable[..., Launch]) -> None:
    launch = start("--proxy-args=--prefill-policy random --both 127.0.0.1:9")
    assert '"http_address":"127.0.0.1:9"' in (fetch_text(launch.status_url) or "")
    processes = launch.processes()
    launch.process.kill()
    assert launch.process.wait(SECONDS) == -signal.SIGKILL
    eventually(lambda: not any(map(is_alive, processes)), timeout=SECONDS, what="all processes end")


def test_launch_ends_when_an_instance_dies_and_says_why(begin: Callable[..., Launch]) -> None:
    launch = begin("--decode-args=--behave die-at-start", "--", "--max-model-len", "64")
    processes = launch.processes()
    assert launch.process.wait(SECONDS) == 1
    said = launch.said()
    assert "decode-1 ended with exit code 3" in said
    assert "ValueError: no such model" in said
    eventually(lambda: not any(map(is_alive, processes)))


def test_a_second_signal_kills_what_is_left(start: Callable[..., Launch]) -> None:
    launch = start("--prefill-args=--behave ignore-sigterm")
    launch.process.send_signal(signal.SIGTERM)
    launch.wait_for("stopping all")
    launch.process.send_signal(signal.SIGTERM)
    assert launch.process.wait(18) == 0  # the grace period alone is longer


def test_who_joins_at_the_http_port_of_a_proxy_is_not_ready_and_hears_why(tmp_path: Path) -> None:
    with (
        SimulatedFleet(log_dir=tmp_path / "a") as first,
        SimulatedFleet(log_dir=tmp_path / "b") as second,
    ):
        first.wait_ready(first.start_proxy(), timeout=SECONDS)
        assert first.proxy is not None
        second.registration_address = first.proxy.http_address
        member = second.start("decode")

        def look(_: object) -> None:
            second.interrupted = member.stage.startswith("not registered: ")

        with pytest.raises(FleetInterrupted):
            second.wait_ready(member, timeout=SECONDS, on_look=look)
        assert f"proxy {first.proxy.http_address}: " in member.stage
        right = f"name the proxy's registration port (30001, here {first.registration_address})"
        assert f"that port answers HTTP: {right}" in member.stage
        assert not member.is_ready


def test_one_more_instance_joins_a_running_proxy(start: Callable[..., Launch]) -> None:
    first = start("--decode", "0")
    hint = next(line for line in first.said().splitlines() if "--join" in line)
    address = hint.partition("--join ")[2].split()[0]
    second = start("--prefill", "0", "--join", address)
    eventually(
        lambda: (fetch_text(first.status_url) or "").count('"state":"ready"') == 2, timeout=SECONDS
    )
    for launch in (second, first):
        launch.process.terminate()
        assert launch.process.wait(SECONDS) == 0
