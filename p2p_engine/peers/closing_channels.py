"""ClosingChannels: channels whose closing waits until their copies have stopped.

The calls never block, because the engine's lock is held. That lock guards everything here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from p2p_engine.control.tick_parts import for_each
from p2p_engine.transports.base import Channel

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 1.0  # for a channel's copies to stop, before `then` is called anyway


@dataclass(eq=False)
class ClosingChannel:
    """A channel to `peer`. `then` is called once it is closed, or at `patience_ends_at`."""

    channel: Channel
    peer: str
    patience_ends_at: float
    then: Callable[[], None]
    is_told: bool = False


class ClosingChannels:
    """The channels of one engine. If a copy never stops, its channel stays and keeps its memory."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._items: list[ClosingChannel] = []

    def __len__(self) -> int:
        """Return how many channels are not closed yet."""
        return len(self._items)

    def close(self, channel: Channel, peer: str, then: Callable[[], None]) -> None:
        """Close a channel and call `then`: now, or when its copies have stopped."""
        if channel.close(0.0):
            then()
        else:
            until = self._clock() + CLOSE_SECONDS
            self._items.append(ClosingChannel(channel, peer, until, then))

    def try_again(self) -> None:
        """Close the channels whose copies have stopped by now."""
        items = self._items
        self._items = [item for item in items if not item.channel.close(0.0)]
        left = set(map(id, self._items))
        for_each(items, lambda item: self._tell(item, is_closed=id(item) not in left))

    def _tell(self, item: ClosingChannel, *, is_closed: bool) -> None:
        if item.is_told or not (is_closed or self._clock() >= item.patience_ends_at):
            return
        item.is_told = True
        if not is_closed:
            logger.error("channel to %s: its copies do not stop; their memory is kept", item.peer)
        item.then()
