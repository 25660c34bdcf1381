"""Expectations: what this engine waits for from named peers, and what it will ask for later.

`Pulls` writes what is awaited, `Renewals` what is kept, and the store reads both: it must know
whose word counts about a key, and which content outlives its lease. The engine's lock guards both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from p2p_engine.peers.link import InstanceAddress, Link, PeerAddress
from p2p_engine.transfer import Transfer
from p2p_engine.wire.messages import ContentKey, TransferKey


@dataclass(eq=False)
class AskedRank:
    """One rank that sends what is expected."""

    link: Link
    resend_at: float = 0.0
    num_wants: int = 0


@dataclass(eq=False)
class Expected:
    """One receive whose sender is known; `asked` follows when its directory has answered.

    So do the `idle` ranks there, which hold it too, or what we have no place for, for nobody.
    """

    transfer: Transfer
    peer: PeerAddress | InstanceAddress
    binding: bytes
    pull: bool
    asked: list[AskedRank] = field(default_factory=list)
    idle: list[tuple[TransferKey, PeerAddress]] = field(default_factory=list)

    @property
    def content(self) -> ContentKey:
        """What is waited for."""
        return self.transfer.key, self.binding

    @property
    def epochs(self) -> set[int]:
        """Of those who send it; 0: of one that has not been met yet."""
        return {asked.link.epoch for asked in self.asked}


@dataclass(eq=False)
class Kept:
    """A content that will be asked for; `told` are the names under which ranks of its peer have it,
    those of `sources` among them give it to this rank."""

    content: ContentKey
    began_at: float
    sources: frozenset[PeerAddress] = frozenset()
    told: list[tuple[PeerAddress, ContentKey]] = field(default_factory=list)


class Expectations:
    """Both tables."""

    def __init__(self) -> None:
        self.awaited: dict[TransferKey, Expected] = {}
        # How to tell peers that what was left for another receive here is wanted by none any more.
        self.let_go: dict[ContentKey, Callable[[], None]] = {}
        self._kept: dict[ContentKey, Kept] = {}  # oldest first
        self._keys: Counter[TransferKey] = Counter()

    def is_from(self, key: TransferKey, epoch: int) -> bool:
        """Whether a key is awaited from the engine of this epoch."""
        item = self.awaited.get(key)
        return item is not None and epoch in item.epochs

    def keep(self, kept: Kept) -> None:
        """Note a content that is not kept yet."""
        self._kept[kept.content] = kept
        self._keys[kept.content[0]] += 1

    def drop(self, content: ContentKey) -> Kept | None:
        """Forget a content; returns what was kept of it."""
        kept = self._kept.pop(content, None)
        if kept is not None:
            self._keys[content[0]] -= 1
            if not self._keys[content[0]]:
                del self._keys[content[0]]
        return kept

    def kept(self, content: ContentKey) -> Kept | None:
        """Return what is kept of a content."""
        return self._kept.get(content)

    def all_kept(self) -> Iterator[Kept]:
        """Go through all that is kept, the oldest first; change nothing meanwhile."""
        return iter(self._kept.values())

    def num_kept(self) -> int:
        """How many contents are kept."""
        return len(self._kept)

    def is_kept(self, content: ContentKey) -> bool:
        """Whether a content, or anything of a key without a binding, is kept."""
        return content in self._kept or (not content[1] and content[0] in self._keys)
