"""How both sides have ended the sending of a content."""

from __future__ import annotations

import tracemalloc

from p2p_engine.bounded import Budget
from p2p_engine.peers.link import PeerAddress
from p2p_engine.send.endings import Endings
from p2p_engine.wire.messages import TransferKey

KEY = TransferKey("request")
CONTENT, OTHER = (KEY, b"binding"), (KEY, b"other")
READERS = frozenset({0, 1})
PEERS = [PeerAddress(f"127.0.0.1:{number}") for number in (1, 2)]  # by rank
STRANGER = PeerAddress("127.0.0.1:3")


def test_who_released_a_content_before_it_was_held_is_known_then() -> None:
    endings = Endings(Budget())
    endings.depart(CONTENT, 1, PEERS[1], READERS)
    departed = endings.begin(CONTENT)
    assert departed is not None
    assert (departed.readers, departed.ranks) == (READERS, {1: PEERS[1]})
    assert endings.begin(CONTENT) is None


def test_who_asks_again_has_not_departed() -> None:
    endings = Endings(Budget())
    endings.depart(CONTENT, 1, PEERS[1], READERS)
    assert endings.expect(CONTENT, 1, PEERS[1]) is None
    departed = endings.begin(CONTENT)
    assert departed is not None
    assert not departed.ranks


def test_what_ended_is_refused_until_it_begins_again() -> None:
    endings = Endings(Budget())
    endings.end(CONTENT, "it was aborted", generation=3)
    ending = endings.expect(CONTENT, 0, PEERS[0])
    assert ending is not None
    assert (ending.reason, ending.generation) == ("it was aborted", 3)
    endings.begin(OTHER)
    assert endings.expect(CONTENT, 0, PEERS[0]) is ending
    endings.begin(CONTENT)
    assert endings.expect(CONTENT, 0, PEERS[0]) is None


def test_what_ended_says_nothing_of_other_contents_of_the_key() -> None:
    endings = Endings(Budget())
    endings.end(CONTENT, "it was aborted")
    assert endings.expect(OTHER, 0, PEERS[0]) is None
    assert not endings.is_served(OTHER)


def test_a_rank_that_departed_asks_for_the_next_attempt() -> None:
    """In either order: it released the first attempt before, or after, that ended here."""
    for is_first in (True, False):
        endings = Endings(Budget())
        if is_first:
            endings.depart(CONTENT, 0, PEERS[0], READERS)
        endings.end(CONTENT, "it was aborted")
        if not is_first:
            endings.depart(CONTENT, 0, PEERS[0], READERS)
        assert endings.expect(CONTENT, 1, PEERS[1]) is not None
        assert endings.expect(CONTENT, 0, PEERS[0]) is None
        # All that was known was of the first attempt.
        assert endings.expect(CONTENT, 1, PEERS[1]) is None


def test_a_release_of_an_attempt_that_has_ended_says_nothing_about_the_next() -> None:
    endings = Endings(Budget())
    endings.end(CONTENT, "it was aborted")
    endings.depart(CONTENT, 0, PEERS[0], READERS)
    assert endings.begin(CONTENT) is None


def test_a_rank_that_departed_from_one_attempt_is_refused_when_the_next_has_ended_too() -> None:
    endings = Endings(Budget())
    endings.depart(CONTENT, 0, PEERS[0], READERS)
    endings.end(CONTENT, "it was aborted", generation=1)
    endings.end(CONTENT, "it was aborted once more", generation=1)
    assert endings.expect(CONTENT, 0, PEERS[0]) is None
    endings.end(CONTENT, "the next one, too", generation=2)
    ending = endings.expect(CONTENT, 0, PEERS[0])
    assert ending is not None
    assert ending.reason == "the next one, too"


def test_a_rank_of_another_instance_asks_for_what_has_ended() -> None:
    """It has the same number as one that departed."""
    endings = Endings(Budget())
    endings.end(CONTENT, "it was pulled already", is_served=True)
    endings.depart(CONTENT, 0, PEERS[0], READERS)
    assert endings.expect(CONTENT, 0, STRANGER) is not None
    assert endings.expect(CONTENT, 0, PEERS[0]) is None


