"""Endings: how this side and its peers have ended the sending of a key, until it begins anew.

A request may be sent again under the same transfer id, after one or both sides have ended the first
attempt, and the two sides learn of the second at different times. A peer says RELEASE when its
attempt ends without success, so a WANT or RENEW behind that belongs to its next attempt, and what
ended here before says nothing about it. The engine's lock guards everything here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from p2p_engine.bounded import BoundedMap, K, V
from p2p_engine.peers.link import PeerAddress
from p2p_engine.wire.messages import ContentKey, TransferKey

MAX_BINDINGS, MAX_PEERS = 16, 1024  # of one key; a peer may name any number of them


@dataclass
class Departed:
    """The ranks of a peer's instance that want no more of a content, among those that pull it; and
    which engine each of them is: a rank of another instance has not departed."""

    readers: frozenset[int]
    ranks: dict[int, PeerAddress] = field(default_factory=dict)


@dataclass
class Ending:
    """What is known of a key that is not held. `reason`: why it will not come from here, "" while
    it may. `is_served`: every reader has got it or has released it.

    Attempts that ended here and attempts that a peer ended are counted: a peer that has ended as
    many asks for the next one.
    """

    reason: str = ""
    is_served: bool = False
    generation: int = 0  # of the last attempt that ended
    num_ended: int = 0
    departed: dict[bytes, Departed] = field(default_factory=dict)  # by binding
    # How many attempts each peer has ended, whatever the binding, and whether it pulled the last.
    left: dict[PeerAddress, tuple[int, bool]] = field(default_factory=dict)

    def has_left(self, peer: PeerAddress) -> bool:
        """Whether a peer has ended as many attempts as have ended here."""
        return self.left.get(peer, (0, False))[0] >= self.num_ended

    def reopen(self) -> None:
        """Note that the key may come again, in a new attempt."""
        self.reason, self.is_served = "", False
        self.departed.clear()


class Endings:
    """The endings of all keys; the oldest are forgotten."""

    def __init__(self) -> None:
        self._endings: BoundedMap[TransferKey, Ending] = BoundedMap()

    def begin(self, content: ContentKey) -> Departed | None:
        """Note that a key is held. Returns who has released the content already; None if an ending
        of this side lies in between, because those belong to an earlier attempt."""
        ending = self._endings.get(content[0])
        if ending is None:
            return None
        departed = None if ending.reason else ending.departed.get(content[1])
        ending.reopen()
        return departed

    def forget_ended(self, key: TransferKey) -> None:
        """Note that a chunk of a key is sent: earlier attempts do not count any more."""
        ending = self._endings.get(key)
        if ending is not None and ending.reason:
            self._endings.pop(key)

    def meet(self, key: TransferKey, peer: PeerAddress) -> None:
        """Note that a peer asks for what is held: both sides are in the same attempt."""
        ending = self._endings.get(key)
        if ending is not None:
            _put(ending.left, peer, (ending.num_ended, False), MAX_PEERS)

    def end(
        self, key: TransferKey, reason: str, *, is_served: bool = False, generation: int = 0
    ) -> Ending:
        """Note that a key will not come from here, or not again, in attempts up to this one; once
        for each attempt."""
        ending = self._endings.get(key) or Ending()
        if not generation or generation > ending.generation:
            ending.num_ended += generation > 0 or not ending.reason
            ending.reason, ending.is_served = reason or "it was given up", is_served
            ending.generation = max(ending.generation, generation)
        self._endings.put(key, ending)
        return ending

    def depart(
        self,
        content: ContentKey,
        rank: int,
        peer: PeerAddress,
        readers: frozenset[int],
        *,
        has_pulled: bool = False,
    ) -> None:
        """Note that a rank of the peer, one of `readers`, wants no more of a content: it has
        released it, or it `has_pulled` its part."""
        ending = self._endings.get(content[0]) or Ending()
        departed = ending.departed.get(content[1]) or Departed(readers)
        departed.readers = readers
        departed.ranks[rank] = peer
        _put(ending.departed, content[1], departed, MAX_BINDINGS)
        num_left, _ = ending.left.get(peer, (0, False))
        _put(ending.left, peer, (num_left + 1, has_pulled), MAX_PEERS)
        self._endings.put(content[0], ending)

    def expect(
        self, content: ContentKey, rank: int, peer: PeerAddress, *, renews: bool = False
    ) -> Ending | None:
        """Return why a rank that asks for a key, or `renews` it, will not get it from here; None if
        it may.

        If the peer has ended as many attempts as have ended here, this is the next one, and the key
        may come again. But who has pulled its part goes on renewing, as long as others pull theirs.
        """
        ending = self._endings.get(content[0])
        if ending is None:
            return None
        if not ending.reason:
            departed = ending.departed.get(content[1])
            if departed is not None:
                departed.ranks.pop(rank, None)
            return None
        if not ending.has_left(peer):
            return ending
        if not (renews and ending.left[peer][1]):
            ending.reopen()
        return None

    def is_served(self, key: TransferKey) -> bool:
        """Whether every reader of a key has got it or has released it."""
        ending = self._endings.get(key)
        return ending is not None and ending.is_served


def _put(entries: dict[K, V], key: K, value: V, limit: int) -> None:
    """Store a value as the newest; beyond the limit, forget the oldest. A BoundedMap for each key
    would take half as much memory again."""
    entries.pop(key, None)
    entries[key] = value
    if len(entries) > limit:
        del entries[next(iter(entries))]
