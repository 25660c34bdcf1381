"""Spans: records which blocks of a cache are being written or have arrived. A long prompt has
hundreds of chunks, so a chunk is found by its position, not by a scan."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from p2p_engine.wire.messages import Manifest, Part

T = TypeVar("T")


def _range(manifest: Manifest) -> tuple[int, int]:
    """Return the start and end of a chunk: in tokens, or in blocks if it has no part."""
    size = manifest.part.block_size if manifest.part is not None else 1
    return manifest.first_block * size, (manifest.first_block + manifest.num_blocks) * size


def _may_meet(one: Part | None, other: Part | None) -> bool:
    """Whether two parts can have bytes in common. Without a part, their positions are unknown."""
    if one is None or other is None:
        return True
    return one.overlaps(other)


@dataclass
class _Row(Generic[T]):
    """The spans of one part, sorted by their starts."""

    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    owners: list[T] = field(default_factory=list)
    longest: int = 0  # of all spans so far


class Spans(Generic[T]):
    """Chunks with their owners. A look-up does not slow down with the number of chunks."""

    def __init__(self) -> None:
        self._rows: dict[Part | None, _Row[T]] = {}
        self._num = 0

    def __len__(self) -> int:
        """Return how many chunks there are."""
        return self._num

    def add(self, manifest: Manifest, owner: T) -> None:
        """Add a chunk."""
        row = self._rows.setdefault(manifest.part, _Row())
        start, end = _range(manifest)
        index = bisect_right(row.starts, start)
        row.starts.insert(index, start)
        row.ends.insert(index, end)
        row.owners.insert(index, owner)
        row.longest = max(row.longest, end - start)
        self._num += 1

    def discard(self, manifest: Manifest, owner: T) -> None:
        """Remove a chunk; idempotent."""
        row = self._rows.get(manifest.part)
        if row is None:
            return
        start, _ = _range(manifest)
        for index in range(bisect_left(row.starts, start), bisect_right(row.starts, start)):
            if row.owners[index] is owner:
                del row.starts[index], row.ends[index], row.owners[index]
                self._num -= 1
                break
        if not row.owners:
            del self._rows[manifest.part]

    def overlapping(self, manifest: Manifest) -> Iterator[T]:
        """Iterate over the owners of chunks that overlap this one, or might. The spans must not
        change meanwhile."""
        start, end = _range(manifest)
        for part, row in self._rows.items():
            if not _may_meet(part, manifest.part):
                continue
            if (part is None) is not (manifest.part is None):
                yield from row.owners
                continue
            first = bisect_right(row.starts, start - row.longest)
            for index in range(first, bisect_left(row.starts, end)):
                if row.ends[index] > start:
                    yield row.owners[index]


class Cover:
    """Blocks that have arrived, in any order. Adjacent ones are merged."""

    def __init__(self) -> None:
        self._rows: dict[Part | None, tuple[list[int], list[int]]] = {}

    def add(self, manifest: Manifest) -> None:
        """Add blocks; idempotent."""
        start, end = _range(manifest)
        if start == end:
            return
        starts, ends = self._rows.setdefault(manifest.part, ([], []))
        first, last = bisect_left(ends, start), bisect_right(starts, end)
        if first < last:
            start, end = min(start, starts[first]), max(end, ends[last - 1])
        starts[first:last], ends[first:last] = [start], [end]

    def overlaps(self, manifest: Manifest) -> bool:
        """Whether a block of a chunk has arrived, or might have."""
        start, end = _range(manifest)
        for part, (starts, ends) in self._rows.items():
            if not _may_meet(part, manifest.part):
                continue
            index = bisect_right(ends, start)
            is_comparable = (part is None) is (manifest.part is None)
            if not is_comparable or (index < len(starts) and starts[index] < end):
                return True
        return False
