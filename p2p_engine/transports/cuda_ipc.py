"""CUDA IPC between two GPUs of one host, or two processes on one GPU. The sender copies straight
into the peer's buffer, which it has mapped, or into the peer's pinned pool. No kernel waits
for another.

The handshake is that of `shm`: the peer's memory file holds its pool and all completion words. It
proves that both are on one host and in one boot. Opening the handle of the buffer does not prove
that the devices reach each other: `proof.py` says what does. If either fails, the next transport is
tried. The end of the Unix socket does not prove that a sender has stopped: `cuda_ipc_departures.py`
says what does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from mempool import Arena, Mover
from p2p_engine.control.affinity import restore_affinity
from p2p_engine.control.plane import ControlPlane
from p2p_engine.errors import TransportError
from p2p_engine.gpu.cuda import Cuda
from p2p_engine.gpu.device import Device, DeviceJob
from p2p_engine.gpu.landing import DEVICE_OFFSET, DeviceLanding
from p2p_engine.memory.arena import HEADER_BYTES, PROOF_BYTES
from p2p_engine.memory.jobs import Job, still_running
from p2p_engine.memory.layout import Int64s, Regions
from p2p_engine.transports.base import (
    Broken,
    Channel,
    Connected,
    ConnectionInterrupted,
    Endpoint,
    Order,
    TransportUnusable,
    check_word,
)
from p2p_engine.transports.cuda_ipc_departures import (
    FAREWELL,
    UNSEEN,
    Departures,
    peer_process,
    watch_peer,
)
from p2p_engine.transports.cuda_ipc_proof import ProofWriter, has_arrived, prove
from p2p_engine.transports.proof import Pattern, ProofDesk
from p2p_engine.transports.shm import ShmTransport
from p2p_engine.wire.messages import Grant

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 2.0
MAP_SECONDS = 5.0  # then the next transport is tried


class Buffer(NamedTuple):
    """The buffer of an engine of this process, which cannot open its own handle."""

    address: int
    device: int
    nbytes: int


_buffers: dict[str, Buffer] = {}  # of open engines; endpoints name them


class Mapping:
    """A peer's memory as this process reaches it: its arena and its buffer."""

    def __init__(
        self, device: Device, arena: Arena, handle: bytes, nbytes: int, ours: Buffer | None
    ) -> None:
        """Open `handle` of a buffer of so many bytes, or use `ours` if the peer is of this process.
        Blocks.

        Raises:
            TransportError: the devices cannot reach each other, or the peer's memory is smaller.
        """
        self._device = device
        self.arena = arena
        self._is_opened = ours is None
        if ours is None:
            self.buffer, self.buffer_bytes = _open(device.cuda, handle, nbytes), nbytes
        else:
            self.buffer, self.buffer_bytes = ours.address, ours.nbytes
            device.cuda.reach(ours.device)
        device.pins.add(arena.address, arena.nbytes)  # page-locked here too, as copies need it

    @property
    def end(self) -> int:
        """Return where the memory for proofs begins."""
        return self.buffer + self.buffer_bytes

    def close(self) -> None:
        """Undo the mappings. No copy may run. Blocks while pages are unlocked, and perhaps until
        the device is idle."""
        try:
            if self._is_opened:
                self._device.cuda.close(self.buffer)
        except TransportError as error:
            logger.warning("a mapping of a peer's memory is left behind: %s", str(error))
        if self._device.pins.remove(self.arena.address):
            self.arena.close()
        else:
            logger.error("a peer's pool is still being page-locked, its mapping is left behind")


def _export(cuda: Cuda, address: int) -> bytes:
    """Return the handle of a buffer.

    Raises:
        TransportUnusable: CUDA refuses.
    """
    try:
        return cuda.export(address)
    except TransportError as error:
        raise TransportUnusable(str(error)) from error


def _open(cuda: Cuda, handle: bytes, nbytes: int) -> int:
    """Map a buffer of so many bytes, with the memory for proofs behind it. Blocks.

    Raises:
        TransportError: CUDA does not map it, or it is smaller.
    """
    address = cuda.open(handle)
    try:
        mapped = cuda.nbytes_from(address)
        if not 0 < nbytes <= mapped - PROOF_BYTES:
            raise TransportError(f"the peer says {nbytes} bytes, {mapped} bytes are mapped")
    except TransportError:
        cuda.close(address)
        raise
    return address


