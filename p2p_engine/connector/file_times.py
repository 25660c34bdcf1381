"""Which files have changed since this process began: vLLM may have loaded what they were before."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path


def changed_since_start(paths: Iterable[Path]) -> Path | None:
    """Return one of these files and folders that has been written, replaced or removed since this
    process began, or a link on the way to it; None if there is none. Does not look at other folders
    on the way."""
    began = _process_began()
    for path in paths:
        try:
            for step in _way_to(path):
                if step.lstat().st_ctime > began:
                    return step
        except OSError:
            return path
    return None


def _process_began() -> float:
    """Return when this process began, on the clock of files. vLLM's engine core has one of its own,
    and begins to load weights in it, or in its children."""
    told = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ticks = int(told[19])  # `starttime` of proc(5), the third field being the first of these
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def _way_to(path: Path) -> Iterator[Path]:
    """Yield each link that leads to a file or folder, and where they lead."""
    path = path.absolute()
    for part in (*reversed(path.parents), path):
        if part.is_symlink():
            yield part
            yield from _way_to(part.parent / part.readlink() / path.relative_to(part))
            return
    yield path
