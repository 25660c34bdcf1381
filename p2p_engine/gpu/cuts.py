"""Cuts: lists of regions, cut for what copies them. Pure: numpy arrays of addresses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from p2p_engine.memory.layout import Int64s

Bools = npt.NDArray[np.bool_]

STAGE_BYTES = 8 << 20  # a slab is packed ten times as fast as it crosses the bus
PIECES = 64  # copies for one slab, at most


@dataclass(frozen=True)
class SlabLoad:
    """What goes through a slab at a time: regions [first, first + num) of a list, and the copies
    between host memory and the slab, as (address in host memory, in the slab, bytes)."""

    first: int
    num: int
    copies: list[tuple[int, int, int]]


def cut_at(
    addresses: Int64s, others: Int64s, lengths: Int64s, start: int | Int64s, size: int
) -> tuple[Int64s, Int64s, Int64s]:
    """Cut regions so that none crosses a multiple of `size` from `start` on in `addresses`; returns
    the three lists anew."""
    offsets = (addresses - start) % size
    counts = np.maximum(1, -(-(offsets + lengths) // size))
    if counts.max(initial=1) == 1:
        return addresses, others, lengths
    which = np.repeat(np.arange(len(counts)), counts)
    numbers = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.maximum(0, numbers * size - offsets[which])
    ends = np.minimum(lengths[which], (numbers + 1) * size - offsets[which])
    return addresses[which] + begins, others[which] + begins, ends - begins


def level(
    sources: Int64s, destinations: Int64s, lengths: Int64s, unit: int
) -> tuple[Int64s, Int64s, Int64s]:
    """Cut regions so that none is longer than four times the mean, in units; there are at most
    twice as many then."""
    size = -(-int(lengths.mean()) // unit) * unit
    if lengths.max() <= 4 * size:
        return sources, destinations, lengths
    return cut_at(sources, destinations, lengths, sources, size)


def stage(
    near: Int64s,
    host: Int64s,
    lengths: Int64s,
    slab: int,
    slices: tuple[int, int] | None = None,
) -> tuple[Int64s, Int64s, Int64s, list[SlabLoad]]:
    """Cut copies between device memory (`near`) and host memory into loads of a slab at the address
    `slab`. Returns the regions between both as (near, in the slab, lengths), and the loads. No copy
    crosses two of the `slices` of host memory, which have a start and a size.
    """
    packed = np.cumsum(lengths) - lengths
    host = cut_at(packed, host, lengths, 0, STAGE_BYTES)[1]
    packed, near, lengths = cut_at(packed, near, lengths, 0, STAGE_BYTES)
    places = slab + packed % STAGE_BYTES
    is_piece = np.r_[True, host[1:] != host[:-1] + lengths[:-1]]
    if slices is not None:
        is_piece |= _changes((host - slices[0]) // slices[1])
    is_load = _changes(packed // STAGE_BYTES) | _changes(np.cumsum(is_piece) // PIECES)
    pieces = np.flatnonzero(is_piece | is_load)
    sizes = np.add.reduceat(lengths, pieces)
    copies = list(zip(host[pieces].tolist(), places[pieces].tolist(), sizes.tolist(), strict=True))
    starts = np.flatnonzero(is_load)
    ends = np.r_[starts[1:], len(lengths)]
    loads = [
        SlabLoad(start, end - start, copies[first:last])
        for start, end, first, last in np.stack((
            starts, ends, np.searchsorted(pieces, starts), np.searchsorted(pieces, ends)
        )).T.tolist()
    ]  # fmt: skip
    return near, places, lengths, loads


def _changes(numbers: Int64s) -> Bools:
    """Return where a number differs from the one before it; it does so at the start."""
    changes: Bools = np.r_[True, numbers[1:] != numbers[:-1]]
    return changes
