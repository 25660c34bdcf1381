"""HostPins: page-locks host memory for CUDA in slices, as far as copies need it.

One call for gigabytes holds locks of the driver, and stalls every process that uses a GPU of this
host: about 0.1 s for each gigabyte. Some drivers and kernels refuse so much at once. So a thread
page-locks slices of SLICE_BYTES, each when it is first needed, with pauses in between. A copy waits
for its slices. If one is refused, its copies work all the same, but hold up the thread that starts
them.
"""

from __future__ import annotations

import collections
import enum
import logging
import threading
import time

import numpy as np

from p2p_engine.control.affinity import restore_affinity
from p2p_engine.errors import TransportError
from p2p_engine.gpu.cuda import Cuda
from p2p_engine.memory.jobs import Moment
from p2p_engine.memory.layout import Int64s

logger = logging.getLogger(__name__)

SLICE_BYTES = 128 << 20
PAUSE_SECONDS = 0.02
MAX_REFUSALS = 3  # in a row; then CUDA is not asked again
REMOVE_SECONDS = 10.0  # for the slice that is being page-locked to end


class PinState(enum.Enum):
    """The state of a slice."""

    UNUSED = enum.auto()
    WANTED = enum.auto()
    PINNED = enum.auto()
    REFUSED = enum.auto()


