"""A child process and everything below it end with us, however we end."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from p2p_engine.cli.processes import ChildProcess, stop_all
from tests.doubles.fleet import MEMBER_DOUBLE, grandchild_of
from tests.processes import is_alive, parent_of
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("no_leaks")


def start(tmp_path: Path, port: int, *behaviours: str, grace_seconds: float = 10.0) -> ChildProcess:
    command = [*MEMBER_DOUBLE, "--port", str(port), "--behave", *behaviours]
    log_path = tmp_path / f"{port}.log"
    return ChildProcess("double", command, log_path=log_path, grace_seconds=grace_seconds)


def wait_for_log(child: ChildProcess, words: str) -> None:
    eventually(lambda: words in child.log_path.read_text(), what=f"{words!r} in the log")


def test_a_child_ends_when_asked(tmp_path: Path, free_port: int) -> None:
    child = start(tmp_path, free_port)
    wait_for_log(child, "Application startup complete")
    assert child.running
    assert child.end == ""
    child.stop()
    assert not child.running
    assert not is_alive(child.pid)
    assert child.end == "was killed by SIGTERM"


def test_a_child_shares_our_session_but_gets_no_interrupt_of_ours(
    tmp_path: Path, free_port: int
) -> None:
    """A terminal interrupts a process group; Linux shares the cores between sessions."""
    child = start(tmp_path, free_port)
    for pid in (child.pid, parent_of(child.pid)):
        assert os.getsid(pid) == os.getsid(0)
        assert os.getpgid(pid) == pid
    child.stop()


def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(
    tmp_path: Path, free_port: int
) -> None:
    child = start(tmp_path, free_port, "ignore-sigterm", grace_seconds=0.2)
    wait_for_log(child, "Application startup complete")
    child.stop()
    assert child.end == "was killed by SIGKILL"
    assert not is_alive(child.pid)


def test_what_a_child_leaves_behind_ends_too(tmp_path: Path, free_port: int) -> None:
    child = start(tmp_path, free_port, "grandchild", "die-at-start", grace_seconds=0.2)
    assert child.wait(15)
    grandchild = grandchild_of(child.log_path)
    assert grandchild is not None
    assert not is_alive(grandchild)
    assert child.end == "ended with exit code 3"
    assert "no such model" in child.log_tail()


def test_kill_takes_the_whole_tree_at_once(tmp_path: Path, free_port: int) -> None:
    child = start(tmp_path, free_port, "grandchild", grace_seconds=60)
    wait_for_log(child, "Application startup complete")
    grandchild = grandchild_of(child.log_path)
    child.kill()
    assert child.wait(10)
    assert grandchild is not None
    assert not is_alive(grandchild)
    assert not is_alive(child.pid)
    assert child.end == "was killed by SIGKILL"


def test_stopping_many_takes_one_grace_period(tmp_path: Path, free_port: int) -> None:
    children = [
        start(tmp_path, free_port + number, "ignore-sigterm", "never-serve", grace_seconds=0.5)
        for number in range(3)
    ]
    for child in children:
        wait_for_log(child, "Loading weights")
    stop_all(children)
    assert [child.end for child in children] == ["was killed by SIGKILL"] * 3


def test_stop_is_idempotent(tmp_path: Path, free_port: int) -> None:
    child = start(tmp_path, free_port)
    child.stop()
    child.stop()
    child.kill()
    assert child.wait(0)


def test_a_command_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"nothing did not start.*no-such-program"):
        ChildProcess("nothing", ["/no-such-program"], log_path=tmp_path / "log")


def test_a_child_does_not_outlive_its_warden(tmp_path: Path, free_port: int) -> None:
    child = start(tmp_path, free_port, "ignore-sigterm")
    os.kill(parent_of(child.pid), signal.SIGKILL)
    eventually(lambda: not is_alive(child.pid), what="the child ends")
    assert child.wait(10)


LAUNCHER = """
import sys, time
from pathlib import Path
from p2p_engine.cli.processes import ChildProcess
child = ChildProcess("double", sys.argv[2:], log_path=Path(sys.argv[1]), grace_seconds=0.2)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_launcher_that_is_killed_leaves_nothing(
    tmp_path: Path, free_port: int, number: signal.Signals
) -> None:
    log_path = tmp_path / "log"
    command = [*MEMBER_DOUBLE, "--port", str(free_port), "--behave", "grandchild", "ignore-sigterm"]
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(log_path), *command], stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        grandchild = eventually(lambda: grandchild_of(log_path) or 0)
        warden = parent_of(pid)
        os.kill(launcher.pid, number)
    eventually(lambda: not any(map(is_alive, (pid, grandchild, warden))), what="all end")
    assert launcher.returncode == -number


def test_a_launcher_with_many_open_files_starts_children(tmp_path: Path, free_port: int) -> None:
    """The warden's end of the socket gets a number that `select` cannot take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        child = start(tmp_path, free_port)
        child.stop()
        assert child.end == "was killed by SIGTERM"
    finally:
        for descriptor in many:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
