"""A receiver and a sender of one transport, as engines make them, for the tests of transports."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from mempool import Mover
from p2p_engine.control.plane import ControlPlane
from p2p_engine.errors import TransportError
from p2p_engine.gpu.cuda import Cuda
from p2p_engine.gpu.device import Device
from p2p_engine.gpu.landing import DEVICE_OFFSET
from p2p_engine.memory.arena import LandingArena, Space
from p2p_engine.memory.jobs import Job
from p2p_engine.memory.layout import Regions, one_region
from p2p_engine.transports.base import (
    Arrival,
    Channel,
    Endpoint,
    Order,
    Transport,
)
from p2p_engine.transports.nccl.library import Nccl
from p2p_engine.transports.nccl.transport import NcclTransport
from p2p_engine.transports.nixl.transport import NixlTransport
from p2p_engine.transports.shm import ShmTransport
from p2p_engine.transports.tcp import TcpTransport
from p2p_engine.wire.messages import Grant
from tests.doubles.gpu import GpuDouble
from tests.rigs.nixl import UCX_TLS

T = TypeVar("T")
MIB = 1 << 20
ARENA_BYTES = 8 * MIB
NAMES = ("shm", "tcp", "nixl", "nccl", "nccl to host")
TRAILER = 0x1234567890ABCDEF


class TransportEnd:
    """What an engine gives a transport: a control thread, a mover and an arena."""

    def __init__(self, name: str, *, slice_bytes: int = 1 << 20, **options: Any) -> None:
        """`options` are those of the transport."""
        self.device: Device | None = None
        self.epoch = secrets.randbits(60)
        self.control = ControlPlane("127.0.0.1", range(1), name="p2p-test")
        self.mover = Mover(slice_bytes=slice_bytes)
        self.arena = LandingArena(ARENA_BYTES, 0, has_proof=name == "nixl")
        self.control.watch(self.mover.fileno(), self.tell_ended_jobs)
        self.transport = self._make(name, options)
        self.control.start()

    def in_control(self, call: Callable[[], T]) -> T:
        """Run `call` in the control thread and return what it returns."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001  # it is the caller's
                future.set_exception(error)

        self.control.call_soon(run)
        return future.result(10)

    def tell_ended_jobs(self) -> None:
        """Run the callbacks of jobs that the mover has ended."""
        for job in self.mover.drain():
            if job.tag is not None:
                job.tag(job)  # type: ignore[operator]

    def close(self) -> None:
        """End everything, in an engine's order; idempotent."""
        self.control.stop(5)
        self.mover.close(5)
        self.transport.close()
        if self.device is not None:
            cuda, address = self.device.cuda, self._arena_address
            if address in cuda.host_ranges:
                cuda.on(self.device.index, lambda: cuda.unregister(address))
            assert self.device.close(5)
        self.control.close(5)
        self.arena.close()

    def _make(self, name: str, options: dict[str, Any]) -> Transport:
        if name == "shm":
            return ShmTransport(self.mover, self.arena, self.control, self.epoch)
        if name.startswith("nccl"):
            return self._make_nccl(to_host=name.endswith("host"), **options)
        if name == "nixl":
            place = (self.control, self.epoch, "127.0.0.1", 10.0)
            return NixlTransport(self.mover, self.arena, *place, UCX_TLS)
        return TcpTransport(self.mover, self.control, self.epoch, "127.0.0.1", 10.0)

    def _make_nccl(self, *, to_host: bool, **options: Any) -> NcclTransport:
        path, arena = GpuDouble().path, self.arena.arena
        self.device = Device(Cuda(), options.pop("device", 0))
        self.device.check_host = self.mover.check
        if to_host:
            cuda = self.device.cuda
            self.device.run(lambda: cuda.register(arena.address, arena.nbytes), 10.0)
        self._arena_address = arena.address
        settings = {"buffer": (arena.address, arena.nbytes), "overflows": to_host,
                    "num_channels": 2, "max_groups": 16, "patience_seconds": 5.0,
                    "slab_bytes": 256 << 10, **options}  # fmt: skip
        return NcclTransport(
            Nccl(path), self.device, self.control, self.epoch, "127.0.0.1", **settings
        )


