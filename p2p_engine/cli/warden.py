"""Runs one command and ensures that none of its processes outlives the launcher, even by SIGKILL.

It is started by path with the bare interpreter, so it imports only the standard library: `python -I
-S warden.py CONTROL_FD GRACE_SECONDS COMMAND...`. The launcher holds the other end of the control
socket: `t` asks for a clean end, `k` for an immediate one, and the end of the stream means that the
launcher is gone. The warden's first line back is the command's process id.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ORPHAN_GRACE_SECONDS = 3.0  # for descendants after the command itself has ended
_KILL_AGAIN_SECONDS = 0.1  # a process may fork while its tree is read

_libc = ctypes.CDLL(None, use_errno=True)


def _die_with_warden() -> None:
    os.setpgid(0, 0)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _parents() -> dict[int, int]:
    """Return each process's parent; processes that end meanwhile are left out."""
    parent_by_pid = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError):
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                parent_by_pid[int(entry.name)] = int(fields[1])
    return parent_by_pid


def _descendants() -> list[int]:
    """Return all descendants. As the warden is a subreaper, orphans of any session are among
    them."""
    parent_by_pid = _parents()
    found = {os.getpid()}
    before = 0
    while len(found) != before:
        before = len(found)
        found |= {pid for pid, parent in parent_by_pid.items() if parent in found}
    return sorted(found - {os.getpid()})


def _signal_all(number: signal.Signals) -> None:
    for pid in _descendants():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class Warden:
    """The command, all its descendants, and the time at which they are killed."""

    def __init__(self, control: socket.socket, grace_seconds: float, command: list[str]) -> None:
        """Start the command; signals wake the loop through a pipe."""
        self._control: socket.socket | None = control
        self._grace_seconds = grace_seconds
        self._wakeup, wakeup_end = os.pipe()
        os.set_blocking(wakeup_end, False)
        signal.set_wakeup_fd(wakeup_end, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)  # unlike "ignore", not inherited by exec
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._leader = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            preexec_fn=_die_with_warden,  # safe: this process has one thread
        )
        self._leader_status: int | None = None
        self._kill_at: float | None = None
        control.sendall(b"%d\n" % self._leader.pid)

    def run(self) -> int:
        """Wait until all processes have ended; return the command's exit status as a shell does."""
        while self._reap():
            if self._leader_status is not None and self._kill_at is None:
                _signal_all(signal.SIGTERM)
                self._kill_at = time.monotonic() + _ORPHAN_GRACE_SECONDS
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                _signal_all(signal.SIGKILL)
                self._kill_at = time.monotonic() + _KILL_AGAIN_SECONDS
            self._wait_for_event()
        status = self._leader_status or 0
        return status if status >= 0 else 128 - status

    def _reap(self) -> bool:
        """Reap ended children; return False if none is left."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return True
                if pid == self._leader.pid:
                    self._leader_status = os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            return False

    def _wait_for_event(self) -> None:
        timeout = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
        control = -1 if self._control is None else self._control.fileno()
        poll = select.poll()  # unlike select, for descriptors of any number
        for source in filter(lambda number: number >= 0, (self._wakeup, control)):
            poll.register(source, select.POLLIN)
        events = poll.poll(None if timeout is None else math.ceil(timeout * 1000))
        ready = {number for number, _ in events}
        if self._wakeup in ready and signal.SIGTERM in os.read(self._wakeup, 64):
            self._terminate()
        if control in ready:
            self._obey()

    def _obey(self) -> None:
        if self._control is None:
            return
        try:
            words = self._control.recv(64)
        except OSError:
            words = b""
        if not words:
            self._control = None
        if b"k" in words:
            self._kill_at = time.monotonic()
        else:
            self._terminate()

    def _terminate(self) -> None:
        if self._kill_at is None:
            self._kill_at = time.monotonic() + self._grace_seconds
            if self._leader_status is None:  # not reaped yet, so its id is still its own
                os.kill(self._leader.pid, signal.SIGTERM)


def main() -> int:
    """Run the command line described above."""
    os.setpgid(0, 0)  # Ctrl-C in a terminal is for the launcher alone
    control = socket.socket(fileno=int(sys.argv[1]))
    try:
        warden = Warden(control, float(sys.argv[2]), sys.argv[3:])
    except OSError as error:
        control.sendall(b"! %s\n" % str(error).encode())
        return 127
    return warden.run()


if __name__ == "__main__":
    sys.exit(main())
