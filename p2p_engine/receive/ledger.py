"""The records of incoming chunks and of the receives that wait for them.

    GRANTED → LANDED → SCATTERING → (freed)      by way of the arena
    GRANTED → LANDED → (freed)                   straight in final blocks
    GRANTED → QUARANTINED → (freed)              given up, but the sender may still write

A quarantined landing is freed when the sender says CANCELLED or publishes the completion word, when
our own I/O has ended, or when the sender is proven unable to write. No timer frees it.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import TypeAlias

from p2p_engine.bounded import Index
from p2p_engine.errors import P2pError
from p2p_engine.memory.arena import Space
from p2p_engine.memory.jobs import Job, Moment
from p2p_engine.memory.layout import Regions, Sink, ask, ask_regions
from p2p_engine.receive.spans import Cover, Spans
from p2p_engine.transfer import Transfer
from p2p_engine.transports.base import Transport
from p2p_engine.wire.messages import ContentKey, Manifest, TransferKey

MAX_STRANGERS = 64  # remembered by one receive
BLOCKS = "blocks"  # the third place, beside the arena's buffer and pool

LandingId: TypeAlias = tuple[int, int]  # the sender's epoch, its sequence number
Writer: TypeAlias = tuple[Transport, int]  # and the sender's epoch


class LandingState(enum.Enum):
    """See the module's docstring."""

    GRANTED = enum.auto()
    LANDED = enum.auto()
    SCATTERING = enum.auto()
    QUARANTINED = enum.auto()


@dataclass(eq=False)
class Landing:
    """One granted region. It owns `space`, which is None in final blocks or if nothing is
    wanted."""

    id: LandingId
    attempt: int
    content: ContentKey
    manifest: Manifest  # of the granted blocks, which may be fewer than were offered
    transport: Transport
    trailer: int  # the completion word that the sender writes where receiver_writes is false
    deadline: float
    checked: bool = False  # it lands only if its checksum equals the sender's
    space: Space | None = None
    word: int | None = None  # number of the completion word lent to it
    state: LandingState = LandingState.GRANTED
    job: Job | None = None
    receive: Receive | None = None
    is_spare: bool = False  # the receive is complete without it: free it once it has landed
    done_heard: bool = False
    checksum: int = 0  # the sender's, from DONE
    checking: Job | None = None
    resend_at: float = 0.0
    heap_bytes: int = 0  # of our own memory, beside what it occupies where it lands

    @property
    def nbytes(self) -> int:
        """Return the payload in bytes."""
        return self.manifest.nbytes

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes that it occupies in the memory where it lands."""
        return self.nbytes if self.space is None else self.space.nbytes

    @property
    def place(self) -> str:
        """Return where it lands: blocks, buffer or pool."""
        return BLOCKS if self.space is None else self.space.place

    @property
    def orphaned(self) -> bool:
        """Whether it has landed and no receive has claimed it."""
        return self.state is LandingState.LANDED and self.receive is None

    @property
    def is_owed(self) -> bool:
        """Whether its deadline is in force: it must land, or its lease ends."""
        return self.state is LandingState.GRANTED or self.orphaned

    @property
    def is_straight(self) -> bool:
        """Whether it lands in the sink's final memory."""
        return self.space is None and self.nbytes > 0


