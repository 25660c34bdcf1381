"""UnheldWants: WANTs for contents that are not held yet. The engine's lock guards it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from p2p_engine.bounded import Budget, Index, heap_bytes
from p2p_engine.control.tick_parts import for_each
from p2p_engine.control.timers import Timers
from p2p_engine.peers.link import PeerAddress
from p2p_engine.send.endings import Ending
from p2p_engine.wire.messages import CacheSpec, ContentKey, TransferKey

WANT_BYTES = 2500  # of a WANT, without its names
WantName: TypeAlias = tuple[ContentKey, PeerAddress]


@dataclass(frozen=True)
class PendingWant:
    """A WANT that is not served yet."""

    spec: CacheSpec | None
    deadline: float
    refuse: Callable[[Ending], None]
    reason: str = "it was never held here"  # to refuse it at the deadline, unless
    comes: Callable[[], bool] = lambda: False  # it is on its way then
    binding: bytes = b""
    attempt: tuple[int, int] = (0, 0)  # epoch of the engine that asks, and number of its receive

    def is_before(self, other: PendingWant) -> bool:
        """Whether a receive asked that has ended: the `other` WANT is of a later one."""
        (epoch, number), (other_epoch, other_number) = self.attempt, other.attempt
        return epoch == other_epoch and 0 < number < other_number


class UnheldWants:
    """The WANTs of all peers, with an index for each question, so that nothing is a scan."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._unheld: dict[WantName, PendingWant] = {}
        self._of_key: Index[TransferKey, WantName] = Index()
        self._of_engine: Index[int, WantName] = Index()
        self._timers: Timers[WantName] = Timers()

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._unheld)

    def put(self, content: ContentKey, peer: PeerAddress, want: PendingWant) -> None:
        """Remember a WANT until its deadline. A repetition moves no deadline back: receivers
        repeat a WANT several times in a lease, so such a deadline would never come. A WANT of
        another receive has its own. Beyond the budget, a WANT is dropped: the peer repeats
        it."""
        name = (content, peer)
        known = self._unheld.get(name)
        if known is not None and want.is_before(known):
            return
        if known is not None and known.attempt == want.attempt:
            want = replace(want, deadline=min(known.deadline, want.deadline))
        if known is None or known.attempt[0] != want.attempt[0]:
            self._pop(name)
            if not self._budget.take(want.attempt[0], _size(name)):
                return
        self._unheld[name] = want
        self._of_key.add(content[0], name)
        self._of_engine.add(want.attempt[0], name)
        self._timers.set(name, want.deadline)

    def discard(self, content: ContentKey, peer: PeerAddress) -> None:
        """Forget a peer's WANT; idempotent."""
        self._pop((content, peer))

    def engine_lost(self, epoch: int) -> None:
        """Forget the WANTs of an engine whose session has ended. If the engine comes back, it
        repeats them."""
        for name in self._of_engine.get(epoch):
            self._pop(name)

    def take(self, key: TransferKey) -> list[tuple[WantName, PendingWant]]:
        """Remove and return the WANTs of all contents of a key, with their names."""
        names = self._of_key.get(key)
        return [(name, want) for name in names if (want := self._pop(name)) is not None]

    def refuse_all(self, content: ContentKey, ending: Ending) -> None:
        """Refuse a content to all peers that want it in the attempt that has ended."""
        names = [name for name in self._of_key.get(content[0]) if name[0] == content]
        waiting = [name for name in names if not ending.has_left(name[1])]
        for_each(waiting, lambda name: self._refuse(name, ending))

    def refuse_each(self, refusal: Callable[[ContentKey], Ending | None]) -> None:
        """Refuse those of whose contents a `refusal` is known now."""
        found = [(name, ending) for name in self._unheld if (ending := refusal(name[0]))]
        for_each(found, lambda refused: self._refuse(*refused))

    def tick(self, now: float) -> None:
        """Refuse the WANTs that are past their deadlines, and forget those for what comes."""
        self._timers.look(now, self._end)

    def due_at(self) -> float:
        """Return when the next tick has something to do."""
        return self._timers.due_at()

    def _end(self, name: WantName) -> None:
        want = self._pop(name)
        if want is not None and not want.comes():
            want.refuse(Ending(want.reason))

    def _refuse(self, name: WantName, ending: Ending) -> None:
        want = self._pop(name)
        if want is not None:
            want.refuse(ending)

    def _pop(self, name: WantName) -> PendingWant | None:
        want = self._unheld.pop(name, None)
        if want is not None:
            self._budget.give_back(want.attempt[0], _size(name))
            self._of_key.discard(name[0][0], name)
            self._of_engine.discard(want.attempt[0], name)
            self._timers.cancel(name)
        return want


def _size(name: WantName) -> int:
    """Return how many bytes a WANT takes."""
    content, peer = name
    return WANT_BYTES + heap_bytes(content) + heap_bytes(peer.address)
