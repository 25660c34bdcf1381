"""Timers against a model: what is due comes out, in order, and nothing is lost or kept."""

from __future__ import annotations

import gc
import weakref

import pytest

from p2p_engine.bounded import Index
from p2p_engine.control.timers import AGAIN_SECONDS, MIN_STALE, Timers
from tests.support import SeededRandom


def test_timers_do_what_a_scan_would(rng: SeededRandom) -> None:
    timers: Timers[int] = Timers()
    model: dict[int, float] = {}
    now = 0.0
    for _ in range(20_000):
        move, entry = rng.random(), rng.randrange(30)
        if move < 0.5:
            at = now + rng.choice([-1.0, 0.0, 0.5, 1.0, 3.0, 100.0])
            timers.set(entry, at)
            model[entry] = at
        elif move < 0.7:
            timers.cancel(entry)
            model.pop(entry, None)
        else:
            now += rng.choice([0.0, 0.1, 1.0])
            due = timers.take_due(now)
            assert len(due) == len(set(due))
            assert set(due) == {name for name, at in model.items() if at <= now}
            times = [model[name] for name in due]
            assert times == sorted(times)
            model |= dict.fromkeys(due, now + AGAIN_SECONDS)
        assert len(timers) == len(model)


def test_look_that_sets_nothing_comes_again() -> None:
    timers: Timers[str] = Timers()
    timers.set("a", 1.0)
    assert timers.take_due(1.0) == ["a"]
    assert timers.take_due(1.0) == []
    assert timers.take_due(1.0 + AGAIN_SECONDS) == ["a"]
    timers.cancel("a")
    assert timers.take_due(1e9) == []


def test_what_an_earlier_look_has_ended_is_looked_at_no_more() -> None:
    timers: Timers[str] = Timers()
    looked_at: list[str] = []

    def look(entry: str) -> None:
        looked_at.append(entry)
        for name in ("a", "b"):
            timers.cancel(name)
        if entry == "a":
            raise ValueError(entry)

    for entry, at in (("c", 3.0), ("b", 2.0), ("a", 1.0)):
        timers.set(entry, at)
    with pytest.raises(ValueError, match="a"):
        timers.look(4.0, look)
    assert looked_at == ["a", "c"]
    assert timers.take_due(1e9) == ["c"]


class Entry:
    """Something that can be looked at weakly."""


def test_cancelled_entries_do_not_stay_in_memory() -> None:
    timers: Timers[Entry] = Timers()
    references = []
    for _ in range(1000):
        entry = Entry()
        timers.set(entry, 1e9)
        timers.cancel(entry)
        references.append(weakref.ref(entry))
    gc.collect()
    assert sum(item() is not None for item in references) == 1  # the name in the loop


def test_times_that_move_on_leave_little_behind() -> None:
    timers: Timers[str] = Timers()
    for number in range(100_000):
        timers.set("a", 1e6 - number)
    assert len(timers._heap) <= 2 + MIN_STALE


def test_index_keeps_order_and_no_empty_names() -> None:
    index: Index[str, int] = Index()
    for value in (3, 1, 2, 3):
        index.add("a", value)
    assert (index.get("a"), index.count("a"), index.get("b")) == ([3, 1, 2], 3, [])
    for value in (1, 1, 2, 3):
        index.discard("a", value)
    index.discard("b", 1)
    assert index.names() == []
