"""Bytes on a device that every process can tell from each other, and room to receive them."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np

from mempool import Arena
from p2p_engine.gpu.cuda import Cuda
from p2p_engine.memory.paged import PagedCache, PagedSink, PagedSource
from tests.gpu.oracle import read_by

SEED = 7
ONE_BLOCK = np.zeros(1, np.int64)


def draw(seed: str, count: int, max_bytes: int, budget_bytes: int) -> list[tuple[int, int]]:
    """Return (offset, size) of so many pieces: sizes log-uniform from 1 to max_bytes, of which the
    last ones are small when their sum would be more than the budget."""
    source, left, pieces = random.Random(seed), budget_bytes, []
    for number in range(count):
        size = int(2 ** source.uniform(0, math.log2(max_bytes)))
        size = max(1, min(size, left - (count - number)))
        left -= size
        pieces.append((source.randrange(max_bytes), size))
    return pieces


class GpuMemory:
    """Owns 2 * max_bytes of random device memory, `num_slots` times max_bytes to receive into, and
    host memory in which both are compared, also by cupy if it is there. Pieces start below
    max_bytes."""

    def __init__(self, cuda: Cuda, max_bytes: int, num_slots: int, cupy: Any) -> None:
        self._cuda = cuda
        self._cupy = cupy
        self._stream = cuda.create_stream()
        self._max_bytes = max_bytes
        self._host = Arena(2 * max_bytes)
        cuda.register(self._host.address, 2 * max_bytes)
        self._expected = np.random.default_rng(SEED).integers(0, 256, 2 * max_bytes, np.uint8)
        self._source = cuda.allocate(2 * max_bytes)
        self._slots = cuda.allocate(num_slots * max_bytes)
        self._host.view(0, 2 * max_bytes)[:] = self._expected.tobytes()
        cuda.copy(self._source, self._host.address, 2 * max_bytes, self._stream)
        cuda.synchronize(self._stream)

    def source(self, piece: tuple[int, int]) -> PagedSource:
        """Return a piece of the random memory."""
        offset, size = piece
        return PagedSource(_cache(self._source + offset, size), ONE_BLOCK, 0, 1)

    def sink(self, slot: int, size: int) -> PagedSink:
        """Return the beginning of a slot."""
        return PagedSink(_cache(self._slots + slot * self._max_bytes, size), ONE_BLOCK, 0, 1)

    def holds(self, slot: int, piece: tuple[int, int]) -> bool:
        """Whether a slot begins with the piece; blocks until it has been read."""
        offset, size = piece
        address = self._slots + slot * self._max_bytes
        self._cuda.copy(self._host.address, address, size, self._stream)
        self._cuda.synchronize(self._stream)
        reads = [np.frombuffer(self._host.view(0, size), np.uint8)]
        if self._cupy is not None:
            reads.append(read_by(self._cupy, address, size))
        return all(np.array_equal(got, self._expected[offset : offset + size]) for got in reads)

    def close(self) -> None:
        """Give everything back."""
        for address in (self._source, self._slots):
            self._cuda.free(address)
        self._cuda.unregister(self._host.address)
        self._host.close()
        self._cuda.destroy_stream(self._stream)


def _cache(address: int, nbytes: int) -> PagedCache:
    place, size = np.array([address], np.int64), np.array([nbytes], np.int64)
    return PagedCache(place, size, size, 1)
