"""The doctor's findings, one line each, and their output."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text


class Level(enum.Enum):
    """How much a finding matters; the value is its colour."""

    OK = "green"
    NOTE = "yellow"  # works; worth knowing
    CHANGE = "red"  # must change


@dataclass(frozen=True)
class Finding:
    """The state of one subject; `remedy` says what to change or to know."""

    level: Level
    subject: str
    state: str
    remedy: str = ""


def ok(subject: str, state: str) -> Finding:
    """Make a finding that needs no action."""
    return Finding(Level.OK, subject, state)


def note(subject: str, state: str, remedy: str = "") -> Finding:
    """Make a finding that needs no action but is worth knowing."""
    return Finding(Level.NOTE, subject, state, remedy)


def change(subject: str, state: str, remedy: str) -> Finding:
    """Make a finding that must be fixed."""
    return Finding(Level.CHANGE, subject, state, remedy)


def show(findings: Sequence[Finding], console: Console) -> int:
    """Print the findings, and each remedy once; return the exit code: 1 if something must
    change."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for finding in findings:
        word = Text(finding.level.name.lower(), style=finding.level.value)
        table.add_row(word, Text(finding.subject), Text(finding.state))
    console.print(table)
    for level, title in ((Level.NOTE, "Know"), (Level.CHANGE, "Change")):
        found = [finding for finding in findings if finding.level is level and finding.remedy]
        for remedy in dict.fromkeys(f"{finding.subject}: {finding.remedy}" for finding in found):
            console.print(f"[{level.value}]{title}[/] ", end="")
            console.print(remedy, markup=False, highlight=False, soft_wrap=True)
    return int(any(finding.level is Level.CHANGE for finding in findings))
