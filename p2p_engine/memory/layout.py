"""Layout: regions of memory, sources and sinks, tensors. Pure; nothing here moves a byte.

A chunk's byte stream is layer-major: for each layer, for each block, that block's page. Both sides
derive it from the manifest, so gather and scatter need no list of blocks on the wire.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from mempool import SupportsDLPack, tensor_over
from p2p_engine.errors import LocalProtocolError, P2pError, RemoteProtocolError
from p2p_engine.wire.messages import CacheSpec, Manifest

Array: TypeAlias = SupportsDLPack  # of torch, cupy or numpy
T = TypeVar("T")
Int64s = npt.NDArray[np.int64]
ALL_LAYERS = slice(None)


@dataclass(frozen=True)
class Regions:
    """Pieces of memory in stream order: `addresses` and `lengths` (bytes) are int64[n]."""

    addresses: Int64s
    lengths: Int64s
    is_joined: bool = False  # coalescing would change nothing, or is not worth it
    each: int = 0  # the length of every region, if all are known to be equal

    @classmethod
    def repeated(cls, one: Regions, firsts: Int64s) -> Regions:
        """Return `one`'s regions, which must be joined, once relative to each address of
        `firsts`."""
        addresses = (firsts[:, None] + one.addresses).ravel()
        each = one.each or (int(one.lengths[0]) if len(one.lengths) else 0)
        if one.each or (one.lengths == each).all():
            return cls(addresses, equal_lengths(each, len(addresses)), is_joined=True, each=each)
        return cls(addresses, np.tile(one.lengths, len(firsts)), is_joined=True)

    @property
    def nbytes(self) -> int:
        """Return the sum of the lengths."""
        return len(self.lengths) * self.each or int(self.lengths.sum())

    @property
    def starts(self) -> Int64s:
        """Return where each region begins in the stream; may be shared and read-only."""
        if self.each:
            num = len(self.lengths)
            return _multiples(self.each, _capacity(num))[:num]
        starts: Int64s = np.cumsum(self.lengths)
        starts -= self.lengths  # in place: large arrays cost page faults
        return starts

    def coalesced(self) -> Regions:
        """Return the regions with adjacent ones joined and empty ones dropped."""
        if self.is_joined:
            return self
        if self.each and not (self.addresses[1:] == self.addresses[:-1] + self.each).any():
            return replace(self, is_joined=True)
        kept = self.lengths > 0
        addresses, lengths = self.addresses[kept], self.lengths[kept]
        if len(addresses) < 2:
            return Regions(addresses, lengths, is_joined=True)
        starts = np.flatnonzero(np.r_[True, addresses[1:] != addresses[:-1] + lengths[:-1]])
        return Regions(addresses[starts], np.add.reduceat(lengths, starts), is_joined=True)


def equal_lengths(each: int, num: int) -> Int64s:
    """Return `num` times the same length, as a shared, read-only array."""
    return _copies(each, _capacity(num))[:num]


def _capacity(num: int) -> int:
    """Return a power of two, so that few tables serve chunks of all sizes."""
    return 1 << max(0, num - 1).bit_length()


@lru_cache(maxsize=4)
def _copies(each: int, capacity: int) -> Int64s:
    table = np.full(capacity, each, np.int64)
    table.setflags(write=False)
    return table


@lru_cache(maxsize=4)
def _multiples(each: int, capacity: int) -> Int64s:
    table = np.arange(0, each * capacity, each, dtype=np.int64)
    table.setflags(write=False)
    return table


def one_region(address: int, nbytes: int) -> Regions:
    """Return a single region."""
    return Regions(np.array([address], np.int64), np.array([nbytes], np.int64))


def pair(source: Regions, destination: Regions) -> tuple[Int64s, Int64s, Int64s]:
    """Cut both sides at each other's boundaries; returns (sources, destinations, lengths) to copy.

    Raises:
        LocalProtocolError: the two sides differ in bytes.
    """
    source, destination = source.coalesced(), destination.coalesced()
    if source.nbytes != destination.nbytes:
        raise LocalProtocolError(f"{source.nbytes} bytes do not fit {destination.nbytes} bytes")
    if len(source.lengths) >= len(destination.lengths):
        found = _places_in(destination, source)
        if found is not None:
            return source.addresses, found, source.lengths
    else:
        found = _places_in(source, destination)
        if found is not None:
            return found, destination.addresses, destination.lengths
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


def _places_in(coarse: Regions, fine: Regions) -> Int64s | None:
    """Return where each fine region begins in the coarse ones; None if one crosses a boundary."""
    starts = fine.starts
    if len(coarse.lengths) == 1:
        places: Int64s = starts + coarse.addresses[0]
        return places
    edges = coarse.starts
    index = np.searchsorted(starts, edges)
    if not np.array_equal(starts.take(index, mode="clip"), edges):
        return None
    places = np.repeat(coarse.addresses - edges, np.diff(index, append=len(starts)))
    places += starts
    return places


def _at(regions: Regions, ends: Int64s, positions: Int64s) -> Int64s:
    index = np.searchsorted(ends, positions, side="right")
    return regions.addresses[index] + positions - (ends - regions.lengths)[index]


def ask(call: Callable[[], T]) -> T:
    """Call a method of the caller's source or sink; its exceptions end only that transfer.

    Raises:
        P2pError: raised by the source or sink.
        LocalProtocolError: in place of any other exception.
    """
    try:
        return call()
    except P2pError:
        raise
    except Exception as error:  # the caller's code may raise anything
        raise LocalProtocolError(f"the caller's source or sink failed: {error!r}") from error


def ask_regions(call: Callable[[], Regions], nbytes: int) -> Regions:
    """Ask a source or sink where `nbytes` bytes lie, and check the size: the bytes beside them are
    not ours.

    Raises:
        P2pError: as for `ask`.
        LocalProtocolError: the regions have another size.
    """
    regions = ask(lambda: call().coalesced())
    if regions.nbytes != nbytes:
        raise LocalProtocolError(f"the caller's regions have {regions.nbytes} bytes, not {nbytes}")
    return regions


def packed_pages(address: int, packed: Manifest, first_block: int, num_blocks: int) -> Regions:
    """Return where blocks [first_block, +num_blocks) lie in a chunk that is packed at `address`."""
    if num_blocks == packed.num_blocks:
        return one_region(address, packed.nbytes).coalesced()
    pages = np.asarray(packed.page_bytes, np.int64)
    layer_starts = (np.cumsum(pages) - pages) * packed.num_blocks
    skipped = (first_block - packed.first_block) * pages
    return Regions(address + layer_starts + skipped, pages * num_blocks).coalesced()


class Source(Protocol):
    """The bytes that a sender reads. Their memory must stay valid and unchanged until released."""

    @property
    def manifest(self) -> Manifest:
        """Return the geometry of the whole source."""
        ...

    @property
    def first_layer(self) -> int:
        """Return which of the layers that its owner counts is the manifest's first one."""
        ...

    def regions(self, first_block: int, num_blocks: int, layers: slice = ALL_LAYERS) -> Regions:
        """Return where these blocks of the manifest lie, in these of its layers, in stream
        order."""
        ...

    def towards(self, peer: CacheSpec | None) -> Source:
        """Return the source of the bytes that go to a peer.

        Raises:
            PeerRefused: nothing goes there, or it cannot be mapped.
        """
        ...

    def packed(self, starts: Int64s) -> Source:
        """Return a source of the same bytes copied elsewhere: each block, with all its layers, from
        one of these addresses on."""
        ...


