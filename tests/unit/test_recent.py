"""Recent: it remembers the newest and no more than its limit."""

from __future__ import annotations

from p2p_engine.recent import Recent


def test_oldest_is_forgotten_first() -> None:
    recent: Recent[int, str] = Recent(limit=3)
    for number in range(5):
        recent.put(number, str(number))
    assert [recent.get(number) for number in range(5)] == [None, None, "2", "3", "4"]
    assert len(recent) == 3


def test_what_is_put_again_is_new() -> None:
    recent: Recent[str, int] = Recent(limit=2)
    for name, value in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
        recent.put(name, value)
    assert (recent.get("a"), recent.get("b"), recent.get("c")) == (3, None, 4)


def test_pop_forgets() -> None:
    recent: Recent[str, int] = Recent()
    recent.put("a", 1)
    assert recent.pop("a") == 1
    assert recent.pop("a") is None
    assert len(recent) == 0
