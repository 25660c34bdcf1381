"""DeviceMemory: the GPU memory that an engine needs, and that vLLM must leave for it.

vLLM measures the GPU and sizes its cache before it makes the connector, so its figures include
nothing of ours. The engine can use the memory outside `--gpu-memory-utilization`, or, if
`--kv-cache-memory-bytes` is set, the memory that is still free after vLLM's cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from p2p_engine.config import SendMode

if TYPE_CHECKING:
    from p2p_engine.config import EngineConfig

MIB = 1 << 20
CONTEXT_BYTES = 512 * MIB  # what CUDA keeps for a process, before vLLM measures


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one GPU: the first two are taken at start, those of groups as peers come, at
    most."""

    buffer_bytes: int
    slab_bytes: int
    group_bytes: int

    @property
    def at_start(self) -> int:
        """Return the bytes that must be free when the engine starts."""
        return self.buffer_bytes + self.slab_bytes

    @property
    def at_most(self) -> int:
        """Return the bytes that must be left to the engine."""
        return self.at_start + self.group_bytes

    def __str__(self) -> str:
        """Return a text with the amount of each use."""
        return (
            f"{self.at_most / MIB:.0f} MiB (buffer {self.buffer_bytes / MIB:.0f}, slabs "
            f"{self.slab_bytes / MIB:.0f}, groups up to {self.group_bytes / MIB:.0f})"
        )


@dataclass(frozen=True)
class Room:
    """The memory that vLLM leaves on a GPU of `total_bytes`, of which it uses the part
    `utilization`.

    With `utilization` None, its cache was given a size, and vLLM measures nothing. `free_bytes` are
    free now, beside its cache of `cache_bytes`; other processes may have taken some.
    `outside_bytes` were taken before vLLM measured, which adds its part to them: CUDA's context,
    NCCL of vLLM's own ranks.
    """

    total_bytes: int
    utilization: float | None
    cache_bytes: int | None = None
    free_bytes: int | None = None
    outside_bytes: int = 0

    @property
    def left_bytes(self) -> int:
        """Return the bytes that neither vLLM nor another process uses."""
        used = math.ceil(self.total_bytes * (self.utilization or 0.0))
        left = self.total_bytes - self.outside_bytes - used
        return left if self.free_bytes is None else min(left, self.free_bytes)

    def lacking(self, needed: DeviceMemory) -> int:
        """Return how many bytes are missing; 0 if there is room."""
        return max(0, needed.at_most - self.left_bytes)

    def advice(self, needed: DeviceMemory) -> str:
        """Return which of vLLM's settings leaves room: the largest value of each, but never 0,
        which vLLM refuses or ignores. If there is none, return what does not fit."""
        ways = self.remedies(needed)
        return f"use {' or '.join(ways)}" if ways else self._refusal(needed)

    def remedies(self, needed: DeviceMemory) -> list[str]:
        """Return those settings as they are written; empty if no value leaves room."""
        ways = []
        if self.utilization is not None:
            lower = self.utilization - self.lacking(needed) / max(1, self.total_bytes)
            if _hundredths(lower) > 0:
                ways.append(f"--gpu-memory-utilization {_hundredths(lower):.2f}")
        if self.cache_bytes is not None and self.cache_bytes > self.lacking(needed):
            ways.append(f"--kv-cache-memory-bytes {self.cache_bytes - self.lacking(needed)}")
        return ways

    def _refusal(self, needed: DeviceMemory) -> str:
        most = self.total_bytes
        if self.free_bytes is not None:
            most = self.free_bytes + (self.cache_bytes or 0)
        if self.utilization is not None:
            # it is no less than a hundredth
            least = self.total_bytes - self.total_bytes * 99 // 100
            most = min(most, self.total_bytes - self.outside_bytes - least)
        what, nbytes, remedy = "buffer and slabs", needed.at_start, "kv_buffer_size"
        if needed.at_start < most:
            what, nbytes = "buffer, slabs and groups", needed.at_most
            remedy += " or nccl_max_groups"
        return (
            f"lower {remedy}: the engine's {what} do not fit; they need {nbytes / MIB:.0f} MiB, "
            f"and vLLM can leave less than {most / MIB:.0f} MiB"
        )


def has_landing_memory(kv_role: str, send_type: SendMode) -> bool:
    """Whether an engine has a buffer and a pool: to receive, or with GET to spill held sources."""
    return kv_role != "kv_producer" or send_type is SendMode.GET


def device_memory(config: EngineConfig, *, receives: bool = True) -> DeviceMemory:
    """Compute the memory of one rank's engine; its `config` must be that of a GPU (`on_device`)."""
    # These load torch, which the command line avoids until it needs this.
    from p2p_engine.gpu.landing import allocated_bytes
    from p2p_engine.gpu.pack_kernel import DEVICE_BYTES
    from p2p_engine.transports.nccl.memory import Side, estimated_bytes
    from p2p_engine.transports.nccl.slabs import NUM_RECV_SLABS, slabs_bytes
    from p2p_engine.transports.proof import PATTERN_BYTES

    lands = receives and config.kv_buffer_size + config.pool_bytes > 0
    buffer = allocated_bytes(config.kv_buffer_size) if lands else 0
    own = DEVICE_BYTES + (PATTERN_BYTES if "cuda_ipc" in config.transports else 0)
    if "nccl" not in config.transports:
        return DeviceMemory(buffer, own, 0)
    num_recv_slabs = NUM_RECV_SLABS if lands and config.pool_bytes else 0
    slabs = sum(slabs_bytes(num_recv_slabs)) + own
    side = Side.RECEIVER if lands else Side.SENDER
    groups = config.nccl_max_groups * estimated_bytes(config.nccl_num_channels, side)
    return DeviceMemory(buffer, slabs, groups)


def memory_now(config: EngineConfig) -> tuple[int, int]:
    """Return the free and the total bytes of the engine's GPU, whoever uses the rest."""
    from p2p_engine.gpu.cuda import Cuda

    cuda = Cuda()
    return cuda.on(config.device_index, cuda.memory)


def _hundredths(part: float) -> float:
    """Return a share rounded down to hundredths, at least 0."""
    return max(0, math.floor(part * 100 + 1e-9)) / 100
