"""A flood from strangers costs a bounded map and a few log lines."""

from __future__ import annotations

import logging

import pytest

from p2p_engine.bounded import WARNING_SECONDS, BoundedMap, RateLimitedWarnings


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


def test_a_flood_is_a_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    rare = RateLimitedWarnings(logging.getLogger("test"), lambda: now[0])
    for number in range(1000):
        rare.warn("refused: %d", number)
    now[0] += WARNING_SECONDS
    rare.warn("refused: %r", "a\nline")
    assert caplog.messages == ["refused: 0", "refused: 'a\\nline' (and 999 such lines before)"]