class PinnedRange:
    """One range of host memory, and the states of its slices."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.slice_bytes = SLICE_BYTES
        self.states = [PinState.UNUSED] * -(-nbytes // SLICE_BYTES)
        self.is_closed = False

    def slices_of(self, addresses: Int64s, lengths: Int64s) -> list[int]:
        """Return the numbers of the slices that these regions touch."""
        inside = (addresses >= self.address) & (addresses < self.address + self.nbytes)
        offsets = addresses[inside] - self.address
        firsts = offsets // self.slice_bytes
        lasts = (offsets + np.maximum(lengths[inside], 1) - 1) // self.slice_bytes
        pairs = set(zip(firsts.tolist(), lasts.tolist(), strict=True))
        return sorted({number for first, last in pairs for number in range(first, last + 1)})

    def place_of(self, number: int) -> tuple[int, int]:
        """Return the address and the bytes of a slice."""
        offset = number * self.slice_bytes
        return self.address + offset, min(self.slice_bytes, self.nbytes - offset)

    def nbytes_in(self, state: PinState) -> int:
        """Return the bytes of all slices in a state."""
        numbers = (number for number, each in enumerate(self.states) if each is state)
        return sum(self.place_of(number)[1] for number in numbers)


class SlicesSettled:
    """A moment: slices are page-locked, or never will be."""

    def __init__(self, pinned: PinnedRange, numbers: list[int]) -> None:
        self._range = pinned
        self._numbers = numbers

    def is_complete(self) -> bool:
        """Whether that is so; never blocks."""
        settled = (PinState.PINNED, PinState.REFUSED)
        return self._range.is_closed or all(
            self._range.states[number] in settled for number in self._numbers
        )


class HostPins:
    """The page-locked host memory of one device's engine."""

    def __init__(self, cuda: Cuda, device: int) -> None:
        self._cuda = cuda
        self._device = device
        self._changed = threading.Condition()  # guards all below
        self._ranges: dict[int, PinnedRange] = {}
        self._wanted: collections.deque[tuple[PinnedRange, int]] = collections.deque()
        self._busy: PinnedRange | None = None
        self._num_refusals = 0  # in a row; the thread's only
        self._thread: threading.Thread | None = None
        self._is_stopping = False

    def add(self, address: int, nbytes: int) -> None:
        """Manage a range of host memory; nothing is page-locked yet."""
        self._cuda.note_host(address, nbytes)
        with self._changed:
            self._ranges = {**self._ranges, address: PinnedRange(address, nbytes)}

    def want(self, address: int, nbytes: int) -> None:
        """Page-lock the slices of a region soon, if it lies in a range that is managed."""
        self.pending(np.array([address], np.int64), np.array([nbytes], np.int64))

    def pending(self, addresses: Int64s, lengths: Int64s) -> list[Moment]:
        """Return the moments for which copies of these regions must wait; never blocks."""
        moments: list[Moment] = []
        for each in self._near(addresses):
            unsettled = SlicesSettled(each, each.slices_of(addresses, lengths))
            if not unsettled.is_complete():
                self._enqueue(each, unsettled)
                moments.append(unsettled)
        return moments

    def boundary(self, addresses: Int64s) -> tuple[int, int] | None:
        """Return the start and the size of the slices in which the first of these regions lies that
        is in a range of several; a copy must not cross them."""
        for each in self._near(addresses):
            if len(each.states) > 1 and each.slices_of(addresses, np.ones_like(addresses)):
                return each.address, each.slice_bytes
        return None

    def nbytes(self) -> dict[str, int]:
        """Return the bytes that are page-locked, and those that CUDA has refused."""
        ranges = list(self._ranges.values())
        return {
            "pinned": sum(each.nbytes_in(PinState.PINNED) for each in ranges),
            "refused": sum(each.nbytes_in(PinState.REFUSED) for each in ranges),
        }

    def remove(self, address: int) -> bool:
        """Undo a range; no copy of it may run. Blocks, in a thread on the device. Returns False if
        a slice is still being page-locked: its memory must stay mapped."""
        with self._changed:
            each = self._ranges.get(address)
            if each is None:
                return True
            each.is_closed = True
            if not self._changed.wait_for(lambda: self._busy is not each, REMOVE_SECONDS):
                return False
            self._ranges = {key: item for key, item in self._ranges.items() if key != address}
        for number, state in enumerate(each.states):
            if state is PinState.PINNED:
                self._unpin(each.place_of(number)[0])
        self._cuda.forget_host(address)
        return True

    def close(self, timeout: float) -> bool:
        """Stop the thread; idempotent. Blocks for at most `timeout` seconds; returns False if it
        did not stop."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)
            return not self._thread.is_alive()
        return True

    def _near(self, addresses: Int64s) -> list[PinnedRange]:
        """Return the ranges that these addresses may lie in: with many peers, few of theirs."""
        if not len(addresses):
            return []
        low, high = int(addresses.min()), int(addresses.max())
        ranges = self._ranges.values()
        return [
            each for each in ranges if each.address <= high and low < each.address + each.nbytes
        ]

    def _enqueue(self, each: PinnedRange, unsettled: SlicesSettled) -> None:
        with self._changed:
            for number in unsettled._numbers:
                if each.states[number] is PinState.UNUSED:
                    each.states[number] = PinState.WANTED
                    self._wanted.append((each, number))
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="p2p-pin", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        restore_affinity()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._is_stopping)
                if self._is_stopping:
                    return
                each, number = self._wanted.popleft()
                if each.is_closed:
                    continue
                self._busy = each
            state = self._pin(*each.place_of(number))
            with self._changed:
                each.states[number], self._busy = state, None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_stopping, PAUSE_SECONDS)

    def _pin(self, address: int, nbytes: int) -> PinState:
        if self._num_refusals >= MAX_REFUSALS:
            return PinState.REFUSED
        start, mib = time.monotonic(), nbytes >> 20
        try:
            self._cuda.use(self._device)
            self._cuda.pin(address, nbytes)
        except TransportError as error:
            logger.warning(
                "%d MiB of host memory stay pageable, copies of them are slower: %s",
                mib, str(error),
            )  # fmt: skip
            self._num_refusals += 1
            if self._num_refusals == MAX_REFUSALS:
                logger.warning("no more host memory is page-locked: CUDA is not asked again")
            return PinState.REFUSED
        self._num_refusals = 0
        logger.info("page-locked %d MiB of host memory in %.3f s", mib, time.monotonic() - start)
        return PinState.PINNED

    def _unpin(self, address: int) -> None:
        try:
            self._cuda.unpin(address)
        except TransportError as error:
            logger.warning("host memory stays page-locked: %s", str(error))
