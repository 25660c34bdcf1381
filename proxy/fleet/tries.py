"""Tries: how often somebody may show a wrong key; pure.

A stranger must not be able to lock the owner out. So each address has tries of its own, and when
strangers from many addresses have used up the tries of all, those are still heard that have shown
the right key before, and those on this machine.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from proxy.http.origins import origin_of

# Wrong keys in a row, then one in so many seconds: from one address, and from all together.
TRIES_OF_ONE = 10
ONE_AGAIN_SECONDS = 6.0
TRIES_OF_ALL = 100
ALL_AGAIN_SECONDS = 0.6
MAX_ADDRESSES = 4096
MAX_OWNERS = 64


@dataclass
class _Bucket:
    """So many tries, and a new one every so often."""

    size: int
    again_seconds: float
    used: float = 0.0
    seen: float = 0.0

    def wait(self, now: float) -> float:
        """Return the seconds until there is a try; 0 if there is one."""
        self.used = max(0.0, self.used - (now - self.seen) / self.again_seconds)
        self.seen = now
        return max(0.0, self.used + 1 - self.size) * self.again_seconds

    def use(self) -> None:
        """Use up a try."""
        self.used += 1


class Tries:
    """The wrong keys of late, by address; an IPv6 network of 64 bits counts as one address."""

    def __init__(self) -> None:
        self._all = _Bucket(TRIES_OF_ALL, ALL_AGAIN_SECONDS)
        self._each: OrderedDict[str, _Bucket] = OrderedDict()
        self._owners: OrderedDict[str, None] = OrderedDict()

    def wait(self, address: str, now: float) -> float:
        """Return for how many seconds a key from this address is not looked at; 0: it is."""
        name, is_local = origin_of(address)
        own = self._each.get(name)
        wait = own.wait(now) if own is not None else 0.0
        if name in self._owners or is_local:
            return wait
        return max(wait, self._all.wait(now))

    def fail(self, address: str, now: float) -> None:
        """Count a wrong key."""
        name, _ = origin_of(address)
        own = self._each.setdefault(name, _Bucket(TRIES_OF_ONE, ONE_AGAIN_SECONDS, seen=now))
        self._each.move_to_end(name)
        for bucket in (own, self._all):
            bucket.wait(now)
            bucket.use()
        if len(self._each) > MAX_ADDRESSES:
            self._each.popitem(last=False)

    def succeed(self, address: str) -> None:
        """Remember where the owner is."""
        name, _ = origin_of(address)
        self._each.pop(name, None)
        self._owners[name] = None
        self._owners.move_to_end(name)
        if len(self._owners) > MAX_OWNERS:
            self._owners.popitem(last=False)
