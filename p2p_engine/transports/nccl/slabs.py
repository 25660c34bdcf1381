"""Slabs: equal blocks of device memory. A sender packs scattered bytes into them, one piece in
each. A receiver uses them for pieces that belong in host memory.

The sender's slabs belong to lanes, one for each of its slots, and each slab has a stream: first it
is packed there, then it is sent. So the device packs one slab of a lane while it sends another one,
and nobody has to tell it when: all pieces of a burst are enqueued at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from p2p_engine.memory.layout import Int64s, Regions
from p2p_engine.transports.nccl.rendezvous import SlotRequest, Slots

SLAB_BYTES = 32 << 20  # 0.7 ms at 50 GB/s: twenty times what a kernel takes to start and to end
NUM_SLABS = 4  # to send from, each with a stream: one is packed while another one is sent
RECV_SLAB_SHARE = 2  # a slab for what goes on to the host is smaller by this
NUM_RECV_SLABS = 3  # two are filled while one is copied out, or the other way round


def slabs_bytes(num_recv_slabs: int, slab_bytes: int = SLAB_BYTES) -> tuple[int, int]:
    """Return the bytes of the slabs to send from (with a byte for all), and of those to receive."""
    return slab_bytes * NUM_SLABS + 4096, slab_bytes // RECV_SLAB_SHARE * num_recv_slabs


@dataclass(eq=False)
class Slab:
    """A slab that is held, or a wait for one while `address` is 0."""

    request: SlotRequest
    address: int = 0


class Slabs:
    """A few equal slabs, given out first come, first served."""

    def __init__(self, address: int, slab_bytes: int, count: int) -> None:
        """Cut the slabs from the memory at `address`."""
        self.slab_bytes = slab_bytes
        self._free = [address + i * slab_bytes for i in range(count)]
        self._slots = Slots(count)

    def take(self, granted: Callable[[Slab], None]) -> Slab:
        """Call `granted` when a slab is free, perhaps at once."""

        def have() -> None:
            slab.address = self._free.pop()
            granted(slab)

        slab = Slab(SlotRequest(have))
        self._slots.take(slab.request)
        return slab

    def give_back(self, slab: Slab) -> None:
        """Free a slab, or stop waiting for one; idempotent."""
        if slab.address:
            self._free.append(slab.address)
            slab.address = 0
        self._slots.give_back(slab.request)


@dataclass(eq=False)
class LaneSlab:
    """A slab to send from, with its stream."""

    address: int
    stream: int
    num_used: int = 0  # by bursts in progress


class Lane:
    """The slabs of one sending slot, used in turn."""

    def __init__(self, slabs: list[LaneSlab]) -> None:
        self._slabs = slabs
        self._next = 0

    @property
    def next(self) -> LaneSlab:
        """Return the slab that comes next."""
        return self._slabs[self._next]

    def turn(self) -> LaneSlab:
        """Return the next slab, and go on to the one behind it."""
        slab = self.next
        self._next = (self._next + 1) % len(self._slabs)
        return slab


class Lanes:
    """All slabs to send from. All may use the byte at `scratch`."""

    def __init__(self, address: int, slab_bytes: int, streams: list[int], count: int) -> None:
        """Cut a slab for each stream from the memory at `address`, and share them among `count`
        lanes."""
        self.slab_bytes = slab_bytes
        self.scratch = address + len(streams) * slab_bytes
        slabs = [
            LaneSlab(address + number * slab_bytes, stream) for number, stream in enumerate(streams)
        ]
        self.lanes = [Lane(slabs[number::count]) for number in range(count)]


class Cutter:
    """Cuts a list of regions into consecutive pieces of its byte stream."""

    def __init__(self, regions: Regions) -> None:
        kept = regions.coalesced()
        self._addresses, self._lengths = kept.addresses, kept.lengths
        self._ends: Int64s = np.cumsum(kept.lengths)

    def cut(self, offset: int, nbytes: int) -> Regions:
        """Return where the bytes [offset, offset + nbytes) lie; nbytes > 0."""
        first = int(np.searchsorted(self._ends, offset, side="right"))
        last = int(np.searchsorted(self._ends, offset + nbytes, side="left"))
        addresses = self._addresses[first : last + 1].copy()
        lengths = self._lengths[first : last + 1].copy()
        skipped = offset - int(self._ends[first] - self._lengths[first])
        addresses[0] += skipped
        lengths[0] -= skipped
        lengths[-1] -= int(self._ends[last]) - (offset + nbytes)
        return Regions(addresses, lengths, is_joined=True)
