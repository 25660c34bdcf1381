"""The record of what was tried: a line of JSON for each trial of a change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.options.table import CONTROL, Change, changes
from tests.options.trial import GOOD, SIDES, WRONG

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "results" / "options.jsonl"
Line = dict[str, Any]


def is_good(line: Line) -> bool:
    """Whether both sides came out as they may. The control must be seen to be wrong."""
    if line["change"] == control().name:
        return all(line[side]["outcome"] == WRONG for side in SIDES)
    return all(line[side]["outcome"] in GOOD for side in SIDES)


def control() -> Change:
    """Return the change that everybody lets pass, though it is wrong."""
    return next(change for change in changes() if change.value == CONTROL)


def read(record: Path) -> dict[str, Line]:
    """Return the last line of each change."""
    lines = record.read_text().splitlines() if record.exists() else []
    return {line["change"]: line for line in map(json.loads, lines)}
