"""Readiness: probes `/health` of every registered instance, and asks vLLM whether it is paused.

A heartbeat shows only that the engine's process is alive. Heartbeats begin before the HTTP server
listens, and continue if the server has died.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from proxy.fleet.doors import DoorFailed, Doors, DoorSilent
from proxy.fleet.instances import PAUSED, Instance
from proxy.http.client import ClientError, NoRoom, TimedOut

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.config import ProxyConfig
    from proxy.fleet.registry import Registry
    from proxy.fleet.upstream import Upstream

logger = logging.getLogger(__name__)

# An instance that is not ready or paused is probed more often, so that it gets requests soon after.
EAGER_INTERVAL_SECONDS = 0.5


@dataclass
class _Turn:
    """Whose turn it is to probe an instance, and when the last probe began."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    began_at: float = -math.inf


class Readiness:
    """One task for each registered name; it ends with its incarnation."""

    def __init__(
        self,
        config: ProxyConfig,
        registry: Registry,
        upstream: Upstream,
        doors: Doors,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._doors = doors
        self._registry = registry
        self._upstream = upstream
        self._clock = clock
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._turns: WeakKeyDictionary[Instance, _Turn] = WeakKeyDictionary()

    def watch(self, instance: Instance) -> None:
        """Start to probe an instance; the task ends when the instance is removed or replaced."""
        name = instance.identity.name
        if (previous := self._watches.get(name)) is not None:
            previous.cancel()
        self._watches[name] = asyncio.ensure_future(self._watch(instance))

    async def close(self) -> None:
        """Cancel all tasks and wait for them."""
        watches = list(self._watches.values())
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)

    async def _watch(self, instance: Instance) -> None:
        name = instance.identity.name
        while self._registry.is_current(instance):
            was_ready = instance.is_ready
            await self._probe(instance)
            if instance.is_ready != was_ready:
                state = "ready" if instance.is_ready else "not ready"
                logger.info("instance %s http=%s", state, name)
                self._registry.on_room()
            await asyncio.sleep(self._pause(instance))
            self._registry.let_go(instance, self._clock())
        logger.info("instance gone http=%s reason=%s", name, self._end_of(instance))
        del self._watches[name]

    def _end_of(self, instance: Instance) -> str:
        """Return the reason why the instance was removed."""
        if instance.last_beat is None:
            return "it was removed"
        if all(expires <= instance.last_beat for expires in instance.expires.values()):
            return "it left"
        return f"no heartbeat for {self._clock() - instance.last_beat:.1f} s"

    async def look(self, instance: Instance) -> None:
        """Probe an instance at once, because a leg has failed that it took part in; waits for at
        most two probes. One that is held, not ready, or without doors is not asked."""
        if instance.held or not instance.is_ready or instance.has_doors is False:
            return
        is_ours = await self._probe(instance, self._clock())
        if is_ours and instance.held and self._registry.is_current(instance):
            self.watch(instance)  # again, and often from now on

    async def _probe(self, instance: Instance, asked_at: float = math.inf) -> bool:
        """Probe an instance, unless a probe has begun since `asked_at`: all who ask while one runs
        share the next. Return whether this call has probed."""
        turn = self._turns.setdefault(instance, _Turn())
        async with turn.lock:
            if turn.began_at > asked_at:
                return False
            turn.began_at = self._clock()
            await self._probe_in_turn(instance)
            return True

    async def _probe_in_turn(self, instance: Instance) -> None:
        timeout = self._config.probe_timeout_seconds
        try:
            status, _ = await self._upstream.get(instance, "/health", {}, timeout, is_probe=True)
            if status == HTTPStatus.OK:
                await self._ask_if_paused(instance, is_new=not instance.is_ready)
        except NoRoom:
            logger.warning("no descriptor to probe %s", instance.identity.name)
        except TimedOut:
            instance.record_silence()
        except ClientError:
            instance.record_unreachable()
        except Exception:
            logger.exception("probe failed: internal error of the proxy")
            instance.record_unreachable()
        else:
            instance.record_answer(status)

    async def _ask_if_paused(self, instance: Instance, *, is_new: bool) -> None:
        """Ask vLLM whether it is paused: hold the instance back, or let it have legs again.

        Of one that an order has left, or is changing, the order decides. One that has no such door,
        as it says when it is new, is asked once. One that answers `/health` and is silent here
        counts as paused: its engine core answers behind what it does, such as a change of weights.
        """
        if is_new:
            instance.has_doors = None
        if instance.has_doors is False or instance.held not in ("", PAUSED):
            return
        try:
            is_paused = await self._doors.is_paused(instance, self._config.probe_timeout_seconds)
            instance.has_doors = True
        except DoorSilent as error:
            is_paused = True
            if not instance.held:
                logger.warning("%s does not say if it is paused: %s", instance.identity.name, error)
        except DoorFailed as error:
            if instance.has_doors or error.status != HTTPStatus.NOT_FOUND:
                return
            instance.has_doors = is_paused = False
        self._hold(instance, PAUSED if is_paused else "")

    def _hold(self, instance: Instance, held: str) -> None:
        if instance.held in ("", PAUSED) and instance.held != held:
            instance.held = held
            state = "paused" if held else "goes on"
            logger.info("instance %s http=%s", state, instance.identity.name)
            self._registry.on_room()

    def _pause(self, instance: Instance) -> float:
        interval = self._config.probe_interval_seconds
        gets_legs = instance.is_ready and not instance.held
        return interval if gets_legs else min(interval, EAGER_INTERVAL_SECONDS)
