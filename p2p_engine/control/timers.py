"""Timers: when each of many entries is to be looked at next. What a look costs does not grow with
what is open: only what is due is touched."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from p2p_engine.control.tick_parts import for_each

T = TypeVar("T", bound=Hashable)

AGAIN_SECONDS = 1.0  # until an entry whose look has set no other time is looked at again
MIN_STALE = 64


@dataclass(order=True, slots=True)
class _Item(Generic[T]):
    at: float
    number: int
    entry: T | None = field(compare=False)  # None: it is stale


class Timers(Generic[T]):
    """Entries with one time each, in a heap. The engine's lock guards it.

    A time that is moved on, or cancelled, stays in the heap until it comes, or until more than half
    of the heap is stale. A cancelled entry is let go of at once.
    """

    def __init__(self) -> None:
        self._heap: list[_Item[T]] = []
        self._times: dict[T, float] = {}
        self._items: dict[T, _Item[T]] = {}  # never later than the entry's time
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """How many entries have a time."""
        return len(self._times)

    def set(self, entry: T, at: float) -> None:
        """Look at an entry at this time, and at no other."""
        self._times[entry] = at
        item = self._items.get(entry)
        if item is None or at < item.at:
            self._push(entry, at)

    def cancel(self, entry: T) -> None:
        """Do not look at an entry any more; idempotent."""
        if self._times.pop(entry, None) is not None:
            self._items.pop(entry).entry = None

    def look(self, now: float, step: Callable[[T], object]) -> None:
        """Take the step for what is due, the oldest first, unless an earlier step has cancelled it.

        Raises what a step raised first, once all were taken.
        """
        for_each(self.take_due(now), lambda entry: step(entry) if entry in self._times else None)

    def take_due(self, now: float) -> list[T]:
        """Return what is due, the oldest first; each is due again AGAIN_SECONDS later, unless it is
        set or cancelled: a look that fails loses no entry."""
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
