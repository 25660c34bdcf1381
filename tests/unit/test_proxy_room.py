"""Which connection makes room for a newcomer to a full house, and what it costs to find it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from proxy.http.house import MOST_LOOKS, ClientHouse, Rules
from tests.doubles.clock import Clock


class Newcomer:
    """A connection that was never answered; counts how often somebody looks at it."""

    was_answered = False
    num_looks = 0

    def __init__(self, clock: Clock, *, has_spoken: bool = False) -> None:
        self.loop = SimpleNamespace(time=clock)
        self.is_open = True
        self._has_spoken = has_spoken

    @property
    def has_spoken(self) -> bool:
        """Tell it, and count the look."""
        Newcomer.num_looks += 1
        return self._has_spoken

    def drop(self) -> None:
        """Be closed."""
        self.is_open = False


def house(num_places: int) -> Any:
    return cast("Any", ClientHouse(Rules(num_places, 75.0, 20.0, 240.0), turn_away=None))


def test_in_a_crowd_that_has_spoken_a_newcomer_costs_a_few_looks() -> None:
    clock, full = Clock(), house(1000)
    crowd = [Newcomer(clock, has_spoken=True) for _ in range(1000)]
    for stranger in crowd:
        full.enter(stranger)
    Newcomer.num_looks = 0
    for number in range(300):
        newcomer = Newcomer(clock, has_spoken=True)
        full.enter(newcomer)
        assert newcomer.is_open
        assert full.num_guests == 1000
        assert Newcomer.num_looks <= MOST_LOOKS * (number + 1)
    assert [stranger.is_open for stranger in crowd] == [False] * 300 + [True] * 700


def test_who_is_silent_makes_room_before_who_has_spoken() -> None:
    clock, full = Clock(), house(3)
    spoken, silent, heard = (Newcomer(clock, has_spoken=each) for each in (True, False, False))
    for stranger in (spoken, heard, silent):
        full.enter(stranger)
    full.note_spoken(heard)
    full.enter(Newcomer(clock, has_spoken=True))
    assert (spoken.is_open, heard.is_open, silent.is_open) == (True, True, False)
    full.note_read(heard)  # half of a head, or of a handshake
    full.enter(Newcomer(clock, has_spoken=True))
    assert (spoken.is_open, heard.is_open) == (True, False)
