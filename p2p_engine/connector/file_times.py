"""Which files have changed since vLLM began to read them: it may have what they were before."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

# What vLLM calls its processes behind its front end, whatever an operator has them begin with.
_BEHIND_FRONT_END = (b"::EngineCore", b"::Worker")


def changed_since_start(
    paths: Iterable[Path], *, is_read_by_front_end: bool = False
) -> Path | None:
    """Return one of these files and folders that has been written, replaced or removed since this
    process began, or a link on the way to it; None if there is none. Of what vLLM's front end has
    read, since that one's process began: the engine core and its workers begin later.

    A folder counts if it is another one; entries come and go. Does not look at other folders on the
    way, nor at downloads from the hub: vLLM fetches them now, and each revision has its folder.
    """
    began = _process_began(_front_end() if is_read_by_front_end else os.getpid())
    for path in paths:
        if any(each.match("models--*/snapshots/*") for each in (path, *path.parents)):
            continue
        try:
            for step in _way_to(path):
                if _changed(step) > began:
                    return step
        except OSError:
            return path
    return None


def _changed(path: Path) -> float:
    """Return when a file was changed or put in its place; of a folder, when it was put in its
    place, if no entry has come or gone since."""
    told = path.lstat()
    is_by_entry = stat.S_ISDIR(told.st_mode) and told.st_ctime_ns == told.st_mtime_ns
    return 0.0 if is_by_entry else told.st_ctime


def _front_end() -> int:
    """Return the process in which vLLM has read its configuration: the nearest one above this one
    that is neither a worker nor an engine core; this one, if a caller runs the core itself."""
    pid = os.getpid()
    while any(name in Path(f"/proc/{pid}/cmdline").read_bytes()[:80] for name in _BEHIND_FRONT_END):
        pid = int(_stat_of(pid)[1])
    return pid


def _process_began(pid: int) -> float:
    """Return when a process began, on the clock of files."""
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(_stat_of(pid)[19]) / os.sysconf(
        "SC_CLK_TCK"
    )
    return time.time() - age


def _stat_of(pid: int) -> list[str]:
    """Return what proc(5) says of a process in `stat`, from the third field on: 1 is its parent's
    id, and 19 when it began, in ticks since boot."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _way_to(path: Path) -> Iterator[Path]:
    """Yield each link that leads to a file or folder, and where they lead."""
    path = path.absolute()
    for part in (*reversed(path.parents), path):
        if part.is_symlink():
            yield part
            yield from _way_to(part.parent / part.readlink() / path.relative_to(part))
            return
    yield path
