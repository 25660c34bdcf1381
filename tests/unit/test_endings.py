"""How both sides have ended the sending of a key."""

from __future__ import annotations

from p2p_engine.peers.link import PeerAddress
from p2p_engine.send.endings import MAX_BINDINGS, Endings
from p2p_engine.wire.messages import TransferKey

KEY = TransferKey("request")
CONTENT, OTHER = (KEY, b"binding"), (KEY, b"other")
READERS = frozenset({0, 1})
PEERS = [PeerAddress(f"127.0.0.1:{number}") for number in (1, 2)]  # by rank
STRANGER = PeerAddress("127.0.0.1:3")


def test_who_released_a_content_before_it_was_held_is_known_then() -> None:
    endings = Endings()
    endings.depart(CONTENT, 1, PEERS[1], READERS)
    departed = endings.begin(CONTENT)
    assert departed is not None
    assert (departed.readers, departed.ranks) == (READERS, {1: PEERS[1]})
    assert endings.begin(CONTENT) is None


def test_who_asks_again_has_not_departed() -> None:
    endings = Endings()
    endings.depart(CONTENT, 1, PEERS[1], READERS)
    assert endings.expect(CONTENT, 1, PEERS[1]) is None
    departed = endings.begin(CONTENT)
    assert departed is not None
    assert not departed.ranks


def test_what_ended_is_refused_until_it_begins_again() -> None:
    endings = Endings()
    endings.end(KEY, "it was aborted", generation=3)
    ending = endings.expect(CONTENT, 0, PEERS[0])
    assert ending is not None
    assert (ending.reason, ending.generation) == ("it was aborted", 3)
    endings.begin(OTHER)
    assert endings.expect(CONTENT, 0, PEERS[0]) is None


def test_a_rank_that_departed_asks_for_the_next_attempt() -> None:
    """In either order: it released the first attempt before, or after, that ended here."""
    for is_first in (True, False):
        endings = Endings()
        if is_first:
            endings.depart(CONTENT, 0, PEERS[0], READERS)
        endings.end(KEY, "it was aborted")
        if not is_first:
            endings.depart(CONTENT, 0, PEERS[0], READERS)
        assert endings.expect(OTHER, 1, PEERS[1]) is not None
        assert endings.expect(OTHER, 0, PEERS[0]) is None
        # All that was known was of the first attempt.
        assert endings.expect(OTHER, 1, PEERS[1]) is None


def test_a_release_of_an_attempt_that_has_ended_says_nothing_about_the_next() -> None:
    endings = Endings()
    endings.end(KEY, "it was aborted")
    endings.depart(CONTENT, 0, PEERS[0], READERS)
    assert endings.begin(CONTENT) is None


def test_a_rank_that_departed_from_one_attempt_is_refused_when_the_next_has_ended_too() -> None:
    endings = Endings()
    endings.depart(CONTENT, 0, PEERS[0], READERS)
    endings.end(KEY, "it was aborted", generation=1)
    endings.end(KEY, "it was aborted once more", generation=1)
    assert endings.expect(CONTENT, 0, PEERS[0]) is None
    endings.end(KEY, "the next one, too", generation=2)
    ending = endings.expect(CONTENT, 0, PEERS[0])
    assert ending is not None
    assert ending.reason == "the next one, too"


def test_a_rank_of_another_instance_asks_for_what_has_ended() -> None:
    """It has the same number as one that departed."""
    endings = Endings()
    endings.end(KEY, "it was pulled already", is_served=True)
    endings.depart(CONTENT, 0, PEERS[0], READERS)
    assert endings.expect(CONTENT, 0, STRANGER) is not None
    assert endings.expect(CONTENT, 0, PEERS[0]) is None


def test_a_rank_that_asks_again_is_refused_when_that_ends_whatever_it_asks_for() -> None:
    """The release of the first attempt came when the second, with another content, had begun."""
    endings = Endings()
    endings.end(KEY, "it was aborted", generation=1)
    endings.begin(OTHER)
    endings.depart(CONTENT, 0, PEERS[0], READERS)
    assert endings.expect(OTHER, 0, PEERS[0]) is None
    endings.end(KEY, "it was aborted", generation=2)
    assert endings.expect(OTHER, 0, PEERS[0]) is not None


def test_a_peer_that_releases_what_was_never_here_takes_little_memory() -> None:
    endings = Endings()
    for number in range(100 * MAX_BINDINGS):
        endings.depart((KEY, b"%d" % number), 0, PEERS[0], READERS)
    ending = endings.end(KEY, "it was aborted")
    assert len(ending.departed) == MAX_BINDINGS
    assert len(ending.left) == 1


def test_attempts_that_end_on_both_sides_are_counted() -> None:
    """A peer may have ended several before this side ends the first."""
    endings = Endings()
    for _ in range(2):
        endings.depart(CONTENT, 0, PEERS[0], READERS)
    for generation in (1, 2):
        ending = endings.end(KEY, "it was aborted", generation=generation)
        assert ending.has_left(PEERS[0])
        assert not ending.has_left(PEERS[1])
    assert endings.expect(CONTENT, 0, PEERS[0]) is None
    assert not endings.end(KEY, "the third, too", generation=3).has_left(PEERS[0])


def test_a_late_end_of_the_last_attempt_does_not_refuse_the_next() -> None:
    endings = Endings()
    endings.end(KEY, "it was pulled already", is_served=True, generation=1)
    endings.depart(CONTENT, 0, PEERS[0], READERS, has_pulled=True)
    assert endings.expect(CONTENT, 0, PEERS[0]) is None
    assert not endings.end(KEY, "it was aborted", generation=1).reason
    assert endings.expect(CONTENT, 0, PEERS[0]) is None


def test_a_chunk_that_is_sent_leaves_what_a_peer_has_released() -> None:
    endings = Endings()
    endings.depart(CONTENT, 0, PEERS[0], READERS)
    endings.forget_ended(KEY)
    assert endings.end(KEY, "it was aborted", generation=1).has_left(PEERS[0])
    endings.forget_ended(KEY)
    assert endings.expect(CONTENT, 1, PEERS[1]) is None
