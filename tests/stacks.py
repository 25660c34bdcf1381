"""The stacks of another process, for a look at what does not move."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DUMP_SECONDS = 60.0


def stacks(pid: int) -> str:
    """Return the stacks of all threads of a process, Python's and native ones."""
    spy = Path(sys.executable).parent / "py-spy"
    try:
        shown = subprocess.run(
            [spy, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=DUMP_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no stacks: {error}"
    return shown.stdout or shown.stderr
