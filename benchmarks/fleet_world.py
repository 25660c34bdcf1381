"""A fleet in virtual time: engines without threads, sockets or bytes, on a modelled network.

Each rank of each instance is a real engine's parts: links, sessions, locator, sender, store,
credit, pulls, renewals, the planner, and the messages as they cross the wire. Only what waits or
moves bytes is a model: the control plane's sockets, the mover, and one transport, whose bytes go
through a network card at each end, one chunk after the other.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from p2p_engine import assembly
from p2p_engine.assembly import Parts
from p2p_engine.config import EngineConfig
from p2p_engine.control.plane import TICK_SECONDS, ControlPlane, PlaneListener
from p2p_engine.control.sockets import Route
from p2p_engine.errors import TransportError
from p2p_engine.memory.arena import LandingArena, Space
from p2p_engine.peers.directory import Directory
from p2p_engine.transports.base import Arrival, Broken, Connected, Endpoint, Order, PlainTransport
from p2p_engine.wire.messages import CacheSpec, decode

REST_SECONDS = 1.25  # between two ticks of an engine with nothing due, as with the defaults
COPY_BYTES_PER_SECOND = 10e9


@dataclass(frozen=True)
class ModelledNetwork:
    """What lies between the instances."""

    latency_seconds: float = 20e-6
    jitter_seconds: float = 30e-6
    bytes_per_second: float = 50e9  # of each rank's card, in each direction
    loss: float = 0.0  # share of control frames that never arrive


class FleetWorld:
    """The clock, the events, the network, and what is counted."""

    def __init__(self, network: ModelledNetwork, seed: int) -> None:
        self.now = 1000.0
        self.network = network
        self.random = random.Random(seed)
        self.frames: Counter[str] = Counter()  # by the kind of message
        self.frame_bytes = 0
        self.cpu_seconds = 0.0  # of our own code, real
        self.hosts: dict[str, FleetControl] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._arrives_at: dict[tuple[str, str], float] = {}  # the last frame of a connection
        cast("Any", assembly).time = SimpleNamespace(monotonic=lambda: self.now)

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call at a time."""
        heapq.heappush(self._events, (max(when, self.now), next(self._numbers), call))

    def run(self, until: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Let time pass until then, or until `stop` says so after an event."""
        while self._events and self._events[0][0] <= until and not stop():
            self.now, _, call = heapq.heappop(self._events)
            call()
        if not stop():
            self.now = max(self.now, until)

    def work(self, call: Callable[[], None]) -> None:
        """Run our own code, and count its processor time."""
        start = time.perf_counter()
        call()
        self.cpu_seconds += time.perf_counter() - start

    def deliver(self, to: str, route: Route, frame: bytes) -> None:
        """Bring a frame to an address; what is lost is lost without a word."""
        self.frames[type(decode(frame)).__name__] += 1
        self.frame_bytes += len(frame)
        if self.random.random() < self.network.loss:
            return
        delay = self.network.latency_seconds + self.random.random() * self.network.jitter_seconds
        way = to, route.address or route.identity.decode()  # one connection keeps the order
        arrives_at = self._arrives_at[way] = max(self.now + delay, self._arrives_at.get(way, 0.0))
        self.at(arrives_at, lambda: self._arrive(to, route, frame))

    def _arrive(self, to: str, route: Route, frame: bytes) -> None:
        control = self.hosts.get(to)
        if control is not None:
            control.hear(route, frame)


class FleetControl:
    """A control plane: frames instead of sockets, events instead of a thread."""

    alive = True
    errors = 0

    def __init__(self, world: FleetWorld, address: str) -> None:
        self.address = address
        self.listener: PlaneListener = PlaneListener()
        self.sockets = SimpleNamespace(frames_sent=0, frames_received=0, is_short=False)
        self._peers: dict[str, FleetControl] = {}  # a connection each
        self._world = world
        self._tick_at = math.inf
        world.hosts[address] = self

    def send(self, route: Route, frame: bytes, over: Callable[[], None] = lambda: None) -> None:
        """Send to an address, or back to who dialled us."""
        to = route.address or route.identity.decode()
        there = self._world.hosts.get(to)
        if there is not None and self._peers.setdefault(to, there) is not there:
            del self._peers[to]  # a new process answers with a reset
            self._world.at(self._world.now, lambda: self.listener.on_ended(route))
            self.stir()
            return
        mine = self.address
        back = Route("", mine.encode()) if route.address else Route(mine)
        self._world.deliver(to, back, frame)

    def hear(self, route: Route, frame: bytes) -> None:
        """Take a frame."""
        if self._world.hosts.get(self.address) is self:
            self._world.work(lambda: self.listener.on_frame(route, frame))
            self.stir()

    def call_soon(self, call: Callable[[], None]) -> None:
        """Call in the next turn."""
        self._world.at(self._world.now, lambda: self._world.work(call))
        self.stir()

    def stir(self) -> None:
        """Tick soon."""
        self._tick_by(self._world.now + TICK_SECONDS)

    def _tick_by(self, when: float) -> None:
        if when < self._tick_at:
            self._tick_at = when
            self._world.at(when, lambda: self._tick(when))

    def _tick(self, when: float) -> None:
        if when != self._tick_at or self._world.hosts.get(self.address) is not self:
            return
        now, self._tick_at = self._world.now, math.inf
        self._world.work(lambda: self.listener.on_tick(now))
        due = self.listener.due_at(now)
        self._tick_by(min(max(due, now + TICK_SECONDS), now + REST_SECONDS))

    def hang_up(self, address: str) -> None:
        """End a connection."""
        self._peers.pop(address, None)

    def watch(self, *_: object, **__: object) -> None:
        """Nothing is watched: events tell."""

    unwatch = watch_time = unwatch_time = pump = watch


@dataclass(eq=False)
class FleetJob:
    """A movement of bytes, which ends when the world says so."""

    nbytes: int
    tag: Any
    state: str = "running"
    error: str | None = None
    checksum: int | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.state != "running"

    def cancel(self) -> None:
        """End it at once: no byte is moved in this world."""
        self.state = "cancelled" if not self.done else self.state

    def wait(self, timeout: float, /) -> bool:
        """Whether it has ended; nobody waits here."""
        return self.done


class FleetMover:
    """Copies take their time, and nothing else."""

    def __init__(self, world: FleetWorld) -> None:
        self._world = world
        self._ended: list[FleetJob] = []
        self.collect: Callable[[], None] = lambda: None

    def fileno(self) -> int:
        """None to watch."""
        return -1

    def copy(self, sources: Any, destinations: Any, lengths: Any, **job: Any) -> FleetJob:
        """Copy, at the rate of one core."""
        nbytes = int(np.sum(lengths))
        made = FleetJob(nbytes, job.get("tag"))
        seconds = nbytes / COPY_BYTES_PER_SECOND
        self._world.at(self._world.now + seconds, lambda: self.end(made, "done"))
        return made

    def end(self, job: FleetJob, state: str) -> None:
        """End a job, and have its owner told."""
        if not job.done:
            job.state = state
            self._ended.append(job)
            self._world.work(self.collect)

    def drain(self) -> list[FleetJob]:
        """Return what has ended."""
        ended, self._ended = self._ended, []
        return ended

    def stats(self) -> dict[str, int]:
        """Alive."""
        return {"alive": 1}

    def close(self, timeout: float) -> bool:
        """Nothing runs."""
        return True


class FleetChannel:
    """The sending half between two ranks."""

    def __init__(self, here: FleetTransport, there: FleetTransport) -> None:
        self._here, self._there = here, there
        self._is_closed = False

    def write(self, order: Order) -> FleetJob:
        """Take both cards' turns."""
        if self._is_closed or self._there.is_off:
            raise TransportError("write: the connection has ended")
        job = FleetJob(order.source.nbytes, order.tag)
        world = self._here.world
        start = max(world.now, self._here.free_out_at, self._there.free_in_at)
        end = start + job.nbytes / world.network.bytes_per_second
        self._here.free_out_at = self._there.free_in_at = end
        epoch, seq = self._here.parts.epoch, order.grant.seq
        world.at(end, lambda: self._here.mover.end(job, "done"))
        arrives_at = end + world.network.latency_seconds
        world.at(arrives_at, lambda: self._there.arrived(epoch, seq))
        return job

    def watch(self, broken: Broken) -> None:
        """Nobody hears of a host that has lost its power."""

    def close(self, timeout: float = 1.0) -> bool:
        """End it."""
        self._is_closed = True
        return True


class FleetTransport(PlainTransport):
    """A transport whose receiver writes, as `tcp` does."""

    name = "tcp"
    receiver_writes = scatters = checks = True

    def __init__(self, world: FleetWorld, parts: FleetParts) -> None:
        self.world, self.parts = world, parts
        self.mover = cast("FleetMover", parts.mover)
        self.senders: set[int] = set()
        self.is_off = False
        self.free_out_at = self.free_in_at = 0.0
        self._expected: dict[tuple[int, int], FleetJob] = {}

    def invite(self, source_epoch: int) -> Endpoint | None:
        """Return where the card is."""
        return {"address": self.parts.control.address}

    def connect(self, endpoint: Endpoint, connected: Connected) -> None:
        """Connect within a round trip."""
        there = self.world.hosts.get(endpoint["address"])
        parts = getattr(there, "parts", None)

        def made() -> None:
            if parts is None or parts.transports["tcp"].is_off:
                connected(TransportError("nobody is there"))
                return
            parts.transports["tcp"].senders.add(self.parts.epoch)
            connected(cast("Any", FleetChannel(self, parts.transports["tcp"])))

        self.world.at(
            self.world.now + 2 * self.world.network.latency_seconds,
            lambda: self.world.work(made),
        )

    def expect(self, arrival: Arrival) -> Any:
        """Wait for the bytes of a chunk."""
        if arrival.source_epoch not in self.senders:
            raise TransportError("expect: the sender has no data connection")
        job = FleetJob(arrival.regions.nbytes, arrival.tag)
        self._expected[arrival.source_epoch, arrival.seq] = job
        return job

    def arrived(self, epoch: int, seq: int) -> None:
        """Take a chunk's bytes."""
        job = self._expected.pop((epoch, seq), None)
        if job is not None and not self.is_off:
            self.mover.end(job, "done")

    def is_gone(self, source_epoch: int) -> bool:
        """Only our own side writes."""
        return True

    def forget(self, source_epoch: int, *, may_write: bool) -> None:
        """End a sender's connection."""
        self.senders.discard(source_epoch)
        for key in [key for key in self._expected if key[0] == source_epoch]:
            self.mover.end(self._expected.pop(key), "failed")

    def close(self) -> None:
        """Nothing is open."""


class SparseMemory(LandingArena):
    """Landing memory of which no page is ever touched."""

    def _prefault(self) -> None:
        pass

    def is_touched(self, space: Space) -> bool:
        return True


class FleetParts(Parts):
    """One rank's engine in the world."""

    def __init__(
        self,
        world: FleetWorld,
        address: str,
        config: EngineConfig,
        spec: CacheSpec,
        *,
        receives: bool,
    ) -> None:
        self._world, self._address = world, address
        super().__init__(config, spec, {}, receives=receives, spills=False)

    def _make_machinery(self, has_landing: bool) -> None:
        config = self.config
        self.gpu, self.arena = None, None
        if has_landing:
            self.arena = SparseMemory(config.kv_buffer_size, config.pool_bytes)
            self._open.append(self.arena.close)
        control = FleetControl(self._world, self._address)
        cast("Any", control).parts = self
        self.control = cast("ControlPlane", control)
        mover = FleetMover(self._world)
        mover.collect = self.collect
        self.mover = cast("Any", mover)
        self.transports = {"tcp": cast("Any", FleetTransport(self._world, self))}

    def power_off(self) -> None:
        """Fall silent for good; nobody is told."""
        cast("FleetTransport", self.transports["tcp"]).is_off = True
        self._world.hosts.pop(self._address, None)


@dataclass(eq=False)
class FleetInstance:
    """An instance: a directory, and an engine for each rank."""

    name: str
    role: str
    directory: str
    ranks: list[FleetParts] = field(default_factory=list)

    def power_off(self, world: FleetWorld) -> None:
        """Lose all power."""
        world.hosts.pop(self.directory, None)
        for rank in self.ranks:
            rank.power_off()


def start_directory(world: FleetWorld, address: str, ranks: list[FleetParts]) -> None:
    """Answer LOOKUPs as a real directory does, without its thread and sockets."""
    directory = Directory.__new__(Directory)
    control = FleetControl(world, address)
    state = {
        "wrong_messages": 0, "_epoch": world.random.getrandbits(60), "_beat_at": math.inf,
        "_addresses": {number: rank.control.address for number, rank in enumerate(ranks)},
        "_spec": ranks[0].sessions._spec, "_identity": b"", "_control": control, "_proxies": {},
    }  # fmt: skip
    for name, value in state.items():
        setattr(directory, name, value)
    control.listener = directory
