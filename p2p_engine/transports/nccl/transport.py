"""NcclTransport: for GPUs that NCCL can connect. docs/gpu.md has the rules that it keeps.

The control thread dials and listens. After that, everything belongs to the device's thread.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from typing import Any

from p2p_engine.control.plane import ControlPlane
from p2p_engine.errors import TransportError
from p2p_engine.gpu.device import Device, DeviceJob
from p2p_engine.gpu.environment import MAX_KERNELS
from p2p_engine.gpu.landing import DEVICE_OFFSET
from p2p_engine.memory.jobs import Job, still_running
from p2p_engine.transports.base import (
    Arrival,
    Broken,
    Channel,
    Connected,
    Endpoint,
    Order,
    PlainTransport,
)
from p2p_engine.transports.handshake import (
    ACCEPTED,
    PREAMBLE,
    Dials,
    Door,
    Tokens,
    dial,
    listen,
)
from p2p_engine.transports.nccl.group import Memory
from p2p_engine.transports.nccl.groups import Groups
from p2p_engine.transports.nccl.library import Nccl, show_version
from p2p_engine.transports.nccl.pair import NcclPair, Resources
from p2p_engine.transports.nccl.reaper import PATIENCE_SECONDS, Reaper
from p2p_engine.transports.nccl.receiving import ReceivingPair
from p2p_engine.transports.nccl.rendezvous import Slots
from p2p_engine.transports.nccl.sending import SendingPair
from p2p_engine.transports.nccl.slabs import (
    NUM_RECV_SLABS,
    NUM_SLABS,
    RECV_SLAB_SHARE,
    SLAB_BYTES,
    Lanes,
    Slabs,
    slabs_bytes,
)
from p2p_engine.wire.addresses import family_of, join_address, split_address

logger = logging.getLogger(__name__)

MAX_CHANNELS_AT_ONCE = 8  # per direction, if that leaves two kernels: 16 multiprocessors for both
MAX_LANES = 2  # to send: each has two slabs at least
FIRST_SECONDS = 30.0  # NCCL looks for GPUs, networks and plug-ins once in a process
CLOSE_SECONDS = 2.0


def num_slots(num_channels: int, num_processors: int) -> int:
    """Return how many groups of a direction may have kernels in progress: two, so that a peer that
    stands still does not stop the others, or more if they are small. One kernel of each, of both
    directions, must fit at once on a GPU's multiprocessors, of which each channel takes one; at
    least one group is allowed."""
    wanted = max(2, min(MAX_KERNELS, MAX_CHANNELS_AT_ONCE // num_channels))
    return max(1, min(wanted, num_processors // (2 * num_channels)))


class NcclChannel:
    """The sending half of one direction."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pair: SendingPair | None = None
        self._jobs: set[Job] = set()
        self._broken: Broken | None = None
        self._error: TransportError | None = None
        self._is_closed = False
        self._has_ended = threading.Event()

    def write(self, order: Order) -> DeviceJob:
        """Send the source in pieces, as transfer `grant.seq`, once it is computed."""
        pair, seq = self._pair, order.grant.seq
        is_host = order.grant.offset < DEVICE_OFFSET
        if self._is_closed or self._error is not None or pair is None:
            raise TransportError(f"write: the channel is closed: {self._error or 'by us'}")
        self._jobs = {job for job in self._jobs if not job.done}
        nbytes = order.source.nbytes
        job = DeviceJob(self._device, nbytes, order.tag, order.keep, lambda: pair.stop(job))
        self._jobs.add(job)
        self._device.post(
            lambda: pair.write(
                seq,
                order.source,
                order.after,
                job,
                is_host_there=is_host,
                is_checked=order.checked,
            )
        )
        return job

    def watch(self, broken: Broken) -> None:
        """Call `broken` if the pair fails by itself."""
        self._broken = broken
        if self._error is not None and not self._is_closed:
            broken(self._error)

    def close(self, timeout: float = 1.0) -> bool:
        """Abort the writes in progress, and close the connection."""
        self._is_closed = True
        pair = self._pair
        if pair is not None:
            self._device.post(lambda: pair.fail(TransportError("the channel was closed")))
            self._has_ended.wait(timeout)
        self._jobs = still_running(self._jobs, timeout)
        return not self._jobs

    def attach(self, pair: SendingPair) -> None:
        """Set the pair that does the work; device's thread only."""
        self._pair = pair

    def failed(self, error: TransportError) -> None:
        """Note that the pair has failed or was closed; device's thread only."""
        self._error = error
        self._has_ended.set()
        if self._broken is not None and not self._is_closed:
            self._broken(error)