@dataclass
class GrantedRegion:
    """One granted region of the receiver, and where its bytes are to be found."""

    grant: Grant
    space: Space
    job: Job | None
    slot: int


class TransportPair:
    """A receiver and a sender."""

    def __init__(
        self,
        name: str,
        sender: TransportEnd | None = None,
        receiver: TransportEnd | None = None,
        **options: Any,
    ) -> None:
        """Make what is not given, with `options`."""
        self.receiver = receiver or TransportEnd(name, **options)
        self.sender = sender or TransportEnd(name, slice_bytes=64 << 10, **options)
        self._is_on_device = name == "nccl"
        self._channels: list[Channel] = []
        self._seqs = iter(range(1, 1 << 20))

    def invitation(self) -> Endpoint:
        """Ask the receiver how to connect."""
        endpoint = self.receiver.in_control(
            lambda: self.receiver.transport.invite(self.sender.epoch)
        )
        assert endpoint is not None
        return endpoint

    def connect(self, endpoint: Endpoint | None = None) -> Channel | TransportError:
        """Dial, and return what came of it."""
        outcome: Future[Channel | TransportError] = Future()
        chosen = self.invitation() if endpoint is None else endpoint
        self.sender.in_control(lambda: self.sender.transport.connect(chosen, outcome.set_result))
        return outcome.result(10)

    def channel(self) -> Channel:
        """Dial with success."""
        channel = self.connect()
        assert not isinstance(channel, TransportError), channel
        self._channels.append(channel)
        return channel

    def grant(self, regions_of: Callable[[int], Regions] | None, nbytes: int) -> GrantedRegion:
        """Reserve a region; `regions_of(address)` cuts it (None: one piece)."""
        space = self.receiver.arena.reserve(nbytes)
        assert space is not None
        seq, address = next(self._seqs), self.receiver.arena.address(space)
        slot = self.receiver.arena.words.take(seq, TRAILER)
        assert slot is not None
        job = None
        if self.receiver.transport.receiver_writes:
            regions = one_region(address, nbytes) if regions_of is None else regions_of(address)
            arrival = Arrival(self.sender.epoch, seq, regions, checked=True)
            # There, as in an engine: it may answer a sender before it has noted whom it let in.
            job = self.receiver.in_control(lambda: self.receiver.transport.expect(arrival))
        word = self.receiver.arena.words.offset(slot)
        # For the transport nccl, the arena takes the place of a device's buffer.
        offset = space.offset + (DEVICE_OFFSET if self._is_on_device else 0)
        grant = Grant(1, 2, seq, 0, 0, 1, offset, TRAILER, word)
        return GrantedRegion(grant, space, job, slot)

    def has_landed(self, landing: GrantedRegion, nbytes: int) -> bool:
        """Whether the receiver knows that all bytes are there."""
        if landing.job is not None:
            return landing.job.state == "done"
        self.receiver.transport.look()
        return self.receiver.arena.words.is_published(landing.slot)

    def bytes_of(self, landing: GrantedRegion, nbytes: int) -> bytes:
        """What the region holds."""
        return bytes(self.receiver.arena.arena.view(landing.space.offset, nbytes))

    def close(self) -> None:
        """End both; the channels first, as their links do."""
        for channel in self._channels if self.sender.control.alive else []:
            self.sender.in_control(channel.close)
        self.sender.close()
        self.receiver.close()


def write(channel: Channel, source: Regions, landing: GrantedRegion, keep: object = None) -> Job:
    """Start to send."""
    return channel.write(Order(source, landing.grant, checked=True, keep=keep))
