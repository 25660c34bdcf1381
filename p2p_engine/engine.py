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
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar, overload

import torch

from p2p_engine.assembly import Parts
from p2p_engine.config import EngineConfig, SendMode
from p2p_engine.control.fleet_key import warn_if_exposed
from p2p_engine.errors import (
    EngineClosed,
    LocalProtocolError,
    TransferTimeout,
)
from p2p_engine.memory.jobs import Moment
from p2p_engine.memory.layout import (
    Array,
    Sink,
    Source,
    TensorSink,
    TensorSource,
    as_tensor,
    check_reachable,
)
from p2p_engine.memory.paged import Beginning, PagedSource
from p2p_engine.memory.ready_layers import ReadyLayers
from p2p_engine.peers.closing_channels import CLOSE_SECONDS
from p2p_engine.peers.link import InstanceAddress, PeerAddress
from p2p_engine.transfer import Transfer, TransferGroup
from p2p_engine.wire.identity import Identity
from p2p_engine.wire.messages import (
    MAX_LAYERS,
    PROTOCOL_VERSION,
    AbandonOk,
    CacheSpec,
    Hello,
    Offer,
    TransferKey,
    Want,
    check_fits,
)

logger = logging.getLogger(__name__)

A = TypeVar("A", bound=Array)
WITHDRAW_SECONDS = 2.0  # a copy stops at its next slice


