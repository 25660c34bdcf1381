"""Collections whose cost is bounded: a map that forgets its oldest entries, an index that nobody
scans, and log lines that strangers can cause."""

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
        """Remember; the newest entry is forgotten last."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._limit:
            self._entries.popitem(last=False)

    def get(self, key: K) -> V | None:
        """Return what is remembered, or None."""
        return self._entries.get(key)

    def pop(self, key: K) -> V | None:
        """Return what is remembered, or None, and forget it."""
        return self._entries.pop(key, None)

    def __contains__(self, key: K) -> bool:
        """Whether a key is remembered."""
        return key in self._entries

    def __len__(self) -> int:
        """How much is remembered."""
        return len(self._entries)


class Index(Generic[K, HashableV]):
    """A map from names to sets of values, which keep their order. Empty names take no memory."""

    def __init__(self) -> None:
        self._values: dict[K, dict[HashableV, None]] = {}

    def add(self, name: K, value: HashableV) -> None:
        """Put a value under a name; idempotent."""
        self._values.setdefault(name, {})[value] = None

    def discard(self, name: K, value: HashableV) -> None:
        """Take a value away; idempotent."""
        values = self._values.get(name)
        if values is not None:
            values.pop(value, None)
            if not values:
                del self._values[name]

    def get(self, name: K) -> list[HashableV]:
        """Return the values of a name; a copy."""
        return list(self._values.get(name, ()))

    def pop(self, name: K) -> list[HashableV]:
        """Take all values of a name away, and return them."""
        return list(self._values.pop(name, ()))

    def count(self, name: K) -> int:
        """How many values a name has."""
        return len(self._values.get(name, ()))

    def names(self) -> list[K]:
        """Return the names that have values; a copy."""
        return list(self._values)


class RateLimitedWarnings:
    """At most one warning in ten seconds; the next one says how many were left out."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._silent_until = 0.0
        self._num_left_out = 0

    def warn(self, text: str, *values: object) -> None:
        """Log it, or count it."""
        now = self._clock()
        if now < self._silent_until:
            self._num_left_out += 1
            return
        self._silent_until = now + WARNING_SECONDS
        more = f" (and {self._num_left_out} such lines before)" if self._num_left_out else ""
        self._num_left_out = 0
        self._logger.warning("%s%s", text % values, more)
