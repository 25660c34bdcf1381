"""Spans: which blocks of a cache are written, or are there. Chunks are found by where they lie, not
one by one: a long prompt has hundreds of them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from p2p_engine.wire.messages import Manifest, Part

T = TypeVar("T")


def _range(manifest: Manifest) -> tuple[int, int]:
    """From where to where it lies: in tokens, or in blocks where it has no part."""
    size = manifest.part.block_size if manifest.part is not None else 1
    return manifest.first_block * size, (manifest.first_block + manifest.num_blocks) * size


def _may_meet(one: Part | None, other: Part | None) -> bool:
    """Whether two parts can have bytes in common. Without a part it is not known how they lie."""
    if one is None or other is None:
        return True
    return one.overlaps(other)


@dataclass
class _Row(Generic[T]):
    """The spans of one part, by their starts."""

    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    owners: list[T] = field(default_factory=list)
    longest: int = 0  # that there ever was


class Spans(Generic[T]):
    """Chunks with their owners. To find one costs the same among ten and among thousands."""

    def __init__(self) -> None:
        self._rows: dict[Part | None, _Row[T]] = {}
        self._num = 0

    def __len__(self) -> int:
        """How many there are."""
        return self._num

    def add(self, manifest: Manifest, owner: T) -> None:
        """Put a chunk in."""
        row = self._rows.setdefault(manifest.part, _Row())
        start, end = _range(manifest)
        index = bisect_right(row.starts, start)
        row.starts.insert(index, start)
        row.ends.insert(index, end)
        row.owners.insert(index, owner)
        row.longest = max(row.longest, end - start)
        self._num += 1

    def discard(self, manifest: Manifest, owner: T) -> None:
        """Take a chunk out; idempotent."""
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
        """Find the owners of what overlaps a chunk, or might; nothing may change meanwhile."""
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
    """Blocks that are there. Neighbours are joined, in whatever order they come."""

    def __init__(self) -> None:
        self._rows: dict[Part | None, tuple[list[int], list[int]]] = {}

    def add(self, manifest: Manifest) -> None:
        """Put blocks in; idempotent."""
        start, end = _range(manifest)
        if start == end:
            return
        starts, ends = self._rows.setdefault(manifest.part, ([], []))
        first, last = bisect_left(ends, start), bisect_right(starts, end)
        if first < last:
            start, end = min(start, starts[first]), max(end, ends[last - 1])
        starts[first:last], ends[first:last] = [start], [end]

    def overlaps(self, manifest: Manifest) -> bool:
        """Whether a block of a chunk is there, or might be."""
        start, end = _range(manifest)
        for part, (starts, ends) in self._rows.items():
            if not _may_meet(part, manifest.part):
                continue
            index = bisect_right(ends, start)
            is_comparable = (part is None) is (manifest.part is None)
            if not is_comparable or (index < len(starts) and starts[index] < end):
                return True
        return False
