"""What peers want and nobody holds yet."""

from __future__ import annotations

from p2p_engine.peers.link import PeerAddress
from p2p_engine.send.endings import Ending
from p2p_engine.send.unheld_wants import PendingWant, UnheldWants
from p2p_engine.wire.messages import TransferKey

CONTENT, PEER = (TransferKey("request"), b"binding"), PeerAddress("127.0.0.1:1")


def test_a_want_that_is_said_again_keeps_its_deadline() -> None:
    """Receivers say it again and again: they must be refused all the same."""
    wants, refused = UnheldWants(), list[Ending]()
    wants.put(CONTENT, PEER, PendingWant(None, 60.0, refused.append))
    wants.put(CONTENT, PEER, PendingWant(None, 115.0, refused.append))
    wants.tick(61.0)
    assert [ending.reason for ending in refused] == ["it was never held here"]
    assert len(wants) == 0


def test_a_want_of_another_receive_has_its_own_deadline() -> None:
    wants, refused = UnheldWants(), list[Ending]()
    wants.put(CONTENT, PEER, PendingWant(None, 60.0, refused.append, attempt=(5, 1)))
    wants.put(CONTENT, PEER, PendingWant(None, 115.0, refused.append, attempt=(5, 2)))
    wants.tick(114.0)
    assert len(wants) == 1
    wants.tick(116.0)
    assert len(refused) == 1
    assert len(wants) == 0