class P2pNcclEngine:
    """Moves tensors and blocks of KV cache, point to point, with any number of peers."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        spec: CacheSpec | None = None,
        identity: Identity | None = None,
        receives: bool = True,
        spills: bool | None = None,
    ) -> None:
        """Bind the control port and start the threads; blocks until they run.

        `spec` describes the cache; peers must agree with it. `identity` has the fields of which it
        has the digest. The engine has a buffer and a pool if
        it `receives`, or if it `spills` held sources (default: if it receives). If it receives,
        part of them is reserved for chunks that a receive waits for.

        Raises:
            ConfigError: no port can be bound, or the key file cannot be used.
            LocalProtocolError: `spec` is more than a message can carry.
            OSError: the landing memory cannot be mapped.
        """
        check_fits(Hello(0, 0, PROTOCOL_VERSION, "", spec, {}))
        config.check_device()
        self.config = config
        self.identity = identity or {}
        self._tensor_device = config.device  # transfers of send_tensor and recv_tensor
        self._closed = self._closing = False
        self._pid = os.getpid()
        # Layers that callers have marked, and that are still to leave.
        self._marks: deque[tuple[Transfer, tuple[Moment, ...], int]] = deque()
        self._parts = parts = Parts(
            config,
            spec,
            self.identity,
            receives=receives,
            spills=receives if spills is None else spills,
        )
        self.epoch = parts.epoch
        try:
            warn_if_exposed(config.host, parts.secrets)
            parts.control.start()
        except BaseException:  # no thread is left: libzmq would wait for its sockets for ever
            parts.close()
            raise

    @property
    def zmq_address(self) -> str:
        """Return the address that peers dial, "host:port"."""
        return self._parts.control.address

    @property
    def healthy(self) -> bool:
        """Whether all threads run, all parts of the tick work, no wait has outlived its deadline,
        and peers can be let in."""
        return not self._closed and self._parts.are_sound

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
        generation: int = 0,
        stream: int | None = None,
        by_layer: bool = False,
    ) -> Transfer:
        """Offer a chunk now and, once it is `ready` and granted, write it; never blocks. If the
        peer is an instance, each of its ranks gets the part that it needs.

        On a GPU, a source that is ready is read after all that is in `stream` now (a CUDA handle;
        default: torch's current one).

        All chunks of one attempt to send a key have the same `generation`, and a later attempt has
        a higher one: a peer that ended an attempt refuses what still comes of it, but not the next.
        All must have the same bytes under one `binding`: what has arrived of two is joined.

        If it goes `by_layer`, its first layers leave before its last ones are marked ready.

        The engine may read the source's memory until `released`; it must stay unchanged. The
        transfer ends with COMMIT, or with a named error after `timeout` seconds at the latest
        (default: transfer_timeout_seconds).

        Raises:
            EngineClosed: the engine is closed.
            LocalProtocolError: key, binding or manifest are more than a message can carry.
            PeerUnreachable: the address is not host:port.
            TransferRejected: the binding names other weights than `use_weights`.
        """
        check_fits(Offer(0, 0, 0, 0, key, source.manifest, binding, "", False, generation))
        with self._open():
            self._parts.dispatch.check_weights(binding)
            seconds = self.config.transfer_timeout_seconds if timeout is None else timeout
            ready_layers = ReadyLayers.whole(self._now(stream)) if ready else ReadyLayers()
            self._parts.endings.forget_ended((key, binding))
            if isinstance(peer, InstanceAddress):
                transfer: Transfer = self._parts.fanout.send(
                    key, peer, source, binding, seconds,
                    ready_layers=ready_layers, generation=generation, by_layer=by_layer,
                )  # fmt: skip
            else:
                shipment = self._parts.sender.send(
                    key, peer, source, binding, seconds,
                    ready_layers=ready_layers, generation=generation, by_layer=by_layer,
                )  # fmt: skip
                transfer = shipment.transfer
        self._parts.control.pump()
        return transfer

    def mark_ready(self, transfer: Transfer, *, stream: int | None = None) -> None:
        """Declare the source of a send valid from now on; on a GPU, after all that is in `stream`
        now. Never blocks."""
        with self._open():
            self._take_marks()  # made before: a layer waits for no later moment than its own
            self._mark_ready(transfer, self._now(stream), MAX_LAYERS)

    def mark_layers_ready(
        self, transfers: Iterable[Transfer], num_layers: int, *, stream: int | None = None
    ) -> None:
        """Declare the first layers of the sources of sends valid from now on; on a GPU, after all
        that is in `stream` now. Takes no lock, and never blocks: the control thread lets them
        leave."""
        moments = self._now(stream)
        self._marks.extend((transfer, moments, num_layers) for transfer in transfers)
        self._parts.control.call_soon(self._take_marks)

    def _take_marks(self) -> None:
        with self._parts.changed:
            while self._marks:
                self._mark_ready(*self._marks.popleft())

    def _mark_ready(self, transfer: Transfer, moments: tuple[Moment, ...], num_layers: int) -> None:
        if isinstance(transfer, TransferGroup):
            self._parts.fanout.mark_ready(transfer, moments, num_layers)
        else:
            self._parts.sender.mark_ready(transfer, moments, num_layers)

    def hold(
        self,
        key: TransferKey,
        source: Source,
        *,
        binding: bytes = b"",
        lease: float | None = None,
        generation: int = 0,
        stream: int | None = None,
    ) -> Transfer:
        """Hold a source until a peer has pulled it, or for `lease` seconds (default:
        lease_seconds); never blocks. On a GPU, it is read after all that is in `stream` now.

        `generation` is the attempt to send the key, as in `send`.

        If the hold is cancelled, peers that want the key still wait: it may be held again, or
        abandoned.

        Raises:
            EngineClosed: the engine is closed.
            LocalProtocolError: key, binding or manifest are more than a message can carry.
            TransferError: the key is held already.
            TransferRejected: the binding names other weights than `use_weights`.
        """
        check_fits(Offer(0, 0, 0, 0, key, source.manifest, binding, "", False, generation))
        with self._open():
            self._parts.dispatch.check_weights(binding)
            seconds = self.config.lease_seconds if lease is None else lease
            return self._parts.holds.hold(
                key, source, binding, seconds, self._now(stream), generation
            )

    def is_renewed(self, key: TransferKey, *, binding: bytes = b"") -> bool:
        """Whether a peer has said, within the last lease, that it will ask for a key that is not
        held here yet; never blocks.

        Raises:
            EngineClosed: the engine is closed.
        """
        with self._open():
            return self._parts.holds.is_renewed((key, binding))

    def spill(self, transfer: Transfer) -> bool:
        """Copy a held source into landing memory, so that its caller gets its own memory back;
        never blocks.

        The transfer is `released` when the copy ends, and the key stays held. Returns False if the
        source stays where it is: there is no room, it is being pulled, or it was spilled already.

        Raises:
            EngineClosed: the engine is closed.
            P2pError: the source failed.
        """
        with self._open():
            return self._parts.holds.spill(transfer)

    def stash(
        self,
        key: TransferKey,
        source: PagedSource,
        *,
        binding: bytes,
        beginnings: Mapping[bytes, Beginning],
        lease: float | None = None,
        stream: int | None = None,
    ) -> Transfer:
        """Copy a source into the pool, and hold it there as `hold` does, for a peer that may come;
        never blocks. On a GPU, it is read after all that is in `stream` now.

        A peer may pull the whole, or one of the `beginnings` by its binding. The oldest stashes
        make room for newer ones. The transfer is `released` when the copy has ended; if there is no
        room, it ends at once.

        Raises:
            EngineClosed: the engine is closed.
            LocalProtocolError: key, binding or manifest are more than a message can carry.
            TransferError: the key is held already.
            TransferRejected: the binding names other weights than `use_weights`.
            P2pError: the source failed.
        """
        check_fits(Offer(0, 0, 0, 0, key, source.manifest, binding, "", False))
        with self._open():
            self._parts.dispatch.check_weights(binding)
            seconds = self.config.lease_seconds if lease is None else lease
            return self._parts.holds.stash(
                key, source, binding, seconds, beginnings, self._now(stream)
            )

    def abandon(
        self,
        key: TransferKey,
        peer: PeerAddress | InstanceAddress | None,
        reason: str,
        *,
        binding: bytes = b"",
        generation: int = 0,
        is_sent_again: bool = False,
    ) -> None:
        """Abandon a content that will never be completed, so that no receive waits for it; never
        blocks.

        The `peer` is told that attempts up to this `generation` have ended. It and every peer that
        asks for the content later are told that it will not come, unless it `is_sent_again`, in
        another attempt.

        Raises:
            EngineClosed: the engine is closed.
            LocalProtocolError: the key is more than a message can carry.
            PeerUnreachable: the peer's address is not host:port.
        """
        check_fits(AbandonOk(0, 0, key, binding, 0))
        content = (key, binding)
        with self._open():
            if not is_sent_again:
                self._parts.holds.let_go(content, reason, generation)
            if isinstance(peer, InstanceAddress):
                self._parts.fanout.abandon(content, peer, reason, generation)
            elif peer is not None:
                self._parts.sender.abandon(content, peer, reason, generation)

    # Receiving

    def receive(
        self,
        key: TransferKey,
        sink: Sink,
        *,
        binding: bytes = b"",
        peer: PeerAddress | InstanceAddress | None = None,
        pull: bool = False,
        has_held: bool = False,
        is_promised: bool = False,
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Transfer:
        """Bring a key into the sink's memory, which belongs to the engine until `released`; never
        blocks. On a GPU, the memory is written after all that is in `stream` now.

        Chunks that have landed already are claimed at once. A `peer` that is named is watched: if
        it dies, the transfer fails at once instead of at its deadline. With `pull`, it is asked for
        the key (GET).

        A peer may push a part of a key and hold the rest (`has_held`). With `pull`, it is asked for
        the rest; without, the sink wants none of it, and the peer is told when the key is in place.

        If the peer has said that it holds what is to be pulled (`is_promised`, or `has_held`), and
        it does not, the transfer fails within some seconds.

        Raises:
            EngineClosed: the engine is closed.
            LocalProtocolError: pull without a peer, or key or binding are more than a message can
                carry.
            PeerUnreachable: the peer's address is not host:port.
            TransferError: the key is being received already, or was offered and refused before.
        """
        if pull and peer is None:
            raise LocalProtocolError(f"{key}: a pull needs a peer")
        check_fits(Want(0, 0, key, binding))
        with self._open():
            seconds = self.config.transfer_timeout_seconds if timeout is None else timeout
            if peer is not None:
                peer.check()
            self._parts.ticks.run_one("arrivals", time.monotonic())
            # A RENEW behind this receive's RELEASE would say that another request wants the key.
            self._parts.ticks.run_one("renewals", time.monotonic())
            transfer = self._parts.store.receive(
                key, sink, binding, seconds, self._now(stream),
                is_named=peer is not None, is_pulled=pull,
            )  # fmt: skip
            if peer is not None and not transfer.done:
                self._parts.pulls.add(
                    transfer, peer, binding, pull=pull, has_held=has_held, is_promised=is_promised
                )
            elif peer is not None and has_held:
                self._parts.pulls.release((key, binding), peer)
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
        """Refuse a key that will not be received here: landed chunks are freed, new offers are
        refused. Never blocks.

        A named peer is told, so that it can free what it holds now, and takes what is asked for
        later for another attempt. A kept key is left as it is, for the next receive, until `drop`.

        Without a binding, all that comes under the key is refused, and freed at the peer, unless
        some of it is kept.

        Raises:
            EngineClosed: the engine is closed.
            LocalProtocolError: key or binding are more than a message can carry.
            PeerUnreachable: the peer's address is not host:port.
        """
        check_fits(Want(0, 0, key, binding))
        with self._open():
            if not binding and self._parts.expectations.is_kept_otherwise(key):
                return
            if not self._parts.store.leave((key, binding), is_pulled=pull):
                why = reason or "not wanted here"
                self._parts.store.discard((key, binding), why, is_whole_key=not binding)
            if peer is not None:
                self._parts.pulls.release((key, binding), peer)

    def keep(
        self,
        key: TransferKey,
        *,
        binding: bytes = b"",
        peer: PeerAddress | InstanceAddress | None = None,
    ) -> None:
        """Keep a key for a later receive: until `drop`, it outlives its leases here, and at the
        peer that holds it or was denied room for it. Never blocks.

        Nothing is kept for longer than max_renewal_seconds. If the peer will not give the key, a
        `receive` that names it asks again, and others are refused at once. If the key was discarded
        before, and not offered since, offers are accepted again.

        Raises:
            EngineClosed: the engine is closed.
            LocalProtocolError: key or binding are more than a message can carry.
            PeerUnreachable: the peer's address is not host:port.
        """
        check_fits(Want(0, 0, key, binding))
        with self._open():
            self._parts.renewals.keep((key, binding), peer)
            self._parts.store.revive((key, binding))

    def drop(self, key: TransferKey, *, binding: bytes = b"") -> None:
        """Stop keeping a key; idempotent, never blocks. Its remains end with their leases; they end
        now if, while it was kept, a receive of it has failed or it was discarded.

        Raises:
            EngineClosed: the engine is closed.
        """
        with self._open():
            self._parts.renewals.drop((key, binding))

    def step_began(self, *, has_work: bool = True) -> None:
        """Say that the caller begins a step, in which it cannot call `keep`. If the step takes
        longer than a quarter of a lease, nothing ends with its lease, here or at a linked peer (for
        at most max_renewal_seconds here and five leases there). From the end of a step until the
        next one that `has_work`, no peer is asked to keep anything. Costs nothing; never blocks."""
        self._parts.renewals.step_began(has_work=has_work)

    def step_ended(self) -> None:
        """Say that the caller's step is over; idempotent. Costs nothing; never blocks."""
        self._parts.renewals.step_ended()

    def poll(self) -> None:
        """Make progress on this thread, completions included; never blocks. Call it in each step:
        while this thread holds the interpreter, the control thread cannot run. If the control
        thread is dead, only this call enforces deadlines."""
        self._parts.collect()
        self._parts.control.pump()
        if not self._parts.control.alive and not self._closed:
            self._parts.dispatch.on_tick(time.monotonic())

    def wait_for_change(self, timeout: float) -> None:
        """Block until a transfer is released, denied or done, for at most `timeout` seconds. The
        interpreter is free meanwhile. A change just before the call is not seen."""
        with self._parts.changed:
            self._parts.changed.wait(timeout)

    def use_weights(self, name: str) -> None:
        """From now on refuse, by name, contents whose binding names other weights than these
        (wire/bindings.py), from callers, and to peers, also to those that wait for one already; ""
        refuses none. Transfers stay as they are. Never blocks.

        Raises:
            EngineClosed: the engine is closed.
        """
        with self._open():
            self._parts.dispatch.use_weights(name)

    def drop_landed(self) -> int:
        """Drop chunks that no receive has claimed, landed or on their way; returns the bytes that
        had landed."""
        with self._open():
            self._parts.collect()
            return self._parts.store.drop_landed()

    # Tensors by name

    def send_tensor(self, key: TransferKey, array: Array, peer: str) -> Transfer:
        """Send an array of torch, cupy or numpy that is on this device, according to send_type.
        With PUT, blocks until it has left.

        A contiguous array is not copied: leave it unchanged until the transfer is released, and so
        any array of cupy's, whose streams do not wait for the copy. On a GPU, it is read after all
        that torch's current stream and, for an array of cupy's, cupy's current stream have been
        told to do.

        Raises:
            LocalProtocolError: the array is on another device, or no tensor can be over its memory
                (dtype, byte order, negative stride).
            TransferTimeout, PeerError, ...: PUT only; otherwise the transfer has them.
        """
        source = TensorSource(as_tensor(array), device=self._tensor_device)
        if self.config.send_type is SendMode.GET:
            return self.hold(key, source)
        transfer = self.send(key, PeerAddress(peer), source)
        if self.config.send_type is SendMode.PUT:
            _wait_or_withdraw(transfer, self.config.transfer_timeout_seconds)
        return transfer

    @overload
    def recv_tensor(
        self, key: TransferKey, peer: str | None = None, *, timeout: float, out: None = None
    ) -> torch.Tensor: ...

    @overload
    def recv_tensor(
        self, key: TransferKey, peer: str | None = None, *, timeout: float, out: A
    ) -> A: ...

    def recv_tensor(
        self,
        key: TransferKey,
        peer: str | None = None,
        *,
        timeout: float,
        out: A | None = None,
    ) -> torch.Tensor | A:
        """Block until the tensor is there, for at most `timeout` seconds, and return it; in GET
        mode it is pulled.

        It is a new torch tensor, which cupy and numpy read by DLPack, or `out`: a contiguous array
        of torch, cupy or numpy on this device. On a GPU, `out` is written after what
        `send_tensor` would wait for.

        Raises:
            LocalProtocolError: `out` is on another device, read-only or not contiguous, or no
                tensor can be over its memory.
            TransferTimeout: it did not come in time.
            P2pError: it will not come; says why.
        """
        target = None if out is None else self._target(out)
        allocate = functools.partial(torch.empty, device=self._tensor_device)
        sink = TensorSink(target, allocate)
        address = PeerAddress(peer) if peer is not None else None
        pull = self.config.send_type is SendMode.GET
        transfer = self.receive(key, sink, peer=address, pull=pull, timeout=timeout)
        _wait_or_withdraw(transfer, timeout + self.config.retry_seconds)
        if sink.tensor is None:
            raise LocalProtocolError(f"{key} ended without a tensor")
        return sink.tensor if out is None else out

    def _target(self, out: Array) -> torch.Tensor:
        target = as_tensor(out, is_written=True)
        check_reachable(target, self._tensor_device)
        if not target.is_contiguous() or target.is_conj() or target.is_neg():
            raise LocalProtocolError("out must be contiguous")
        return target

    # Observing and closing

    def stats(self) -> dict[str, Any]:
        """Return a snapshot: sizes in bytes, counts since the start."""
        with self._parts.changed:
            counters, live = self._parts.counters, self._parts.store.live_bytes()
            return {
                "live_bytes": sum(live.values()),
                "live_bytes_by_place": live,
                "landed_bytes_by_place": dict(counters.landed_bytes_by_place),
                "quarantined_bytes": self._parts.store.quarantined_bytes(),
                "sent_bytes": counters.sent_bytes,
                "spilled_bytes": counters.spilled_bytes,
                "writing_seconds": counters.writing.seconds,
                "transfers_by_outcome": dict(counters.outcomes),
                "open_transfers": sum(
                    part.num_open()
                    for part in (
                        self._parts.fanout,
                        self._parts.sender,
                        self._parts.holds,
                        self._parts.store,
                    )
                ),
                "links": self._parts.links.count(),
                "refused_instances": self._parts.locator.refused_instances(),
                "unusable_transports": dict(self._parts.unusable),
                "nccl": self._parts.gpu.stats() if self._parts.gpu is not None else {},
                "pinned_bytes": self._parts.gpu.pinned() if self._parts.gpu is not None else {},
                "unclosed_channels": self._parts.links.num_unclosed_channels(),
                "sessions": len(self._parts.sessions),
                "kept": self._parts.expectations.num_kept(),
                "remembered_bytes": sum(budget.used_bytes for budget in self._parts.budgets),
                "refused_for_memory": sum(budget.num_refused for budget in self._parts.budgets),
                "denied_offers": counters.denied,
                "expired_leases": counters.expired,
                "corrupted_chunks": counters.corrupted,
                "messages_sent": self._parts.control.sockets.frames_sent,
                "messages_received": self._parts.control.sockets.frames_received,
                "wrong_messages": counters.wrong_messages
                + self._parts.control.sockets.dropped_frames,
                "authenticated": bool(self._parts.secrets),
                "refused_connections": self._parts.control.sockets.refused_connections,
                "control_errors": self._parts.control.errors
                + counters.callback_errors
                + self._parts.ticks.num_failures,
                "broken_parts": self._parts.ticks.broken,
                "overdue_waits": len(self._parts.watchdog.overdue),
                "overdue_waits_reported": self._parts.watchdog.num_reported,
                "healthy": self.healthy,
            }

    def take_observed(self) -> list[tuple[str, str, float]]:
        """Return what was measured since the last call, for histograms: `receive_seconds`,
        `receive_bytes` or `grant_seconds`, then the mode and the transport, and the value."""
        with self._parts.changed:
            observed = list(self._parts.counters.observed)
            self._parts.counters.observed.clear()
            return observed

    def close(self, timeout: float = 2.0) -> None:
        """End every transfer with EngineClosed, say BYE, join the threads; idempotent, bounded.

        If a copy does not stop in time, its transfers stay open and all memory is kept: nobody may
        reuse memory that the copy still reads or writes. A thread that does not stop in time keeps
        its sockets. Both are logged; call `close` again.

        In a forked child `close` does nothing: the engine's threads are not there, a lock that one
        of them held stays held, and the sockets are the parent's. They close with the child.
        """
        if os.getpid() != self._pid:
            return
        with self._parts.changed:
            if self._closing:
                return
            is_first, self._closing, self._closed = not self._closed, True, True
        if is_first:
            self._leave(timeout)
        if not self._stop_copies(timeout):
            logger.error("close: a copy did not stop within %g s, its memory is kept", timeout)
            self._closing = False
            return
        with self._parts.changed:
            error = EngineClosed("the engine was closed")
            self._parts.links.end_closing()
            self._parts.locator.close(error)
            self._parts.sender.close(error)
            self._parts.holds.close(error)
            self._parts.store.close(error)
        num_left = self._parts.close()
        if num_left:
            logger.error("close: a part did not stop in time, %d are left open", num_left)
            self._closing = False

    def _stop_copies(self, timeout: float) -> bool:
        is_stopped = self._parts.gpu is None or self._parts.gpu.stop(timeout)
        return self._parts.mover.close(timeout) and is_stopped

    def _now(self, stream: int | None) -> tuple[Moment, ...]:
        return self._parts.gpu.now(stream) if self._parts.gpu is not None else ()

    def _leave(self, timeout: float) -> None:
        """Say BYE in the control thread, then stop it. If it is dead, say BYE from here."""
        if not self._parts.control.alive:
            self._parts.control.call_soon(self._say_goodbye)
            for _ in range(2):  # BYE is sent in the next turn
                self._parts.control.pump()
            return
        finished = threading.Event()

        def say_goodbye() -> None:
            try:
                self._say_goodbye()
            finally:
                finished.set()

        self._parts.control.call_soon(say_goodbye)
        if not finished.wait(timeout):
            logger.warning("close: the control thread did not answer within %g s", timeout)
        self._parts.control.stop(timeout)

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
        with self._parts.changed:
            self._parts.links.close_channels()
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._parts.links.num_unclosed_channels() and time.monotonic() < deadline:
            time.sleep(0.001)
            with self._parts.changed:
                self._parts.links.end_closing()
        with self._parts.changed:
            self._parts.sessions.say_goodbye()
            self._parts.links.close(EngineClosed("the engine was closed"))

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        """Hold the lock of an engine that is not closed. `close` ends whatever is begun under
        it."""
        with self._parts.changed:
            if self._closed:
                raise EngineClosed("the engine is closed")
            if not self._parts.control.alive:
                raise EngineClosed("the engine's control thread has died")
            try:
                yield
            finally:
                self._parts.control.stir()


def _wait_or_withdraw(transfer: Transfer, timeout: float) -> None:
    """Wait for a transfer; blocks. If that fails, its caller has its memory back before this
    returns.

    Raises:
        TransferTimeout: it did not end in time; the message says if a copy does not stop.
        P2pError: the error that it ended with.
    """
    try:
        transfer.wait(timeout)
    except BaseException as error:
        transfer.cancel("its caller has stopped waiting")
        if not transfer.wait_released(WITHDRAW_SECONDS):
            text = f"{transfer.key}: a copy does not stop, the caller's memory is still in use"
            raise TransferTimeout(text) from error
        raise
