"""What the code lets a link carry, by a model: idle, with a busy interpreter, and with a held one.

The model is in rates_world.py: the device threads and the pairs of the transport nccl are real, and
run in virtual time; CUDA, NCCL, sockets and links cost what its `Costs` say. One prompt moves from
one GPU to another, in chunks of regions of 32 KiB, as the engine does: four of them are not written
yet, and the next one is offered when one is.

Nothing here was measured on a GPU. These are predictions, to be checked on one.
"""

from __future__ import annotations

import dataclasses
import itertools
import socket
from typing import Any, cast

import numpy as np

from benchmarks.harness import Row, arguments, progress, record
from benchmarks.rates_world import (
    MIB,
    Costs,
    LinkUse,
    ModelDevice,
    ModelNccl,
    ModelSocket,
    NoReaper,
    VirtualTime,
)
from p2p_engine.config import EngineConfig
from p2p_engine.gpu.device import DeviceJob
from p2p_engine.memory.arena import SHARE_OF_LANDING, WINDOW
from p2p_engine.memory.layout import Regions
from p2p_engine.transports.nccl.groups import Groups
from p2p_engine.transports.nccl.pair import Resources
from p2p_engine.transports.nccl.receiving import ReceivingPair
from p2p_engine.transports.nccl.rendezvous import Slots
from p2p_engine.transports.nccl.sending import SendingPair
from p2p_engine.transports.nccl.slabs import NUM_SLABS, SLAB_BYTES, Lanes, Slabs
from p2p_engine.transports.nccl.transport import MAX_LANES, num_slots

REGION_BYTES = 32 << 10
CHUNK_MIB = EngineConfig().on_device("cuda:0").chunk_bytes // MIB
CONTROL_HOPS = 3  # OFFER, GRANT and the order to write, each in another thread
PUSHES = {"cuda_ipc, PCIe 5 x16": 55.0, "cuda_ipc, NVLink 4": 370.0}
LINKS = {  # GB/s that two channels can fill, or as many as are said
    "100 Gb/s": 12.5,
    "200 Gb/s": 25.0,
    "400 Gb/s": 50.0,
    "PCIe 5 x16": 55.0,
    "NVLink, 8 channels": 80.0,
}
INTERPRETERS = {"idle": 0.0, "busy": 500e-6, "held": 5e-3}


