"""Endings: how this side and its peers have ended the sending of a content, until it begins anew.

A request may be sent again under the same transfer id, after one or both sides have ended the first
attempt, and the two sides learn of the second at different times. A peer says RELEASE when its
attempt ends without success, so a WANT or RENEW behind that belongs to its next attempt, and what
ended here before says nothing about it. A stash is made once, so its end is final for its key. The
engine's lock guards everything here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from p2p_engine.bounded import Budget, Notes, heap_bytes
from p2p_engine.peers.link import PeerAddress
from p2p_engine.wire.messages import ContentKey, TransferKey

ENDING_BYTES = 600  # of an ending, beside a note
PEER_BYTES = 400  # of a peer that ended an attempt, without its address
RANK_BYTES = 128  # of one of its ranks


@dataclass
class Departed:
    """The ranks of a peer's instance that want no more of a content, among those that pull it; and
    which engine each of them is: a rank of another instance has not departed."""

    readers: frozenset[int]
    ranks: dict[int, PeerAddress] = field(default_factory=dict)
    pulled: set[PeerAddress] = field(default_factory=set)  # those that have got it


@dataclass
class Ending:
    """What is known of a content that is not held. `reason`: why it will not come from here, ""
    while it may. `is_served`: every reader has got it or has released it.

    Attempts that ended here and attempts that a peer ended are counted: a peer that has ended as
    many asks for the next one.
    """

    reason: str = ""
    is_served: bool = False
    generation: int = 0  # of the last attempt that ended
    num_ended: int = 0
    departed: Departed | None = None
    has_ended: bool = False  # an attempt here, whatever has begun since
    # How many attempts each peer has ended, and whether it pulled the last.
    left: dict[PeerAddress, tuple[int, bool]] = field(default_factory=dict)
    left_bytes: int = 0  # that `left` takes

    @property
    def nbytes(self) -> int:
        """Return how many bytes it takes."""
        departed = self.departed
        num_ranks = len(departed.ranks) + len(departed.readers) if departed is not None else 0
        return ENDING_BYTES + self.left_bytes + RANK_BYTES * num_ranks

    def note_left(self, peer: PeerAddress, num_left: int, *, has_pulled: bool) -> None:
        """Note how many attempts a peer has ended."""
        if peer not in self.left:
            self.left_bytes += PEER_BYTES + heap_bytes(peer.address)
        self.left[peer] = num_left, has_pulled

    def has_left(self, peer: PeerAddress) -> bool:
        """Whether a peer has ended as many attempts as have ended here."""
        return self.left.get(peer, (0, False))[0] >= self.num_ended

    def reopen(self) -> None:
        """Note that the content may come again, in a new attempt."""
        self.reason, self.is_served, self.departed = "", False, None


def want_again(served: dict[int, PeerAddress], rank: int, peer: PeerAddress) -> None:
    """Take a rank that asks off those that want no more; all, if they are another instance's."""
    if served.pop(rank, peer) != peer:
        served.clear()


