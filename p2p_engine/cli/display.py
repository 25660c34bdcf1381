"""The display while processes start."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from p2p_engine.cli.members import Member


def busy(console: Console, task: str) -> AbstractContextManager[object]:
    """Show a task in progress: a spinner in a terminal, elsewhere one line at the beginning."""
    if console.is_terminal:
        return console.status(task)
    console.print(f"{task} ...", markup=False, highlight=False)
    return nullcontext()


class StartDisplay:
    """Shows each member's stage: a live table in a terminal, elsewhere a line for each change."""

    def __init__(self, console: Console) -> None:
        """Show on this console, between `__enter__` and `__exit__`."""
        self._console = console
        self._live = Live(console=console, transient=True) if console.is_terminal else None
        self._spinner = Spinner("dots")
        self._shown: dict[str, str] = {}

    def show(self, members: Collection[Member]) -> None:
        """Show the current stages."""
        if self._live is not None:
            self._live.update(self._table(members))
        for member in members:
            if self._shown.get(member.name) != member.stage:
                self._shown[member.name] = member.stage
                if self._live is None or member.is_ready:
                    self._console.print(_line(member), highlight=False)

    def _table(self, members: Collection[Member]) -> Table:
        table = Table.grid(padding=(0, 2))
        for member in members:
            if not member.is_ready:
                seconds = f"{member.elapsed_seconds:3.0f} s"
                table.add_row(self._spinner, member.name, seconds, f"[dim]{member.stage}")
        return table

    def __enter__(self) -> StartDisplay:
        """Begin to show."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the live table; the lines of ready members stay."""
        if self._live is not None:
            self._live.stop()


def _line(member: Member) -> str:
    return f"{member.elapsed_seconds:5.0f} s  {member.name:<12} {member.stage}"
