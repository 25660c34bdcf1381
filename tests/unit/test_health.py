"""What an engine counts about itself."""

from __future__ import annotations

from p2p_engine.health import BusyTime


def test_uses_that_overlap_are_counted_once() -> None:
    busy = BusyTime()
    busy.begin(1.0)
    busy.begin(1.5)
    busy.end(2.0)
    busy.begin(2.0)
    busy.end(3.0)
    assert busy.seconds == 2.0  # while the third one goes on
    busy.end(4.0)
    busy.begin(10.0)
    busy.end(10.5)
    assert busy.seconds == 3.5
