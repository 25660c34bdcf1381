"""DeviceLanding: the landing memory of an engine whose caches are on a GPU.

The buffer is device memory, allocated once. The pool is page-locked host memory, so a full
buffer costs no more device memory; it is page-locked in slices, as it is used. Completion words are
always in host memory. For peers, an offset below DEVICE_OFFSET is in the host arena, any other in
the buffer.
"""

from __future__ import annotations

import logging

from mempool import Buddy
from p2p_engine.gpu.device import Device
from p2p_engine.gpu.pins import REMOVE_SECONDS, SLICE_BYTES
from p2p_engine.memory.arena import (
    BUFFER,
    MIN_BLOCK_BYTES,
    POOL,
    PROOF_BYTES,
    LandingArena,
    Space,
)

logger = logging.getLogger(__name__)

DEVICE_OFFSET = 1 << 47
IPC_BYTES = 2 << 20  # CUDA shares whole pages of this size: nothing else may lie in them
AHEAD_BYTES = 32 << 20  # of the pool, page-locked beyond what is reserved


def allocated_bytes(buffer_bytes: int) -> int:
    """Return how many bytes of the device a buffer of so many bytes takes, with the memory for
    proofs behind it."""
    return -(-max(buffer_bytes, 1) // IPC_BYTES) * IPC_BYTES + PROOF_BYTES


class DeviceLanding(LandingArena):
    """The buffer on the device, the pool and words on the host. The engine's lock guards it."""

    def __init__(
        self, device: Device, buffer_bytes: int, pool_bytes: int, *, page_lock: bool = False
    ) -> None:
        """Allocate the buffer, and map the pool. Blocks.

        Raises:
            OSError: the host memory cannot be mapped.
            TransportError: the device has too little memory.
        """
        super().__init__(buffer_bytes, pool_bytes, page_lock=page_lock, has_buffer=False)
        self._device = device
        nbytes = allocated_bytes(buffer_bytes)
        self.device_bytes = nbytes - PROOF_BYTES
        self._device_buddy = Buddy(self.device_bytes, MIN_BLOCK_BYTES)
        self._on_device: set[Space] = set()
        self._is_closed = self._is_kept = False
        cuda = device.cuda
        try:
            self.device_address = device.run(lambda: cuda.allocate(nbytes), 60.0)
        except BaseException:
            super().close()
            raise
        device.pins.add(self.arena.address, self.arena.nbytes)

    def reserve_in(self, place: str, nbytes: int) -> Space | None:
        """Reserve nbytes of the device or of the arena; None if its free pieces are too small."""
        if place == BUFFER:
            return self._reserve_on_device(nbytes)
        space = super().reserve_in(POOL, nbytes)
        if space is not None:  # before its bytes come
            end = min(self.arena.nbytes, space.offset + space.nbytes + AHEAD_BYTES)
            self._device.pins.want(self.arena.address + space.offset, end - space.offset)
        return space

    def release(self, space: Space) -> None:
        """Free a space.

        Raises:
            ValueError: it is not live.
        """
        if space.place != BUFFER:
            super().release(space)
            return
        self._device_buddy.free(space.handle)
        self._on_device.discard(space)
        self.live_bytes[BUFFER] -= space.nbytes

    def is_touched(self, space: Space) -> bool:
        """Whether another process may write to a space. In the pool, that process page-locks
        whole slices first, and must find all of their pages touched."""
        if space.place == BUFFER:
            return True
        end = -(-(space.offset + space.nbytes) // SLICE_BYTES) * SLICE_BYTES
        return min(end, self.arena.nbytes) <= self.arena.touched_bytes

    def address(self, space: Space) -> int:
        """Return the address of a space for this process and its device."""
        if space.place == BUFFER:
            return self.device_address + space.offset - DEVICE_OFFSET
        return super().address(space)

    def check(self) -> None:
        """Check the invariants.

        Raises:
            RuntimeError: names the one that is broken.
        """
        self._buddy.check()
        self._device_buddy.check()
        self.check_nonce()
        live = sum(space.nbytes for space in self._on_device)
        if live != self.live_bytes[BUFFER]:
            raise RuntimeError(f"accounted {self.live_bytes[BUFFER]}, live {live} device bytes")

    @property
    def proof_address(self) -> int:
        """Return where the memory for proofs begins, in the same allocation; no landing lies
        there."""
        return self.device_address + self.device_bytes

    def keep_buffer(self) -> None:
        """Never free the device's memory: a sender may still write there, and CUDA does not keep it
        for a process that has mapped it."""
        self._is_kept = True

    def close(self) -> None:
        """Free everything; idempotent. Nothing may be written any more."""
        if self._is_closed:
            return
        self._is_closed = True
        host, cuda = self.arena, self._device.cuda
        if not self._is_kept:
            self._device.run(lambda: cuda.free(self.device_address), 10.0)
        pins = self._device.pins
        if self._device.run(lambda: pins.remove(host.address), 2 * REMOVE_SECONDS):
            super().close()
        else:
            logger.error("close: the pool is still being page-locked, its memory is kept")

    def _reserve_on_device(self, nbytes: int) -> Space | None:
        try:
            handle = self._device_buddy.alloc(nbytes)
        except MemoryError:  # in pieces too small
            return None
        offset = DEVICE_OFFSET + self._device_buddy.offset(handle)
        space = Space(handle, offset, nbytes, BUFFER)
        self._on_device.add(space)
        self.live_bytes[BUFFER] += nbytes
        return space
