"""Spans: records which blocks of which layers are being written or have arrived. A long prompt has
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


@dataclass(frozen=True)
class _Layers:
    """Where chunks with the same layers are comparable by their blocks."""

    part: Part | None
    first: int
    end: int

    def may_meet(self, other: _Layers) -> bool:
        """Whether two chunks can have bytes in common. If one of them has no part, the positions of
        the other's layers are unknown."""
        if self.part == other.part:
            return self.first < other.end and other.first < self.end
        if self.part is None or other.part is None:
            return True
        return self.part.overlaps(other.part)

    def is_comparable(self, other: _Layers) -> bool:
        """Whether blocks of both are counted alike."""
        return (self.part is None) is (other.part is None)


def _layers(manifest: Manifest) -> _Layers:
    return _Layers(manifest.part, manifest.first_layer, manifest.end_layer)


@dataclass
class _Row(Generic[T]):
    """The spans of the same layers, sorted by their starts."""

    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    owners: list[T] = field(default_factory=list)
    longest: int = 0  # of all spans so far


class Spans(Generic[T]):
    """Chunks with their owners. A look-up does not slow down with the number of chunks."""

    def __init__(self) -> None:
        self._rows: dict[_Layers, _Row[T]] = {}
        self._num = 0

    def __len__(self) -> int:
        """Return how many chunks there are."""
        return self._num

    def add(self, manifest: Manifest, owner: T) -> None:
        """Add a chunk."""
        row = self._rows.setdefault(_layers(manifest), _Row())
        start, end = _range(manifest)
        index = bisect_right(row.starts, start)
        row.starts.insert(index, start)
        row.ends.insert(index, end)
        row.owners.insert(index, owner)
        row.longest = max(row.longest, end - start)
        self._num += 1

    def discard(self, manifest: Manifest, owner: T) -> None:
        """Remove a chunk; idempotent."""
        row = self._rows.get(_layers(manifest))
        if row is None:
            return
        start, _ = _range(manifest)
        for index in range(bisect_left(row.starts, start), bisect_right(row.starts, start)):
            if row.owners[index] is owner:
                del row.starts[index], row.ends[index], row.owners[index]
                self._num -= 1
                break
        if not row.owners:
            del self._rows[_layers(manifest)]

    def overlapping(self, manifest: Manifest) -> Iterator[T]:
        """Iterate over the owners of chunks that overlap this one, or might. The spans must not
        change meanwhile."""
        start, end = _range(manifest)
        layers = _layers(manifest)
        for there, row in self._rows.items():
            if not there.may_meet(layers):
                continue
            if not there.is_comparable(layers):
                yield from row.owners
                continue
            first = bisect_right(row.starts, start - row.longest)
            for index in range(first, bisect_left(row.starts, end)):
                if row.ends[index] > start:
                    yield row.owners[index]


class Cover:
    """Blocks that have arrived, in any order. Adjacent ones are merged."""

    def __init__(self) -> None:
        self._rows: dict[_Layers, tuple[list[int], list[int]]] = {}

    def add(self, manifest: Manifest) -> None:
        """Add blocks; idempotent."""
        start, end = _range(manifest)
        if start == end:
            return
        starts, ends = self._rows.setdefault(_layers(manifest), ([], []))
        first, last = bisect_left(ends, start), bisect_right(starts, end)
        if first < last:
            start, end = min(start, starts[first]), max(end, ends[last - 1])
        starts[first:last], ends[first:last] = [start], [end]

    def overlaps(self, manifest: Manifest) -> bool:
        """Whether a block of a chunk has arrived, or might have."""
        start, end = _range(manifest)
        layers = _layers(manifest)
        for there, (starts, ends) in self._rows.items():
            if not there.may_meet(layers):
                continue
            index = bisect_right(ends, start)
            if not there.is_comparable(layers) or (index < len(starts) and starts[index] < end):
                return True
        return False
