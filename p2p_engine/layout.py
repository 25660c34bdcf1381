"""Where bytes lie: regions of memory, paged caches, tensors. Pure; nothing here moves a byte.

A chunk's byte stream is layer-major: for each layer, for each block, that block's page. Both sides
derive it from the manifest, so that gather and scatter need no list of blocks on the wire.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from p2p_engine.errors import LocalProtocolError, P2pError, RemoteProtocolError
from p2p_engine.messages import Manifest

T = TypeVar("T")
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Regions:
    """Pieces of memory in stream order: `addresses` and `lengths` (bytes) are int64[n]."""

    addresses: Int64s
    lengths: Int64s

    @property
    def nbytes(self) -> int:
        """The sum of the lengths."""
        return int(self.lengths.sum())

    def coalesced(self) -> Regions:
        """Join neighbours that touch, drop empty ones."""
        kept = self.lengths > 0
        addresses, lengths = self.addresses[kept], self.lengths[kept]
        if len(addresses) < 2:
            return Regions(addresses, lengths)
        starts = np.flatnonzero(np.r_[True, addresses[1:] != addresses[:-1] + lengths[:-1]])
        return Regions(addresses[starts], np.add.reduceat(lengths, starts))


def one_region(address: int, nbytes: int) -> Regions:
    """Return a single piece."""
    return Regions(np.array([address], np.int64), np.array([nbytes], np.int64))


def pair(source: Regions, destination: Regions) -> tuple[Int64s, Int64s, Int64s]:
    """Cut both sides at each other's boundaries: (sources, destinations, lengths) to copy.

    Raises:
        LocalProtocolError: the two sides differ in bytes.
    """
    source, destination = source.coalesced(), destination.coalesced()
    if source.nbytes != destination.nbytes:
        raise LocalProtocolError(f"{source.nbytes} bytes do not fit {destination.nbytes} bytes")
    source_ends, destination_ends = np.cumsum(source.lengths), np.cumsum(destination.lengths)
    ends = np.concatenate((source_ends, destination_ends))
    ends.sort(kind="stable")  # merges two sorted runs, in time proportional to their length
    lengths = np.diff(ends, prepend=np.int64(0))
    cuts = lengths > 0
    starts, lengths = (ends - lengths)[cuts], lengths[cuts]
    return (
        _at(source, source_ends, starts),
        _at(destination, destination_ends, starts),
        lengths,
    )


def _at(regions: Regions, ends: Int64s, positions: Int64s) -> Int64s:
    index = np.searchsorted(ends, positions, side="right")
    return regions.addresses[index] + positions - (ends - regions.lengths)[index]


def ask(call: Callable[[], T]) -> T:
    """Call a source or sink, which are our caller's: what they raise ends their transfer only.

    Raises:
        P2pError: theirs.
        LocalProtocolError: in place of any other error.
    """
    try:
        return call()
    except P2pError:
        raise
    except Exception as error:  # anything may come from code that is not ours
        raise LocalProtocolError(f"the caller's source or sink failed: {error!r}") from error


def ask_regions(call: Callable[[], Regions], nbytes: int) -> Regions:
    """Ask a source or sink where `nbytes` bytes lie; its neighbours' bytes are not ours to touch.

    Raises:
        P2pError: as for ask; LocalProtocolError: they are not so many bytes.
    """
    regions = ask(lambda: call().coalesced())
    if regions.nbytes != nbytes:
        raise LocalProtocolError(f"the caller's regions have {regions.nbytes} bytes, not {nbytes}")
    return regions


def packed_pages(address: int, packed: Manifest, first_block: int, num_blocks: int) -> Regions:
    """Where blocks [first_block, +num_blocks) lie in a chunk that is packed at `address`."""
    pages = np.asarray(packed.page_bytes, np.int64)
    layer_starts = (np.cumsum(pages) - pages) * packed.num_blocks
    skipped = (first_block - packed.first_block) * pages
    return Regions(address + layer_starts + skipped, pages * num_blocks).coalesced()


@dataclass(frozen=True)
class PagedCache:
    """One rank's cache: block b of layer l is page_bytes[l] bytes at
    layer_addresses[l] + b * block_strides[l]; all int64[num_layers]."""

    layer_addresses: Int64s
    block_strides: Int64s
    page_bytes: Int64s
    num_blocks: int

    def pages(self, block_ids: Int64s) -> Regions:
        """The pages of these blocks, layer-major.

        Raises:
            LocalProtocolError: a block id is not in the cache.
        """
        if len(block_ids) and not 0 <= block_ids.min() <= block_ids.max() < self.num_blocks:
            raise LocalProtocolError(f"block ids outside 0 to {self.num_blocks - 1}: {block_ids}")
        addresses = self.layer_addresses[:, None] + self.block_strides[:, None] * block_ids
        lengths = np.broadcast_to(self.page_bytes[:, None], addresses.shape)
        return Regions(addresses.ravel(), lengths.ravel()).coalesced()


class Source(Protocol):
    """What a sender reads; its memory must stay valid and unchanged until released."""

    @property
    def manifest(self) -> Manifest:
        """The geometry of the whole of it."""
        ...

    def regions(self, first_block: int, num_blocks: int) -> Regions:
        """Return where these blocks of the manifest lie, in stream order."""
        ...


class Sink(Protocol):
    """What a receiver fills."""

    def wanted(self, manifest: Manifest) -> tuple[int, int]:
        """Return (first block, number of blocks) of this chunk that is still wanted."""
        ...

    def regions(self, manifest: Manifest, first_block: int, num_blocks: int) -> Regions:
        """Return where these blocks are to lie, in stream order."""
        ...

    def landed(self, first_block: int, num_blocks: int) -> bool:
        """Note that these blocks are in place; True when nothing is missing any more."""
        ...


@dataclass(frozen=True)
class PagedSource:
    """Blocks [first_block, first_block + len(block_ids)) of a request, read from a paged cache."""

    cache: PagedCache
    block_ids: Int64s
    first_block: int
    num_tokens: int

    @property
    def manifest(self) -> Manifest:
        """The geometry of this chunk."""
        return Manifest(
            self.first_block, len(self.block_ids), self.cache.page_bytes.tolist(), self.num_tokens
        )

    def regions(self, first_block: int, num_blocks: int) -> Regions:
        """Return where these blocks of the request lie."""
        start = first_block - self.first_block
        return self.cache.pages(self.block_ids[start : start + num_blocks])


@dataclass(frozen=True)
class PackedSource:
    """A whole chunk's stream, in one piece of memory at `address`."""

    manifest: Manifest
    address: int

    def regions(self, first_block: int, num_blocks: int) -> Regions:
        """Return where these blocks of the chunk lie."""
        return packed_pages(self.address, self.manifest, first_block, num_blocks)


