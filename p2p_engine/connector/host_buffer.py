"""Host buffer: blocks in host memory that stand for device blocks while these are transferred.

"kv_buffer_device": "cpu" beside a cache on another device: the engine reads and fills host blocks
only; vLLM's copy operations, which each of its accelerators has, carry blocks over. A cache that is
in host memory needs none: each of its blocks stands for itself.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch

from p2p_engine.errors import ConfigError, TransportError
from p2p_engine.memory.layout import Int64s

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import CopyBlocksOp

logger = logging.getLogger(__name__)


class Staging(Protocol):
    """Maps vLLM's blocks to the host blocks that the engine uses. Used by vLLM's thread only."""

    is_copy: bool

    def take(self, block_ids: Int64s) -> Int64s | None:
        """Return host blocks for these device blocks, the caller's until given back; None: there
        are not so many free ones now."""
        ...

    def give_back(self, places: Int64s) -> None:
        """Return host blocks that nothing reads or writes any more."""
        ...

    def save(self, block_ids: Int64s, places: Int64s) -> None:
        """Copy device blocks into host blocks; blocks until it is done.

        Raises:
            TransportError: the copy failed.
        """
        ...

    def load(self, places: Int64s, block_ids: Int64s) -> None:
        """Copy host blocks into device blocks, before whatever the device does next.

        Raises:
            TransportError: the copy failed.
        """
        ...


class InPlace:
    """vLLM's blocks are in host memory, so each is its own host block."""

    is_copy = False

    def take(self, block_ids: Int64s) -> Int64s | None:
        """Return the same ids."""
        return block_ids

    def give_back(self, places: Int64s) -> None:
        """Do nothing: the blocks are vLLM's."""

    def save(self, block_ids: Int64s, places: Int64s) -> None:
        """Nothing."""

    def load(self, places: Int64s, block_ids: Int64s) -> None:
        """Nothing."""


class HostBuffer:
    """A cache of `num_blocks` blocks in host memory with the layers of one on a device.

    Invariant: a host block is free, or lent to exactly one caller.
    """

    is_copy = True

    def __init__(
        self,
        layers: dict[str, torch.Tensor],
        num_device_blocks: int,
        budget_bytes: int,
        min_blocks: int,
    ) -> None:
        """Allocate as many blocks as the device has, or as the budget allows.

        Memory is taken page by page, as it is needed.

        Raises:
            ConfigError: the budget is too small for the `min_blocks` of one request.
        """
        self._device = layers
        self._num_pieces = {
            name: tensor.shape[0] // num_device_blocks for name, tensor in layers.items()
        }
        self._block_bytes = sum(
            tensor[0].numel() * tensor.element_size() * self._num_pieces[name]
            for name, tensor in layers.items()
        )
        self.num_blocks = min(num_device_blocks, budget_bytes // self._block_bytes)
        if self.num_blocks < min_blocks:
            raise ConfigError(
                f"{budget_bytes / 2**30:.3g} GiB of mem_pool_size_gb hold {self.num_blocks} blocks "
                f"of the host buffer; one request may need {min_blocks}, which are "
                f"{min_blocks * self._block_bytes / 2**30:.3g} GiB"
            )
        self.layers = {
            name: _host_like(tensor, self.num_blocks * self._num_pieces[name])
            for name, tensor in layers.items()
        }
        self._free = np.arange(self.num_blocks - 1, -1, -1)  # a stack: its end was used last
        self._num_free = self.num_blocks
        self._copy: CopyBlocksOp | None = None
        logger.info("host buffer: blocks=%s bytes=%s", self.num_blocks, self.nbytes)

    @property
    def nbytes(self) -> int:
        """The bytes of host memory that it may use."""
        return self.num_blocks * self._block_bytes

    @property
    def num_lent(self) -> int:
        """The number of lent blocks."""
        return self.num_blocks - self._num_free

    def set_copy(self, copy: CopyBlocksOp) -> None:
        """Use these copy operations."""
        self._copy = copy

    def take(self, block_ids: Int64s) -> Int64s | None:
        """Lend as many blocks; None: there are not so many free ones now."""
        left = self._num_free - len(block_ids)
        if left < 0:
            return None
        taken: Int64s = self._free[left : self._num_free].copy()
        self._num_free = left
        return taken

    def give_back(self, places: Int64s) -> None:
        """Take blocks back."""
        self._free[self._num_free : self._num_free + len(places)] = places
        self._num_free += len(places)

    def save(self, block_ids: Int64s, places: Int64s) -> None:
        """Copy device blocks into host blocks; blocks until it is done.

        Raises:
            TransportError: the copy failed.
        """
        self._run("d2h", block_ids, places)

    def load(self, places: Int64s, block_ids: Int64s) -> None:
        """Copy host blocks into device blocks, before whatever the device does next.

        Raises:
            TransportError: the copy failed.
        """
        self._run("h2d", places, block_ids)

    def _run(self, direction: Literal["d2h", "h2d"], sources: Int64s, targets: Int64s) -> None:
        """Copy blocks; layers that the backend has cut into equally many pieces are copied
        together."""
        if not len(sources):
            return
        if self._copy is None:
            raise TransportError(f"{direction}: vLLM has given no copy operation")
        device, host = self._device, self.layers
        for count in sorted(set(self._num_pieces.values())):
            names = [name for name, pieces in self._num_pieces.items() if pieces == count]
            sides = [{name: side[name] for name in names} for side in (device, host)]
            first, second = sides if direction == "d2h" else reversed(sides)
            from_ids, to_ids = (_pieces(blocks, count).tolist() for blocks in (sources, targets))
            try:
                self._copy(first, second, from_ids, to_ids, direction)
            except Exception as error:  # it is not ours, and may raise anything
                text = f"the {direction} copy of {len(sources)} blocks failed: {error!r}"
                raise TransportError(text) from error


def make_host_buffer(
    vllm_config: VllmConfig, layers: dict[str, torch.Tensor], num_blocks: int, budget_bytes: int
) -> HostBuffer | None:
    """Make the buffer that these settings ask for; None: the cache is in host memory itself.

    Raises:
        ConfigError: the budget is too small for one request.
    """
    is_in_host_memory = all(tensor.device.type == "cpu" for tensor in layers.values())
    if is_in_host_memory or not is_host_buffer_asked_for(vllm_config):
        return None
    max_tokens = vllm_config.model_config.max_model_len
    min_blocks = min(num_blocks, -(-max_tokens // vllm_config.cache_config.block_size))
    return HostBuffer(layers, num_blocks, budget_bytes, min_blocks)


def is_host_buffer_asked_for(vllm_config: VllmConfig) -> bool:
    """Whether a cache that is on another device is to be copied into host memory."""
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and transfer.kv_buffer_device == "cpu"


def _host_like(tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Host memory for so many blocks, inside in the order of the tensor's, block after block."""
    inner = range(1, tensor.dim())
    order = [0, *sorted(inner, key=tensor.stride, reverse=True)]
    sizes = [num_blocks, *(tensor.shape[axis] for axis in order[1:])]
    memory = torch.empty(math.prod(sizes), dtype=tensor.dtype).reshape(sizes)
    return memory.permute([order.index(axis) for axis in range(tensor.dim())])


def _pieces(block_ids: Int64s, count: int) -> Int64s:
    if count == 1:
        return block_ids
    expanded: Int64s = (block_ids[:, None] * count + np.arange(count)).ravel()
    return expanded