class CudaIpcChannel:
    """A channel into the peer's memory, which is mapped here."""

    def __init__(
        self,
        device: Device,
        mapping: Mapping,
        connection: socket.socket,
        control: ControlPlane,
    ) -> None:
        self._device = device
        self._mapping = mapping
        self._connection = connection
        self._control = control
        self._jobs: set[Job] = set()
        self._broken: Broken | None = None
        self._is_closed = self._is_released = False
        control.watch(connection.fileno(), self._hung_up)

    def write(self, order: Order) -> DeviceJob:
        """Copy the source once it is computed, then publish the grant's completion word."""
        if self._is_closed:
            raise TransportError("write: the channel is closed")
        source, grant = order.source, order.grant
        destinations, word = self._place(source, grant)
        self._jobs = {job for job in self._jobs if not job.done}
        job = self._device.copy(
            source.addresses,
            destinations,
            source.lengths,
            word_address=word,
            word_value=grant.trailer,
            lane=order.lane,
            checked=order.checked,
            tag=order.tag,
            keep=order.keep,
            after=order.after,
        )
        self._jobs.add(job)
        return job

    def watch(self, broken: Broken) -> None:
        """Call `broken` if the receiver closes the connection."""
        self._broken = broken

    def close(self, timeout: float = 1.0) -> bool:
        """Join the copies, say farewell, and undo the mappings in a thread."""
        self._is_closed = True
        for job in self._jobs:
            job.cancel()
        self._jobs = still_running(self._jobs, timeout)
        if self._jobs:
            return False
        if not self._is_released:
            self._is_released = True
            if self._connection.fileno() >= 0:
                self._control.unwatch(self._connection.fileno())
                _part(self._connection)
            threading.Thread(target=self._release, name="p2p-unmap", daemon=True).start()
        return True

    def _place(self, source: Regions, grant: Grant) -> tuple[Int64s, int]:
        """Return the destination addresses, and the address of the completion word."""
        arena, nbytes = self._mapping.arena, source.nbytes
        is_on_device = grant.offset >= DEVICE_OFFSET
        start = grant.offset - (DEVICE_OFFSET if is_on_device else 0)
        size = self._mapping.buffer_bytes if is_on_device else arena.nbytes
        if start + nbytes > size:
            raise TransportError(f"write: the grant at {grant.offset} ends outside of the arena")
        if start < HEADER_BYTES and not is_on_device:
            raise TransportError(f"write: the grant at {grant.offset} is in the arena's header")
        check_word(grant.word_offset, arena.nbytes)
        base = self._mapping.buffer if is_on_device else arena.address
        return source.starts + (base + start), arena.address + grant.word_offset

    def _release(self) -> None:
        restore_affinity()
        self._device.cuda.use(self._device.index)
        self._mapping.close()

    def _hung_up(self) -> None:
        """Report the end of the connection; the mappings stay valid until `close`."""
        self._control.unwatch(self._connection.fileno())
        self._is_closed = True
        if self._broken is not None:
            self._broken(TransportError("the receiver closed the connection"))


class MapAttempt:
    """A mapping that is being made and proven in a thread. Its outcome is told once, after
    MAP_SECONDS at the latest: another process may hold the driver's locks for as long as it
    likes."""

    def __init__(self, control: ControlPlane, connected: Connected) -> None:
        self._control = control
        self._connected = connected
        self.deadline = time.monotonic() + MAP_SECONDS
        self.is_over = False
        control.watch_time(self._look)

    def tell(self, outcome: Channel | TransportError) -> bool:
        """Tell the outcome; returns False if one was told already."""
        if self.is_over:
            return False
        self.drop()
        self._connected(outcome)
        return True

    def drop(self) -> None:
        """Tell nothing any more; idempotent."""
        self.is_over = True
        self._control.unwatch_time(self._look)

    def _look(self, now: float) -> None:
        if now >= self.deadline:
            text = f"the peer's buffer was not mapped and proven within {MAP_SECONDS:g} s"
            self.tell(ConnectionInterrupted(text))


