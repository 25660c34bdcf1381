"""StashNotes: several requests may ask for one stash at the same moment."""

from __future__ import annotations

from p2p_engine.peers.stash_notes import RECALL_SECONDS, StashNotes
from p2p_engine.wire.messages import TransferKey
from tests.doubles.clock import Clock

HOLDER, MARKS = "127.0.0.1:1", [(16, b"binding")]
KEY = TransferKey("turn")


def test_all_who_ask_at_once_get_the_one_answer() -> None:
    clock = Clock()
    notes = StashNotes(clock)
    asked = [notes.ask(HOLDER, KEY) for _ in range(3)]
    notes.answer(HOLDER, KEY, MARKS)
    assert [each.marks for each in asked] == [MARKS] * 3
    assert notes.ask(HOLDER, KEY).marks is None


def test_a_question_whose_time_is_up_is_asked_anew() -> None:
    clock = Clock()
    notes = StashNotes(clock)
    lost = notes.ask(HOLDER, KEY)
    clock.now += RECALL_SECONDS
    notes.ask(HOLDER, KEY)
    notes.answer(HOLDER, KEY, MARKS)
    assert lost.marks is None
