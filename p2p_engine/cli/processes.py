"""One child process with a name, a log file and a guaranteed end."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from p2p_engine.cli import warden

_START_SECONDS = 30.0  # for the warden to report that the command runs
_KILL_SECONDS = 5.0  # for the warden to reap the processes that it killed
_TAIL_BYTES = 1 << 16


class ChildProcess:
    """A command under a warden: the command and all descendants end with us, however we end.

    It has its own process group, so that Ctrl-C in a terminal reaches the launcher only. It stays
    in our session: Linux divides cores between sessions first (autogroup, sched(7)), and a mostly
    sleeping member in a session of its own did not run for ten seconds beside busy ones.

    Not thread-safe.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        grace_seconds: float = 15.0,
    ) -> None:
        """Start the command, with stdout and stderr in a new `log_path`; block until it runs.

        Raises:
            OSError: it could not be started.
        """
        self.name = name
        self.command = tuple(command)
        self.log_path = log_path
        self._grace_seconds = grace_seconds
        self._control, theirs = socket.socketpair()
        wrapped = [sys.executable, "-I", "-S", warden.__file__]
        wrapped += [str(theirs.fileno()), str(grace_seconds), *command]
        with theirs, log_path.open("wb") as log:
            self._warden = subprocess.Popen(
                wrapped,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=None if env is None else dict(env),
                pass_fds=(theirs.fileno(),),
            )
        self.pid = self._read_pid()

    def _read_pid(self) -> int:
        self._control.settimeout(_START_SECONDS)
        try:
            first_line = self._control.makefile("r").readline()
        except TimeoutError:
            first_line = f"! no sign of life in {_START_SECONDS:g} s"
        if not first_line.strip().isdecimal():
            self.kill()
            self.wait(_KILL_SECONDS)
            raise OSError(f"{self.name} did not start: {first_line.strip('! ') or self.log_tail()}")
        return int(first_line)

    @property
    def running(self) -> bool:
        """Tell whether any of its processes is still running."""
        return self._warden.poll() is None

    @property
    def end(self) -> str:
        """Its end in words; empty while it runs."""
        status = self._warden.poll()
        if status is None:
            return ""
        if status > 128:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(status - 128).name}"
        return f"ended with exit code {status}"

    def terminate(self) -> None:
        """Ask it to end; after the grace period it is killed. Does not block."""
        self._tell(b"t")

    def kill(self) -> None:
        """Kill it and all its descendants with SIGKILL. Does not block."""
        self._tell(b"k")

    def _tell(self, word: bytes) -> None:
        with contextlib.suppress(OSError):  # the warden is gone, and so are all its processes
            self._control.sendall(word)

    def wait(self, timeout: float) -> bool:
        """Wait until all its processes have ended; return False after `timeout` seconds."""
        try:
            self._warden.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        self._control.close()
        return True

    def stop(self) -> None:
        """End it cleanly, or else by force; blocks for at most the grace period plus 10 seconds."""
        self.terminate()
        if not self.wait(self._grace_seconds + _KILL_SECONDS):
            self._warden.kill()  # its death kills the command, and nothing else can be done
            self.wait(_KILL_SECONDS)

    def log_tail(self, num_lines: int = 30) -> str:
        """Return the last lines of its log."""
        with self.log_path.open("rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-num_lines:])


def stop_all(children: Sequence[ChildProcess]) -> None:
    """End all at once, so that it takes no longer than the slowest child."""
    for child in children:
        child.terminate()
    for child in children:
        child.stop()