class Rig:
    """A sender and a receiver with one group."""

    def __init__(self, costs: Costs, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self.clock = clock = VirtualTime()
        self.costs = costs
        self._seqs = itertools.count(1)
        self._is_ready = False
        self._num_left = self._num_open = self._num_unwritten = 0
        link, meetings = LinkUse(), dict[bytes, Any]()
        self.devices = [ModelDevice(clock, costs) for _ in range(2)]
        sockets = [ModelSocket(device) for device in self.devices]
        sockets[0].peer, sockets[1].peer = sockets[1], sockets[0]
        shared = [self._resources(device, meetings, link) for device in self.devices]
        reaper = cast("Any", NoReaper())
        self.receiver = ReceivingPair(shared[1], cast("socket.socket", sockets[1]))
        self.sender = SendingPair(
            shared[0], Groups(reaper, 16), cast("socket.socket", sockets[0]), self._ready, _fail
        )
        self.devices[0].on_end, self.devices[1].on_end = self._written, self._ended

    def rate(self, num_chunks: int) -> float:
        """Return the GB/s at which chunks arrive."""
        with self.clock.installed():
            self.clock.run_until(lambda: self._is_ready, 100.0)
            start, self._num_left = self.clock.now, num_chunks
            self._open_more(0.0)
            self.clock.run_until(lambda: not self._num_open and not self._num_left, 1000.0)
            return num_chunks * self._chunk_bytes / (self.clock.now - start) / 1e9

    def _resources(
        self, device: ModelDevice, meetings: dict[bytes, Any], link: LinkUse
    ) -> Resources:
        nccl, slots = ModelNccl(device.cuda, meetings, link), num_slots(2, 132)
        streams = [device.cuda.create_stream() for _ in range(NUM_SLABS + 3)]
        lanes = Lanes(1 << 40, SLAB_BYTES, streams[:NUM_SLABS], MAX_LANES)
        return Resources(
            cast("Any", nccl), device, cast("Any", NoReaper()), Slots(MAX_LANES), Slots(slots),
            lanes, streams[NUM_SLABS:], Slabs(1 << 41, SLAB_BYTES, 0), (), 2, 60.0, 60.0,
        )  # fmt: skip

    def _begin(self) -> None:
        seq, count = next(self._seqs), self._chunk_bytes // REGION_BYTES
        sender, receiver = self.devices
        starts = np.arange(count, dtype=np.int64) * 2 * REGION_BYTES
        regions = Regions(starts + (1 << 42), np.full(count, REGION_BYTES, np.int64))
        there = DeviceJob(receiver, self._chunk_bytes, "there", None, _nothing)
        here = DeviceJob(sender, self._chunk_bytes, "here", None, _nothing)
        address = (1 << 43) + seq * self._chunk_bytes
        receiver.post(lambda: self.receiver.expect(seq, address, self._chunk_bytes, there))
        sender.post(lambda: self.sender.write(seq, regions, (), here))

    def _open_more(self, pause: float) -> None:
        while self._num_left and self._num_unwritten < WINDOW and self._num_open < SHARE_OF_LANDING:
            self._num_left -= 1
            self._num_open += 1
            self._num_unwritten += 1
            self.clock.at(self.clock.now + pause, self._begin)

    def _written(self, job: DeviceJob) -> None:
        self._num_unwritten -= 1
        self._open_more(self.costs.grant + CONTROL_HOPS * self.costs.interpreter)

    def _ended(self, job: DeviceJob) -> None:
        if job.state != "done":
            raise RuntimeError(f"a chunk is {job.state}: {job.error}")
        self._num_open -= 1
        self._open_more(self.costs.grant + CONTROL_HOPS * self.costs.interpreter)

    def _ready(self) -> None:
        self._is_ready = True


class PushRig:
    """A sender that writes into a mapped buffer, by the device's own copies."""

    def __init__(self, costs: Costs, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._costs = costs
        self._num_left = self._num_open = 0
        self._clock = VirtualTime()
        # The kernel writes at the link's rate, and nothing has to come back.
        self._device = ModelDevice(
            self._clock, dataclasses.replace(costs, pack_rate=costs.link_rate)
        )
        self._device.on_end = self._ended

    def rate(self, num_chunks: int) -> float:
        """Return the GB/s at which chunks are written."""
        with self._clock.installed():
            start, self._num_left = self._clock.now, num_chunks
            for _ in range(min(WINDOW, num_chunks)):
                self._take()
                self._begin()
            self._clock.run_until(lambda: not self._num_open, 1000.0)
            return num_chunks * self._chunk_bytes / (self._clock.now - start) / 1e9

    def _take(self) -> None:
        self._num_left -= 1
        self._num_open += 1

    def _begin(self) -> None:
        count = self._chunk_bytes // REGION_BYTES
        starts = np.arange(count, dtype=np.int64) * 2 * REGION_BYTES
        lengths = np.full(count, REGION_BYTES, np.int64)
        self._device.copy(starts + (1 << 42), starts + (1 << 43), lengths)

    def _ended(self, job: DeviceJob) -> None:
        if job.state != "done":
            raise RuntimeError(f"a chunk is {job.state}: {job.error}")
        self._num_open -= 1
        if self._num_left:
            self._take()
            waits = CONTROL_HOPS * self._costs.interpreter
            self._clock.at(self._clock.now + self._costs.grant + waits, self._begin)


def _fail(error: Exception) -> None:
    raise error


def _nothing() -> None:
    """Nobody cancels."""


def main() -> None:
    """Play every link with every interpreter."""
    parser = arguments("rates", __doc__ or "", repetitions=1)
    parser.add_argument("--prompt-gib", type=int, default=4, help="bytes (%(default)s GiB)")
    parser.add_argument("--chunk-mib", type=int, default=CHUNK_MIB, help="(%(default)s)")
    options = parser.parse_args()
    rows: list[Row] = []
    for name, limit in (*LINKS.items(), *PUSHES.items()):
        progress(name)
        row: Row = {"link": name, "limit_gb_s": limit}
        for kind, seconds in INTERPRETERS.items():
            costs = dataclasses.replace(Costs(), link_rate=limit * 1e9, interpreter=seconds)
            rig = PushRig if name in PUSHES else Rig
            rate = rig(costs, options.chunk_mib * MIB).rate(
                options.prompt_gib * 1024 // options.chunk_mib // (8 if kind == "held" else 1)
            )
            row |= {kind: round(rate, 1), f"{kind}_ratio": round(rate / limit, 2)}
        rows.append(row)
    record(rows, options, {"costs": dataclasses.asdict(Costs()), "interpreters": INTERPRETERS})


if __name__ == "__main__":
    main()
