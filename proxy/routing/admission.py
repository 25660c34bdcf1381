"""Admission: a limit on running requests, and a bounded queue for those above it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from proxy.errors import ProxyError
from proxy.http.asgi import Ends
from proxy.routing.router import Busy

Started = TypeVar("Started")


@dataclass(eq=False)
class _Waiter(Generic[Started]):
    """A queued request. `start` begins it at once or raises Busy; `turn` allows the next try."""

    start: Callable[[], Started]
    ends: Ends
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    is_late: bool = False

    def give_up(self) -> None:
        """End the wait after one last try."""
        self.is_late = True
        self.turn.set()


class _Line(deque[_Waiter[Any]]):
    """The queue of one model. `found_busy` is the number of the wake-up that was of no use to its
    head, and so is of no use to the next."""

    found_busy = -1


class Admission:
    """Admits requests. Each model has its own queue, so that no model waits for another's
    instances.

    Invariant: num_queued <= max_queued and num_running <= max_running.
    """

    def __init__(self, max_running: int, max_queued: int, timeout_seconds: float) -> None:
        self._max_running = max_running
        self._max_queued = max_queued
        self._timeout_seconds = timeout_seconds
        self._lines: dict[str | None, _Line] = {}
        self._num_wakes = 0
        self.num_running = 0
        self.num_queued = 0

    async def enter(self, model: str | None, start: Callable[[], Started], ends: Ends) -> Started:
        """Call `start` as soon as there is room and return its result; the request runs until
        `ends`.

        Raises:
            ProxyError: 429, the queue is full or the wait timed out.
            NoInstance: no instance could serve the request.
        """
        started = None if model in self._lines else self._try(start, ends)
        if started is None:
            started = await self._wait(model, _Waiter(start, ends))
        return started

    def wake(self) -> None:
        """Let the first request of each queue try again; call this when there may be room."""
        self._num_wakes += 1
        for line in self._lines.values():
            line[0].turn.set()

    def _try(self, start: Callable[[], Started], ends: Ends) -> Started | None:
        if self.num_running >= self._max_running:
            return None
        try:
            started = start()
        except Busy:
            return None
        self.num_running += 1
        ends.callback(self._leave)
        return started

    def _leave(self) -> None:
        self.num_running -= 1
        self.wake()

    async def _wait(self, model: str | None, waiter: _Waiter[Started]) -> Started:
        if self.num_queued >= self._max_queued:
            message = f"all instances are busy, and the queue of {self.num_queued} requests is full"
            raise ProxyError(429, "queue_full", message)
        line = self._lines.setdefault(model, _Line())
        line.append(waiter)
        self.num_queued += 1
        timer = asyncio.get_running_loop().call_later(self._timeout_seconds, waiter.give_up)
        try:
            return await self._take_turns(waiter, line)
        finally:
            timer.cancel()
            self.num_queued -= 1
            line.remove(waiter)
            if line:
                line[0].turn.set()
            else:
                del self._lines[model]

    async def _take_turns(self, waiter: _Waiter[Started], line: _Line) -> Started:
        while True:
            await waiter.turn.wait()
            waiter.turn.clear()
            if line.found_busy != self._num_wakes:
                if (started := self._try(waiter.start, waiter.ends)) is not None:
                    return started
                line.found_busy = self._num_wakes
            if waiter.is_late:
                message = f"no instance had room within {self._timeout_seconds:g} s"
                raise ProxyError(429, "queue_timeout", message)
