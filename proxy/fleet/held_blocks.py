"""HeldBlocks: which instances hold how much of a prompt, as a process that hears their KV events
knows it (event_reader.py). Whatever fails there costs a prompt its look-up, and nothing else."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
from async_timeout import timeout

from p2p_engine.bounded import RateLimitedWarnings
from proxy.fleet.event_reader import (
    LENGTH,
    Counted,
    Find,
    Follow,
    Found,
    Order,
    Promise,
    Report,
    Troubled,
    Unfollow,
)
from proxy.fleet.instances import Instance
from proxy.http.client import ClientError

if TYPE_CHECKING:
    from proxy.fleet.registry import Registry

logger = logging.getLogger(__name__)

FIND_SECONDS = 0.1  # to look a prompt up; a batch of events may be in the way for most of that
MAX_WAITING = 256  # prompts that are being looked up
MAX_UNWRITTEN_BYTES = 16 << 20  # of prompts that wait to be written to the process
MAX_DATA_BYTES = 2 << 30  # of memory that the process may take
SILENCE_SECONDS = 10.0  # without a word of the process, before it is taken for hung
RESTART_SECONDS = 5.0  # between two of these processes
LOOK_SECONDS = 1.0  # between two looks whether an instance is still there
_HOME = Path(__file__).parents[2]


class Addresses(Protocol):
    """Finds the IP addresses of a "host:port" that may be dialled; `Upstream` does."""

    async def addresses(self, address: str) -> tuple[str, ...]:
        """Return them; raises ClientError."""
        ...


@dataclass(eq=False)
class Sighting:
    """What is held of one prompt. `held` has leading tokens, by instance; those whose events are
    not heard are left out. Those in `partial` may hold more."""

    number: int = 0
    num_tokens: int = 0
    held: Mapping[Instance, int] = field(default_factory=dict)
    partial: Collection[Instance] = ()


class HeldBlocks:
    """Owns the process. It is started for the first instance that publishes events."""

    def __init__(self, registry: Registry, names: Addresses) -> None:
        self._registry = registry
        self._names = names
        self._numbers = itertools.count(1)
        self._watched: dict[int, tuple[Instance, Follow]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[int, asyncio.Future[Found]] = {}
        self._counts: dict[int, int] = {}
        self._process: Process | None = None
        self._running: asyncio.Task[None] | None = None
        self._warnings = RateLimitedWarnings(logger)

    @property
    def is_of_use(self) -> bool:
        """Tell whether anything is known of any instance."""
        return self.num_blocks > 0

    @property
    def num_blocks(self) -> int:
        """The number of blocks that are known, over all instances."""
        return sum(self._counts.values())

    def watch(self, instance: Instance) -> None:
        """Hear an instance's events until it is gone, if it publishes any."""
        if instance.events is None:
            return
        if self._running is None:
            self._running = asyncio.ensure_future(self._run())
        task = asyncio.ensure_future(self._watch(instance))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def find(self, tokens: bytes, lora: str, salt: str) -> Sighting | None:
        """Look a prompt up; None if that takes too long. `tokens` is JSON: a list of ids, or an
        answer of `/tokenize`."""
        if len(self._waiting) >= MAX_WAITING or not self.is_of_use:
            return None
        number, loop = next(self._numbers), asyncio.get_running_loop()
        found = self._waiting[number] = loop.create_future()
        timer = loop.call_later(FIND_SECONDS, found.cancel)
        try:
            if not self._order(Find(number, tokens, lora, salt)):
                return None
            await asyncio.wait([found])
        finally:
            timer.cancel()
            del self._waiting[number]
        if found.cancelled() or not found.result().num_tokens:
            return None
        watched = self._watched
        held = {watched[n][0]: count for n, count in found.result().held.items() if n in watched}
        partial = {watched[n][0] for n in found.result().partial if n in watched}
        return Sighting(number, found.result().num_tokens, held, partial)

    def promise(self, sighting: Sighting, *instances: Instance) -> None:
        """Say that these instances are asked to compute a prompt, so that they will hold it."""
        chosen = [n for n, (instance, _) in self._watched.items() if instance in instances]
        if chosen:
            self._order(Promise(sighting.number, chosen))

    async def close(self) -> None:
        """End the process; idempotent."""
        tasks = [*self._tasks, *([self._running] if self._running is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, instance: Instance) -> None:
        number = next(self._numbers)
        try:
            while self._registry.is_current(instance):
                if number not in self._watched:
                    await self._begin(number, instance)
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            self._watched.pop(number, None)
            self._counts.pop(number, None)
            self._order(Unfollow(number))

    async def _begin(self, number: int, instance: Instance) -> None:
        """Find an address of the instance's own host that may be dialled, and have it dialled."""
        host, events = instance.identity.zmq_address.rpartition(":")[0], instance.events
        assert events is not None
        ports = [events.port, *([events.replay_port] if events.replay_port else [])]
        try:
            found = [await self._names.addresses(f"{host}:{port}") for port in ports]
        except ClientError as error:
            self._warnings.warn("no KV events of %s: %s", instance.identity.name, error)
            return
        watch = Follow(number, found[0][0], events.port, events.replay_port, events.topic)
        self._watched[number] = instance, watch
        self._order(watch)

    async def _run(self) -> None:
        """Keep a process running until cancelled."""
        while True:
            try:
                await self._run_one()
            except (OSError, EOFError, asyncio.TimeoutError, msgspec.MsgspecError) as error:
                logger.error("the process that hears KV events has ended: %r", error)
            await asyncio.sleep(RESTART_SECONDS)

    async def _run_one(self) -> None:
        # In a session of its own: Ctrl-C is for the proxy, which lets its requests end first.
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "proxy.fleet.event_reader", str(MAX_DATA_BYTES),
            stdin=PIPE, stdout=PIPE, cwd=_HOME, start_new_session=True,
        )  # fmt: skip
        try:
            for _, watch in self._watched.values():
                self._order(watch)
            await self._hear(process)
        finally:
            self._process = None
            self._counts = {}
            with suppress(ProcessLookupError):
                process.kill()
            await asyncio.shield(process.wait())

    async def _hear(self, process: Process) -> None:
        decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
        assert process.stdout is not None
        while True:
            async with timeout(SILENCE_SECONDS):
                (size,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
                report = decoder.decode(await process.stdout.readexactly(size))
            if isinstance(report, Counted):
                self._counts = report.blocks
            elif isinstance(report, Troubled):
                self._warn(report)
            elif (waiter := self._waiting.get(report.number)) and not waiter.done():
                waiter.set_result(report)

    def _warn(self, trouble: Troubled) -> None:
        if trouble.instance in self._watched:
            name = self._watched[trouble.instance][0].identity.name
            self._warnings.warn("no KV events of %s: %s", name, trouble.reason)

    def _order(self, order: Order) -> bool:
        """Give an order; False if nobody can take it."""
        process = self._process
        if process is None or process.stdin is None:
            return False
        unwritten = process.stdin.transport.get_write_buffer_size()
        if isinstance(order, Find) and unwritten > MAX_UNWRITTEN_BYTES:
            return False
        said = msgspec.msgpack.encode(order)
        process.stdin.write(LENGTH.pack(len(said)))
        process.stdin.write(said)
        return True
