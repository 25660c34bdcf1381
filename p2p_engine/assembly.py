"""Assembly: makes the parts of an engine and joins them; GPU parts only if there is a GPU.

Facts flow down: the store is not called by the parts above it; it reads the facts that they write
to `Expectations`. Events flow up: links, sessions and the control plane call their listeners.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from mempool import Mover
from p2p_engine.config import EngineConfig, ucx_transports
from p2p_engine.control.fleet_key import read_key_file
from p2p_engine.control.plane import ControlPlane
from p2p_engine.control.tick_parts import TickParts
from p2p_engine.control.timers import ListeningClock
from p2p_engine.dispatch import Dispatch
from p2p_engine.errors import ConfigError
from p2p_engine.gpu.cuda import Cuda
from p2p_engine.gpu.device import Device
from p2p_engine.gpu.environment import check_environment
from p2p_engine.gpu.landing import DeviceLanding
from p2p_engine.health import Counters, Watchdog
from p2p_engine.memory.arena import LandingArena
from p2p_engine.memory.jobs import Copier, Job, Moment
from p2p_engine.peers.links import Links
from p2p_engine.peers.locator import Locator
from p2p_engine.peers.sessions import Sessions
from p2p_engine.receive.expectations import Expectations
from p2p_engine.receive.placement import Placement
from p2p_engine.receive.pulls import Pulls
from p2p_engine.receive.renewals import Renewals
from p2p_engine.receive.store import Store
from p2p_engine.send.endings import Endings
from p2p_engine.send.fanout import Fanout
from p2p_engine.send.holds import Holds
from p2p_engine.send.sender import Sender
from p2p_engine.transports.base import Transport, TransportUnusable
from p2p_engine.transports.cuda_ipc import CudaIpcTransport
from p2p_engine.transports.nccl.library import Nccl
from p2p_engine.transports.nccl.transport import NcclTransport
from p2p_engine.transports.nixl.library import load_nixl
from p2p_engine.transports.nixl.transport import NixlTransport
from p2p_engine.transports.shm import ShmTransport
from p2p_engine.transports.tcp import TcpTransport
from p2p_engine.wire.identity import Identity
from p2p_engine.wire.messages import CacheSpec

logger = logging.getLogger(__name__)

STOP_SECONDS = 2.0  # for each thread to end
# Of the watchdog's clock: its step is shorter than the wait that it reports, and is two rests.
PATIENCE_SECONDS = 6.0
# Of the shortest patience here, between two looks: half of a clock's step, or of a renewal's round.
REST_SHARE = 1 / 8


class Parts:
    """The parts of one engine, and its lock. Each part is made once."""

    def __init__(
        self,
        config: EngineConfig,
        spec: CacheSpec | None,
        identity: Identity,
        *,
        receives: bool,
        spills: bool,
    ) -> None:
        """Make all parts. No thread that calls back runs yet. If a part cannot be made, the others
        are closed.

        Raises:
            ConfigError: no port can be bound, or the key file or a GPU's library cannot be used.
            OSError: the landing memory cannot be mapped.
            TransportError: the device cannot be used.
        """
        self.config = config
        self.epoch = secrets.randbits(62) | 1
        self.secrets = read_key_file(config.key_file)
        self.changed = threading.Condition(threading.RLock())
        self.counters = Counters()
        self.watchdog = Watchdog()
        self._running = ListeningClock(PATIENCE_SECONDS, time.monotonic)
        self._open: list[Callable[[], Any]] = []
        try:
            self._make_machinery(receives or spills)
            self._make_peers(spec, identity)
            self._make_ways(spec, receives=receives)
            self._join()
        except BaseException:
            self.close()
            raise

    def _make_machinery(self, has_landing: bool) -> None:
        """Make threads, memory and transports."""
        config = self.config
        if "nixl" in config.transports:
            load_nixl()
        self.gpu = Gpu(config) if config.device != "cpu" else None
        if self.gpu is not None:
            device = self.gpu.device
            self._open.append(lambda: device.close(STOP_SECONDS))
        self.arena: LandingArena | None = None
        if has_landing and config.kv_buffer_size + config.pool_bytes > 0:
            self.arena = self._make_landing()
            self._open.append(self.arena.close)
        first, last = config.kv_port_range or (config.port, config.port)
        self.control = ControlPlane(
            config.host, range(first, last + 1), name="p2p-control", secrets=self.secrets,
            connect_seconds=config.connect_timeout_seconds,
            rest_seconds=REST_SHARE
            * min(PATIENCE_SECONDS, config.peer_timeout_seconds, config.lease_seconds),
        )  # fmt: skip
        self._open.append(lambda: self.control.close(STOP_SECONDS))
        self.mover = Mover()
        if self.gpu is not None:
            self.gpu.device.check_host = self.mover.check
        self._open.append(lambda: self.mover.close(STOP_SECONDS))
        self.unusable: dict[str, str] = {}  # transports, and why
        self.transports = self._make_transports()

    def _make_peers(self, spec: CacheSpec | None, identity: Identity) -> None:
        """Make links, sessions and the locator."""
        config, clock = self.config, time.monotonic
        listening = ListeningClock(config.peer_timeout_seconds, clock)
        transports = list(self.transports.values())
        self.links = Links(
            config, self.control, self.epoch, spec, transports,
            lock=self.changed, clock=clock, listening=listening,
        )  # fmt: skip
        self.sessions = Sessions(
            config, self.control, self.epoch, spec, transports,
            lock=self.changed, clock=clock, listening=listening,
            largest_landing=self.arena.largest_bytes if self.arena is not None else 0,
        )  # fmt: skip
        self.locator = Locator(config, self.control, self.epoch, spec, identity, clock)

    def _make_ways(self, spec: CacheSpec | None, *, receives: bool) -> None:
        """Make the sending and the receiving parts."""
        config, clock, counters = self.config, time.monotonic, self.counters
        budget = self.sessions.budget
        copier: Copier = self.gpu.device if self.gpu is not None else self.mover
        placement = Placement(config, self.arena, copier, clock, receives=receives)
        self.placement = placement
        self.endings = Endings(budget)
        self.sender = Sender(config, self.changed, self.links, self.endings, counters, clock)
        self.holds = Holds(
            config, self.changed, self.sender, self.endings, placement, copier, counters, clock,
            budget, spec,
        )  # fmt: skip
        self.fanout = Fanout(self.changed, self.locator, self.sender, spec, counters, clock)
        self.expectations = Expectations()
        self.store = Store(
            config, self.changed, placement, copier, counters,
            reply=self.sessions.reply, clock=clock, expectations=self.expectations,
            budget=budget,
        )  # fmt: skip
        waits = (config, self.links, self.locator, spec, clock, self.store, self.expectations)
        self.renewals = Renewals(*waits)
        self.pulls = Pulls(*waits, budget)
        self.budgets = (budget, self.store.offered)

    def _join(self) -> None:
        """Join each part with its listeners."""
        self.control.watch(self.mover.fileno(), self.collect)
        if self.gpu is not None:
            self.control.watch(self.gpu.device.fileno(), self.collect)
        self.links.listeners = (self.locator, self.sender, self.pulls, self.renewals)
        self.sessions.listeners = (self.store, self.links, self.holds)
        self.ticks = TickParts({
            "jobs": lambda now: self._tell_ended_jobs(),
            "arrivals": lambda now: self._find_arrivals(),
            "links": self.links.tick,
            "locator": self.locator.tick,
            "sender": self.sender.tick,
            "holds": self.holds.tick,
            "store": self.store.tick,
            "pulls": self.pulls.tick,
            "renewals": self.renewals.tick,
            "sessions": lambda now: self.sessions.tick(),
            "watchdog": lambda now: self.watchdog.look(self._running(), self._overdue(now)),
        }, dues=[
            self.store.due_at, self.links.due_at, self.locator.due_at, self.sender.due_at,
            self.holds.due_at, self.pulls.due_at, self.renewals.due_at, self.sessions.due_at,
        ])  # fmt: skip
        self.dispatch = self.control.listener = Dispatch(
            self.changed, self.counters, self.ticks, self.links, self.locator, self.sender,
            self.pulls, self.renewals, self.sessions, self.holds, self.store, self.transports,
        )  # fmt: skip

    def _make_landing(self) -> LandingArena:
        if self.gpu is not None:
            return self.gpu.landing()
        config = self.config
        return LandingArena(
            config.kv_buffer_size, config.pool_bytes, page_lock=config.page_lock,
            has_proof="nixl" in config.transports,
        )  # fmt: skip

    def _make_transports(self) -> dict[str, Transport]:
        """Make all that this host can have, the best first."""
        made: dict[str, Transport] = {}
        for name in self.config.transports:
            try:
                made[name] = self._make_transport(name)
            except TransportUnusable as error:
                self.unusable[name] = str(error)
                logger.warning("the transport %s cannot be used here: %s", name, str(error))
        if not made:
            raise ConfigError(f"transports: none can be used here: {self.unusable}")
        return made

    def _make_transport(self, name: str) -> Transport:
        transport: Transport
        if self.gpu is not None:
            landing = self.arena if isinstance(self.arena, DeviceLanding) else None
            transport = self.gpu.transport(name, self.mover, landing, self.control, self.epoch)
        elif name == "shm":
            transport = ShmTransport(self.mover, self.arena, self.control, self.epoch)
        elif name == "nixl":
            transport = NixlTransport(
                self.mover, self.arena, self.control, self.epoch, self.config.host,
                self.config.peer_timeout_seconds, ucx_transports(os.environ),
            )  # fmt: skip
        else:
            transport = TcpTransport(
                self.mover, self.control, self.epoch, self.config.host,
                self.config.peer_timeout_seconds,
            )  # fmt: skip
        self._open.append(transport.close)
        return transport

    def _overdue(self, now: float) -> Iterable[str]:
        timed = (self.links, self.locator, self.sender, self.holds, self.store)
        return [*(name for part in timed for name in part.overdue(now)), *self._lacks()]

    def _lacks(self) -> Iterable[str]:
        """Yield what members wait for that this process or its system has no more of."""
        if self.control.sockets.is_short:
            yield "a peer waits for a descriptor of this process (RLIMIT_NOFILE)"
        if self.arena is not None and self.arena.arena.refusal and self.placement.is_waited_for():
            yield f"a sender waits for landing memory: {self.arena.arena.refusal}"

    @property
    def are_sound(self) -> bool:
        """Whether all threads run, the GPU works, all parts of the tick work, and no wait has
        outlived its deadline."""
        threads_live = self.control.alive and bool(self.mover.stats()["alive"])
        if self.gpu is not None:
            device = self.gpu.device
            threads_live = threads_live and device.alive and not device.failure
        return threads_live and not self.ticks.broken and not self.watchdog.overdue

    def collect(self) -> None:
        """Run the callbacks of jobs that the mover and the GPU have ended, and find chunks that
        have landed."""
        with self.changed:
            now = time.monotonic()
            self.ticks.run_one("jobs", now)
            self.ticks.run_one("arrivals", now)

    def _find_arrivals(self) -> None:
        for transport in self.transports.values():
            transport.look()
        self.store.poll()

    def _tell_ended_jobs(self) -> None:
        for job in self.mover.drain():
            self._tell_ended(job)
        if self.gpu is not None:
            for ended in self.gpu.device.drain():
                self._tell_ended(ended)

    def _tell_ended(self, job: Job) -> None:
        """Run a job's callback, and survive any exception: the other callbacks must still run."""
        try:
            if job.tag is not None:
                job.tag(job)  # type: ignore[operator]
        except Exception:
            self.counters.callback_errors += 1
            logger.exception(
                "the callback of a %s job failed; the other callbacks still run", job.state
            )
        finally:
            self.control.stir()  # a caller of `poll` may have taken the thread's event

    def close(self) -> int:
        """Close all parts in reverse order. Returns how many are left for the next call: one that
        did not stop, and all that were made before it, because it may still use them."""
        while self._open:
            try:
                if self._open[-1]() is False:
                    break
            except Exception:
                logger.exception("close: one part failed, the others are closed")
            self._open.pop()
        return len(self._open)


