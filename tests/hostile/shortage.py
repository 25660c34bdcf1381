"""A process without a descriptor left."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from p2p_engine.control.listener import START_FILES
from p2p_engine.control.plane import ControlPlane
from p2p_engine.control.sockets import Route
from p2p_engine.errors import ConfigError
from tests.support import eventually

_WAITER = """
import socket, sys, time
def dial(): return socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=10)
dial(); print("waiting", flush=True); sys.stdin.readline()
dial().sendall(b"no greeting"); print("again", flush=True); sys.stdin.readline()
"""


@contextlib.contextmanager
def no_descriptor_left(but: int = 0) -> Iterator[None]:
    """Take every descriptor that this process may have, but a few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(but):
            os.close(taken.pop())
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def start() -> ControlPlane:
    """Start a control plane."""
    control = ControlPlane("127.0.0.1", range(1), name="test")
    control.start()
    return control


def io_threads() -> list[int]:
    """Open the records of the I/O threads of ZMQ."""
    tasks = Path("/proc/self/task").iterdir()
    return [
        os.open(task / "stat", os.O_RDONLY) for task in tasks if "IO" in (task / "comm").read_text()
    ]


def cpu_seconds(records: list[int]) -> float:
    """Return what the threads behind these records have used."""
    fields = [os.pread(record, 4096, 0).decode().rpartition(")")[2].split() for record in records]
    return sum(int(row[11]) + int(row[12]) for row in fields) / os.sysconf("SC_CLK_TCK")


class Shortage:
    """The commands of a process that runs out of descriptors: each says what it saw."""

    def waiting(self) -> dict[str, Any]:
        """Somebody waits to be accepted for two seconds."""
        control, port = start(), 0
        port = int(control.address.rpartition(":")[2])
        records = io_threads()
        command = [sys.executable, "-c", _WAITER, str(port)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **pipes) as waiter:  # type: ignore[call-overload]
            # The waiter starts more slowly than what follows.
            with no_descriptor_left():
                waiter.stdout.readline()
                before, start_at = cpu_seconds(records), time.monotonic()
                time.sleep(2.0)
                share = (cpu_seconds(records) - before) / (time.monotonic() - start_at)
                turned_away = control.sockets.refused_connections
            waiter.stdin.write("\n")
            waiter.stdin.flush()
            waiter.stdout.readline()  # connected again, and spoke no ZMTP: refused as such
            eventually(lambda: control.sockets.refused_connections > turned_away)
            waiter.stdin.write("\n")
            waiter.stdin.flush()
        control.close(5)
        return {"share": share, "turned_away": turned_away}

    def dialling(self) -> dict[str, Any]:
        """Addresses are dialled with a few descriptors left, and hung up."""
        control = start()
        before = len(os.listdir("/proc/self/fd"))
        for room in range(9):
            addresses = [f"127.0.0.1:{port}" for port in range(901, 907)]
            with no_descriptor_left(but=room):
                for address in addresses:
                    control.send(Route(address), b"hello")
                time.sleep(0.3)
                for address in addresses:
                    control.hang_up(address)
                time.sleep(0.2)
            eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)
        other = start()
        control.send(Route(other.address), b"hello")
        eventually(lambda: other.sockets.frames_received == 1)
        errors = control.errors
        for plane in (control, other):
            plane.close(5)
        return {"errors": errors}

    def starting(self) -> dict[str, Any]:
        """A control plane is started with a few descriptors left, which libzmq would die of."""
        before = len(os.listdir("/proc/self/fd"))
        said = []
        for room in range(START_FILES):
            with no_descriptor_left(but=room):
                try:
                    start().close(5)
                except (ConfigError, OSError) as error:
                    said.append(str(error))
        return {"said": said, "left": len(os.listdir("/proc/self/fd")) - before}
