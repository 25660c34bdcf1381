"""NIXL's side of the transfer benchmark: one-sided WRITE over UCX between two processes."""

from __future__ import annotations

import importlib.util
import logging
import time
from typing import Any

import numpy as np

from benchmarks.memory import (
    HostCache,
    Int64s,
    address_of,
    ordinary_memory,
    random_memory,
    scattered,
)


def installed() -> bool:
    """Whether NIXL is there; only processes of its own load it, because UCX hooks malloc."""
    return importlib.util.find_spec("nixl") is not None


def _agent(name: str) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    logging.getLogger("nixl").setLevel(logging.WARNING)
    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


def _descriptors(base: int, offsets: Int64s, nbytes: int) -> Any:
    """One (address, length, device) for each piece."""
    columns = [base + offsets, np.full_like(offsets, nbytes), np.zeros_like(offsets)]
    return np.stack(columns, axis=1).astype(np.uint64)


class NixlTarget:
    """Owns the memory that is written."""

    def __init__(self, total_bytes: int, seed: int) -> None:
        self._agent = _agent("target")
        self._memory = ordinary_memory(total_bytes)
        self._source = random_memory(2 * total_bytes, seed)
        self._agent.register_memory([(address_of(self._memory), total_bytes, 0, "")], "DRAM")

    def endpoint(self) -> tuple[bytes, int]:
        """Return the agent's metadata and where the memory lies."""
        return self._agent.get_agent_metadata(), address_of(self._memory)

    def verify(self, block_bytes: int, seed: int, number: int) -> bool:
        """Whether the memory holds the initiator's blocks, one after the other."""
        mine, its = (HostCache(item, 1, block_bytes) for item in (self._memory, self._source))
        num_blocks, out_of = mine.paged.num_blocks, its.paged.num_blocks
        block_ids = scattered(num_blocks, out_of, seed)
        its.stamp(block_ids, number)
        return mine.holds(np.arange(num_blocks), its, block_ids)

    def close(self) -> None:
        """The process's end leaves nothing behind."""


class NixlInitiator:
    """Writes scattered blocks of its own memory into the target's."""

    def __init__(self, total_bytes: int, seed: int, metadata: bytes, base: int) -> None:
        self._agent = _agent("initiator")
        self._total_bytes = total_bytes
        self._source = random_memory(2 * total_bytes, seed)
        self._agent.register_memory([(address_of(self._source), 2 * total_bytes, 0, "")], "DRAM")
        self._peer = self._agent.add_remote_agent(metadata)
        self._base = base

    def prepare(self, block_bytes: int, seed: int) -> None:
        """Describe the blocks on both sides, which is not timed."""
        self._cache = HostCache(self._source, 1, block_bytes)
        out_of = self._cache.paged.num_blocks
        self._block_ids = scattered(out_of // 2, out_of, seed)
        to = np.arange(out_of // 2, dtype=np.int64) * block_bytes
        local = _descriptors(address_of(self._source), self._block_ids * block_bytes, block_bytes)
        remote = _descriptors(self._base, to, block_bytes)
        self._handle = self._agent.initialize_xfer(
            "WRITE",
            self._agent.get_xfer_descs(local, "DRAM"),
            self._agent.get_xfer_descs(remote, "DRAM"),
            self._peer,
        )

    def write(self, number: int) -> float:
        """Write everything once; returns the seconds from the start until it is complete."""
        self._cache.stamp(self._block_ids, number)
        start = time.perf_counter()
        state = self._agent.transfer(self._handle)
        while state != "DONE":
            state = self._agent.check_xfer_state(self._handle)
            if state == "ERR":
                raise RuntimeError("the NIXL transfer failed")
        return time.perf_counter() - start

    def close(self) -> None:
        """The process's end leaves nothing behind."""
