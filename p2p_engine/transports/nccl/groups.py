"""Groups: bounds the number of groups, makes them in turn, and evicts idle ones.

For the device's thread. This engine starts one group at a time. Groups that peers start are always
accepted; otherwise two engines could wait for each other. Idle groups end by agreement, least
recently used first: the sender's side ends them, the receiver's side asks for it.
"""

from __future__ import annotations

import collections
import time
from typing import Protocol

from p2p_engine.transports.nccl.group import Group
from p2p_engine.transports.nccl.reaper import Reaper

ASK_AGAIN_SECONDS = 1.0


class GroupMember(Protocol):
    """A pair, as far as its group is concerned."""

    group: Group | None

    @property
    def is_idle(self) -> bool:
        """Whether its group is ready and moves nothing."""
        ...

    def evict(self) -> None:
        """End an idle group on both sides, soon."""
        ...


class SendingMember(GroupMember, Protocol):
    """A pair that sends."""

    def start_group(self) -> None:
        """Start to make a group."""
        ...


class Groups:
    """The groups of one engine."""

    def __init__(self, reaper: Reaper, max_groups: int) -> None:
        self.num_made = self.num_evicted = 0
        self.outgoing: set[SendingMember] = set()
        self.incoming: set[GroupMember] = set()
        self._reaper = reaper
        self._max_groups = max_groups
        self._wanting: collections.deque[SendingMember] = collections.deque()
        self._making: SendingMember | None = None
        self._evicted_at: dict[Group, float] = {}

    @property
    def live(self) -> list[Group]:
        """Return the groups that can be used, or soon can."""
        return [pair.group for pair in self._pairs if pair.group is not None]

    def want(self, pair: SendingMember) -> None:
        """Make a group for a pair when it is its turn; idempotent."""
        self.outgoing.add(pair)
        if pair is not self._making and pair not in self._wanting:
            self._wanting.append(pair)
            self.advance()

    def made(self, pair: SendingMember) -> None:
        """Note that a pair's group is ready; the next one may be made."""
        self.num_made += 1
        if self._making is pair:
            self._making = None
        self.advance()

    def gone(self, pair: SendingMember) -> None:
        """Forget a pair that has failed."""
        self.outgoing.discard(pair)
        if pair in self._wanting:
            self._wanting.remove(pair)
        if self._making is pair:
            self._making = None
        self.advance()

    def advance(self) -> None:
        """Evict a group if there are too many, and start the next one; called in each tick."""
        now, live = time.monotonic(), set(self.live)
        self._evicted_at = {
            group: since
            for group, since in self._evicted_at.items()
            if group in live and now - since < ASK_AGAIN_SECONDS
        }
        num_ending = self._reaper.num_pending() - self._reaper.num_quarantined()
        excess = len(live) + bool(self._wanting) - self._max_groups
        if excess - len(self._evicted_at) > 0:
            self._evict_oldest(now)
        if self._wanting and self._making is None and excess + num_ending <= 0:
            self._making = self._wanting.popleft()
            self._making.start_group()

    @property
    def _pairs(self) -> tuple[GroupMember, ...]:
        return (*self.outgoing, *self.incoming)

    def _evict_oldest(self, now: float) -> None:
        idle = [
            (pair.group.used_at, index, pair)
            for index, pair in enumerate(self._pairs)
            if pair.group is not None and pair.group not in self._evicted_at and pair.is_idle
        ]
        if idle:
            _, _, pair = min(idle)
            if pair.group is not None:
                self._evicted_at[pair.group] = now
            self.num_evicted += 1
            pair.evict()
