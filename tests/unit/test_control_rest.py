"""A control plane that has nothing to do sleeps, and is awake when something happens.

Its ticks are an hour apart here, so that only what wakes it can be the cause of one.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator

import pytest

from p2p_engine.control.plane import ControlPlane, PlaneListener
from p2p_engine.control.sockets import Route
from tests.hostile.strangers import MORE, long_frame, stranger
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("no_leaks")

HOUR = 3600.0


class Sleeper(PlaneListener):
    """A plane whose next work is due at a time that the test sets."""

    def __init__(self) -> None:
        self.ticks: list[float] = []
        self.due = math.inf
        self.control = ControlPlane(
            "127.0.0.1", range(1), name="p2p-test", listener=self, rest_seconds=HOUR
        )
        self.control.start()

    def on_tick(self, now: float) -> None:
        self.ticks.append(now)

    def due_at(self, now: float) -> float:
        return self.due

    def has_ticked_since(self, count: int) -> bool:
        return len(self.ticks) > count

    def fall_asleep(self) -> int:
        """Wait until the plane rests; returns the number of ticks until then."""
        eventually(lambda: self.ticks and self.control._is_resting)
        return len(self.ticks)


@pytest.fixture
def sleeper() -> Iterator[Sleeper]:
    made = Sleeper()
    yield made
    made.control.close(5)


def test_with_nothing_due_there_is_no_tick(sleeper: Sleeper) -> None:
    count = sleeper.fall_asleep()
    switches = _voluntary_switches(sleeper)
    time.sleep(0.3)  # the time itself is what is tested: 15 ticks at the usual pace
    assert len(sleeper.ticks) == count
    # It may have been on its way into the wait: once for the interpreter, and once to sleep.
    assert _voluntary_switches(sleeper) <= switches + 2


def test_a_change_that_is_told_ends_the_rest(sleeper: Sleeper) -> None:
    count = sleeper.fall_asleep()
    sleeper.due = 0.0
    sleeper.control.stir()
    eventually(lambda: sleeper.has_ticked_since(count + 10))


def test_a_tick_comes_when_something_is_due(sleeper: Sleeper) -> None:
    count = sleeper.fall_asleep()
    sleeper.due = time.monotonic() + 0.2
    sleeper.control.stir()
    eventually(lambda: any(tick >= sleeper.due for tick in sleeper.ticks))
    assert len(sleeper.ticks) <= count + 2 + 0.3 / 0.02  # after `due` each tick has work


def test_a_call_ends_the_rest(sleeper: Sleeper) -> None:
    count = sleeper.fall_asleep()
    sleeper.control.call_soon(lambda: None)
    eventually(lambda: sleeper.has_ticked_since(count))


def test_a_frame_ends_the_rest(sleeper: Sleeper) -> None:
    other = Sleeper()
    try:
        count = sleeper.fall_asleep()
        other.fall_asleep()
        other.control.send(Route(sleeper.control.address), b"frame")
        eventually(lambda: sleeper.has_ticked_since(count))
    finally:
        other.control.close(5)


def test_a_frame_that_a_caller_takes_in_ends_the_rest(sleeper: Sleeper) -> None:
    sleeper.fall_asleep()
    heard: list[bytes] = []
    sleeper.on_frame = lambda route, frame: heard.append(frame)  # type: ignore[method-assign]
    other = Sleeper()
    try:
        with sleeper.control._io:  # the thread cannot take it
            other.control.send(Route(sleeper.control.address), b"frame")
            eventually(lambda: sleeper.control._watches.ready())
        sleeper.due = 0.0
        count = len(sleeper.ticks)
        sleeper.control.pump()
        eventually(lambda: heard)
        eventually(lambda: sleeper.has_ticked_since(count + 10))
    finally:
        other.control.close(5)


def test_a_caller_that_takes_the_wake_of_the_thread_ends_the_rest(sleeper: Sleeper) -> None:
    """An epoll that has woken up sleeps on if another thread has read its event meanwhile."""
    for _ in range(20):
        sleeper.due = math.inf
        sleeper.control.stir()
        count = sleeper.fall_asleep()
        sleeper.due = 0.0
        sleeper.control.stir()
        sleeper.control.pump()
        eventually(lambda count=count: sleeper.has_ticked_since(count))  # type: ignore[misc]


def test_bytes_of_a_stranger_end_the_rest(sleeper: Sleeper) -> None:
    """They make no frame, but their number must be looked at. libzmq may have read some of them
    before the kernel can tell of them, so there are many."""
    for _ in range(3):
        with stranger(sleeper.control.address) as connection:
            count = sleeper.fall_asleep()

            def has_woken(count: int = count) -> bool:
                with contextlib.suppress(ConnectionError):  # it is cut in a tick
                    connection.sendall(long_frame(1 << 14, MORE))
                return sleeper.has_ticked_since(count)

            eventually(has_woken)


def test_a_question_that_raises_costs_no_tick(
    sleeper: Sleeper, caplog: pytest.LogCaptureFixture
) -> None:
    count = sleeper.fall_asleep()

    def broken(now: float) -> float:
        raise RuntimeError("a bug")

    sleeper.due_at = broken  # type: ignore[method-assign]
    sleeper.control.stir()
    eventually(lambda: sleeper.has_ticked_since(count + 3))
    assert sleeper.control.alive


def _voluntary_switches(sleeper: Sleeper) -> int:
    path = f"/proc/self/task/{sleeper.control._thread.native_id}/status"
    with open(path) as status:
        found = [line for line in status if line.startswith("voluntary")]
    return int(found[0].split()[1])