def test_a_rank_that_asks_again_is_refused_when_that_ends() -> None:
    """The release of the first attempt came when the second had begun."""
    endings = Endings(Budget())
    endings.end(CONTENT, "it was aborted", generation=1)
    endings.begin(CONTENT)
    endings.depart(CONTENT, 0, PEERS[0], READERS)
    assert endings.expect(CONTENT, 0, PEERS[0]) is None
    endings.end(CONTENT, "it was aborted", generation=2)
    ending = endings.end(CONTENT, "the third, too", generation=3)
    assert endings.expect(CONTENT, 0, PEERS[0]) is ending


def test_peers_that_release_what_was_never_here_take_little_memory() -> None:
    budget = Budget(100_000)
    endings = Endings(budget)
    tracemalloc.start()
    try:
        for number in range(4096):
            peer, readers = PeerAddress(f"{'host' * 50}:{number}"), frozenset(range(number % 999))
            content = (TransferKey(f"request {number % 64}"), b"binding")
            endings.depart(content, number, peer, readers, epoch=number % 50)
        assert tracemalloc.get_traced_memory()[0] < 130_000
    finally:
        tracemalloc.stop()
    assert 0 < budget.used_bytes <= 100_000
    endings.end(CONTENT, "it was aborted")
    assert endings.has_ended(CONTENT)


def test_attempts_that_end_on_both_sides_are_counted() -> None:
    """A peer may have ended several before this side ends the first."""
    endings = Endings(Budget())
    for _ in range(2):
        endings.depart(CONTENT, 0, PEERS[0], READERS)
    for generation in (1, 2):
        ending = endings.end(CONTENT, "it was aborted", generation=generation)
        assert ending.has_left(PEERS[0])
        assert not ending.has_left(PEERS[1])
    assert endings.expect(CONTENT, 0, PEERS[0]) is None
    assert not endings.end(CONTENT, "the third, too", generation=3).has_left(PEERS[0])


def test_a_late_end_of_the_last_attempt_does_not_refuse_the_next() -> None:
    endings = Endings(Budget())
    endings.end(CONTENT, "it was pulled already", is_served=True, generation=1)
    endings.depart(CONTENT, 0, PEERS[0], READERS, has_pulled=True)
    assert endings.expect(CONTENT, 0, PEERS[0]) is None
    assert not endings.end(CONTENT, "it was aborted", generation=1).reason
    assert endings.expect(CONTENT, 0, PEERS[0]) is None


def test_a_chunk_that_is_sent_leaves_what_a_peer_has_released() -> None:
    endings = Endings(Budget())
    endings.depart(CONTENT, 0, PEERS[0], READERS)
    endings.forget_ended(CONTENT)
    assert endings.end(CONTENT, "it was aborted", generation=1).has_left(PEERS[0])
    endings.forget_ended(CONTENT)
    assert endings.expect(CONTENT, 1, PEERS[1]) is None


def test_a_key_is_over_until_something_of_it_begins() -> None:
    endings = Endings(Budget())
    endings.end(CONTENT, "it was pulled already", is_served=True)
    assert not endings.why_over(KEY)
    for generation, begin in enumerate((endings.begin, endings.forget_ended), 1):
        endings.end(CONTENT, "it was aborted", generation=generation)
        assert endings.why_over(KEY) == "it was aborted"
        begin(OTHER)
        assert not endings.why_over(KEY)


def test_what_has_ended_is_known_also_when_it_is_sent_again() -> None:
    endings = Endings(Budget())
    endings.depart(CONTENT, 0, PEERS[0], READERS)
    assert not endings.has_ended(CONTENT)
    endings.end(CONTENT, "it was pulled already", is_served=True)
    endings.forget_ended(CONTENT)
    assert endings.has_ended(CONTENT)
    assert endings.expect(CONTENT, 0, PEERS[0]) is None
