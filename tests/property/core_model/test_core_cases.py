"""Named cases of the design of the core, each a run of its model: how each ends, and what it costs
the other tries."""

from __future__ import annotations

import pytest

from tests.property.core_model.explore import WaysToEnd, quiet
from tests.property.core_model.moves import make
from tests.property.core_model.state import CoreState, Scope

TO_D, TO_P = ("deliver", 1), ("deliver", 0)
LOSE_OF_P, LOSE_OF_D = ("stray", 1, 0), ("stray", 0, 0)
PUSH = Scope("push", num_faults=9, aborts=9, give_ups=9)
PULL = Scope("pull", pushes=(False,), num_faults=9, aborts=9, give_ups=9)
AGAIN = Scope("push again", pushes=(True, True), try_contents=(0, 0), ask_contents=(0, 0),
                num_faults=9, aborts=9, give_ups=9)  # fmt: skip
HELD_AGAIN = Scope("pull again", pushes=(False, False), try_contents=(0, 0), ask_contents=(0, 0),
                     num_faults=9, aborts=9, give_ups=9)  # fmt: skip
SECOND = Scope("second try", pushes=(True, True), try_contents=(0, 0), num_faults=9, give_ups=9)
TWO = Scope("two prompts", pushes=(False, False), try_contents=(0, 1), ask_contents=(0, 1),
              num_faults=9, aborts=9)  # fmt: skip
BOTH_PUSHED = Scope("two pushes", pushes=(True, True), try_contents=(0, 1), ask_contents=(0, 1),
                      num_faults=9)  # fmt: skip
D_AGAIN = Scope("to D again", pushes=(False,), ask_contents=(0, 0), num_faults=9, aborts=9)
TICKETED = Scope("ticketed", pushes=(False,), ask_contents=(0, 0), is_ticketed=True,
                   num_faults=9, aborts=9)  # fmt: skip


def play(setting: Scope, *moves: tuple[object, ...]) -> CoreState:
    """Make these moves."""
    world = CoreState(setting)
    for move in moves:
        make(world, move)
    return world


def go_on(world: CoreState, *moves: tuple[object, ...]) -> CoreState:
    """Let all that is due happen, but no deadline; then make these moves."""
    quiet(world)
    for move in moves:
        make(world, move)
    return world


def asks(world: CoreState) -> list[str]:
    """How each ask stands on the first rank, when all is quiet; from there everything ends."""
    quiet(world)
    found = [ask[0] for ask in world.ranks[0].asks[1:]]
    WaysToEnd().check(world.copy())
    return found


def words_on(way: int, world: CoreState) -> list[str]:
    """The kinds of the messages that are on their way."""
    return [message[0] for message in world.queues[way]]


def test_ask_1_lost_ask_2_heard_ask_1_repeated() -> None:
    begun = [("begin try", 0), ("begin try", 1), ("begin ask", 0, 1), LOSE_OF_D]
    world = play(TWO, *begun, ("begin ask", 0, 2), TO_P)
    assert world.heard[0][1:] == ["none", "paired"]
    assert asks(world) == ["loaded", "loaded"]


@pytest.mark.parametrize("first", [TO_D, TO_P], ids=["STOPPED first", "STOP first"])
def test_an_end_crosses_an_end(first: tuple[object, ...]) -> None:
    world = play(PUSH, ("begin try", 0), ("offer", 1, 0), ("begin ask", 0, 1), TO_D, TO_P, TO_P,
                 ("give up", 0), ("abort", 0, 1))  # fmt: skip
    assert words_on(1, world) == ["STOPPED"]
    assert words_on(0, world) == ["STOP", "RELEASE"]
    make(world, first)
    before = world.num_sent
    assert asks(world) == ["failed"]
    assert world.num_sent - before <= 12, "no answer answers an answer"


def test_release_of_what_was_never_heard_ends_the_hold_by_its_ticket() -> None:
    world = play(TICKETED, ("begin try", 0), ("begin ask", 0, 1), LOSE_OF_D, ("abort", 0, 1), TO_P)
    assert world.tries[0].state == "ended"


def test_a_push_is_given_up_after_its_first_commit() -> None:
    world = play(PUSH, ("begin try", 0), ("begin ask", 0, 1), TO_P, ("offer", 1, 0), TO_D, TO_P,
                 ("work", 1, 0), ("work", 1, 0), ("look", 0, 1, 0), TO_P,
                 ("give up", 0))  # fmt: skip
    assert world.heard[0][1] == "waiting"
    assert asks(world) == ["failed"]


def test_a_push_is_given_up_before_any_offer() -> None:
    world = play(PUSH, ("begin try", 0), ("give up", 0), ("begin ask", 0, 1), TO_P)
    assert asks(world) == ["failed"]


