"""Ledger: the open landings and receives of a store, and all that they are looked up by. The
engine's lock guards it."""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

from p2p_engine.index import Index
from p2p_engine.receive.landing import Landing, LandingId, LandingState, Receive
from p2p_engine.transfer import Transfer
from p2p_engine.transports.base import Transport
from p2p_engine.wire.messages import ContentKey, TransferKey

Writer: TypeAlias = tuple[Transport, int]  # and the sender's epoch


class Ledger:
    """What is open; nothing here is found by a scan."""

    def __init__(self) -> None:
        self.landings: dict[LandingId, Landing] = {}
        self.receives: dict[ContentKey, Receive] = {}
        self._of_content: Index[ContentKey, Landing] = Index()
        self._of_key: Index[TransferKey, Landing] = Index()
        self._of_sender: Index[int, Landing] = Index()
        self._num_empty: Counter[int] = Counter()  # of each sender
        self._quarantined: Index[Writer, Landing] = Index()
        self._quarantined_bytes: Counter[int] = Counter()
        self._receives_of_key: Index[TransferKey, Receive] = Index()
        self._receives_of_sender: Index[int, Receive] = Index()
        self._by_transfer: dict[Transfer, Receive] = {}

    # Landings

    def add(self, landing: Landing) -> None:
        """Note a granted landing."""
        self.landings[landing.id] = landing
        self._of_content.add(landing.content, landing)
        self._of_key.add(landing.content[0], landing)
        self._of_sender.add(landing.id[0], landing)
        if not landing.nbytes:
            _count(self._num_empty, landing.id[0], 1)

    def remove(self, landing: Landing) -> bool:
        """Forget a landing; False: it was forgotten before."""
        if self.landings.get(landing.id) is not landing:
            return False  # a later attempt may have its name by now
        del self.landings[landing.id]
        self._of_content.discard(landing.content, landing)
        self._of_key.discard(landing.content[0], landing)
        self._of_sender.discard(landing.id[0], landing)
        if not landing.nbytes:
            _count(self._num_empty, landing.id[0], -1)
        if landing.state is LandingState.QUARANTINED:
            _count(self._quarantined_bytes, landing.id[0], -landing.reserved_bytes)
            self._quarantined.discard((landing.transport, landing.id[0]), landing)
        return True

    def quarantine(self, landing: Landing) -> None:
        """Set a landing's state: nobody wants it, and its sender may still write."""
        if landing.state is not LandingState.QUARANTINED and landing.id in self.landings:
            _count(self._quarantined_bytes, landing.id[0], landing.reserved_bytes)
            self._quarantined.add((landing.transport, landing.id[0]), landing)
        landing.state = LandingState.QUARANTINED

    def of_content(self, content: ContentKey) -> list[Landing]:
        """Return the landings of a content."""
        return self._of_content.get(content)

    def of_key(self, key: TransferKey) -> list[Landing]:
        """Return the landings of a key, whatever their binding."""
        return self._of_key.get(key)

    def of_sender(self, epoch: int) -> list[Landing]:
        """Return the landings from a sender."""
        return self._of_sender.get(epoch)

    def num_from(self, epoch: int) -> int:
        """How many landings a sender has."""
        return self._of_sender.count(epoch)

    def num_empty(self, epoch: int | None = None) -> int:
        """How many landings without bytes one sender has, or all."""
        return self._num_empty[epoch] if epoch is not None else sum(self._num_empty.values())

    def quarantined_from(self, writer: Writer) -> list[Landing]:
        """Return the landings in quarantine that a sender might write by a transport."""
        return self._quarantined.get(writer)

    def quarantined_writers(self) -> list[Writer]:
        """Return who has landings in quarantine, by which transport."""
        return self._quarantined.names()

    def quarantined_bytes(self, epoch: int | None = None) -> int:
        """Bytes in quarantine, of one sender or of all."""
        if epoch is not None:
            return self._quarantined_bytes[epoch]
        return sum(self._quarantined_bytes.values())

    # Receives

    def open(self, receive: Receive) -> None:
        """Note a receive."""
        self.receives[receive.content] = receive
        self._receives_of_key.add(receive.content[0], receive)
        self._by_transfer[receive.transfer] = receive

    def close(self, receive: Receive) -> bool:
        """Forget a receive; False: it was forgotten before."""
        if self.receives.pop(receive.content, None) is None:
            return False
        self._receives_of_key.discard(receive.content[0], receive)
        del self._by_transfer[receive.transfer]
        for epoch in receive.senders:
            self._receives_of_sender.discard(epoch, receive)
        return True

    def attach(self, landing: Landing, receive: Receive) -> None:
        """Note that a landing is on its way to a receive."""
        receive.attach(landing)
        self._receives_of_sender.add(landing.id[0], receive)

    def receives_of_key(self, key: TransferKey) -> list[Receive]:
        """Return the receives of a key, whatever their binding."""
        return self._receives_of_key.get(key)

    def receives_from(self, epoch: int) -> list[Receive]:
        """Return the receives to which a sender has offered something."""
        return self._receives_of_sender.get(epoch)

    def receive_of(self, transfer: Transfer) -> Receive | None:
        """Return the receive that a caller's handle stands for."""
        return self._by_transfer.get(transfer)


def _count(counts: Counter[int], epoch: int, change: int) -> None:
    """Change what is counted of a sender; one of whom nothing is left is not kept."""
    counts[epoch] += change
    if not counts[epoch]:
        del counts[epoch]
