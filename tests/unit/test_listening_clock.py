"""ListeningClock: absence is excused once, never more than was missed, and a silence is noticed."""

from __future__ import annotations

import pytest

from p2p_engine.control.timers import NUM_STEPS, ListeningClock

PATIENCE = 2.0


class SilentPeer:
    """One peer's silence, by a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 50.0
        self.listening = ListeningClock(PATIENCE, lambda: self.now)
        self.heard_at = self.listening()

    def look_after(self, seconds: float) -> float:
        """Let time pass; return how long the peer is silent then."""
        self.now += seconds
        return self.listening() - self.heard_at

    def notice(self, absence: float) -> tuple[int, float]:
        """Return after how many looks, and seconds, the peer is found to be silent."""
        began, num_looks = self.now, 1
        while self.look_after(absence) < PATIENCE:
            num_looks += 1
            assert num_looks < 1000
        return num_looks, self.now - began


@pytest.fixture
def listener() -> SilentPeer:
    return SilentPeer()


def test_time_that_is_listened_to_counts_whole(listener: SilentPeer) -> None:
    for number in range(1, 50):
        assert listener.look_after(0.02) == pytest.approx(number * 0.02)


@pytest.mark.parametrize("absence", [0.02, 0.3, 0.49])
def test_who_looks_often_enough_notices_silence_in_time(
    listener: SilentPeer, absence: float
) -> None:
    _, seconds = listener.notice(absence)
    assert PATIENCE <= seconds + 1e-6 <= PATIENCE + absence + 1e-6


@pytest.mark.parametrize("absence", [0.51, 1.0, 6.0, 100.0])
def test_who_is_always_absent_notices_silence_within_five_looks(
    listener: SilentPeer, absence: float
) -> None:
    assert listener.notice(absence)[0] == NUM_STEPS + 1


@pytest.mark.parametrize("absence", [1.0, 6.0, 3600.0])
def test_after_one_absence_silence_counts_as_if_there_had_been_none(
    listener: SilentPeer, absence: float
) -> None:
    listener.look_after(0.4)
    assert listener.look_after(absence) == pytest.approx(0.4)
    _, seconds = listener.notice(0.02)
    assert seconds == pytest.approx(PATIENCE - 0.4, abs=0.03)


def test_who_was_heard_after_an_absence_is_not_heard_in_the_future(listener: SilentPeer) -> None:
    """What came meanwhile is read before the timers run."""
    listener.now += 6.0
    listener.heard_at = listener.listening()
    _, seconds = listener.notice(0.02)
    assert seconds == pytest.approx(PATIENCE, abs=0.03)


def test_a_second_absence_soon_after_the_first_counts_a_step_and_a_later_one_nothing(
    listener: SilentPeer,
) -> None:
    listener.look_after(6.0)
    assert listener.look_after(6.0) == pytest.approx(PATIENCE / NUM_STEPS)
    for _ in range(100):
        listener.look_after(0.02)
    before = listener.look_after(0.02)
    assert listener.look_after(6.0) == before


def test_a_peer_that_answers_at_each_look_is_never_silent(listener: SilentPeer) -> None:
    for absence in (0.3, 1.0, 6.0, 6.0, 0.6, 100.0, 100.0):
        assert listener.look_after(absence) <= PATIENCE / NUM_STEPS
        listener.heard_at = listener.listening()
