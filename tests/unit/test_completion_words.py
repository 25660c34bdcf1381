"""CompletionWords: what senders publish is seen in one look, and told once, to its owner only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mempool import Arena, write_word
from p2p_engine.memory.arena import CompletionWords
from tests.support import SeededRandom

NUM = 50
OFFSET = 4096


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(OFFSET + 8 * NUM)
    yield made
    made.close()


@pytest.fixture
def words(arena: Arena) -> Iterator[CompletionWords[str]]:
    made: CompletionWords[str] = CompletionWords(arena, OFFSET, NUM)
    yield made
    made.close()


def publish(arena: Arena, words: CompletionWords[str], slot: int, value: int) -> None:
    write_word(arena.address + words.offset(slot), value)


def test_owner_is_told_once(arena: Arena, words: CompletionWords[str]) -> None:
    slots = {name: words.take(name, 7) for name in "abc"}
    assert words.take_published() == []
    publish(arena, words, slots["b"], 7)  # type: ignore[arg-type]
    assert [words.is_published(slot) for slot in slots.values()] == [False, True, False]  # type: ignore[arg-type]
    assert words.take_published() == ["b"]
    assert words.take_published() == []
    assert words.is_published(slots["b"])  # type: ignore[arg-type]


def test_only_the_right_value_counts(arena: Arena, words: CompletionWords[str]) -> None:
    slot = words.take("a", 7)
    assert slot is not None
    for value in (1, 8, (1 << 62) | 7):
        publish(arena, words, slot, value)
        assert words.take_published() == []
        assert not words.is_published(slot)


def test_word_that_is_lent_again_is_reset(arena: Arena, words: CompletionWords[str]) -> None:
    slot = words.take("a", 7)
    assert slot is not None
    publish(arena, words, slot, 7)
    words.give_back(slot)
    assert words.take_published() == []
    assert words.take("b", 7) == slot
    assert words.take_published() == []


def test_there_are_so_many_and_no_more(words: CompletionWords[str]) -> None:
    slots = [words.take("a", 7) for _ in range(NUM)]
    assert len({words.offset(slot) for slot in slots if slot is not None}) == NUM
    assert words.take("a", 7) is None
    words.give_back(3)
    assert words.take("a", 7) == 3


def test_any_order_of_lending_and_publishing(
    arena: Arena, words: CompletionWords[str], rng: SeededRandom
) -> None:
    lent: dict[int, tuple[str, int]] = {}
    published: set[int] = set()
    for number in range(3000):
        move = rng.random()
        if move < 0.4:
            value = rng.getrandbits(62) | 1
            slot = words.take(f"{number}", value)
            assert (slot is None) == (len(lent) == NUM)
            if slot is not None:
                lent[slot] = (f"{number}", value)
        elif move < 0.7 and lent:
            slot = rng.choice(list(lent))
            publish(arena, words, slot, lent[slot][1])
            published.add(slot)
        elif move < 0.9:
            told = words.take_published()
            assert sorted(told) == sorted(lent[slot][0] for slot in published)
            for slot in published:
                words.give_back(slot)
                del lent[slot]
            published.clear()


def test_nothing_is_published_after_close(arena: Arena, words: CompletionWords[str]) -> None:
    slot = words.take("a", 7)
    assert slot is not None
    publish(arena, words, slot, 7)
    words.close()
    words.close()
    assert words.take_published() == []


def test_word_is_published_for_a_sender_only_while_it_is_awaited(
    arena: Arena, words: CompletionWords[str]
) -> None:
    """A notification may come late, when its word has been lent again."""
    slot = words.take("a", 7)
    assert slot is not None
    offset = words.offset(slot)
    for wrong in ((offset, 8), (offset + 4, 7), (offset + 8, 7), (0, 7), (1 << 60, 7)):
        words.publish(*wrong)
    assert words.take_published() == []
    words.publish(offset, 7)
    assert words.take_published() == ["a"]
    words.give_back(slot)
    words.publish(offset, 7)
    assert words.take("b", 9) == slot
    words.publish(offset, 9)
    words.publish(offset, 7)
    assert words.take_published() == ["b"]
