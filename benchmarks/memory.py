"""Host memory with known contents as a paged cache; a seed makes the same in two processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from p2p_engine.memory.paged import PagedCache

Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]


def ordinary_memory(nbytes: int) -> Bytes:
    """Memory as torch allocates a KV cache on the host, every page touched."""
    memory: Bytes = torch.ones(nbytes, dtype=torch.uint8).numpy()
    return memory


def random_memory(nbytes: int, seed: int) -> Bytes:
    """Ordinary memory with contents that depend on the seed alone; nbytes is a multiple of 8."""
    memory = ordinary_memory(nbytes)
    words = memory.view(np.uint64)
    random = np.random.default_rng(seed)
    step = 1 << 20
    for start in range(0, len(words), step):
        part = words[start : start + step]
        part[:] = random.integers(0, 2**64, len(part), dtype=np.uint64)
    return memory


class HostCache:
    """`memory` as num_layers layers of pages, each layer's blocks one after the other."""

    def __init__(self, memory: Bytes, num_layers: int, page_bytes: int) -> None:
        num_blocks = len(memory) // (num_layers * page_bytes)
        used = memory[: num_layers * num_blocks * page_bytes]
        self.pages = used.reshape(num_layers, num_blocks, page_bytes)
        layers = np.arange(num_layers, dtype=np.int64)
        same = np.full(num_layers, page_bytes, np.int64)
        first = layers * num_blocks * page_bytes + address_of(memory)
        self.paged = PagedCache(first, same, same, num_blocks)

    def stamp(self, block_ids: Int64s, number: int) -> None:
        """Write `number` into the first word of each page, so that old bytes are recognized."""
        self.pages.view(np.uint64)[:, block_ids, 0] = number

    def holds(self, block_ids: Int64s, other: HostCache, other_ids: Int64s) -> bool:
        """Whether these blocks are the other cache's blocks, byte for byte."""
        pairs = zip(self.pages, other.pages, strict=True)
        return all(np.array_equal(mine[block_ids], its[other_ids]) for mine, its in pairs)


def address_of(memory: npt.NDArray[Any]) -> int:
    """Where the memory lies."""
    return int(memory.ctypes.data)


def scattered(num_blocks: int, out_of: int, seed: int) -> Int64s:
    """Choose blocks in random order: neighbours in the list are rarely neighbours in memory."""
    return np.random.default_rng(seed).permutation(out_of)[:num_blocks].astype(np.int64)
