"""P2pNcclEngine: joins control plane, links, sender, store and transports. Read this file first.

send  → sender.Sender offers a chunk → the peer's store grants → a transport writes → COMMIT
receive → store.Store grants what is offered → bytes land → they are brought into the sink
Two threads: the control thread (ZMQ, timers) and the native mover (bytes). One lock guards all
state; it is held briefly and never across a wait.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch

from mempool import Mover
from p2p_engine.assembly import Gpu
from p2p_engine.config import EngineConfig, SendMode
from p2p_engine.control.fleet_key import read_key_file, warn_if_exposed
from p2p_engine.control.plane import ControlPlane
from p2p_engine.control.sockets import Route
from p2p_engine.control.tick_parts import TickParts
from p2p_engine.control.timers import ListeningClock
from p2p_engine.dispatch import Dispatch
from p2p_engine.errors import (
    EngineClosed,
    LocalProtocolError,
    PeerUnreachable,
    RemoteProtocolError,
    TransferTimeout,
)
from p2p_engine.gpu.landing import DeviceLanding
from p2p_engine.health import OVERDUE_SECONDS, Counters, Watchdog
from p2p_engine.memory.arena import LandingArena
from p2p_engine.memory.jobs import Copier, Job, Moment
from p2p_engine.memory.layout import Sink, Source, TensorSink, TensorSource, check_reachable
from p2p_engine.peers.closing_channels import CLOSE_SECONDS
from p2p_engine.peers.link import InstanceAddress, PeerAddress
from p2p_engine.peers.links import Links
from p2p_engine.peers.locator import Locator
from p2p_engine.peers.sessions import Sessions
from p2p_engine.receive.placement import Placement
from p2p_engine.receive.pulls import Pulls
from p2p_engine.receive.renewals import Renewals
from p2p_engine.receive.store import Store
from p2p_engine.send.fanout import Fanout
from p2p_engine.send.holds import Holds
from p2p_engine.send.sender import Sender
from p2p_engine.transfer import Transfer, TransferGroup
from p2p_engine.transports.base import Transport
from p2p_engine.transports.inproc import InprocTransport
from p2p_engine.transports.shm import ShmTransport
from p2p_engine.transports.tcp import TcpTransport
from p2p_engine.wire.messages import (
    PROTOCOL_VERSION,
    AbandonOk,
    CacheSpec,
    Hello,
    Offer,
    TransferKey,
    Want,
    check_fits,
    decode,
)

logger = logging.getLogger(__name__)

WITHDRAW_SECONDS = 2.0  # a copy stops at its next slice


class P2pNcclEngine:
    """Moves tensors and blocks of KV cache, point to point, with any number of peers."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        spec: CacheSpec | None = None,
        receives: bool = True,
        spills: bool | None = None,
    ) -> None:
        """Bind the control port and start both threads.

        `spec` is what peers must agree on. Buffer and pool are made where the engine `receives`, or
        `spills` what it holds (default: where it receives); where it receives, a part of them is
        kept for what it waits for.

        Raises:
            ConfigError: no port can be bound, or the key file cannot be used.
            LocalProtocolError: `spec` is more than a message can carry.
            OSError: the landing memory cannot be mapped.
        """
        check_fits(Hello(0, 0, PROTOCOL_VERSION, "", spec, {}))
        config.check_device()
        self.config = config
        self.epoch = secrets.randbits(62) | 1
        self._spec = spec
        self._tensor_device = config.device  # of what send_tensor and recv_tensor move
        self._secrets = read_key_file(config.key_file)
        self._changed = threading.Condition(threading.RLock())
        self._counters = Counters()
        self._watchdog = Watchdog()
        self._listening = ListeningClock(config.peer_timeout_seconds, time.monotonic)
        self._running = ListeningClock(OVERDUE_SECONDS, time.monotonic)
        self._closed = self._closing = False
        self._open_parts: list[Callable[[], Any]] = []
        try:
            self._make_parts(receives, receives if spills is None else spills)
        except BaseException:
            self._close_parts()
            raise
        warn_if_exposed(config.host, self._secrets)
        self._control.start()

    def _make_parts(self, receives: bool, spills: bool) -> None:
        config = self.config
        self._gpu = Gpu(config) if config.device != "cpu" else None
        if self._gpu is not None:
            device = self._gpu.device
            self._open_parts.append(lambda: device.close(2.0))
        self._arena: LandingArena | None = None
        self._device_landing: DeviceLanding | None = None
        if (receives or spills) and config.kv_buffer_size + config.pool_bytes > 0:
            self._arena = self._make_landing()
            self._open_parts.append(self._arena.close)
        first, last = config.kv_port_range or (config.port, config.port)
        self._control = ControlPlane(
            config.host, range(first, last + 1),
            on_frame=self._on_frame, on_tick=self._on_tick, name="p2p-control",
            on_refused=self._on_refused, on_unresolved=self._on_unresolved, secrets=self._secrets,
            connect_seconds=config.connect_timeout_seconds, on_ended=self._on_ended,
        )  # fmt: skip
        self._open_parts.append(lambda: self._control.close(2.0))
        self._mover = Mover()
        self._open_parts.append(lambda: self._mover.close(2.0))
        self._control.watch(self._mover.fileno(), self._collect)
        copier: Copier = self._mover
        if self._gpu is not None:
            copier = self._gpu.device
            self._control.watch(self._gpu.device.fileno(), self._collect)
        self._transports = {name: self._make_transport(name) for name in config.transports}
        self._links = Links(
            config, self._control, self.epoch, self._spec, list(self._transports.values()),
            lock=self._changed, clock=time.monotonic, listening=self._listening,
        )  # fmt: skip
        self._sessions = Sessions(
            config, self._control, self.epoch, self._spec, list(self._transports.values()),
            lock=self._changed, clock=time.monotonic, listening=self._listening,
            largest_landing=self._arena.largest_bytes if self._arena is not None else 0,
        )  # fmt: skip
        self._sender = Sender(config, self._changed, self._links, self._counters, time.monotonic)
        places = Placement(config, self._arena, self._mover, time.monotonic, receives=receives)
        self._holds = Holds(
            config, self._changed, self._sender, places, copier, self._counters,
            time.monotonic, self._spec,
        )  # fmt: skip
        self._locator = Locator(config, self._control, self.epoch, self._spec, time.monotonic)
        self._fanout = Fanout(
            self._changed, self._locator, self._sender, self._spec, time.monotonic
        )
        self._store = Store(
            config, self._changed, places, copier, self._counters,
            reply=self._sessions.reply, clock=time.monotonic,
            is_from=lambda key, epoch: self._pulls.is_from(key, epoch),
            is_kept=lambda content: self._renewals.is_kept(content),
        )  # fmt: skip
        self._renewals = Renewals(
            config, self._links, self._locator, self._spec, time.monotonic,
            fail=self._store.fail_key, is_here=self._store.has_any,
        )  # fmt: skip
        self._pulls = Pulls(
            config, self._links, self._locator, self._spec, time.monotonic,
            fail=self._store.fail_key, source_lost=self._store.source_lost,
            abandoned=self._store.on_abandon, introduced=self._store.sender_known,
        )  # fmt: skip
        self._links.listeners = (self._locator, self._sender, self._pulls, self._renewals)
        self._sessions.listeners = (self._store, self._links)
        self._dispatch = Dispatch(
            self._links, self._locator, self._sender, self._pulls, self._renewals,
            self._sessions, self._holds, self._store, self._transports,
        )  # fmt: skip
        timed = (self._links, self._locator, self._sender, self._holds, self._store)
        self._parts = TickParts({
            "jobs": lambda now: self._tell_ended_jobs(),
            "arrivals": lambda now: self._store.poll(),
            "links": self._links.tick,
            "locator": self._locator.tick,
            "sender": self._sender.tick,
            "holds": self._holds.tick,
            "store": self._store.tick,
            "pulls": self._pulls.tick,
            "renewals": self._renewals.tick,
            "sessions": lambda now: self._sessions.tick(),
            "watchdog": lambda now: self._watchdog.look(
                self._running(), [name for part in timed for name in part.overdue(now)]
            ),
        })  # fmt: skip

    def _make_landing(self) -> LandingArena:
        config = self.config
        if self._gpu is not None:
            self._device_landing = self._gpu.landing()
            return self._device_landing
        return LandingArena(config.kv_buffer_size, config.pool_bytes, page_lock=config.page_lock)

    def _make_transport(self, name: str) -> Transport:
        transport: Transport
        if self._gpu is not None:
            transport = self._gpu.transport(
                name, self._mover, self._device_landing, self._control, self.epoch
            )
        elif name == "inproc":
            transport = InprocTransport(self._mover, self._arena, self.epoch)
        elif name == "shm":
            transport = ShmTransport(self._mover, self._arena, self._control, self.epoch)
        else:
            transport = TcpTransport(
                self._mover, self._control, self.epoch, self.config.host,
                self.config.peer_timeout_seconds,
            )  # fmt: skip
        self._open_parts.append(transport.close)
        return transport

    @property
    def zmq_address(self) -> str:
        """The address that peers dial, "host:port"."""
        return self._control.address

    @property
    def healthy(self) -> bool:
        """Whether all threads live, all parts work and no wait has outlived its deadline."""
        threads_live = self._control.alive and bool(self._mover.stats()["alive"])
        if self._gpu is not None:
            threads_live = threads_live and self._gpu.device.alive
        is_sound = not self._parts.broken and not self._watchdog.overdue
        return not self._closed and threads_live and is_sound

    # Sending

    def send(
        self,
        key: TransferKey,
        peer: PeerAddress | InstanceAddress,
        source: Source,
        *,
        binding: bytes = b"",
        timeout: float | None = None,
        ready: bool = True,
        stream: int | None = None,
    ) -> Transfer:
        """Offer a chunk now and, once it is `ready` and granted, write it; never blocks.

        To an instance it goes in parts: to each rank what that rank needs of it.

        On a GPU, a source that is ready is read after all that is in `stream` now (a CUDA handle;
        default: torch's current one).

        The source's memory belongs to the engine, for reading, until `released`. The transfer ends
        by COMMIT, or with a named error at the latest after `timeout` seconds
        (default: transfer_timeout_seconds).

        Raises:
            EngineClosed: the engine is closed.
            LocalProtocolError: key, binding or manifest are more than a message can carry.
            PeerUnreachable: the address is not host:port.
        """
        check_fits(Offer(0, 0, 0, 0, key, source.manifest, binding, ""))
        with self._open():
            seconds = self.config.transfer_timeout_seconds if timeout is None else timeout
            moments = self._now(stream) if ready else ()
            self._holds.take_back(key)
            if isinstance(peer, InstanceAddress):
                transfer: Transfer = self._fanout.send(
                    key, peer, source, binding, seconds, ready=ready, moments=moments
                )
            else:
                shipment = self._sender.send(
                    key, peer, source, binding, seconds, ready=ready, moments=moments
                )
                transfer = shipment.transfer
        self._control.pump()
        return transfer

    def mark_ready(self, transfer: Transfer, *, stream: int | None = None) -> None:
        """Say that the source of a send that was not ready is valid now, or on a GPU after all that
        is in `stream` now; never blocks."""
        with self._open():
            moments = self._now(stream)
            if isinstance(transfer, TransferGroup):
                self._fanout.mark_ready(transfer, moments)
            else:
                self._sender.mark_ready(transfer, moments)

    def hold(
        self,
        key: TransferKey,
        source: Source,
        *,
        binding: bytes = b"",
        lease: float | None = None,
        stream: int | None = None,
    ) -> Transfer:
        """Keep a source until a peer has pulled it, or `lease` seconds (default: lease_seconds).

        On a GPU it is read after all that is in `stream` now.

        When it is cancelled, who wants it goes on waiting: it may be held again, or abandoned.

        Raises:
            EngineClosed: the engine is closed.
            LocalProtocolError: key, binding or manifest are more than a message can carry.
            TransferError: the key is held already.
        """
        check_fits(Offer(0, 0, 0, 0, key, source.manifest, binding, ""))
        with self._open():
            seconds = self.config.lease_seconds if lease is None else lease
            return self._holds.hold(key, source, binding, seconds, self._now(stream))

    def is_renewed(self, key: TransferKey, *, binding: bytes = b"") -> bool:
        """Whether a peer has said, within the last lease, that it will ask for a key that is not
        held here yet; never blocks.

        Raises:
            EngineClosed: the engine is closed.
        """
        with self._open():
            return self._holds.is_renewed((key, binding))

    def spill(self, transfer: Transfer) -> bool:
        """Copy what is held into landing memory, so that its caller has its own back; never blocks.

        The transfer is `released` at the end of the copy and goes on being held. False: it stays
        where it is, because there is no room or it is being pulled or was spilled already.

        Raises:
            EngineClosed: the engine is closed.
            P2pError: the source failed.
        """
        with self._open():
            return self._holds.spill(transfer)

    def abandon(
        self, key: TransferKey, peer: PeerAddress | InstanceAddress | None, reason: str
    ) -> None:
        """Say that a key will never be completed, so that nobody waits for it; never blocks.

        The peer is told; without one, whoever wants the key (GET).

        Raises:
            EngineClosed: the engine is closed.
            LocalProtocolError: the key is more than a message can carry.
            PeerUnreachable: the peer's address is not host:port.
        """
        check_fits(AbandonOk(0, 0, key))
        with self._open():
            self._holds.let_go(key, reason)  # whoever asks learns it, too
            if peer is None:
                return
            if isinstance(peer, InstanceAddress):
                self._fanout.abandon(key, peer, reason)
            else:
                self._sender.abandon(key, peer, reason)

    # Receiving

    def receive(
        self,
        key: TransferKey,
        sink: Sink,
        *,
        binding: bytes = b"",
        peer: PeerAddress | InstanceAddress | None = None,
        pull: bool = False,
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Transfer:
        """Bring a key into the sink's memory, which is the engine's until `released`; never blocks.

        On a GPU it is written after all that is in `stream` now.

        What has landed already is taken at once. A `peer` that is known is watched: when it dies,
        the transfer fails at once instead of at its deadline. With `pull` it is asked (GET).

        Raises:
            EngineClosed: the engine is closed.
            LocalProtocolError: pull without a peer; more key or binding than a message can carry.
            PeerUnreachable: the peer's address is not host:port.
            TransferError: the key is being received already, or came and was refused before.
        """
        if pull and peer is None:
            raise LocalProtocolError(f"{key}: a pull needs a peer")
        check_fits(Want(0, 0, key, binding))
        with self._open():
            seconds = self.config.transfer_timeout_seconds if timeout is None else timeout
            if peer is not None:
                peer.check()
            self._parts.run_one("arrivals", time.monotonic())
            transfer = self._store.receive(
                key, sink, binding, seconds, self._now(stream), is_named=peer is not None
            )
            if peer is not None and not transfer.done:
                self._pulls.add(transfer, peer, binding, pull=pull)
            return transfer

    def discard(
        self,
        key: TransferKey,
        *,
        binding: bytes = b"",
        peer: PeerAddress | InstanceAddress | None = None,
        pull: bool = False,
        reason: str = "",
    ) -> None:
        """Say that a key will not be received here: what came is freed, what comes is refused.

        With `pull` the peer that holds it is told, so that it can free it now. Never blocks.

        Raises:
            EngineClosed: the engine is closed.
            LocalProtocolError: key or binding are more than a message can carry.
            PeerUnreachable: the peer's address is not host:port.
        """
        check_fits(Want(0, 0, key, binding))
        with self._open():
            self._store.discard((key, binding), reason or "not wanted here")
            if pull and peer is not None:
                self._pulls.release((key, binding), peer)

    def keep(
        self,
        key: TransferKey,
        *,
        binding: bytes = b"",
        peer: PeerAddress | InstanceAddress | None = None,
    ) -> None:
        """Say that a key will be asked for, later: until `drop` it outlives its leases, where it
        has landed here, and where the peer holds it or was denied room for it; never blocks.

        Nothing is kept for longer than max_renewal_seconds. A key that the peer will not give is
        refused by `receive` at once. What was discarded before, and not offered since, may come.

        Raises:
            EngineClosed: the engine is closed.
            LocalProtocolError: key or binding are more than a message can carry.
            PeerUnreachable: the peer's address is not host:port.
        """
        check_fits(Want(0, 0, key, binding))
        with self._open():
            self._renewals.keep((key, binding), peer)
            self._store.revive((key, binding))

    def drop(self, key: TransferKey, *, binding: bytes = b"") -> None:
        """Keep a key no longer; idempotent. What is left of it ends by its leases.

        Raises:
            EngineClosed: the engine is closed.
        """
        with self._open():
            self._renewals.drop((key, binding))

    def poll(self) -> None:
        """Make progress on this thread, completions included; never blocks. Call it in each step:
        while this thread keeps the interpreter, the control thread waits for it, and when that is
        dead, nobody else sees deadlines."""
        self._collect()
        self._control.pump()
        if not self._control.alive and not self._closed:
            self._on_tick(time.monotonic())

    def _collect(self) -> None:
        with self._changed:
            now = time.monotonic()
            self._parts.run_one("jobs", now)
            self._parts.run_one("arrivals", now)

    def _tell_ended_jobs(self) -> None:
        for job in self._mover.drain():
            self._tell_ended(job)
        if self._gpu is not None:
            for ended in self._gpu.device.drain():
                self._tell_ended(ended)

    def _tell_ended(self, job: Job) -> None:
        """Run a job's callback; a bug in one must not cost the others their news."""
        try:
            if job.tag is not None:
                job.tag(job)  # type: ignore[operator]
        except Exception:
            self._counters.callback_errors += 1
            logger.exception("the callback of a %s job failed, the others run", job.state)

    def drop_landed(self) -> int:
        """Forget what has come, or is on its way, and nobody has asked for; returns the bytes that
        had landed."""
        with self._open():
            self._collect()
            return self._store.drop_landed()

    # The simple form

    def send_tensor(self, key: TransferKey, tensor: torch.Tensor, peer: str) -> Transfer:
        """Send a tensor of this device according to send_type; PUT blocks until it has left.

        A contiguous tensor is not copied: leave it unchanged until the transfer is released.

        Raises:
            TransferTimeout, PeerError, ...: PUT only; otherwise the transfer has them.
        """
        source = TensorSource(tensor, device=self._tensor_device)
        if self.config.send_type is SendMode.GET:
            return self.hold(key, source)
        transfer = self.send(key, PeerAddress(peer), source)
        if self.config.send_type is SendMode.PUT:
            _wait_or_withdraw(transfer, self.config.transfer_timeout_seconds)
        return transfer

    def recv_tensor(
        self,
        key: TransferKey,
        peer: str | None = None,
        *,
        timeout: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Block until the tensor is there, at most `timeout` seconds; in GET mode it is pulled.

        Raises:
            TransferTimeout: it did not come in time.
            P2pError: it will not come, and why.
        """
        if out is not None:
            check_reachable(out, self._tensor_device)
            if not out.is_contiguous() or out.is_conj() or out.is_neg():
                raise LocalProtocolError("out must be contiguous")
        allocate = functools.partial(torch.empty, device=self._tensor_device)
        sink = TensorSink(out, allocate)
        address = PeerAddress(peer) if peer is not None else None
        pull = self.config.send_type is SendMode.GET
        transfer = self.receive(key, sink, peer=address, pull=pull, timeout=timeout)
        _wait_or_withdraw(transfer, timeout + self.config.retry_seconds)
        if sink.tensor is None:
            raise LocalProtocolError(f"{key} ended without a tensor")
        return sink.tensor

    # Seeing and ending

    def stats(self) -> dict[str, Any]:
        """A snapshot: sizes in bytes, counts since the start."""
        with self._changed:
            counters, live = self._counters, self._store.live_bytes()
            return {
                "live_bytes": sum(live.values()),
                "live_bytes_by_place": live,
                "landed_bytes_by_place": dict(counters.landed_bytes_by_place),
                "quarantined_bytes": self._store.quarantined_bytes(),
                "sent_bytes": counters.sent_bytes,
                "spilled_bytes": counters.spilled_bytes,
                "writing_seconds": counters.writing_seconds,
                "transfers_by_outcome": dict(counters.outcomes),
                "open_transfers": sum(
                    part.num_open()
                    for part in (self._fanout, self._sender, self._holds, self._store)
                ),
                "links": self._links.count(),
                "nccl": self._gpu.stats() if self._gpu is not None else {},
                "unclosed_channels": self._links.num_unclosed_channels(),
                "sessions": len(self._sessions),
                "kept": self._renewals.num_kept(),
                "denied_offers": counters.denied,
                "expired_leases": counters.expired,
                "corrupted_chunks": counters.corrupted,
                "messages_sent": self._control.sockets.frames_sent,
                "messages_received": self._control.sockets.frames_received,
                "wrong_messages": counters.wrong_messages + self._control.sockets.dropped_frames,
                "authenticated": bool(self._secrets),
                "refused_connections": self._control.sockets.refused_connections,
                "control_errors": self._control.errors
                + counters.callback_errors
                + self._parts.num_failures,
                "broken_parts": self._parts.broken,
                "overdue_waits": len(self._watchdog.overdue),
                "overdue_waits_reported": self._watchdog.num_reported,
                "healthy": self.healthy,
            }

    def close(self, timeout: float = 2.0) -> None:
        """End every transfer with EngineClosed, say BYE, join both threads; idempotent, bounded.

        When a copy does not stop in time, transfers stay open and all memory is kept: nobody may
        use what it still reads or writes. A thread that does not stop in time keeps its sockets. It
        is logged; call again.
        """
        with self._changed:
            if self._closing:
                return
            is_first, self._closing, self._closed = not self._closed, True, True
        if is_first:
            self._leave(timeout)
        if not self._stop_copies(timeout):
            logger.error("close: a copy did not stop within %g s, its memory is kept", timeout)
            self._closing = False
            return
        with self._changed:
            error = EngineClosed("the engine was closed")
            self._links.end_closing()
            self._locator.close(error)
            self._sender.close(error)
            self._holds.close(error)
            self._store.close(error)
        self._close_parts()
        if self._open_parts:
            logger.error("close: %d parts did not stop in time", len(self._open_parts))
            self._closing = False

    def _stop_copies(self, timeout: float) -> bool:
        is_stopped = self._gpu is None or self._gpu.stop(timeout)
        return self._mover.close(timeout) and is_stopped

    def _now(self, stream: int | None) -> tuple[Moment, ...]:
        return self._gpu.now(stream) if self._gpu is not None else ()

    def _leave(self, timeout: float) -> None:
        """Say BYE in the control thread, then stop that; when it is dead, in its stead."""
        if not self._control.alive:
            self._control.call_soon(self._say_goodbye)
            for _ in range(2):  # what it says is sent in the next turn
                self._control.pump()
            return
        finished = threading.Event()

        def say_goodbye() -> None:
            try:
                self._say_goodbye()
            finally:
                finished.set()

        self._control.call_soon(say_goodbye)
        if not finished.wait(timeout):
            logger.warning("close: the control thread did not answer within %g s", timeout)
        self._control.stop(timeout)

    def __enter__(self) -> P2pNcclEngine:
        """Return the engine itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the engine."""
        self.close()

    def _say_goodbye(self) -> None:
        with self._changed:
            self._links.close_channels()
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._links.num_unclosed_channels() and time.monotonic() < deadline:
            time.sleep(0.001)
            with self._changed:
                self._links.end_closing()
        with self._changed:
            self._sessions.say_goodbye()
            self._links.close(EngineClosed("the engine was closed"))

    def _close_parts(self) -> None:
        """Close all in reverse order; those that say False stay for the next time."""
        parts, self._open_parts = self._open_parts, []
        for close in reversed(parts):
            try:
                if close() is False:
                    self._open_parts.insert(0, close)
            except Exception:
                logger.exception("close: one part failed, the others are closed")

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        """Hold the lock of an engine that is not closed: whatever is begun under it, close ends."""
        with self._changed:
            if self._closed:
                raise EngineClosed("the engine is closed")
            if not self._control.alive:
                raise EngineClosed("the engine's control thread has died")
            yield

    # Callbacks of the control plane

    def _on_frame(self, route: Route, frame: bytes) -> None:
        with self._changed:
            try:
                self._dispatch.on_message(route, decode(frame))
            except RemoteProtocolError as error:
                self._counters.wrong_messages += 1
                logger.debug("message dropped: %s", str(error))

    def _on_refused(self, address: str, reason: str) -> None:
        with self._changed:
            self._links.refused(address, reason)
            self._locator.refused(address, reason)

    def _on_unresolved(self, address: str, error: PeerUnreachable) -> None:
        with self._changed:
            self._links.unresolved(address, error)
            self._locator.unresolved(address, error)

    def _on_ended(self, route: Route) -> None:
        with self._changed:
            if route.address:
                self._links.connection_ended(route.address)
            else:
                self._sessions.connection_ended(route)

    def _on_tick(self, now: float) -> None:
        with self._changed:
            self._parts.run(now)


def _wait_or_withdraw(transfer: Transfer, timeout: float) -> None:
    """Wait for a transfer; when that fails, its caller has its memory back before this returns.

    Raises:
        TransferTimeout: it did not end in time; that a copy does not stop is said, too.
        P2pError: the error that it ended with.
    """
    try:
        transfer.wait(timeout)
    except BaseException as error:
        transfer.cancel("its caller waits no longer")
        if not transfer.wait_released(WITHDRAW_SECONDS):
            text = f"{transfer.key}: a copy does not stop, the caller's memory is still in use"
            raise TransferTimeout(text) from error
        raise