class Endings:
    """The endings of all contents, as far as the budget allows. If one is forgotten, a hold waits
    for its lease, or a peer that asks for what has ended waits for its deadline."""

    def __init__(self, budget: Budget) -> None:
        self._endings: Notes[ContentKey, Ending] = Notes(budget)
        # Keys of which a content was given up, and none has begun since; and why.
        self._over: Notes[TransferKey, str] = Notes(budget)
        # Of keys that have no next attempt: stashes.
        self._final: Notes[TransferKey, Ending] = Notes(budget)

    def begin(self, content: ContentKey) -> Departed | None:
        """Note that a content is held. Returns who has released it already; None if an ending of
        this side lies in between, because those belong to an earlier attempt."""
        self._over.pop(content[0])
        self._final.pop(content[0])
        ending = self._endings.get(content)
        if ending is None:
            return None
        departed = None if ending.reason else ending.departed
        ending.reopen()
        return departed

    def forget_ended(self, content: ContentKey) -> None:
        """Note that a chunk of a content is sent: earlier attempts do not count any more."""
        self._over.pop(content[0])
        ending = self._endings.get(content)
        if ending is not None and ending.reason:
            self._endings.put(content, Ending(has_ended=True), nbytes=ENDING_BYTES)

    def meet(self, content: ContentKey, peer: PeerAddress, epoch: int = 0) -> None:
        """Note that a peer, the engine of this epoch, asks for what is held: both sides are in the
        same attempt."""
        ending = self._endings.get(content)
        if ending is not None:
            ending.note_left(peer, ending.num_ended, has_pulled=False)
            self._endings.put(content, ending, epoch, ending.nbytes)

    def end(
        self, content: ContentKey, reason: str, *, is_served: bool = False, generation: int = 0
    ) -> Ending:
        """Note that a content will not come from here, or not again, in attempts up to this one;
        once for each attempt."""
        ending = self._endings.get(content) or Ending()
        if not generation or generation > ending.generation:
            ending.num_ended += generation > 0 or not ending.reason
            ending.reason, ending.is_served = reason or "it was given up", is_served
            ending.has_ended = True
            ending.generation = max(ending.generation, generation)
            if not is_served:
                self._over.put(content[0], ending.reason, nbytes=heap_bytes(ending.reason))
        self._endings.put(content, ending, nbytes=ending.nbytes)
        return ending

    def end_key(self, key: TransferKey, reason: str, *, is_served: bool) -> Ending:
        """Note that nothing of a key will come from here, or not again, whoever asks for it."""
        ending = Ending(reason, is_served, num_ended=1, has_ended=True)
        self._final.put(key, ending, nbytes=ending.nbytes)
        return ending

    def depart(
        self,
        content: ContentKey,
        rank: int,
        peer: PeerAddress,
        readers: frozenset[int],
        *,
        has_pulled: bool = False,
        is_counted: bool = False,
        epoch: int = 0,
    ) -> None:
        """Note that a rank of the peer, one of `readers`, wants no more of a content: it has
        released it, or it `has_pulled` its part. Its attempt's end may be one that `is_counted`
        already. `epoch` is that of the engine that says so; 0: nobody does."""
        ending = self._endings.get(content) or Ending()
        departed = ending.departed = ending.departed or Departed(readers)
        departed.readers = readers
        departed.ranks[rank] = peer
        if has_pulled:
            departed.pulled.add(peer)
        num_left, _ = ending.left.get(peer, (0, False))
        ending.note_left(peer, num_left + (not is_counted), has_pulled=has_pulled)
        self._endings.put(content, ending, epoch, ending.nbytes)

    def expect(
        self, content: ContentKey, rank: int, peer: PeerAddress, *, renews: bool = False
    ) -> Ending | None:
        """Return why a rank that asks for a content, or `renews` it, will not get it from here;
        None if it may.

        If the peer has ended as many attempts as have ended here, this is the next one, and it may
        come again. But who has pulled its part goes on renewing, as long as others pull theirs.
        """
        ending = self._final.get(content[0])
        if ending is not None:
            return ending
        ending = self._endings.get(content)
        if ending is None:
            return None
        if not ending.reason:
            if ending.departed is not None:
                want_again(ending.departed.ranks, rank, peer)
            return None
        if not ending.has_left(peer):
            return ending
        if not (renews and ending.left[peer][1]):
            ending.reopen()
            self._over.pop(content[0])
        return None

    def has_ended(self, content: ContentKey) -> bool:
        """Whether an attempt to send a content has ended here, whatever has begun since; as far as
        is remembered."""
        ending = self._final.get(content[0]) or self._endings.get(content)
        return ending is not None and ending.has_ended

    def why_over(self, key: TransferKey) -> str:
        """Return why a content of a key was given up here, if none has begun since; else ""."""
        return self._over.get(key) or ""

    def is_final(self, key: TransferKey) -> bool:
        """Whether nothing of a key will come from here, or not again, whoever asks for it."""
        return key in self._final

    def is_served(self, content: ContentKey) -> bool:
        """Whether every reader of a content has got it or has released it."""
        ending = self._final.get(content[0]) or self._endings.get(content)
        return ending is not None and ending.is_served
