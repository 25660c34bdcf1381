"""Collections with a bounded cost: a map that forgets its oldest entries, an index for look-ups
without a scan, and rate-limited warnings for events that strangers can cause."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
HashableV = TypeVar("HashableV", bound=Hashable)

MAX_ENTRIES = 1 << 16
WARNING_SECONDS = 10.0


class BoundedMap(Generic[K, V]):
    """A map that forgets its oldest entries beyond `limit`."""

    def __init__(self, limit: int = MAX_ENTRIES) -> None:
        self._limit = limit
        self._entries: OrderedDict[K, V] = OrderedDict()

    def put(self, key: K, value: V) -> None:
        """Store a value; the key becomes the newest."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._limit:
            self._entries.popitem(last=False)

    def get(self, key: K) -> V | None:
        """Return the value of a key, or None."""
        return self._entries.get(key)

    def pop(self, key: K) -> V | None:
        """Remove a key; returns its value, or None."""
        return self._entries.pop(key, None)

    def __contains__(self, key: K) -> bool:
        """Whether a key is in the map."""
        return key in self._entries

    def __len__(self) -> int:
        """Return how many keys are in the map."""
        return len(self._entries)


def put_newest(entries: dict[K, V], key: K, value: V, limit: int) -> None:
    """Store a value as the newest of a map; beyond the limit, forget the oldest. For the many small
    maps in another one, where a BoundedMap each would take half as much memory again."""
    entries.pop(key, None)
    entries[key] = value
    if len(entries) > limit:
        del entries[next(iter(entries))]


class Index(Generic[K, HashableV]):
    """A map from names to ordered sets of values. Names without values take no memory."""

    def __init__(self) -> None:
        self._values: dict[K, dict[HashableV, None]] = {}

    def add(self, name: K, value: HashableV) -> None:
        """Add a value to a name; idempotent."""
        self._values.setdefault(name, {})[value] = None

    def discard(self, name: K, value: HashableV) -> None:
        """Remove a value from a name; idempotent."""
        values = self._values.get(name)
        if values is not None:
            values.pop(value, None)
            if not values:
                del self._values[name]

    def get(self, name: K) -> list[HashableV]:
        """Return a copy of a name's values."""
        return list(self._values.get(name, ()))

    def pop(self, name: K) -> list[HashableV]:
        """Remove all values of a name, and return them."""
        return list(self._values.pop(name, ()))

    def count(self, name: K) -> int:
        """Return how many values a name has."""
        return len(self._values.get(name, ()))

    def names(self) -> list[K]:
        """Return a copy of the names that have values."""
        return list(self._values)


class RateLimitedWarnings:
    """Logs at most one warning in ten seconds; the next one says how many were left out."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._silent_until = 0.0
        self._num_left_out = 0

    def warn(self, text: str, *values: object) -> None:
        """Log a warning, or count it."""
        now = self._clock()
        if now < self._silent_until:
            self._num_left_out += 1
            return
        self._silent_until = now + WARNING_SECONDS
        more = f" (and {self._num_left_out} such lines before)" if self._num_left_out else ""
        self._num_left_out = 0
        self._logger.warning("%s%s", text % values, more)
