"""A flood from strangers costs a bounded map and a few log lines."""

from __future__ import annotations

import logging

import pytest

from p2p_engine.bounded import (
    NOTE_BYTES,
    WARNING_SECONDS,
    BoundedMap,
    Budget,
    Notes,
    RateLimitedWarnings,
)
from tests.support import SeededRandom


def test_oldest_is_forgotten_first() -> None:
    recent: BoundedMap[int, str] = BoundedMap(limit=3)
    for number in range(5):
        recent.put(number, str(number))
    assert [recent.get(number) for number in range(5)] == [None, None, "2", "3", "4"]
    assert len(recent) == 3


def test_what_is_put_again_is_new() -> None:
    recent: BoundedMap[str, int] = BoundedMap(limit=2)
    for name, value in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
        recent.put(name, value)
    assert (recent.get("a"), recent.get("b"), recent.get("c")) == (3, None, 4)


def test_pop_forgets() -> None:
    recent: BoundedMap[str, int] = BoundedMap()
    recent.put("a", 1)
    assert recent.pop("a") == 1
    assert recent.pop("a") is None
    assert len(recent) == 0


def test_a_peer_may_have_what_it_leaves_free() -> None:
    budget = Budget(1000)
    shares = [sum(budget.take(peer, 1) for _ in range(1000)) for peer in (1, 2, 3)]
    assert shares == [500, 250, 125]
    assert budget.num_refused == 3000 - 875
    budget.give_back(1, 500)
    assert budget.take(4, 300)


def test_notes_give_way_to_what_is_open_and_to_notes_of_peers_that_have_fewer() -> None:
    budget = Budget(200 * NOTE_BYTES)
    notes: Notes[int, int] = Notes(budget)
    for number in range(10):
        notes.put(number, number, peer=1)
    for number in range(10, 1000):
        notes.put(number, number, peer=2)
    assert [notes.get(number) for number in range(10)] == list(range(10))
    assert notes.get(999) == 999
    assert notes.get(10) is None
    assert budget.take(3, 90 * NOTE_BYTES)
    assert len(notes) > 80
    assert budget.take(4, 50 * NOTE_BYTES)
    assert 5 in notes
    assert 0 < len(notes) <= 60


def test_a_name_of_any_length_takes_as_much_as_another() -> None:
    budget = Budget()
    notes: Notes[tuple[str, bytes], int] = Notes(budget)
    notes.put(("a", b""), 1)
    notes.put(("a" * 4000, b""), 2)
    assert ("\ud800", b"") not in notes
    assert budget.used_bytes == 2 * NOTE_BYTES
    assert (notes.pop(("a", b"")), notes.pop(("a", b"")), notes.get(("a" * 4000, b""))) == (
        1, None, 2,
    )  # fmt: skip


def test_a_budget_is_never_exceeded_and_ends_empty(rng: SeededRandom) -> None:
    budget = Budget(20_000)
    kinds: list[Notes[int, int]] = [Notes(budget), Notes(budget)]
    held: list[tuple[int, int]] = []
    for _ in range(5000):
        peer, nbytes, notes = rng.randrange(9), rng.randrange(3000), rng.choice(kinds)
        choice = rng.randrange(4)
        if choice == 0 and budget.take(peer, nbytes):
            held.append((peer, nbytes))
        elif choice == 1 and held:
            budget.give_back(*held.pop(rng.randrange(len(held))))
        elif choice == 2:
            notes.put(rng.randrange(99), 0, peer, nbytes)
        else:
            notes.pop(rng.randrange(99))
        assert sum(nbytes for _, nbytes in held) <= budget.used_bytes <= 20_000
    for peer, nbytes in held:
        budget.give_back(peer, nbytes)
    for number in range(99):
        for notes in kinds:
            notes.pop(number)
    assert budget.used_bytes == len(kinds[0]) == len(kinds[1]) == 0


def test_a_flood_is_a_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    rare = RateLimitedWarnings(logging.getLogger("test"), lambda: now[0])
    for number in range(1000):
        rare.warn("refused: %d", number)
    now[0] += WARNING_SECONDS
    rare.warn("refused: %r", "a\nline")
    assert caplog.messages == ["refused: 0", "refused: 'a\\nline' (and 999 such lines before)"]