class PagedSink:
    """The request's blocks from `first_block` on, to be filled in a paged cache.

    `block_ids` are the ids of the request's blocks first_block, first_block + 1, ...
    """

    def __init__(
        self, cache: PagedCache, block_ids: Int64s, first_block: int, num_tokens: int
    ) -> None:
        self._cache = cache
        self._block_ids = block_ids
        self._first_block = first_block
        self._num_tokens = num_tokens
        self._missing = np.ones(len(block_ids), np.bool_)

    def wanted(self, manifest: Manifest) -> tuple[int, int]:
        """Return the smallest range of the chunk that holds all its missing blocks.

        Raises:
            RemoteProtocolError: the peer's pages are not ours, or its prompt has another length.
        """
        if manifest.page_bytes != self._cache.page_bytes.tolist():
            raise RemoteProtocolError("the peer's pages differ from ours in size or number")
        if manifest.num_tokens != self._num_tokens:
            raise RemoteProtocolError(
                f"the peer's prompt has {manifest.num_tokens} tokens, ours {self._num_tokens}"
            )
        start = manifest.first_block - self._first_block
        low, high = max(start, 0), max(start + manifest.num_blocks, 0)
        missing = np.flatnonzero(self._missing[low:high])
        if not len(missing):
            return manifest.first_block, 0
        first, last = int(missing[0]), int(missing[-1])
        return self._first_block + low + first, last - first + 1

    def missing_blocks(self) -> Int64s:
        """The ids of the blocks that are not in place; stable once the transfer is done."""
        return self._block_ids[self._missing]

    def regions(self, manifest: Manifest, first_block: int, num_blocks: int) -> Regions:
        """Return where these blocks are to lie."""
        start = first_block - self._first_block
        return self._cache.pages(self._block_ids[start : start + num_blocks])

    def landed(self, first_block: int, num_blocks: int) -> bool:
        """Note that these blocks are in place."""
        start = first_block - self._first_block
        self._missing[start : start + num_blocks] = False
        return not self._missing.any()


