"""PrefixTree: a radix tree of prompt prefixes and their holders, bounded in size."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Holder = TypeVar("Holder")

# `tidy` yields after this many nodes, so that other tasks can run.
SLICE = 512
# `tidy` evicts down to this share of the bound, to leave room until it runs again.
LOW_WATER = 0.8


class _Node(Generic[Holder]):
    """A run of blocks below its parent. A holder of a node also holds all of its ancestors."""

    __slots__ = ("blocks", "children", "holders", "parent")

    def __init__(
        self, parent: _Node[Holder] | None, blocks: tuple[int, ...], holders: set[Holder]
    ) -> None:
        self.parent = parent
        self.blocks = blocks
        self.holders = holders
        self.children: dict[int, _Node[Holder]] = {}


class PrefixTree(Generic[Holder]):
    """A radix tree over block hashes. Invariant: num_blocks <= max_blocks.

    When the tree is full, `insert` drops the rest of a prompt; only `tidy` evicts, in the
    background. Nodes are ordered by last use, and using a node also uses its ancestors a moment
    later. So the least recently used node is always a leaf, and an eviction takes one step.
    """

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.num_blocks = 0
        self._root: _Node[Holder] = _Node(None, (), set())
        self._by_use: OrderedDict[_Node[Holder], None] = OrderedDict()
        self._holders: set[Holder] = set()

    def match(self, blocks: Sequence[int]) -> dict[Holder, int]:
        """Return the number of leading blocks that each holder has; holders of none are left
        out."""
        held: dict[Holder, int] = {}
        depth = 0
        for node, num_equal in self._walk(blocks):
            depth += num_equal
            held.update(dict.fromkeys(node.holders, depth))
        return held

    def insert(self, blocks: Sequence[int], holder: Holder) -> None:
        """Record that `holder` holds these blocks, as far as there is room."""
        node, depth = self._root, 0
        for child, num_equal in list(self._walk(blocks)):
            node = child if num_equal == len(child.blocks) else self._split(child, num_equal)
            node.holders.add(holder)
            depth += num_equal
        rest = tuple(blocks[depth : depth + self.max_blocks - self.num_blocks])
        if rest:
            leaf = _Node(node, rest, {holder})
            node.children[rest[0]] = leaf
            node = leaf
            self.num_blocks += len(rest)
        self._holders.add(holder)
        self._use(node)

    def tidy(self, is_alive: Callable[[Holder], bool]) -> Iterator[None]:
        """Evict the least recently used nodes and remove dead holders; yield between slices of
        work."""
        if self.num_blocks > LOW_WATER * self.max_blocks:
            yield from self._evict()
        gone = {holder for holder in self._holders if not is_alive(holder)}
        self._holders -= gone
        if gone:
            yield from self._forget(gone)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken; walks the whole tree."""
        place = {node: number for number, node in enumerate(self._by_use)}
        assert self.num_blocks == sum(len(node.blocks) for node in place)
        assert self.num_blocks <= self.max_blocks
        assert sum(len(node.children) for node in (self._root, *place)) == len(place)
        for node in place:
            parent = node.parent
            assert parent is not None
            assert parent.children[node.blocks[0]] is node
            assert parent is self._root or place[parent] > place[node]
            assert parent is self._root or node.holders <= parent.holders

    def _walk(self, blocks: Sequence[int]) -> Iterator[tuple[_Node[Holder], int]]:
        """Yield the matching nodes from the root down, with the number of equal blocks in each.

        All but the last match completely.
        """
        node, start = self._root, 0
        while start < len(blocks) and (child := node.children.get(blocks[start])) is not None:
            num_equal = _num_equal(child.blocks, blocks, start)
            yield child, num_equal
            if num_equal < len(child.blocks):
                return
            node, start = child, start + num_equal

    def _split(self, node: _Node[Holder], num_blocks: int) -> _Node[Holder]:
        """Split a node and return the upper half, which is not in the order of use yet."""
        assert node.parent is not None
        node.holders &= self._holders  # `tidy` may be between slices: drop dead holders
        upper = _Node(node.parent, node.blocks[:num_blocks], set(node.holders))
        node.parent.children[node.blocks[0]] = upper
        node.parent, node.blocks = upper, node.blocks[num_blocks:]
        upper.children[node.blocks[0]] = node
        return upper

    def _use(self, node: _Node[Holder]) -> None:
        while node.parent is not None:
            self._by_use[node] = None
            self._by_use.move_to_end(node)
            node = node.parent

    def _evict(self) -> Iterator[None]:
        target = LOW_WATER * self.max_blocks
        for count in range(1, len(self._by_use) + 1):
            if self.num_blocks <= target:
                return
            leaf, _ = self._by_use.popitem(last=False)
            assert leaf.parent is not None
            assert not leaf.children
            del leaf.parent.children[leaf.blocks[0]]
            self.num_blocks -= len(leaf.blocks)
            if count % SLICE == 0:
                yield

    def _forget(self, gone: set[Holder]) -> Iterator[None]:
        """Remove dead holders, children first, so that no child has a holder that its parent
        lacks."""
        for count, node in enumerate(list(self._by_use), 1):
            node.holders -= gone
            if count % SLICE == 0:
                yield


def _num_equal(label: tuple[int, ...], blocks: Sequence[int], start: int) -> int:
    """Return how many leading blocks of `label` equal those of `blocks` from `start` on."""
    most = min(len(label), len(blocks) - start)
    return next((n for n in range(most) if label[n] != blocks[start + n]), most)