class Sink(Protocol):
    """The memory that a receiver fills."""

    def wanted(self, manifest: Manifest) -> tuple[int, int]:
        """Return (first block, number of blocks) of this chunk that is still wanted."""
        ...

    def regions(self, manifest: Manifest, first_block: int, num_blocks: int) -> Regions:
        """Return where these blocks belong, in stream order."""
        ...

    def landed(self, manifest: Manifest, first_block: int, num_blocks: int) -> bool:
        """Note that these blocks are in place; returns True if nothing is missing any more."""
        ...


def as_tensor(array: Array, *, is_written: bool = False) -> torch.Tensor:
    """Return a tensor over the memory of an array of torch, cupy or numpy (`mempool.tensor_over`).

    Raises:
        LocalProtocolError: no tensor can be there.
    """
    try:
        return tensor_over(array, is_written=is_written)
    except (BufferError, TypeError) as error:
        raise LocalProtocolError(str(error)) from error


def check_reachable(tensor: torch.Tensor, device: str = "cpu") -> None:
    """Check that an engine of this device can reach the bytes of a tensor.

    Raises:
        LocalProtocolError: the tensor is on another device, or not dense.
    """
    ours, its = torch.device(device), tensor.device
    is_there = (its.type, its.index or 0) == (ours.type, ours.index or 0)
    if not is_there or tensor.layout != torch.strided:
        raise LocalProtocolError(f"not a dense tensor on {device}: {its} {tensor.layout}")


