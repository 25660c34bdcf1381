"""A process with all that it has started: which they are, and what they have used."""

from __future__ import annotations

import contextlib
from pathlib import Path

PAGE_BYTES = 4096


def descendants(pid: int) -> list[int]:
    """Return a process and all that it and its threads have started, parents before children."""
    found = [pid]
    for each in found:
        with contextlib.suppress(OSError):  # it has ended
            for task in Path(f"/proc/{each}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def usage(pid: int) -> tuple[int, int, int]:
    """Return the resident bytes, the threads and the descriptors of a process.

    Raises:
        OSError: it has ended.
    """
    folder = Path(f"/proc/{pid}")
    resident = int((folder / "statm").read_text().split()[1]) * PAGE_BYTES
    return resident, len(list((folder / "task").iterdir())), len(list((folder / "fd").iterdir()))


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process and its descendants have used, of those alive."""
    return sum(_cpu_nanoseconds(each) for each in descendants(pid)) / 1e9


def _cpu_nanoseconds(pid: int) -> int:
    total = 0
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has ended
                total += int((task / "schedstat").read_text().split()[0])
    return total
