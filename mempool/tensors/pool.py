"""Tensors kept in one host arena. Knows blocks and bytes, no requests and no peers."""

import threading
from array import array
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeVar, overload

import torch

from mempool._native import Arena, Buddy, copy_now
from mempool.tensors.arrays import SupportsDLPack, tensor_over

A = TypeVar("A", bound=SupportsDLPack)

MIN_ALIGNMENT_BYTES = 64  # a cache line: every dtype may be viewed, and copies stream


class PoolError(Exception):
    """A pool cannot do what was asked; also raised as such once it is closed."""


class PoolExhausted(PoolError):
    """No free run of memory is long enough."""


class StaleBlock(PoolError):
    """The block was freed before, or belongs to another pool. Nothing was harmed."""


@dataclass(frozen=True, slots=True)
class PoolBlock:
    """A handle to memory in one pool. It does not own the memory: free it exactly once."""

    nbytes: int
    dtype: torch.dtype | None  # None: raw bytes
    shape: tuple[int, ...]
    _handle: int = field(repr=False)
    _pool: object = field(repr=False)


@dataclass(frozen=True, slots=True)
class PoolStats:
    """A snapshot. capacity == free + used; used - requested is what rounding up costs."""

    capacity_bytes: int
    free_bytes: int
    used_bytes: int
    requested_bytes: int
    num_blocks: int
    largest_free_bytes: int
    high_water_bytes: int