@dataclass(frozen=True)
class TensorSource:
    """One whole tensor. A non-contiguous or lazily conjugated tensor is copied first.

    Raises:
        LocalProtocolError: the tensor is not on the engine's device, or not dense.
    """

    tensor: torch.Tensor
    manifest: Manifest = field(init=False)
    device: str = "cpu"
    given: torch.Tensor = field(init=False)  # kept, as what copies it may not have run yet
    first_layer = 0

    def __post_init__(self) -> None:
        check_reachable(self.tensor, self.device)
        object.__setattr__(self, "given", self.tensor)
        plain = self.tensor.detach().resolve_conj().resolve_neg().contiguous()
        object.__setattr__(self, "tensor", plain)
        dtype, shape = str(self.tensor.dtype).removeprefix("torch."), list(self.tensor.shape)
        manifest = Manifest(0, 1, [self.tensor.nbytes], dtype=dtype, shape=shape)
        object.__setattr__(self, "manifest", manifest)

    def regions(self, first_block: int, num_blocks: int, layers: slice = ALL_LAYERS) -> Regions:
        """Return where the tensor lies."""
        return one_region(self.tensor.data_ptr(), self.tensor.nbytes)

    def towards(self, peer: CacheSpec | None) -> TensorSource:
        """Return the whole tensor: it is the same for every peer."""
        return self

    def packed(self, starts: Int64s) -> PackedTensor:
        """Return a source of the tensor's bytes copied to another address."""
        return PackedTensor(self.manifest, int(starts[0]))


@dataclass(frozen=True)
class PackedTensor:
    """A tensor's bytes at `address`."""

    manifest: Manifest
    address: int
    first_layer = 0

    def regions(self, first_block: int, num_blocks: int, layers: slice = ALL_LAYERS) -> Regions:
        """Return where the tensor lies."""
        return one_region(self.address, self.manifest.nbytes)

    def towards(self, peer: CacheSpec | None) -> PackedTensor:
        """Return the whole tensor."""
        return self

    def packed(self, starts: Int64s) -> PackedTensor:
        """Return a source of the tensor's bytes copied to another address."""
        return PackedTensor(self.manifest, int(starts[0]))


@dataclass
class TensorSink:
    """A tensor that is allocated, or checked against `tensor`, when its manifest is known."""

    tensor: torch.Tensor | None = None
    allocate: Callable[..., torch.Tensor] = torch.empty

    def wanted(self, manifest: Manifest) -> tuple[int, int]:
        """Want the whole tensor.

        Raises:
            RemoteProtocolError: the manifest does not describe a tensor, or not this one.
            LocalProtocolError: the tensor cannot be allocated.
        """
        dtype = getattr(torch, manifest.dtype, None)
        is_whole = (manifest.first_block, manifest.num_blocks, manifest.first_layer) == (0, 1, 0)
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
        """Return where the tensor lies.

        Raises:
            LocalProtocolError: there is no tensor yet, or it is not contiguous.
        """
        if self.tensor is None or not self.tensor.is_contiguous():
            raise LocalProtocolError("the receiving tensor must exist and be contiguous")
        return one_region(self.tensor.data_ptr(), self.tensor.nbytes)

    def landed(self, manifest: Manifest, first_block: int, num_blocks: int) -> bool:
        """Note that the tensor is in place."""
        return True