def test_an_abort_on_d_before_the_offer_of_a_push() -> None:
    world = play(PUSH, ("begin try", 0), ("begin ask", 0, 1), LOSE_OF_D, ("abort", 0, 1), TO_P)
    assert world.tries[0].state == "free"
    assert not world.ships, "nothing is offered any more"
    assert asks(world) == ["failed"]


def test_a_sender_is_denied_again_and_again_beside_another() -> None:
    """Both are two tries here; the first has the only region until its request has blocks."""
    world = play(BOTH_PUSHED, ("begin try", 0), ("begin try", 1), ("offer", 1, 0), TO_D, TO_P,
                 ("work", 1, 0), ("work", 1, 0), ("look", 0, 1, 0))  # fmt: skip
    for _ in range(5):
        make(world, ("offer", 2, 0))
        while world.queues[1]:
            make(world, TO_D)
        while world.queues[0]:
            make(world, TO_P)
    assert world.ships[2].chunks[0][0] == "queued", "its number is kept"
    make(world, ("begin ask", 0, 1))
    make(world, ("begin ask", 0, 2))
    assert asks(world) == ["loaded", "loaded"]


def test_d_is_silent_and_then_done_is_repeated() -> None:
    world = play(PULL, ("begin try", 0), ("begin ask", 0, 1), TO_P, ("give blocks", 0, 1),
                 ("offer", 1, 0), TO_D, TO_P, ("work", 1, 0), ("work", 1, 0), ("look", 0, 1, 0),
                 LOSE_OF_D, LOSE_OF_P)  # fmt: skip
    assert world.ships[1].chunks[0][0] == "written"
    make(world, ("say again", 1, 0))
    make(world, TO_D)
    assert "COMMIT" in words_on(0, world)
    assert asks(world) == ["loaded"]


def test_p_takes_d_for_gone_while_d_is_silent() -> None:
    """P's lease of the ask ends; D returns and asks again under its number."""
    world = play(PULL, ("begin try", 0), ("begin ask", 0, 1), TO_P, ("expire", 0, 1))
    assert world.tries[0].state == "free"
    assert asks(world) == ["loaded"]


def test_a_request_is_sent_again_to_d_alone_with_its_ticket() -> None:
    world = play(TICKETED, ("begin try", 0), ("begin ask", 0, 1), TO_P, ("abort", 0, 1))
    go_on(world, ("begin ask", 0, 2), TO_P)
    assert words_on(1, world)[-1] == "GONE", "at once"
    assert asks(world) == ["failed", "failed"]


def test_a_request_is_sent_again_to_d_alone_without_a_ticket() -> None:
    world = play(D_AGAIN, ("begin try", 0), ("begin ask", 0, 1), ("give blocks", 0, 1))
    assert asks(world)[0] == "loaded"
    make(world, ("begin ask", 0, 2))
    assert asks(world) == ["loaded", "failed"], "a second later: P has ended its only try"


def test_d_asks_for_a_second_try_that_p_does_not_know_yet() -> None:
    """D has never spoken of the first one. Today its request fails at once."""
    world = play(SECOND, ("begin try", 0), ("give up", 0), ("begin ask", 0, 1), TO_P)
    make(world, ("begin try", 1))
    assert asks(world) == ["loaded"]


def test_a_late_release_of_the_first_try_takes_nothing_from_the_second() -> None:
    """The second try is held, and serves the first ask, before RELEASE is heard. Today the request
    fails at its deadline."""
    world = play(HELD_AGAIN, ("begin try", 0), ("begin ask", 0, 1), TO_P, ("give up", 0),
                 ("abort", 0, 1), ("begin try", 1))  # fmt: skip
    assert world.tries[1].ask == 1
    make(world, ("begin ask", 0, 2))
    assert asks(world) == ["failed", "loaded"]


def test_a_push_has_arrived_whole_and_the_next_try_is_given_up() -> None:
    """Today the second request fails at its deadline."""
    first = [("begin try", 0), ("begin ask", 0, 1)]
    world = go_on(play(AGAIN, *first))
    make(world, ("begin try", 1))
    make(world, ("begin ask", 0, 2))
    make(world, TO_P)
    make(world, ("give up", 1))
    assert asks(world)[1] == "failed"


def test_a_pushed_try_is_claimed_for_one_ask_and_offered_for_another() -> None:
    """D has claimed it for ask 1, whose ASK is lost; P has heard ask 2. D stops it, and P sends it
    anew under another number."""
    world = play(AGAIN, ("begin try", 0), ("begin ask", 0, 1), LOSE_OF_D, ("offer", 1, 0), TO_D,
                 ("begin ask", 0, 2), ("stray", 0, 0))  # fmt: skip
    while world.queues[0]:
        make(world, TO_P)
    make(world, ("begin try", 1))
    assert asks(world) == ["loaded", "loaded"]