class NcclTransport(PlainTransport):
    """On-demand groups of two ranks, one for each direction between two engines."""

    name = "nccl"
    receiver_writes = True
    scatters = False

    def __init__(
        self,
        nccl: Nccl,
        device: Device,
        control: ControlPlane,
        epoch: int,
        host: str,
        *,
        buffer: Memory | None,
        overflows: bool,
        num_channels: int,
        max_groups: int,
        patience_seconds: float,
        first_seconds: float = FIRST_SECONDS,
        registers: bool = False,
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        """Listen on an ephemeral port of host; allocates the slabs. Bytes are received into
        `buffer` (None: nothing is received), and if `overflows` also into host memory. With
        `registers`, buffer and slabs are registered with each communicator.

        Raises:
            OSError: host cannot be bound.
            TransportError: the device has no memory for the slabs.
        """
        self._device = device
        self.checks = device.can_check
        self._control = control
        self._epoch = epoch
        self._nccl = nccl
        self._receives = buffer is not None
        self._tokens = Tokens()
        self._dials = Dials()
        self._senders: dict[int, ReceivingPair] = {}
        self._pairs: set[NcclPair] = set()  # the device's thread only
        self._is_closed = False
        processors = device.run(lambda: device.cuda.num_processors(device.index), 10.0)
        slots = num_slots(num_channels, processors)
        if slots == 1:
            logger.warning(
                "nccl_num_channels=%d: one peer is served at a time: the kernels of two do not "
                "fit on %d multiprocessors", num_channels, processors,
            )  # fmt: skip
        listener = listen(family_of(host), (host, 0))
        try:
            num_recv_slabs = NUM_RECV_SLABS if overflows else 0
            sent_bytes, recv_bytes = slabs_bytes(num_recv_slabs, slab_bytes)
            total = sent_bytes + recv_bytes
            self._memory = device.run(lambda: device.cuda.allocate(total), 10.0)
            count = NUM_SLABS + slots
            make = device.cuda.create_stream
            self._streams = device.run(lambda: [make(is_urgent=True) for _ in range(count)], 10.0)
        except BaseException:
            listener.close()
            raise
        self._address = join_address(host, listener.getsockname()[1])
        self._door = Door(control, listener, self._tokens, self._admit)
        self._reaper = Reaper(nccl, device)
        self._groups = Groups(self._reaper, max_groups)
        memory = ((self._memory, total), *([buffer] if buffer is not None else []))
        streams, recv_streams = self._streams[:NUM_SLABS], self._streams[NUM_SLABS:]
        lanes = Lanes(self._memory, slab_bytes, streams, min(slots, MAX_LANES))
        self._shared = Resources(
            nccl, device, self._reaper, Slots(len(lanes.lanes)), Slots(slots), lanes, recv_streams,
            Slabs(self._memory + sent_bytes, slab_bytes // RECV_SLAB_SHARE, num_recv_slabs),
            memory if registers and nccl.can_register else (), num_channels,
            patience_seconds, first_seconds,
        )  # fmt: skip
        self._snapshot = self._count()
        device.post(lambda: device.on_tick(self._tick))

    def invite(self, source_epoch: int) -> Endpoint | None:
        """Return the address, a token, the version of NCCL, whether our first group is still to be
        made, and whether we register memory."""
        if not self._receives:
            return None
        token, version = self._tokens.make(source_epoch), str(self._nccl.version)
        is_first = str(int(not self._nccl.has_initialised))
        return {
            "address": self._address, "token": token, "version": version, "is_first": is_first,
            "registers": str(int(bool(self._shared.registered))),
        }  # fmt: skip

    def patience(self, endpoint: Endpoint) -> float:
        """Return how long `connect` may take: longer if it makes the first group of a process."""
        shared = self._shared
        is_first = not self._nccl.has_initialised or endpoint.get("is_first") == "1"
        return shared.first_seconds + shared.patience_seconds if is_first else 0.0

    def connect(self, endpoint: Endpoint, connected: Connected) -> None:
        """Dial the peer; `connected` is called when the first group is ready, or with the error."""
        try:
            host, port = split_address(endpoint["address"])
            preamble = PREAMBLE.pack(self._epoch, bytes.fromhex(endpoint["token"]))
            version = int(endpoint["version"])
        except (KeyError, ValueError) as error:
            connected(TransportError(f"connect: bad nccl endpoint: {error!r}"))
            return
        if self._device.failure:
            connected(TransportError(f"connect: {self._device.failure}"))
            return
        if version != self._nccl.version:
            ours, theirs = show_version(self._nccl.version), show_version(version)
            text = f"connect: NCCL {ours} here, {theirs} there: both must be the same release"
            connected(TransportError(text))
            return
        dial(
            self._dials, self._control, host, port, preamble,
            lambda connection, _: self._dialled(connection, endpoint, connected), connected,
        )  # fmt: skip

    def expect(self, arrival: Arrival) -> DeviceJob:
        """Receive into one region of device memory."""
        pair, regions = self._senders.get(arrival.source_epoch), arrival.regions
        if pair is None or pair.is_broken:
            raise TransportError("expect: the sender has no data connection")
        if len(regions.lengths) > 1:
            raise TransportError("expect: NCCL receives into one region")
        address = int(regions.addresses[0]) if len(regions.addresses) else 0
        nbytes = regions.nbytes
        job = DeviceJob(self._device, nbytes, arrival.tag, arrival.keep, lambda: pair.stop(job))
        self._device.post(lambda: pair.expect(arrival.seq, address, nbytes, job))
        return job

    def is_gone(self, source_epoch: int) -> bool:
        """Return True: only our own process writes, and its jobs report their own end."""
        return True

    def forget(self, source_epoch: int, *, may_write: bool) -> None:
        """End the pair of a sender."""
        self._tokens.forget(source_epoch)
        self._end(self._senders.pop(source_epoch, None), "the sender is gone")

    def stats(self) -> dict[str, Any]:
        """Return a snapshot, at most a tick old: groups, and the device memory in bytes that they
        take, by our formula and as measured when each was made."""
        return self._snapshot

    def stop(self) -> None:
        """Abort everything in progress; returns at once."""
        self._device.post(self._close_pairs)

    def close(self) -> None:
        """End every pair, then free the slabs unless a kernel may still use them. On one host, an
        abort waits for the peer's, and that for a core: only one that counts as stuck is left."""
        if self._is_closed:
            return
        self._is_closed = True
        self._dials.close()
        self._door.close()
        self._device.run(self._close_pairs, CLOSE_SECONDS)
        if self._reaper.wait(PATIENCE_SECONDS):
            self._device.run(self._give_back, CLOSE_SECONDS)
        else:
            logger.error("close: a communicator does not end, the memory it uses is kept")

    def _dialled(self, connection: socket.socket, endpoint: Endpoint, connected: Connected) -> None:
        channel = NcclChannel(self._device)
        answers = [connected]

        def answer(outcome: Channel | TransportError) -> None:
            if answers:  # only the first outcome counts
                call = answers.pop()
                self._control.call_soon(lambda: call(outcome))

        def failed(error: TransportError) -> None:
            channel.failed(error)
            answer(error)

        def start() -> None:
            pair = SendingPair(
                self._shared, self._groups, connection, lambda: answer(channel), failed,
                is_first_there=endpoint.get("is_first") == "1",
                registers_there=endpoint.get("registers") == "1",
            )  # fmt: skip
            channel.attach(pair)
            self._pairs.add(pair)

        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._device.post(start)

    def _admit(self, connection: socket.socket, epoch: int) -> None:
        self._end(self._senders.pop(epoch, None), "the sender dialled again")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):
            connection.sendall(ACCEPTED)

        def start() -> ReceivingPair:
            pair = ReceivingPair(self._shared, connection)
            self._pairs.add(pair)
            self._groups.incoming.add(pair)
            return pair

        self._senders[epoch] = self._device.run(start, CLOSE_SECONDS)

    def _end(self, pair: NcclPair | None, reason: str) -> None:
        if pair is not None:
            self._device.post(lambda: pair.fail(TransportError(reason)))

    def _tick(self, now: float) -> None:
        for pair in list(self._pairs):
            if self._device.failure:
                pair.fail(TransportError(self._device.failure))
            pair.tick(now)
            if pair.is_broken:
                self._pairs.discard(pair)
                self._groups.incoming.discard(pair)
        self._groups.advance()
        self._snapshot = self._count()

    def _close_pairs(self) -> None:
        for pair in list(self._pairs):
            pair.fail(TransportError("the engine was closed"))

    def _give_back(self) -> None:
        self._device.cuda.free(self._memory)
        for stream in self._streams:
            self._device.cuda.destroy_stream(stream)

    def _count(self) -> dict[str, Any]:
        live = self._groups.live
        return {
            "groups": len(live),
            "estimated_bytes": sum(group.estimated_bytes for group in live),
            "registered_bytes": sum(group.registered_bytes for group in live),
            "measured_bytes": sum(group.measured_bytes for group in live),
            "made": self._groups.num_made,
            "evicted": self._groups.num_evicted,
            "aborted": self._reaper.num_aborted,
            "quarantined": self._reaper.num_quarantined(),
        }