class CudaIpcTransport(ShmTransport):
    """Device memory of one host; the sender's copy engine makes the only copy."""

    name = "cuda_ipc"

    def __init__(
        self,
        device: Device,
        mover: Mover,
        landing: DeviceLanding | None,
        control: ControlPlane,
        epoch: int,
    ) -> None:
        """Export the buffer, and allocate what proofs are written from. Blocks.

        Raises:
            TransportUnusable: CUDA does not share memory here, as under WSL.
            TransportError: the device has too little memory, or does not answer.
        """
        handle = b""
        if landing is not None:
            handle = device.run(lambda: _export(device.cuda, landing.device_address), 10.0)
        self._writer = ProofWriter(device)
        super().__init__(mover, landing, control, epoch)
        self._device = device
        self.checks = device.can_check
        self._device_landing = landing
        self._departures = Departures()
        self._mapping: set[MapAttempt] = set()  # whose threads have not ended
        control.watch_time(self._look)
        self._buffer = secrets.token_hex(16)
        self._extra: Endpoint = {}
        self._desk: ProofDesk | None = None
        if landing is not None:
            read = partial(has_arrived, device, landing.proof_address)
            self._desk = ProofDesk(control, read, self.is_gone)
            self._extra = {
                # An engine that proves nothing knows another name, and takes the next transport.
                "proven_handle": handle.hex(),
                "buffer_bytes": str(landing.device_bytes),
                "buffer": self._buffer,
            }
            _buffers[self._buffer] = Buffer(
                landing.device_address, device.index, landing.device_bytes
            )

    def close(self) -> None:
        """Close as shm does. If a sender may still copy into the buffer, it is never freed.
        Blocks for at most CLOSE_SECONDS."""
        landing = self._device_landing
        _buffers.pop(self._buffer, None)
        if landing is not None and not self.outlast_senders(CLOSE_SECONDS):
            logger.error(
                "close: %d senders may still write, the buffer is kept", len(self._senders)
            )
            landing.keep_buffer()
        if landing is not None and self._desk is not None and not self._desk.close(CLOSE_SECONDS):
            logger.error("close: a sender's proof is still being read, the buffer is kept")
            landing.keep_buffer()
        self._control.unwatch_time(self._look)
        for attempt in self._mapping:
            attempt.drop()
        self._departures.close()
        self._writer.close()
        super().close()

    def patience(self, endpoint: Endpoint) -> float:
        """Return how long `connect` may take: dialling and mapping."""
        return 2 * MAP_SECONDS

    def is_gone(self, source_epoch: int) -> bool:
        """Whether the sender's copies have ended, or its process."""
        return super().is_gone(source_epoch) and self._departures.is_over(source_epoch)

    def forget(self, source_epoch: int, *, may_write: bool) -> None:
        """Forget the sender's process with its connection."""
        super().forget(source_epoch, may_write=may_write)
        if not may_write:
            self._departures.forget(source_epoch)

    def outlast_senders(self, timeout: float) -> bool:
        """Wait until no sender can write any more; see ShmTransport."""
        deadline = time.monotonic() + timeout
        has_none = super().outlast_senders(timeout)
        return self._departures.wait(max(0.0, deadline - time.monotonic())) and has_none

    def invite(self, source_epoch: int) -> Endpoint | None:
        """Return shm's endpoint with the handle of the buffer."""
        endpoint = super().invite(source_epoch)
        return None if endpoint is None else {**endpoint, **self._extra}

    def _make_channel(
        self, endpoint: Endpoint, arena: Arena, connection: socket.socket, connected: Connected
    ) -> None:
        def give_up(error: TransportError) -> None:
            arena.close()
            _part(connection)
            connected(error)

        try:
            handle, size = bytes.fromhex(endpoint["proven_handle"]), int(endpoint["buffer_bytes"])
            name = endpoint["buffer"]
        except (KeyError, ValueError) as error:
            give_up(TransportError(f"connect: bad cuda_ipc endpoint: {error!r}"))
            return
        if any(attempt.is_over for attempt in self._mapping):  # more would hang behind it
            give_up(ConnectionInterrupted("another peer's buffer is still being mapped"))
            return
        # Names are no secret: only a connection within this process may use one.
        ours = _buffers.get(name) if peer_process(connection) == os.getpid() else None
        make = partial(Mapping, self._device, arena, handle, size, ours)
        self._map(make, arena, connection, connected)

    def _map(
        self,
        make: Callable[[], Mapping],
        arena: Arena,
        connection: socket.socket,
        connected: Connected,
    ) -> None:
        """Make a mapping and prove it, in a thread."""
        attempt = MapAttempt(self._control, connected)
        self._mapping.add(attempt)

        def write(destination: int, pattern: Pattern) -> None:
            self._writer.write(destination, pattern, attempt.deadline)

        def open_it() -> None:
            restore_affinity()
            opened: Arena | Mapping = arena
            try:
                self._device.cuda.use(self._device.index)
                opened = mapping = make()
                prove(connection, attempt.deadline, partial(write, mapping.end))
            except TransportError as error:
                failure = error
                opened.close()
                self._control.call_soon(lambda: refuse(failure))
                return
            self._control.call_soon(lambda: accept(mapping))

        def refuse(error: TransportError) -> None:
            self._mapping.discard(attempt)
            _part(connection)
            attempt.tell(error)

        def accept(mapping: Mapping) -> None:
            self._mapping.discard(attempt)
            channel = CudaIpcChannel(self._device, mapping, connection, self._control)
            if not attempt.tell(channel):  # too late
                channel.close()

        try:
            threading.Thread(target=open_it, name="p2p-map", daemon=True).start()
        except RuntimeError as error:  # there are too many
            arena.close()
            refuse(ConnectionInterrupted(f"no thread to map the peer's buffer: {error}"))

    def _admit(self, connection: socket.socket, epoch: int) -> None:
        self._sender_ended(epoch)  # its farewell may not have been read yet, nor its end of file
        process = watch_peer(connection)  # before it gets anything: it is connected now
        super()._admit(connection, epoch)
        if self._senders.get(epoch) is connection:
            self._departures.admit(epoch, process)
        elif process != UNSEEN:
            os.close(process)

    def _heard(self, epoch: int, said: bytes) -> None:
        if FAREWELL in said:
            self._departures.say_farewell(epoch)
        if self._desk is not None:
            self._desk.hear(epoch, self._senders[epoch], said)

    def _left(self, epoch: int) -> None:
        self._departures.leave(epoch)

    def _look(self, now: float) -> None:
        self._departures.look()
        if self._desk is not None:
            self._desk.look(now)


def _part(connection: socket.socket) -> None:
    """Tell the receiver that all copies have ended, and close the connection."""
    with contextlib.suppress(OSError):  # it is gone
        connection.send(FAREWELL)
    connection.close()
