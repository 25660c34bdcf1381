"""Expectations: the contents that this engine awaits from named peers, and those that it keeps.

`Pulls` writes the awaited contents, `Renewals` writes the kept ones, and the store reads both: it
must know which peer may end the wait for a content, and which content outlives its lease. The
engine's lock guards both tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from p2p_engine.bounded import Index
from p2p_engine.peers.link import InstanceAddress, Link, PeerAddress
from p2p_engine.transfer import Transfer
from p2p_engine.wire.messages import ContentKey, TransferKey


@dataclass(eq=False)
class AskedRank:
    """One rank that sends an awaited content."""

    link: Link
    resend_at: float = 0.0
    num_wants: int = 0


@dataclass(eq=False)
class Expected:
    """One receive with a named sender. `asked` is filled when the sender's directory has answered.

    So is `idle`: ranks there that hold the same KV, or groups that this rank lacks, and that nobody
    here pulls. `has_held`: the peer pushes a part of it and holds the rest, which is to `pull` or
    not wanted. `is_promised`: the peer has said that it holds what is pulled. `attempt`: its
    number; a later receive has a higher one. `kept`: as what it was kept when its receive began.
    """

    transfer: Transfer
    peer: PeerAddress | InstanceAddress
    binding: bytes
    pull: bool
    has_held: bool = False
    is_promised: bool = False
    attempt: int = 0
    kept: Kept | None = None
    asked: list[AskedRank] = field(default_factory=list)
    idle: list[tuple[TransferKey, PeerAddress]] = field(default_factory=list)

    @property
    def content(self) -> ContentKey:
        """Return the awaited content."""
        return self.transfer.key, self.binding

    @property
    def epochs(self) -> set[int]:
        """Return the epochs of the ranks that send it; 0 stands for a rank not yet connected."""
        return {asked.link.epoch for asked in self.asked}


@dataclass(eq=False)
class Kept:
    """A content that a request will ask for. `told` lists the ranks of its peer, each with the
    content's name there; the ranks in `sources` give it to this rank. Once they were told that it
    `is_released`, they are asked to keep it no more: that would mean another attempt."""

    content: ContentKey
    began_at: float
    sources: frozenset[PeerAddress] = frozenset()
    told: list[tuple[PeerAddress, ContentKey]] = field(default_factory=list)
    is_released: bool = False


class Expectations:
    """The table of awaited contents and the table of kept ones."""

    def __init__(self) -> None:
        self._awaited: dict[ContentKey, Expected] = {}
        self._awaited_of_key: Index[TransferKey, Expected] = Index()
        # Calls that release at its peers a content that was left for another receive here.
        self.let_go: dict[ContentKey, Callable[[], None]] = {}
        # All that has landed outlives its lease: requests may wait for some of which nobody here
        # knows yet.
        self.keeps_all = False
        self._kept: dict[ContentKey, Kept] = {}  # oldest first
        self._keys: Counter[TransferKey] = Counter()

    def expect(self, item: Expected) -> None:
        """Note a content that is not awaited yet."""
        item.kept = self._kept.get(item.content)
        self._awaited[item.content] = item
        self._awaited_of_key.add(item.content[0], item)

    def expect_no_more(self, item: Expected) -> None:
        """Forget an awaited content."""
        del self._awaited[item.content]
        self._awaited_of_key.discard(item.content[0], item)

    def awaited(self, content: ContentKey) -> Expected | None:
        """Return the entry of an awaited content, or None."""
        return self._awaited.get(content)

    def awaited_of(self, key: TransferKey) -> list[Expected]:
        """Return the entries of all awaited contents of a key."""
        return list(self._awaited_of_key.get(key))

    def num_awaited(self) -> int:
        """Return how many contents are awaited."""
        return len(self._awaited)

    def is_wanted(self, content: ContentKey) -> bool:
        """Whether a request here waits for a content, or will."""
        return content in self._awaited or content in self._kept

    def is_from(self, content: ContentKey, epoch: int) -> bool:
        """Whether a content is awaited from the engine of this epoch."""
        item = self._awaited.get(content)
        return item is not None and epoch in item.epochs

    def is_from_others(self, content: ContentKey, epoch: int) -> bool:
        """Whether a content is awaited only from known engines, and this epoch is none of them."""
        item = self._awaited.get(content)
        return item is not None and bool(item.epochs) and not item.epochs & {0, epoch}

    def is_of_earlier(self, content: ContentKey, attempt: int) -> bool:
        """Whether an attempt to receive a content came before the one that awaits it."""
        item = self._awaited.get(content)
        return item is not None and attempt < item.attempt

    def keep(self, kept: Kept) -> None:
        """Note a content that is not kept yet."""
        self._kept[kept.content] = kept
        self._keys[kept.content[0]] += 1

    def drop(self, content: ContentKey) -> Kept | None:
        """Forget a content; returns its entry, or None."""
        kept = self._kept.pop(content, None)
        if kept is not None:
            self._keys[content[0]] -= 1
            if not self._keys[content[0]]:
                del self._keys[content[0]]
        return kept

    def kept(self, content: ContentKey) -> Kept | None:
        """Return the entry of a kept content, or None."""
        return self._kept.get(content)

    def all_kept(self) -> Iterator[Kept]:
        """Iterate over the kept contents, the oldest first; the table must not change meanwhile."""
        return iter(self._kept.values())

    def num_kept(self) -> int:
        """Return how many contents are kept."""
        return len(self._kept)

    def is_kept(self, content: ContentKey) -> bool:
        """Whether a content is kept; with an empty binding, whether any content of its key is."""
        return content in self._kept or (not content[1] and content[0] in self._keys)

    def is_kept_otherwise(self, key: TransferKey) -> bool:
        """Whether contents of a key are kept, but not the one without a binding."""
        return key in self._keys and (key, b"") not in self._kept

    def outlives_lease(self, content: ContentKey) -> bool:
        """Whether what has landed of a content stays after its lease."""
        return self.keeps_all or self.is_kept(content)