class TensorMemoryPool:
    """A fixed amount of host memory that stores tensors of any dtype, shape and layout.

    An allocation is rounded up to a multiple of `min_block_bytes`, no further. Pages are taken from
    the system as they are first used, lowest first. Any thread may call; copies run outside of the
    lock. A block that is freed while another thread loads it makes that load raise StaleBlock.
    """

    def __init__(
        self,
        capacity_bytes: int,
        min_block_bytes: int = 512,
        *,
        page_lock: bool = False,
        cuda_register: bool = False,
    ) -> None:
        if min_block_bytes < MIN_ALIGNMENT_BYTES:
            raise ValueError(f"min_block_bytes {min_block_bytes} is below {MIN_ALIGNMENT_BYTES}")
        self._buddy = Buddy(capacity_bytes, min_block_bytes)
        capacity = self._buddy.stats()["capacity_bytes"]
        self._arena = Arena(capacity, page_lock=page_lock, cuda_register=cuda_register)
        # Holds a view of the arena, and so do all tensors made from it: the mapping outlives them.
        self._bytes = torch.frombuffer(self._arena.view(0, capacity), dtype=torch.uint8)
        self._identity = object()  # in our blocks instead of us: they do not keep the arena alive
        self._is_closed = False
        self._lock = threading.Lock()  # guards _buddy and _is_closed

    def allocate(self, nbytes: int) -> PoolBlock:
        """Reserve raw bytes; PoolExhausted when no free run is long enough."""
        return self._reserve(nbytes, None, (nbytes,))

    def store_tensor(self, array: SupportsDLPack) -> PoolBlock:
        """Copy an array of torch, cupy or numpy in, from any device, of any strides but negative
        ones. Blocks until it is copied.

        Raises:
            PoolExhausted: it does not fit.
            TypeError, BufferError: no tensor can be over its memory (`tensor_over`), or a tensor
                has more than its bytes.
        """
        tensor = tensor_over(array)
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise TypeError(f"a {tensor.layout} tensor of {tensor.dtype} has more than its bytes")
        block = self._reserve(tensor.nbytes, tensor.dtype, tuple(tensor.shape))
        try:
            if _is_plain(tensor):
                _copy_bytes(tensor.data_ptr(), self.address(block), block.nbytes)
            else:
                self.view(block).copy_(tensor.detach())
        except BaseException:
            self.free(block)
            raise
        return block

    @overload
    def load_tensor(self, block: PoolBlock, out: None = None) -> torch.Tensor: ...

    @overload
    def load_tensor(self, block: PoolBlock, out: A) -> A: ...

    def load_tensor(self, block: PoolBlock, out: A | None = None) -> torch.Tensor | A:
        """Copy a tensor out, and return it: a new torch tensor in host memory, or `out`, an array
        of torch, cupy or numpy on any device. Blocks until it is copied.

        Raises:
            StaleBlock: the block is not the pool's any more.
            ValueError: `out` has another dtype or shape.
            TypeError, BufferError: `out` is read-only, or no tensor can be over its memory.
        """
        dtype = block.dtype or torch.uint8
        if out is None:
            target = torch.empty(block.shape, dtype=dtype)
        else:
            target = tensor_over(out, is_written=True)
        if target.dtype != dtype or target.shape != block.shape:
            given = f"{target.dtype} {tuple(target.shape)}"
            raise ValueError(f"out is {given}, the block holds {dtype} {block.shape}")
        if _is_plain(target):
            _copy_bytes(self.address(block), target.data_ptr(), block.nbytes)
        else:
            target.detach().copy_(self.view(block))
            if target.is_cuda and target is not out:  # cupy does not know torch's stream
                torch.cuda.current_stream(target.device).synchronize()
        self._locate(
            block
        )  # raises if the block was freed meanwhile: the bytes may be another block's
        return target if out is None else out

    def view(self, block: PoolBlock) -> torch.Tensor:
        """Return the block's memory as a tensor, without a copy. Not to be used after the free."""
        arena, offset = self._locate(block)
        memory = arena[offset : offset + block.nbytes]
        return memory.view(block.dtype or torch.uint8).view(block.shape)

    def address(self, block: PoolBlock) -> int:
        """Return where the block's first byte is in this process."""
        arena, offset = self._locate(block)
        return arena.data_ptr() + offset

    def free(self, block: PoolBlock) -> None:
        """Give the memory back; StaleBlock if it is not ours or was freed before."""
        with self._lock:
            self._check_usable(block)
            try:
                self._buddy.free(block._handle)
            except ValueError as error:
                raise _stale(block) from error

    def stats(self) -> PoolStats:
        """Return a snapshot of the counters."""
        with self._lock:
            return PoolStats(**self._buddy.stats())

    def report(self) -> dict[str, str]:
        """Return how each step of setting up the memory went, in words."""
        return self._arena.report()

    def check(self) -> None:
        """Walk every invariant of the allocator; RuntimeError names the one that is broken."""
        with self._lock:
            self._buddy.check()

    def close(self) -> None:
        """Refuse further use. Idempotent. The memory goes with the last tensor that views it."""
        with self._lock:
            self._is_closed = True
            self._bytes = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> "TensorMemoryPool":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _reserve(self, nbytes: int, dtype: torch.dtype | None, shape: tuple[int, ...]) -> PoolBlock:
        with self._lock:
            self._check_open()
            try:
                handle = self._buddy.alloc(nbytes)
            except MemoryError as error:
                largest = self._buddy.stats()["largest_free_bytes"]
                raise PoolExhausted(f"no room for {nbytes} bytes, {largest} would fit") from error
        return PoolBlock(nbytes, dtype, shape, handle, self._identity)

    def _locate(self, block: PoolBlock) -> tuple[torch.Tensor, int]:
        with self._lock:
            self._check_usable(block)
            try:
                offset = self._buddy.offset(block._handle)
            except ValueError as error:
                raise _stale(block) from error
            return self._bytes, offset

    def _check_open(self) -> None:
        if self._is_closed:
            raise PoolError("the pool is closed")

    def _check_usable(self, block: PoolBlock) -> None:
        self._check_open()
        if block._pool is not self._identity:
            raise StaleBlock(f"{block} belongs to another pool")


def _stale(block: PoolBlock) -> StaleBlock:
    return StaleBlock(f"{block} was freed before")


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is its bytes in host memory, in order."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _copy_bytes(source: int, destination: int, nbytes: int) -> None:
    """Copy past the cache, on this thread: torch's own copy would not, and would wake others."""
    copy_now(array("q", [source]), array("q", [destination]), array("q", [nbytes]))
