"""Shipment: one `send`, or one pull, to one rank. It leaves as chunks of bounded size.

A chunk is a range of blocks, over all layers. So if a shipment fails, whole blocks have arrived,
and the receiver keeps them. A few chunks are open at a time: while one is gathered, another is on
the network and a third is scattered. A long prompt therefore needs no more of its peer's memory at
a time than a short one. The engine's lock guards everything here.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from p2p_engine.errors import P2pError
from p2p_engine.memory.arena import SHARE_OF_LANDING, WINDOW
from p2p_engine.memory.jobs import Job, Moment
from p2p_engine.memory.layout import Source, ask
from p2p_engine.peers.link import Link
from p2p_engine.transfer import Transfer
from p2p_engine.transports.base import Channel
from p2p_engine.wire.messages import ContentKey, Grant, Manifest, TransferKey


class ChunkState(enum.Enum):
    """The states of sender.py."""

    QUEUED = enum.auto()
    OFFERED = enum.auto()
    GRANTED = enum.auto()
    WRITING = enum.auto()
    WRITTEN = enum.auto()
    ENDED = enum.auto()


@dataclass(eq=False)
class Shipment:
    """A source on its way to one peer. Chunks may read the source until the transfer is released.

    Until the peer is known and the shipment is cut for it, it has one chunk with all blocks.
    """

    key: TransferKey
    source: Source
    binding: bytes
    link: Link
    transfer: Transfer
    deadline: float
    latest_deadline: float  # beyond which no RENEW extends it
    ready: bool
    on_end: Callable[[Shipment], None] | None = None
    is_held: bool = False  # its source can be read after WRITTEN
    generation: int = 0  # of the attempt to send its key
    after: tuple[Moment, ...] = ()  # moments after which a ready source is valid
    is_given_up: bool = False  # the peer was told that it will not come
    is_cut: bool = False
    max_blocks: int = 0  # of a chunk
    num_taken: int = 0  # blocks that have a chunk, counted from the first one
    num_arrived: int = 0  # blocks of committed chunks
    chunks: dict[int, Chunk] = field(default_factory=dict)  # the open ones, by number
    ending: P2pError | None = None

    def __post_init__(self) -> None:
        """Take the source's own geometry; `cut` replaces it."""
        self.manifest = self.source.manifest

    def cut(self, chunk_bytes: int) -> None:
        """Reduce the source to the peer's part, in chunks of at most so many bytes, or of one
        block.

        Raises:
            P2pError: nothing goes there, it cannot be mapped, or the source failed.
        """
        self.source = ask(lambda: self.source.towards(self.link.spec))
        self.manifest, self.is_cut = ask(lambda: self.source.manifest), True
        self.transfer.nbytes = self.manifest.nbytes
        if self.link.largest_landing:
            chunk_bytes = min(chunk_bytes, self.link.largest_landing // SHARE_OF_LANDING)
        self.max_blocks = max(1, chunk_bytes // max(1, self.manifest.block_bytes))

    @property
    def content(self) -> ContentKey:
        """Return the content that it brings."""
        return self.key, self.binding

    @property
    def has_source(self) -> bool:
        """Whether the source can still be read, to write a chunk again."""
        return self.is_held or not self.transfer.released

    def next_range(self) -> Manifest:
        """Take the blocks of the next chunk; returns their manifest."""
        first = self.manifest.first_block + self.num_taken
        num = min(self.max_blocks, self.manifest.num_blocks - self.num_taken)
        self.num_taken += num
        return self.manifest.narrowed(first, num)

    @property
    def has_more(self) -> bool:
        """Whether there are blocks that no chunk has."""
        return self.is_cut and self.num_taken < self.manifest.num_blocks

    @property
    def may_open(self) -> bool:
        """Whether one more chunk may be offered now."""
        return self.has_more and self.ending is None and len(self.chunks) < WINDOW

    @property
    def is_granted(self) -> bool:
        """Whether the receiver has granted memory for all of it."""
        waiting = (ChunkState.QUEUED, ChunkState.OFFERED)
        return not self.has_more and all(c.state not in waiting for c in self.chunks.values())

    @property
    def is_written(self) -> bool:
        """Whether no part of the source has to be read any more."""
        states = (chunk.state for chunk in self.chunks.values())
        return not self.has_more and all(state is ChunkState.WRITTEN for state in states)

    @property
    def has_arrived(self) -> bool:
        """Whether all of it has landed. Call it when no chunk is open. It can be true after a
        cancel that came too late."""
        return self.ending is None or 0 < self.manifest.num_blocks == self.num_arrived


@dataclass(eq=False)
class Chunk:
    """One chunk of a shipment on its way out."""

    seq: int
    shipment: Shipment
    manifest: Manifest
    state: ChunkState = ChunkState.QUEUED
    attempt: int = 0
    grant: Grant | None = None
    job: Job | None = None
    channel: Channel | None = None  # of its last write
    checksum: int = 0  # of the written bytes, if either side wants one
    ending: P2pError | None = None
    resend_at: float = 0.0

    @property
    def key(self) -> TransferKey:
        """Return the shipment's key."""
        return self.shipment.key

    @property
    def link(self) -> Link:
        """Return the shipment's link."""
        return self.shipment.link

    @property
    def is_being_read(self) -> bool:
        """Whether the mover may still read its source."""
        return self.job is not None and not self.job.done
