"""A turn of a session, with no fault or with the death of who promised: no state that it can reach
breaks a promise or has no way to the end. `make model TURNS=1` explores every fault."""

from __future__ import annotations

from typing import Any

import pytest

from p2p_engine.receive.pulls import Pulls
from p2p_engine.send.holds import Hold, Holds
from p2p_engine.send.shipment import Shipment
from tests.property.explore import explore
from tests.property.turn_model import DEATHS, HALF, KeptBack, Recalled, TurnModel

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize(
    "play",
    [
        KeptBack(False, 0),
        KeptBack(True, 0, num_known=2),
        Recalled(False, 0, is_slow=True),
        Recalled(False, 1, faults=("kill promiser",), shared=HALF),
        Recalled(True, 0, is_kept=True, is_second=True),
    ],
    ids=["kept back", "spare", "recalled late", "recalled", "two answers"],
)
def test_every_state_keeps_the_promises_and_has_an_end(play: TurnModel) -> None:
    assert explore(play, limit=20_000) > 47


def _trust_what_was_offered(pulls: Any, item: Any, asked: Any) -> float:
    """As if what is pushed were all."""
    until: float = pulls._store.offered_until(item.content, asked.link.epoch)
    return until


def _copy_unseen(holds: Any, hold: Any, places: Any) -> bool:
    """The caller has its memory back before the copy has ended."""
    is_begun = COPY(holds, hold, places)
    hold.transfer.release()
    return is_begun


def _forget_promises(pulls: Any, item: Any, asked: Any, now: float) -> None:
    item.is_promised = False
    SAY_WANT(pulls, item, asked, now)


COPY, SAY_WANT = Holds._copy, Pulls._say_want
MUTATIONS: list[tuple[TurnModel, type, str, Any]] = [
    (Recalled(False, 0, shared=HALF), Holds, "_copy", _copy_unseen),
    (Recalled(False, 1, faults=("kill promiser",)), Pulls, "_say_want", _forget_promises),
    (Recalled(False, 0, is_slow=True), Holds, "_is_young", lambda _: True),
    (KeptBack(False, 1, faults=DEATHS), Shipment, "may_be_for_successor", property(lambda _: True)),
    (KeptBack(False, 0), Pulls, "_offered_until", _trust_what_was_offered),
    (Recalled(False, 0), Holds, "_finish", lambda _, hold: hold.transfer.end(hold.error)),
    (Recalled(False, 0, shared=HALF), Hold, "source_of", lambda hold, _: hold.source),
]


@pytest.mark.parametrize(
    ("play", "owner", "name", "mutant"),
    [pytest.param(*each, id=f"{each[1].__name__}.{each[2]}") for each in MUTATIONS],
)
def test_a_broken_promise_is_found(
    play: TurnModel, owner: type, name: str, mutant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(AssertionError, match="after "):
        explore(play, limit=20_000)
