"""No descriptor is left: nothing spins, nothing is lost, and all goes on when there are some."""

from __future__ import annotations

from typing import Any

from p2p_engine.control.listener import START_FILES
from tests.hostile.shortage import Shortage
from tests.processes import Child


def seen(scenario: str) -> Any:
    with Child(Shortage, through=()) as child:
        child.PATIENCE = 100
        saw = child.ask(scenario)
        child.end()
    return saw


def test_who_waits_for_a_descriptor_makes_no_thread_spin() -> None:
    saw = seen("waiting")
    assert saw["share"] < 0.5  # of a core; a spinning thread takes all that it gets
    assert saw["turned_away"] >= 1


def test_dialling_leaves_nothing_behind() -> None:
    assert seen("dialling") == {"errors": 0}


def test_a_start_fails_by_name() -> None:
    """However few descriptors are left: libzmq itself would end the process over some numbers."""
    saw = seen("starting")
    assert len(saw["said"]) == START_FILES
    assert all("open files" in text for text in saw["said"])
    assert sum(f"fewer than {START_FILES} descriptors" in text for text in saw["said"]) >= 28
    assert saw["left"] == 0
