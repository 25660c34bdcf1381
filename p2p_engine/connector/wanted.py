"""Wanted: the KV that requests of this instance will ask for, counted by content.

A client may abort a request and send it again, in either order. Then two requests have the same
content, in one step or in several. The workers keep the content from the first request until the
last one has loaded it or has ended. They are told of changes once per step.
"""

from __future__ import annotations

from collections import Counter

from p2p_engine.connector.orders import Party, StepOrders
from p2p_engine.wire.messages import ContentKey


class Wanted:
    """All wanted contents."""

    def __init__(self) -> None:
        self._counts: Counter[ContentKey] = Counter()
        self._changes: dict[ContentKey, tuple[Party, bool]] = {}  # and whether it is unwanted

    def __len__(self) -> int:
        """Return the number of wanted contents."""
        return len(self._counts)

    @property
    def has_orders(self) -> bool:
        """Tell whether the workers have to be told of a change."""
        return bool(self._changes)

    def add(self, party: Party) -> None:
        """Record that a request will ask for its KV."""
        self._counts[party.content] += 1
        self._changes[party.content] = party, False

    def remove(self, party: Party, *, was_ordered: bool) -> None:
        """Record that a request will not ask any more.

        Unless its load `was_ordered`, the workers discard the KV if no other request wants it.
        """
        self._counts[party.content] -= 1
        if not self._counts[party.content]:
            del self._counts[party.content]
            self._changes[party.content] = party, not was_ordered

    def take_orders(self, orders: StepOrders) -> None:
        """Add the changes since the last step to the orders."""
        changes, self._changes = self._changes, {}
        for content, (party, is_unwanted) in changes.items():
            if content in self._counts:
                orders.kept.append(party)
                continue
            orders.dropped.append(party)
            if is_unwanted:
                orders.unwanted.append(party)
