"""Index: what belongs to a name, in the order in which it came, without a scan of all there is."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=Hashable)


class Index(Generic[K, V]):
    """A map from names to sets of values, which keep their order. Empty names take no memory."""

    def __init__(self) -> None:
        self._values: dict[K, dict[V, None]] = {}

    def add(self, name: K, value: V) -> None:
        """Put a value under a name; idempotent."""
        self._values.setdefault(name, {})[value] = None

    def discard(self, name: K, value: V) -> None:
        """Take a value away; idempotent."""
        values = self._values.get(name)
        if values is not None:
            values.pop(value, None)
            if not values:
                del self._values[name]

    def get(self, name: K) -> list[V]:
        """Return the values of a name; a copy."""
        return list(self._values.get(name, ()))

    def pop(self, name: K) -> list[V]:
        """Take all values of a name away, and return them."""
        return list(self._values.pop(name, ()))

    def count(self, name: K) -> int:
        """How many values a name has."""
        return len(self._values.get(name, ()))

    def names(self) -> list[K]:
        """Return the names that have values; a copy."""
        return list(self._values)