@dataclass(eq=False)
class Receive:
    """A wait for one content; `landings` are the regions on their way to its sink."""

    content: ContentKey
    sink: Sink
    transfer: Transfer
    deadline: float
    after: tuple[Moment, ...] = ()  # moments before which the sink must not be written
    landings: set[Landing] = field(default_factory=set)
    writers: Spans[Landing] = field(default_factory=Spans)  # those that write to the sink
    delivered: Cover = field(default_factory=Cover)
    senders: set[int] = field(default_factory=set)  # the epochs whose chunks were granted
    denied: dict[int, float] = field(default_factory=dict)  # until when an epoch offers again
    source_lost: P2pError | None = None  # the sender is gone: only bytes already here complete it
    ending: P2pError | None = None
    complete: bool = False
    is_named: bool = False  # its sender is known by name
    is_pulled: bool = False  # it was asked for with WANT
    began_at: float = 0.0
    transport: str = "none"  # of the last chunk that was granted
    strangers: set[int] = field(default_factory=set)  # epochs that offer another content of its key
    mismatched: bool = False  # such an epoch is its sender's
    # Why chunks that came before the receive do not fit it, by their senders' epochs.
    misfits: dict[int, P2pError] = field(default_factory=dict)

    def narrowed(self, manifest: Manifest) -> Manifest:
        """Return the part of a chunk that is still wanted.

        Raises:
            P2pError: the sink refuses the chunk, or failed.
        """
        return manifest.narrowed(*self.wanted(manifest))

    def wanted(self, manifest: Manifest) -> tuple[int, int]:
        """Return which blocks of a chunk are still wanted, as (first, number).

        Raises:
            P2pError: the sink refuses the chunk, or failed.
        """
        return ask(lambda: self.sink.wanted(manifest))

    def regions(self, manifest: Manifest, first: int, num: int) -> Regions:
        """Return where these blocks belong in the sink.

        Raises:
            P2pError: the sink failed.
        """
        nbytes = num * manifest.block_bytes
        return ask_regions(lambda: self.sink.regions(manifest, first, num), nbytes)

    def landed(self, manifest: Manifest, first: int, num: int) -> bool:
        """Note that blocks are in place; returns True if nothing is missing any more.

        Raises:
            P2pError: the sink failed.
        """
        self.delivered.add(manifest.narrowed(first, num))
        return ask(lambda: self.sink.landed(manifest, first, num))

    def has_delivered(self, manifest: Manifest) -> bool:
        """Whether any block of a chunk is in place already."""
        return self.delivered.overlaps(manifest)

    def writers_of(self, manifest: Manifest) -> set[Landing]:
        """Return the landings that are writing blocks of this chunk."""
        return set(self.writers.overlapping(manifest))

    def attach(self, landing: Landing) -> None:
        """Note that a landing is on its way to the sink."""
        landing.receive = self
        self.transport = landing.transport.name
        self.landings.add(landing)
        self.senders.add(landing.id[0])
        if landing.is_straight:
            self.writers.add(landing.manifest, landing)

    def note_denied(self, epoch: int, until: float) -> None:
        """Note that a chunk was denied room, and until when its sender offers it again."""
        if epoch in self.denied or len(self.denied) < MAX_STRANGERS:
            self.denied[epoch] = until

    def scatters(self, landing: Landing) -> None:
        """Note that a landing is being copied to the sink."""
        landing.state = LandingState.SCATTERING
        self.writers.add(landing.manifest, landing)

    def detach(self, landing: Landing) -> None:
        """Note that a landing has ended and writes nothing any more."""
        landing.receive = None
        self.landings.discard(landing)
        self.writers.discard(landing.manifest, landing)

    @property
    def hopeless(self) -> P2pError | None:
        """Return why the receive cannot complete: its sender is gone and nothing is on its way."""
        if self.source_lost is None:
            return None
        nothing_comes = all(item.state is LandingState.QUARANTINED for item in self.landings)
        return self.source_lost if nothing_comes else None

    @property
    def is_settling(self) -> bool:
        """Whether nothing is written by a sender any more, and something waits for its place."""
        arrived = (LandingState.LANDED, LandingState.SCATTERING)
        return bool(self.landings) and all(item.state in arrived for item in self.landings)

    @property
    def over(self) -> bool:
        """Whether the outcome is known and no byte can be written into its memory any more."""
        settled = self.complete or self.ending is not None
        return settled and not self.writers


class Ledger:
    """The open landings and receives, with an index for each question, so that nothing is a
    scan."""

    def __init__(self) -> None:
        self.landings: dict[LandingId, Landing] = {}
        self.receives: dict[ContentKey, Receive] = {}
        self._of_content: Index[ContentKey, Landing] = Index()
        self._of_key: Index[TransferKey, Landing] = Index()
        self._of_sender: Index[int, Landing] = Index()
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

    def remove(self, landing: Landing) -> bool:
        """Forget a landing; returns False if it was forgotten before."""
        if self.landings.get(landing.id) is not landing:
            return False  # a later attempt may use the same id by now
        del self.landings[landing.id]
        self._of_content.discard(landing.content, landing)
        self._of_key.discard(landing.content[0], landing)
        self._of_sender.discard(landing.id[0], landing)
        if landing.state is LandingState.QUARANTINED:
            _count(self._quarantined_bytes, landing.id[0], -landing.reserved_bytes)
            self._quarantined.discard((landing.transport, landing.id[0]), landing)
        return True

    def quarantine(self, landing: Landing) -> None:
        """Quarantine a landing: nobody wants it, and its sender may still write."""
        if landing.state is not LandingState.QUARANTINED and landing.id in self.landings:
            _count(self._quarantined_bytes, landing.id[0], landing.reserved_bytes)
            self._quarantined.add((landing.transport, landing.id[0]), landing)
        landing.state = LandingState.QUARANTINED

    def of_content(self, content: ContentKey) -> list[Landing]:
        """Return the landings of a content."""
        return self._of_content.get(content)

    def of_key(self, key: TransferKey) -> list[Landing]:
        """Return the landings of a key, with any binding."""
        return self._of_key.get(key)

    def of_sender(self, epoch: int) -> list[Landing]:
        """Return the landings from a sender."""
        return self._of_sender.get(epoch)

    def num_from(self, epoch: int) -> int:
        """Return how many landings a sender has."""
        return self._of_sender.count(epoch)

    def quarantined_from(self, writer: Writer) -> list[Landing]:
        """Return the quarantined landings that a sender might still write over a transport."""
        return self._quarantined.get(writer)

    def quarantined_writers(self) -> list[Writer]:
        """Return the (transport, epoch) pairs with landings in quarantine."""
        return self._quarantined.names()

    def quarantined_bytes(self, epoch: int | None = None) -> int:
        """Return the bytes in quarantine, of one sender or of all."""
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
        """Forget a receive; returns False if it was forgotten before."""
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
        """Return the receives of a key, with any binding."""
        return self._receives_of_key.get(key)

    def receives_from(self, epoch: int) -> list[Receive]:
        """Return the receives to which a sender's chunks were granted."""
        return self._receives_of_sender.get(epoch)

    def receive_of(self, transfer: Transfer) -> Receive | None:
        """Return the receive behind a caller's handle, or None."""
        return self._by_transfer.get(transfer)


def _count(counts: Counter[int], epoch: int, change: int) -> None:
    """Change the count of a sender; removes a count of zero."""
    counts[epoch] += change
    if not counts[epoch]:
        del counts[epoch]
