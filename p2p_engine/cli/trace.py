"""`p2p-engine trace`: the way of one transfer, stage by stage, from the logs of both instances.

The stages are logged at debug level by `p2p_engine.timeline`, with the time of the host's clock.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from p2p_engine.errors import ConfigError

_LINE = re.compile(
    r"\bat=(?P<at>\d+\.\d+) key=(?P<key>.+?/\d+/\d+/.*?)"
    r" chunk=(?P<chunk>\d+) stage=(?P<stage>[\w ]+)"
)


@dataclass(frozen=True)
class StageEvent:
    """A transfer, or a chunk of it (0: none), has reached a stage; `log` is the file's name."""

    at: float
    transfer_id: str
    log: str
    stage: str
    chunk: int


@dataclass(frozen=True)
class StageSpan:
    """A stage, from the first chunk that reached it to the last; milliseconds since the first
    event of all."""

    log: str
    stage: str
    first: float
    last: float
    num: int


def read_events(paths: Iterable[Path]) -> list[StageEvent]:
    """Return all stages in these logs, in the order of time.

    Raises:
        ConfigError: a log cannot be read, or none has a stage.
    """
    events = []
    for path in paths:
        try:
            with path.open(errors="replace") as log:
                events += [_event(path.stem, found) for found in map(_LINE.search, log) if found]
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
    if not events:
        raise ConfigError("no log has stages: start the instances with VLLM_LOGGING_LEVEL=DEBUG")
    return sorted(events, key=lambda event: event.at)


def _event(log: str, found: re.Match[str]) -> StageEvent:
    transfer_id = found["key"].rsplit("/", 3)[0]
    return StageEvent(
        float(found["at"]), transfer_id, log, found["stage"].strip(), int(found["chunk"])
    )


def spans_of(events: Sequence[StageEvent], transfer_id: str = "") -> list[StageSpan]:
    """Return the stages of a transfer, or of the one that began last.

    Raises:
        ConfigError: the logs do not have it.
    """
    chosen = transfer_id or list(dict.fromkeys(event.transfer_id for event in events))[-1]
    mine = [event for event in events if event.transfer_id == chosen]
    if not mine:
        raise ConfigError(f"no log has a transfer {transfer_id!r}")
    times: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for event in mine:
        times[event.log, event.stage].append((event.at - mine[0].at) * 1e3)
    return [StageSpan(*name, found[0], found[-1], len(found)) for name, found in times.items()]


def run_trace(paths: Sequence[Path], transfer_id: str, console: Console) -> None:
    """Print the stages of one transfer.

    Raises:
        ConfigError: the logs do not have it.
    """
    table = Table("ms", "since", "until", "chunks", "log", "stage", box=None)
    before = 0.0
    for span in spans_of(read_events(paths), transfer_id):
        is_one = span.num == 1
        until, num = ("", "") if is_one else (f"{span.last:.1f}", str(span.num))
        since = f"+{span.first - before:.1f}"
        table.add_row(f"{span.first:.1f}", since, until, num, span.log, span.stage)
        before = span.first
    console.print(table)
