"""Slabs: equal blocks of device memory. A sender packs scattered bytes into them, one piece in
each. A receiver uses them for pieces that belong in host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from p2p_engine.memory.layout import Int64s, Regions
from p2p_engine.transports.nccl.rendezvous import SlotRequest, Slots

SLAB_BYTES = 16 << 20  # 0.8 ms at 20 GB/s: a control round trip hides behind the piece before it
NUM_SLABS = 6
NUM_RECV_SLABS = 3  # two are filled while one is copied out, or the other way round


@dataclass(eq=False)
class Slab:
    """A slab that is held, or a wait for one while `address` is 0."""

    request: SlotRequest
    address: int = 0


class Slabs:
    """A few equal slabs, given out first come, first served. All may use the byte at `scratch`."""

    def __init__(self, address: int, slab_bytes: int, count: int) -> None:
        """Cut the slabs from the memory at `address`, of total_bytes(slab_bytes, count)."""
        self.slab_bytes = slab_bytes
        self.scratch = address + count * slab_bytes
        self._free = [address + i * slab_bytes for i in range(count)]
        self._slots = Slots(count)

    @staticmethod
    def total_bytes(slab_bytes: int, count: int) -> int:
        """Return how much memory the slabs need."""
        return slab_bytes * count + 4096

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
