"""PrefixTree against a list of everything that was put into it."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from proxy.routing.prefix_tree import LOW_WATER, PrefixTree

MAX_BLOCKS = 24

# Few different blocks, so that sequences begin alike and part again.
sequences = st.lists(st.integers(0, 2), max_size=10).map(tuple)
holders = st.sampled_from("abc")


def num_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (x, y) in pairs if x != y), min(len(one), len(other)))


class TreeMachine(RuleBasedStateMachine):
    """While everything fits, the tree knows exactly what the list knows; later, never more."""

    def __init__(self) -> None:
        super().__init__()
        self.tree: PrefixTree[str] = PrefixTree(MAX_BLOCKS)
        self.inserted: set[tuple[str, tuple[int, ...]]] = set()
        self.is_whole = True

    def expected(self, blocks: tuple[int, ...]) -> dict[str, int]:
        held = {holder: 0 for holder, _ in self.inserted}
        for holder, known in self.inserted:
            held[holder] = max(held[holder], num_common(known, blocks))
        return {holder: count for holder, count in held.items() if count}

    @rule(blocks=sequences, holder=holders)
    def insert(self, blocks: tuple[int, ...], holder: str) -> None:
        known = max((num_common(old, blocks) for _, old in self.inserted), default=0)
        self.is_whole &= self.tree.num_blocks + len(blocks) - known <= MAX_BLOCKS
        self.inserted.add((holder, blocks))
        self.tree.insert(blocks, holder)
        if self.is_whole:
            assert self.tree.match(blocks).get(holder, 0) == len(blocks)

    @rule(blocks=sequences)
    def match(self, blocks: tuple[int, ...]) -> None:
        held, expected = self.tree.match(blocks), self.expected(blocks)
        if self.is_whole:
            assert held == expected
        assert all(0 < count <= expected[holder] for holder, count in held.items())

    @rule(gone=st.sets(holders))
    def tidy(self, gone: set[str]) -> None:
        self.is_whole &= self.tree.num_blocks <= LOW_WATER * MAX_BLOCKS
        for _ in self.tree.tidy(lambda holder: holder not in gone):
            pass
        assert self.tree.num_blocks <= LOW_WATER * MAX_BLOCKS
        self.inserted = {(holder, blocks) for holder, blocks in self.inserted if holder not in gone}

    @invariant()
    def holds(self) -> None:
        self.tree.check()


TestPrefixTree = TreeMachine.TestCase
TestPrefixTree.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_what_was_used_last_stays() -> None:
    tree: PrefixTree[str] = PrefixTree(10)
    for first in range(5):
        tree.insert((first, 100 + first), "a")
    tree.insert((0, 100), "a")  # used again
    assert [*tree.tidy(lambda _: True)] == []
    assert tree.num_blocks == 8
    assert [bool(tree.match((first,))) for first in range(5)] == [True, False, True, True, True]


def test_the_living_are_served_while_the_dead_are_forgotten() -> None:
    """Tidying is interrupted at every slice, and prompts go on coming."""
    tree: PrefixTree[str] = PrefixTree(10_000)
    for number in range(6_000):
        tree.insert((number // 7, number % 7, number), "dead" if number % 2 else "alive")
    for step, _ in enumerate(tree.tidy(lambda holder: holder != "dead")):
        tree.insert((step, 3, 10_000_000 + step), "alive")
    tree.insert((1, 3, 5), "alive")
    for _ in tree.tidy(lambda _: True):
        pass
    tree.check()
    assert all("dead" not in tree.match((number // 7, number % 7)) for number in range(6_000))
