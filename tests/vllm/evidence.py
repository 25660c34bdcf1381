"""What an instance's log says of a failure: the lines that a reader would look for first."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from pathlib import Path

MAX_LINES = 40  # of one log, the last ones
DECISIVE = re.compile(
    r"\b(WARNING|ERROR|CRITICAL)\b"
    r"|Traceback|^\S*\s*\w+(Error|Exception)\b"
    r"|link closed|receive ended|load failed|send failed|nobody was listening"
)
# vLLM says these in every log of a CPU instance, whatever happens.
USUAL = re.compile(r"Overriding|not supported on CPU|deprecated|HF_TOKEN|fall(ing )?back", re.I)


def decisive_lines(lines: Iterable[str]) -> list[str]:
    """Return the last MAX_LINES lines that tell of a failure, in order."""
    found = (line.rstrip() for line in lines if DECISIVE.search(line) and not USUAL.search(line))
    return list(deque(found, MAX_LINES))


def evidence_in(folder: Path) -> dict[str, str]:
    """Return the decisive lines of every log below a folder, by the log's name."""
    found = {}
    for path in sorted(folder.rglob("*.log")):
        with path.open(errors="replace") as log:
            lines = decisive_lines(log)
        if lines:
            found[path.name] = "\n".join(lines)
    return found
