"""Wishes: what peers want and nobody holds yet. The engine's lock guards it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from p2p_engine.control.parts import for_each
from p2p_engine.control.timers import Timers
from p2p_engine.index import Index
from p2p_engine.peers.links import PeerAddress
from p2p_engine.wire.messages import CacheSpec, ContentKey, TransferKey

MAX_WISHES = 4096
WishName: TypeAlias = tuple[ContentKey, PeerAddress]


@dataclass(frozen=True)
class Wish:
    """A WANT that is not served yet."""

    spec: CacheSpec | None
    deadline: float
    refuse: Callable[[str], None]


class Wishes:
    """All of them; nothing here is found by a scan."""

    def __init__(self) -> None:
        self._wishes: dict[WishName, Wish] = {}
        self._of_key: Index[TransferKey, WishName] = Index()
        self._timers: Timers[WishName] = Timers()

    def __len__(self) -> int:
        """How many there are."""
        return len(self._wishes)

    def put(self, content: ContentKey, peer: PeerAddress, wish: Wish) -> None:
        """Remember what a peer wants. One that says it again, before or after its restart, waits no
        longer for that. Beyond MAX_WISHES a wish is dropped: it is said again."""
        name = (content, peer)
        known = self._wishes.get(name)
        if known is not None:
            wish = Wish(wish.spec, known.deadline, wish.refuse)
        elif len(self._wishes) >= MAX_WISHES:
            return
        self._wishes[name] = wish
        self._of_key.add(content[0], name)
        self._timers.set(name, wish.deadline)

    def discard(self, content: ContentKey, peer: PeerAddress) -> None:
        """Forget what a peer wants; idempotent."""
        self._pop((content, peer))

    def take(self, content: ContentKey) -> list[tuple[PeerAddress, Wish]]:
        """Forget, and return, who wants a content."""
        names = [name for name in self._of_key.get(content[0]) if name[0] == content]
        return [(name[1], wish) for name in names if (wish := self._pop(name)) is not None]

    def refuse_key(self, key: TransferKey, reason: str) -> None:
        """Refuse a key to all who want it, whatever their binding."""
        for_each(self._of_key.get(key), lambda name: self._refuse(name, reason))

    def tick(self, now: float) -> None:
        """Refuse what was wanted for too long."""
        self._timers.look(now, lambda name: self._refuse(name, "it was never held here"))

    def _refuse(self, name: WishName, reason: str) -> None:
        wish = self._pop(name)
        if wish is not None:
            wish.refuse(reason)

    def _pop(self, name: WishName) -> Wish | None:
        wish = self._wishes.pop(name, None)
        if wish is not None:
            self._of_key.discard(name[0][0], name)
            self._timers.cancel(name)
        return wish
