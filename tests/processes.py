"""Child processes of tests and benchmarks: an object in a process of its own.

Its public methods are the commands, which run in the order in which they were told. Programs that
people start, such as `p2p-engine launch`, are started as people start them, and not from here.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

START_SECONDS = 120.0  # until a first answer: all that it needs is imported then
Self = TypeVar("Self", bound="Child")


class ChildError(AssertionError):
    """The child raised, ended, or did not answer in time."""


def start_fork_server(*modules: str) -> None:
    """Start what makes the children: it imports these modules once, and it stays.

    Call it before leaks are looked for. The first call of a process says what is imported.
    """
    multiprocessing.set_forkserver_preload(list(modules or ["tests.rigs.engines"]))
    multiprocessing.resource_tracker.ensure_running()
    multiprocessing.forkserver.ensure_running()


class Child:
    """The parent's side of `factory(*arguments)` in a new process.

    The fork server makes the process, or, where `through` is given, a command that ends in a new
    interpreter: with another `environment`, or by way of nsenter(1) or the like; () is enough.
    """

    PATIENCE = 30.0  # seconds for an answer, unless told otherwise
    CLOSE_SECONDS = 0.0  # that the object has to close by itself before the process is killed

    def __init__(
        self,
        factory: Callable[..., Any],
        *arguments: Any,
        through: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
        method: str = "forkserver",
    ) -> None:
        """Start the process, and do not wait."""
        context: Any = multiprocessing.get_context(method)
        self._pipe, theirs = context.Pipe()
        self._is_closed = self._has_answered = False
        self._told: deque[str] = deque()  # commands whose answers have not come
        if through is None and environment is None:
            process = context.Process(target=_serve, args=(theirs, factory, arguments), daemon=True)
            process.start()
            self.pid: int = process.pid
            self._reap: Callable[[float], int | None] = lambda timeout: _join(process, timeout)
            self._let_go: Callable[[], None] = process.close
        else:
            number = str(theirs.fileno())
            command = [*(through or ()), sys.executable, "-m", __name__, number]
            # What libraries print is nobody's answer, and nobody's result.
            started = subprocess.Popen(
                command, env=environment, pass_fds=[theirs.fileno()], stdout=2,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
            self.pid, self._let_go = started.pid, lambda: None
            self._reap = lambda timeout: _wait(started, timeout)
            self._pipe.send((factory, arguments))
        theirs.close()

    def wait_until_made(self) -> None:
        """Wait for the object; raises like `answer`."""
        self.ask("")

    def tell(self, command: str, *arguments: Any) -> None:
        """Start a command; its answer comes with `answer`."""
        self._told.append(command)
        with contextlib.suppress(OSError):  # `answer` says that it has ended
            self._pipe.send((command, arguments))

    def answer(self, timeout: float | None = None) -> Any:
        """Wait for the answer to the oldest command.

        Raises:
            ChildError: none came, or the command raised; with its traceback.
        """
        if timeout is None:
            timeout = self.PATIENCE if self._has_answered else max(self.PATIENCE, START_SECONDS)
        try:
            if not self._pipe.poll(timeout):
                what = self._told[0] if self._told else "its making"
                raise ChildError(f"process {self.pid} does not answer in {timeout:g} s: {what}")
            value, failure = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise ChildError(f"process {self.pid} has ended") from error
        self._has_answered = True
        if self._told:
            self._told.popleft()
        if failure:
            raise ChildError(f"process {self.pid}: {failure}")
        return value

    def has_answered(self) -> bool:
        """Whether there is an answer, or an end, to be heard; never blocks."""
        return bool(self._pipe.poll(0))

    def ask(self, command: str, *arguments: Any) -> Any:
        """Run a command and return its answer; raises like `answer`."""
        self.tell(command, *arguments)
        return self.answer()

    def has_ended(self) -> bool:
        """Whether the process is there no more; never blocks."""
        return self._is_closed or self._reap(0) is not None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def kill(self) -> float:
        """Send SIGKILL and reap; returns the monotonic time at which it was sent. Idempotent."""
        moment = time.monotonic()
        if not self.has_ended():
            # The fork server collects its children: one may be gone before we hear of it.
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGKILL)
            self._reap(30)
        return moment

    def stop(self) -> None:
        """Send SIGSTOP and wait until the process has stopped."""
        self.signal(signal.SIGSTOP)
        deadline = time.monotonic() + self.PATIENCE
        while state_of(self.pid)[0] != "T":
            assert time.monotonic() < deadline, f"process {self.pid} does not stop"
            time.sleep(0.002)

    def wake(self) -> None:
        """Send SIGCONT."""
        self.signal(signal.SIGCONT)

    def end(self, timeout: float = 30.0) -> None:
        """Let the object close, and the process end by itself.

        Raises:
            ChildError: it did not, or not well; it is killed.
        """
        self._pipe.close()
        status = None if self._is_closed else self._reap(timeout)
        self.close()
        if status != 0:
            raise ChildError(f"process {self.pid} did not end well: {status}")

    def close(self) -> None:
        """End the process, whatever it is doing; idempotent."""
        if not self._is_closed:
            self._pipe.close()
            if self.CLOSE_SECONDS:
                self._reap(self.CLOSE_SECONDS)
            self.kill()
            self._is_closed = True
            self._let_go()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def together(
    children: Sequence[Child], command: str, arguments: Sequence[Sequence[Any]]
) -> list[Any]:
    """Run a command in several children at once, each with arguments of its own."""
    for child, each in zip(children, arguments, strict=True):
        child.tell(command, *each)
    return [child.answer() for child in children]


def state_of(pid: int) -> list[str]:
    """Return what /proc/PID/stat says behind the name: the state, the parent's process id, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def is_alive(pid: int) -> bool:
    """Whether the process is there and not merely waiting to be collected."""
    try:
        return state_of(pid)[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def parent_of(pid: int) -> int:
    """The process id of its parent."""
    return int(state_of(pid)[1])


def _join(process: Any, timeout: float) -> int | None:
    process.join(timeout)
    status: int | None = process.exitcode
    return status


def _wait(process: subprocess.Popen[bytes], timeout: float) -> int | None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(timeout)
    return None


def _serve(pipe: Connection, factory: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """Make the object and run its commands until the parent closes the pipe."""
    try:
        served = factory(*arguments)
    except Exception:  # noqa: BLE001  # the parent's to judge
        pipe.send((None, traceback.format_exc()))
        return
    while True:
        try:
            command, given = pipe.recv()
        except (EOFError, OSError):  # the parent is gone, or has closed
            break
        try:
            said = getattr(served, command)(*given) if command else None, ""
        except Exception:  # noqa: BLE001  # the parent's to judge
            said = None, traceback.format_exc()
        pipe.send(said)
    if hasattr(served, "close"):
        served.close()


if __name__ == "__main__":
    inherited = Connection(int(sys.argv[1]))
    _serve(inherited, *inherited.recv())