def check_in_host_memory(tensor: torch.Tensor) -> None:
    """Check that the engine can reach the bytes of a tensor.

    Raises:
        LocalProtocolError: the tensor is not in host memory, or not dense.
    """
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise LocalProtocolError(f"not a dense tensor on the CPU: {tensor.device} {tensor.layout}")


@dataclass(frozen=True)
class TensorSource:
    """One whole CPU tensor; one that is not contiguous, or lazily conjugated, is copied first.

    Raises:
        LocalProtocolError: the tensor is not in host memory, or not dense.
    """

    tensor: torch.Tensor
    manifest: Manifest = field(init=False)

    def __post_init__(self) -> None:
        check_in_host_memory(self.tensor)
        plain = self.tensor.detach().resolve_conj().resolve_neg().contiguous()
        object.__setattr__(self, "tensor", plain)
        dtype, shape = str(self.tensor.dtype).removeprefix("torch."), list(self.tensor.shape)
        manifest = Manifest(0, 1, [self.tensor.nbytes], dtype=dtype, shape=shape)
        object.__setattr__(self, "manifest", manifest)

    def regions(self, first_block: int, num_blocks: int) -> Regions:
        """Return where the tensor lies."""
        return one_region(self.tensor.data_ptr(), self.tensor.nbytes)


@dataclass
class TensorSink:
    """A tensor that is made, or checked against `tensor`, when its manifest is known."""

    tensor: torch.Tensor | None = None
    allocate: Callable[..., torch.Tensor] = torch.empty

    def wanted(self, manifest: Manifest) -> tuple[int, int]:
        """Want the whole of it.

        Raises:
            RemoteProtocolError: the manifest does not describe a tensor, or not this tensor.
        """
        dtype = getattr(torch, manifest.dtype, None)
        is_whole = (manifest.first_block, manifest.num_blocks) == (0, 1)
        if not isinstance(dtype, torch.dtype) or not is_whole:
            raise RemoteProtocolError(f"not a whole tensor: dtype {manifest.dtype!r}")
        expected = math.prod(manifest.shape) * dtype.itemsize
        if expected != manifest.nbytes:
            raise RemoteProtocolError(f"{manifest.nbytes} bytes for a tensor of {expected} bytes")
        if self.tensor is None:
            self.tensor = self._make(manifest, dtype)
        if self.tensor.dtype != dtype or list(self.tensor.shape) != manifest.shape:
            raise RemoteProtocolError(
                f"a {manifest.dtype} tensor of shape {manifest.shape} came for a "
                f"{self.tensor.dtype} tensor of shape {list(self.tensor.shape)}"
            )
        return 0, 1

    def _make(self, manifest: Manifest, dtype: torch.dtype) -> torch.Tensor:
        try:
            return self.allocate(manifest.shape, dtype=dtype)
        except (RuntimeError, MemoryError) as error:
            text = f"no {manifest.dtype} tensor of shape {manifest.shape}: {error}"
            raise LocalProtocolError(text) from error

    def regions(self, manifest: Manifest, first_block: int, num_blocks: int) -> Regions:
        """Return where the tensor lies."""
        if self.tensor is None or not self.tensor.is_contiguous():
            raise LocalProtocolError("the receiving tensor must exist and be contiguous")
        return one_region(self.tensor.data_ptr(), self.tensor.nbytes)

    def landed(self, first_block: int, num_blocks: int) -> bool:
        """Note that the tensor is in place."""
        return True
