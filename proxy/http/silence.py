"""Silence: connections whose next byte nobody reads yet."""

from __future__ import annotations

import asyncio
import select
from contextlib import suppress
from typing import Protocol, cast

# So many are heard in each round of the loop.
AT_ONCE = 32


class Silent(Protocol):
    """Somebody who is not read yet."""

    def hear(self) -> None:
        """Note that something came, or that the connection has ended."""


class Silence:
    """Connections that are not read, behind one descriptor for the event loop.

    However many of them speak or end at once, the loop hears a few in each round.
    """

    def __init__(self) -> None:
        self._epoll: select.epoll | None = None
        self._silent: dict[int, Silent] = {}

    @property
    def is_open(self) -> bool:
        """Tell whether it listens."""
        return self._epoll is not None

    def open(self) -> None:
        """Listen, in the loop that runs."""
        self._epoll = select.epoll()
        asyncio.get_running_loop().add_reader(self._epoll.fileno(), self._hear_some)

    def add(self, descriptor: int, who: Silent) -> None:
        """Wait for the next byte of a connection; `who` is told once."""
        cast("select.epoll", self._epoll).register(descriptor, select.EPOLLIN)
        # Somebody may stand there whose connection is closed, and who is not told of it yet.
        self._silent[descriptor] = who

    def remove(self, descriptor: int, who: Silent) -> None:
        """Wait for it no longer; idempotent. The connection may be closed already."""
        if self._silent.get(descriptor) is who:
            del self._silent[descriptor]
            with suppress(OSError):
                cast("select.epoll", self._epoll).unregister(descriptor)

    def close(self) -> None:
        """Wait for nobody; idempotent."""
        self._silent.clear()
        if self._epoll is not None:
            asyncio.get_running_loop().remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None

    def _hear_some(self) -> None:
        for descriptor, _ in cast("select.epoll", self._epoll).poll(0, AT_ONCE):
            who = self._silent.get(descriptor)
            if who is not None:  # the one before may have ended it
                self.remove(descriptor, who)
                who.hear()
