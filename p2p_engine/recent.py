"""Recent: a bounded memory of what has ended, so that what comes late is answered rightly."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

MAX_REMEMBERED = 1 << 16


class Recent(Generic[K, V]):
    """A map that forgets its oldest entries beyond `limit`."""

    def __init__(self, limit: int = MAX_REMEMBERED) -> None:
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
