"""Timers, and a clock that counts only the time in which this process listened.

`Timers`: when to look at each of many entries next. A look touches only the entries that are due,
so its cost does not grow with the number of entries.

`ListeningClock`: the time in which this process could have heard its peers. A process that was
stopped, got no core, or could not get the interpreter, heard nobody; its peers were not silent. So
this clock stands still in such an absence. It never counts more than has passed, and even a process
that is absent again and again still notices a dead peer.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from p2p_engine.control.tick_parts import for_each

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Hashable)

AGAIN_SECONDS = 1.0  # until an entry is looked at again, if its look set no other time
MIN_STALE = 64
NUM_STEPS = 4  # looks that it takes to find a peer silent, at least


@dataclass(order=True, slots=True)
class _Item(Generic[T]):
    at: float
    number: int
    entry: T | None = field(compare=False)  # None: the item is stale


class Timers(Generic[T]):
    """Entries with one time each, in a heap. The engine's lock guards it.

    If an entry is moved to a later time, or cancelled, its item stays in the heap until its old
    time comes, or until more than half of the heap is stale. A cancelled entry itself is released
    at once.
    """

    def __init__(self) -> None:
        self._heap: list[_Item[T]] = []
        self._times: dict[T, float] = {}
        self._items: dict[T, _Item[T]] = {}  # never later than the entry's time
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """Return how many entries have a time."""
        return len(self._times)

    def set(self, entry: T, at: float) -> None:
        """Look at an entry at this time, instead of any time set before."""
        self._times[entry] = at
        item = self._items.get(entry)
        if item is None or at < item.at:
            self._push(entry, at)

    def cancel(self, entry: T) -> None:
        """Do not look at an entry any more; idempotent."""
        if self._times.pop(entry, None) is not None:
            self._items.pop(entry).entry = None

    def due_at(self) -> float:
        """Return a time before which no entry is due; infinity if there is none."""
        return self._heap[0].at if self._times else math.inf

    def look(self, now: float, step: Callable[[T], object]) -> None:
        """Take the step for each entry that is due, the oldest first, unless an earlier step has
        cancelled it.

        If steps raise, the first exception is raised again after all steps were taken.
        """
        for_each(self.take_due(now), lambda entry: step(entry) if entry in self._times else None)

    def take_due(self, now: float) -> list[T]:
        """Return the entries that are due, the oldest first. Each is due again after AGAIN_SECONDS,
        unless it is set or cancelled: a look that fails loses no entry."""
        due: list[T] = []
        while self._heap and self._heap[0].at <= now:
            entry = heapq.heappop(self._heap).entry
            if entry is None:
                continue
            del self._items[entry]
            if self._times[entry] > now:
                self._push(entry, self._times[entry])
            else:
                due.append(entry)
        due.sort(key=self._times.__getitem__)
        for entry in due:
            self.set(entry, now + AGAIN_SECONDS)
        return due

    def _push(self, entry: T, at: float) -> None:
        previous = self._items.get(entry)
        if previous is not None:
            previous.entry = None
        item = self._items[entry] = _Item(at, next(self._numbers), entry)
        heapq.heappush(self._heap, item)
        if len(self._heap) > 2 * len(self._items) + MIN_STALE:
            self._heap = list(self._items.values())
            heapq.heapify(self._heap)


class ListeningClock:
    """Counts the seconds in which this process listened. Look often: a long interval between two
    looks is taken for an absence.

    An interval of up to one step (`patience_seconds` / NUM_STEPS) counts in full; a longer one is
    an absence. The first absence counts nothing, because the sockets are read only after it. Until
    `patience_seconds` have been counted since then, each further absence counts one step. So a
    silence of `patience_seconds` is noticed after five looks at most; if looks are less than a step
    apart, it is noticed without delay. For one thread at a time.
    """

    def __init__(self, patience_seconds: float, clock: Callable[[], float]) -> None:
        """`patience_seconds` is the longest silence that a peer is allowed."""
        self._patience = patience_seconds
        self._step = patience_seconds / NUM_STEPS
        self._clock = clock
        self._looked_at = self._seconds = clock()
        self._excused_at = self._seconds - patience_seconds  # in seconds of this clock

    def __call__(self) -> float:
        """Look at the clock: return its seconds, which start at those of `clock`."""
        now = self._clock()
        interval, self._looked_at = now - self._looked_at, now
        if interval <= self._step:
            self._seconds += interval
        elif self._seconds - self._excused_at >= self._patience:
            self._excused_at = self._seconds
            logger.info("this process did not run for %.1f s; its peers are not blamed", interval)
        else:
            self._seconds += self._step
        return self._seconds
