"""Wanted: which KV requests of this instance will ask for, counted by content, and what the workers
have to be told of it in the next step.

A client may abort a request and send it again, or send it again first. Then two requests have one
content, in one step or in several. The workers keep it from the first of them until the last one
has it or has ended, and hear once in a step how it stands.
"""

from __future__ import annotations

from collections import Counter

from p2p_engine.connector.orders import Party, StepOrders
from p2p_engine.wire.messages import ContentKey


class Wanted:
    """All contents that are wanted."""

    def __init__(self) -> None:
        self._counts: Counter[ContentKey] = Counter()
        self._changes: dict[ContentKey, tuple[Party, bool]] = {}  # and whether it is unwanted

    def __len__(self) -> int:
        """How many contents are wanted."""
        return len(self._counts)

    @property
    def has_orders(self) -> bool:
        """Whether there is something to tell the workers."""
        return bool(self._changes)

    def add(self, party: Party) -> None:
        """A request will ask for its KV."""
        self._counts[party.content] += 1
        self._changes[party.content] = party, False

    def remove(self, party: Party, *, was_ordered: bool) -> None:
        """A request asks no more. Unless its load `was_ordered`, the workers discard what came,
        if nobody else wants it."""
        self._counts[party.content] -= 1
        if not self._counts[party.content]:
            del self._counts[party.content]
            self._changes[party.content] = party, not was_ordered

    def take_orders(self, orders: StepOrders) -> None:
        """Say what has changed since the last step."""
        changes, self._changes = self._changes, {}
        for content, (party, is_unwanted) in changes.items():
            if content in self._counts:
                orders.kept.append(party)
                continue
            orders.dropped.append(party)
            if is_unwanted:
                orders.unwanted.append(party)
