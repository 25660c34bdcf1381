"""TickParts: runs the parts of an engine's tick. If one part raises, the others still run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from traceback import format_exception
from typing import TypeVar

from p2p_engine.bounded import RateLimitedWarnings

T = TypeVar("T")
logger = logging.getLogger(__name__)

FAILING_SECONDS = 2.0  # a part that has raised each time for so long is broken


class TickParts:
    """The parts of one engine's tick. The engine's lock guards it."""

    def __init__(
        self,
        calls: Mapping[str, Callable[[float], object]],
        dues: Iterable[Callable[[float], float]] = (),
    ) -> None:
        """`calls` are run in this order, each with the monotonic time. Each of `dues` takes that
        time too, and returns when a part next has something to do, unless something happens."""
        self.num_failures = 0
        self._calls = dict(calls)
        self._dues = tuple(dues)
        self._failing_since: dict[str, float] = {}
        self._broken: set[str] = set()
        self._warnings = {name: RateLimitedWarnings(logger) for name in self._calls}

    def __iter__(self) -> Iterator[str]:
        """Return the names of the parts."""
        return iter(self._calls)

    def run(self, now: float) -> None:
        """Run all parts; never raises."""
        for name in self._calls:
            self.run_one(name, now)

    def run_one(self, name: str, now: float) -> None:
        """Run one part. If it raises, the exception is logged and counted."""
        try:
            self._calls[name](now)
        except Exception as error:  # noqa: BLE001  # it is logged there
            self._failed(name, now, error)
        else:
            self._succeeded(name)

    def due_at(self, now: float) -> float:
        """Return when the next tick has something to do, unless something happens before; 0 means
        that each tick has."""
        if self._failing_since:
            return 0.0
        return min((due(now) for due in self._dues), default=0.0)

    @property
    def broken(self) -> list[str]:
        """Return the parts that have raised each time for FAILING_SECONDS, and still do."""
        return sorted(self._broken)

    def _failed(self, name: str, now: float, error: Exception) -> None:
        self.num_failures += 1
        since = self._failing_since.setdefault(name, now)
        self._warnings[name].warn(
            "the part %s of a tick failed; the other parts still run: %s",
            name,
            "".join(format_exception(error)),
        )
        if now - since >= FAILING_SECONDS and name not in self._broken:
            self._broken.add(name)
            logger.error("the part %s has failed for %.1f s", name, now - since)

    def _succeeded(self, name: str) -> None:
        if self._failing_since.pop(name, None) is not None and name in self._broken:
            self._broken.discard(name)
            logger.warning("the part %s works again", name)


def for_each(entries: Iterable[T], step: Callable[[T], object]) -> None:
    """Take the step for every entry, even if it raises for one; then raise the first exception.

    The entries may change meanwhile: the loop runs over a copy.
    """
    failure: Exception | None = None
    for entry in list(entries):
        try:
            step(entry)
        except Exception as error:  # noqa: BLE001  # it is raised below
            failure = failure or error
    if failure is not None:
        raise failure
