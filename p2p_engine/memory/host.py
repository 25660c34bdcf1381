"""The memory that this process may use: the machine's, or what its control groups leave of it.

The formats are in the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst,
and in cgroups(7). A group's limit applies to all groups below it, so every group up to the mount
counts. Also how much of the kernel's own memory a socket may have.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_SELF = Path("/proc/self")
SOCKET_BUFFER_BYTES = 4 << 20  # of a data connection, each way
SOCKET_LIMITS = {"net.core.rmem_max": socket.SO_RCVBUF, "net.core.wmem_max": socket.SO_SNDBUF}


@dataclass(frozen=True)
class _Files:
    """File names of one version of control groups."""

    limit: str
    used: str
    cache: str  # the line of memory.stat with file pages that are reclaimed first


_FILES = {
    "cgroup2": _Files("memory.max", "memory.current", "inactive_file"),
    "cgroup": _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def memory_bytes(process: Path = _SELF) -> int:
    """Return the bytes that all processes in this process's control groups may use together."""
    limits = (limit for limit, _ in _limits(process))
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *limits])


def available_memory_bytes(process: Path = _SELF) -> int:
    """Return the bytes that new processes beside this one could use now."""
    left = (max(0, limit - used) for limit, used in _limits(process))
    return min([_available_on_host(), *left])


def _available_on_host() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _limits(process: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, used bytes) of each control group that has a limit."""
    try:
        folders = list(_folders(process))
    except (OSError, ValueError):
        return
    for folder, files in folders:
        try:
            limit = int((folder / files.limit).read_text())
            yield limit, int((folder / files.used).read_text()) - _cache(folder, files)
        except (OSError, ValueError):  # no such file, or "max"
            continue


def _cache(folder: Path, files: _Files) -> int:
    for line in (folder / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == files.cache:
            return int(value)
    return 0


def _folders(process: Path) -> Iterator[tuple[Path, _Files]]:
    """Yield the folder of each control group of this process, from its own upwards."""
    groups = _groups(process)
    for line in (process / "mountinfo").read_text().splitlines():
        fields, _, filesystem = line.partition(" - ")
        kind, _, options = filesystem.split(" ", 2)
        if kind not in groups or (kind == "cgroup" and "memory" not in _options(options)):
            continue
        root, mount = fields.split()[3:5]
        below = _relative(groups[kind], root)
        for folder in (below, *below.parents):
            yield Path(mount) / folder, _FILES[kind]


def _groups(process: Path) -> dict[str, str]:
    """Return the path of the process's group in the hierarchies that limit memory."""
    groups = {}
    for line in (process / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            groups["cgroup2"] = path
        elif "memory" in controllers.split(","):
            groups["cgroup"] = path
    return groups


def _options(text: str) -> list[str]:
    return text.rpartition(" ")[2].split(",")


def _relative(path: str, root: str) -> PurePosixPath:
    """Return the path of a group below its mount; a container sees its own group as the root."""
    try:
        return PurePosixPath(path).relative_to(root)
    except ValueError:
        return PurePosixPath()


def socket_buffer_bytes(option: int) -> int:
    """Return the size that a data connection's buffer is set to, or 0 to set none.

    A size that is set ends the kernel's own tuning of the socket for good. So none is set where
    the kernel's limit (before Linux 6.17: 208 KiB) would cut the size: tuned buffers grow beyond
    that limit.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        doubled = probe.getsockopt(socket.SOL_SOCKET, option)  # Linux adds as much for itself
    return SOCKET_BUFFER_BYTES if doubled >= 2 * SOCKET_BUFFER_BYTES else 0
