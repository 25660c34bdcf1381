"""Every option of the installed vLLM is changed by `make test-options`, or left out for a reason;
and what is seen of a pair is judged as the page says."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from tests.options.page import PAGE, page
from tests.options.record import RECORD, is_good, read
from tests.options.table import CHANGES, LEFT_OUT, changes, known_options
from tests.options.trial import (
    MOVED,
    REFUSED,
    TOLERANCE,
    UNLIKE,
    UNNAMED,
    WRONG,
    GreedyAnswer,
    drift,
    judge,
)


def test_every_option_of_this_vllm_has_a_row() -> None:
    arg_utils = pytest.importorskip("vllm.engine.arg_utils")
    fields = {each.name for each in dataclasses.fields(arg_utils.AsyncEngineArgs)}
    assert sorted(fields - set(known_options())) == []


def test_no_option_is_both_changed_and_left_out() -> None:
    changed = {option for options in CHANGES.values() for option in options}
    left_out = Counter(name for names in LEFT_OUT.values() for name in names.split())
    assert sorted(changed & set(left_out)) == []
    assert [name for name, number in left_out.items() if number > 1] == []


def test_changes_have_names_of_their_own() -> None:
    names = Counter(change.name for change in changes())
    assert [name for name, number in names.items() if number > 1] == []


def test_the_page_is_what_the_record_says() -> None:
    assert PAGE.read_text() == page(read(RECORD)), "run: python -m tests.options.page"


def said(*places: dict[int, float]) -> GreedyAnswer:
    """An answer that takes the first token of each place."""
    likely = [{f"token_id:{token}": value for token, value in place.items()} for place in places]
    return GreedyAnswer([next(iter(place)) for place in places], likely)


OWN = said({7: -0.1, 8: -2.1}, {5: -0.7, 6: -0.702, 9: -4.7})


def test_rounding_is_told_from_difference() -> None:
    assert drift(OWN, OWN) == 0
    assert drift(OWN, said({7: -0.104, 8: -2.1}, {5: -0.7})) == pytest.approx(0.002)
    near_tie = said({7: -0.1}, {6: -0.698, 5: -0.7})
    assert drift(OWN, near_tie) == pytest.approx(0.001)
    assert drift(OWN, said({8: -0.1, 7: -2.1}, {5: -0.7})) == pytest.approx(1)
    assert drift(OWN, said({9: -0.1}, {5: -0.7})) == UNLIKE
    # Behind the first token that differs, each goes on with another text.
    one, other = said({5: -0.7, 6: -0.7, 7: -1}, {1: -0.1}), said({6: -0.7, 5: -0.7}, {2: -0.1})
    assert drift(one, other) == 0


def test_likelihoods_that_lie_close_are_told_apart_too() -> None:
    own = said({7: -6.931, 8: -6.93101})
    assert drift(own, said({8: -6.931, 7: -6.93101})) == pytest.approx(1)


def test_equal_tokens_of_other_probabilities_are_wrong() -> None:
    other = said({7: -0.1 - 4 * TOLERANCE, 8: -2.1}, {5: -0.7})
    assert judge([0.0, drift(OWN, other)], 2, "") == WRONG


@pytest.mark.parametrize(
    ("num_moved", "named", "outcome"),
    [(2, "", MOVED), (0, "dtype: here, there", REFUSED), (0, "", UNNAMED), (1, "said", UNNAMED)],
)
def test_what_is_right_is_judged_by_what_moved(num_moved: int, named: str, outcome: str) -> None:
    assert judge([0.0, TOLERANCE / 2], num_moved, named) == outcome
    assert judge([0.0, 2 * TOLERANCE], num_moved, named) == WRONG


def test_the_control_must_be_seen_to_be_wrong() -> None:
    sides = {side: {"outcome": MOVED} for side in ("decode", "prefill")}
    control = '--hf-overrides={"rms_norm_eps":0.9}'
    assert is_good({"change": "--seed=7", **sides})
    assert not is_good({"change": control, **sides})
    wrong = {side: {"outcome": WRONG} for side in sides}
    assert is_good({"change": control, **wrong})
    assert not is_good({"change": "--seed=7", **wrong})