class Gpu:
    """One device and the transports that move its memory."""

    def __init__(self, config: EngineConfig) -> None:
        """Find the libraries and start the device's thread. Blocks.

        Raises:
            ConfigError: a library or the device is missing, or a setting would deadlock.
            TransportError: the device cannot be used.
        """
        self._config = config
        try:
            cuda, index = Cuda(), config.device_index
        except ConfigError as error:
            raise ConfigError(f"device={config.device!r}: {error}") from error
        if "nccl" in config.transports:
            is_mps = cuda.is_shared_by_mps(index)
            check_environment(
                os.environ, config.nccl_num_channels, registers=config.nccl_register, is_mps=is_mps
            )
            self._nccl = Nccl(config.nccl_library)
        num_devices = cuda.device_count()
        if not index < num_devices:
            raise ConfigError(f"device={config.device!r}: there are {num_devices} GPUs")
        self.device = Device(cuda, index)
        if config.checksum and not self.device.can_check:
            self.device.close(STOP_SECONDS)
            raise ConfigError(
                "checksum: this GPU has no kernel that computes them; the log says why"
            )
        self._transport: NcclTransport | None = None

    def landing(self) -> DeviceLanding:
        """Make the landing memory: buffer on the device, pool in registered host memory.

        Raises:
            OSError: the host memory cannot be mapped.
            TransportError: the device has too little memory.
        """
        config = self._config
        return DeviceLanding(
            self.device, config.kv_buffer_size, config.pool_bytes, page_lock=config.page_lock
        )

    def transport(
        self,
        name: str,
        mover: Mover,
        landing: DeviceLanding | None,
        control: ControlPlane,
        epoch: int,
    ) -> Transport:
        """Make the transport of this name."""
        config = self._config
        if name == "cuda_ipc":
            return CudaIpcTransport(self.device, mover, landing, control, epoch)
        self._transport = NcclTransport(
            self._nccl, self.device, control, epoch, config.host,
            buffer=None if landing is None else (landing.device_address, landing.device_bytes),
            overflows=landing is not None and config.pool_bytes > 0,
            num_channels=config.nccl_num_channels,
            max_groups=config.nccl_max_groups,
            patience_seconds=config.connect_timeout_seconds,
            registers=config.nccl_register,
        )  # fmt: skip
        return self._transport

    def stop(self, timeout: float) -> bool:
        """Start no more copies. Blocks for at most `timeout` seconds; returns whether all have
        ended."""
        if self._transport is not None:
            self._transport.stop()
        return self.device.stop_jobs(timeout)

    def now(self, stream: int | None) -> tuple[Moment, ...]:
        """Return the moment that a caller's stream (None: torch's current one) has reached."""
        if stream is None:
            stream = 0
            if torch.cuda.is_available():
                stream = torch.cuda.current_stream(self.device.index).cuda_stream
        return (self.device.record(stream),)

    def pinned(self) -> dict[str, int]:
        """Return the bytes of host memory that are page-locked, and those that CUDA has refused."""
        return self.device.pins.nbytes()

    def stats(self) -> dict[str, Any]:
        """Return a snapshot of NCCL's groups; empty without them."""
        return self._transport.stats() if self._transport is not None else {}
