"""What peers want and nobody holds yet."""

from __future__ import annotations

from p2p_engine.bounded import Budget
from p2p_engine.peers.link import PeerAddress
from p2p_engine.send.endings import Ending
from p2p_engine.send.unheld_wants import PendingWant, UnheldWants
from p2p_engine.wire.messages import TransferKey

CONTENT, PEER = (TransferKey("request"), b"binding"), PeerAddress("127.0.0.1:1")


def test_a_want_that_is_said_again_keeps_its_deadline() -> None:
    """Receivers say it again and again: they must be refused all the same."""
    wants, refused = UnheldWants(Budget()), list[Ending]()
    wants.put(CONTENT, PEER, PendingWant(None, 60.0, refused.append))
    wants.put(CONTENT, PEER, PendingWant(None, 115.0, refused.append))
    wants.tick(61.0)
    assert [ending.reason for ending in refused] == ["it was never held here"]
    assert len(wants) == 0


def test_wants_end_with_their_session_and_take_no_more_than_the_budget() -> None:
    budget = Budget(100_000)
    wants, refused = UnheldWants(budget), list[Ending]()
    for epoch in (5, 6):
        for number in range(100):
            want = PendingWant(None, 60.0, refused.append, attempt=(epoch, 1))
            wants.put((TransferKey(f"{number}"), b""), PeerAddress(f"127.0.0.1:{epoch}"), want)
    assert 20 < len(wants) < 40  # a third of the budget is left
    assert budget.used_bytes < 75_000
    wants.engine_lost(5)
    assert 0 < len(wants) < 20
    wants.put(CONTENT, PEER, PendingWant(None, 60.0, refused.append, attempt=(7, 1)))
    wants.tick(61.0)
    assert budget.used_bytes == len(wants) == 0
    assert len(refused) < 20


def test_a_want_that_is_said_again_is_kept_whoever_takes_the_rest_of_the_budget() -> None:
    budget = Budget(100_000)
    wants = UnheldWants(budget)
    want = PendingWant(None, 60.0, lambda _: None, attempt=(5, 1))
    wants.put(CONTENT, PEER, want)
    while budget.take(6, 10) or budget.take(7, 10):
        pass
    wants.put(CONTENT, PEER, want)
    assert len(wants) == 1


def test_a_want_of_another_receive_has_its_own_deadline() -> None:
    wants, refused = UnheldWants(Budget()), list[Ending]()
    wants.put(CONTENT, PEER, PendingWant(None, 60.0, refused.append, attempt=(5, 1)))
    wants.put(CONTENT, PEER, PendingWant(None, 115.0, refused.append, attempt=(5, 2)))
    wants.tick(114.0)
    assert len(wants) == 1
    wants.tick(116.0)
    assert len(refused) == 1
    assert len(wants) == 0
