"""Shipment: one `send`, or one pull, to one rank. It leaves as chunks of bounded size.

A chunk is a range of blocks, over all layers. So if a shipment fails, whole blocks have arrived,
and the receiver keeps them. If a shipment leaves by layer, while its last layers are still being
computed, it is divided into ranges of layers first, and each of these into chunks.

A few chunks are open at a time: while one is gathered, another is on the network and a third is
scattered. A long prompt therefore needs no more of its peer's memory at a time than a short one.
The next chunk is offered when one is written: before the peer has seen that, its answer to the
OFFER is under way. The number of chunks that are written and not committed is bounded, too.
The engine's lock guards everything here.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from p2p_engine.errors import P2pError, PeerLost
from p2p_engine.memory.arena import SHARE_OF_LANDING, WINDOW
from p2p_engine.memory.jobs import Job, Moment
from p2p_engine.memory.layout import Source, ask
from p2p_engine.memory.ready_layers import ReadyLayers
from p2p_engine.peers.link import Link
from p2p_engine.transfer import Transfer
from p2p_engine.transports.base import Channel
from p2p_engine.wire.messages import ContentKey, Grant, Manifest, TransferKey

MIN_BYTES_BY_LAYER = 4 << 20  # of a range of layers: less is not worth the messages of a chunk


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
    ready_layers: ReadyLayers
    on_end: Callable[[Shipment], None] | None = None
    is_held: bool = False  # its source can be read after WRITTEN
    generation: int = 0  # of the attempt to send its key
    by_layer: bool = False
    answers: int = 0  # the number of the receive that asked for it; 0: it is pushed
    is_given_up: bool = False  # the peer was told that it will not come
    is_cut: bool = False
    chunk_bytes: int = 0  # at most so many, unless one block has more
    first_layer: int = 0  # of the source that goes to the peer
    ranges: list[Manifest] = field(default_factory=list)  # of layers, that have no chunk yet
    num_taken: int = 0  # blocks of the first of these that have a chunk
    num_arrived: int = 0  # pages of committed chunks
    chunks: dict[int, Chunk] = field(default_factory=dict)  # the open ones, by number
    ending: P2pError | None = None

    def __post_init__(self) -> None:
        """Take the source's own geometry; `cut` replaces it."""
        self.manifest = self.source.manifest
        self._whole = self.source
        self._heard_at = self.link.heard_at

    @property
    def may_be_for_successor(self) -> bool:
        """Whether the peer was lost without a word since this began. Then it may be for an engine
        that had taken the peer's place before. Who pulled it was heard, and has ended."""
        was_silent = self.link.heard_at == self._heard_at
        return was_silent and isinstance(self.link.error, PeerLost) and not self.is_held

    def begin_again(self, link: Link) -> None:
        """Go over another link. Nothing of it may have been granted, and no chunk may be open."""
        self.link, self._heard_at = link, link.heard_at
        self.source, self.manifest = self._whole, self._whole.manifest
        self.is_cut, self.first_layer, self.ranges, self.num_taken = False, 0, [], 0

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
        self.chunk_bytes = chunk_bytes
        self.first_layer = self.source.first_layer
        self.ranges = _by_layer(self.manifest) if self.by_layer else [self.manifest]

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
        layers = self.ranges[0]
        first = layers.first_block + self.num_taken
        max_blocks = max(1, self.chunk_bytes // max(1, layers.block_bytes))
        num = min(max_blocks, layers.num_blocks - self.num_taken)
        self.num_taken += num
        if self.num_taken == layers.num_blocks:
            self.num_taken = 0
            del self.ranges[0]
        return layers.narrowed(first, num)

    def after(self, manifest: Manifest) -> tuple[Moment, ...] | None:
        """Return the moments after which a chunk may be read; None: it is not computed yet."""
        return self.ready_layers.after(self.first_layer + manifest.end_layer)

    @property
    def has_more(self) -> bool:
        """Whether there are blocks that no chunk has."""
        return self.is_cut and bool(self.ranges)

    @property
    def may_open(self) -> bool:
        """Whether one more chunk may be offered now."""
        if not self.has_more or self.ending is not None or len(self.chunks) >= SHARE_OF_LANDING:
            return False
        states = (chunk.state for chunk in self.chunks.values())
        return sum(state is not ChunkState.WRITTEN for state in states) < WINDOW

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
        return self.ending is None or 0 < self.manifest.num_pages == self.num_arrived


def _by_layer(manifest: Manifest) -> list[Manifest]:
    """Divide a manifest into ranges of layers, none of them too small to be worth a chunk."""
    num_layers = len(manifest.page_bytes)
    num_ranges = max(1, min(num_layers, manifest.nbytes // MIN_BYTES_BY_LAYER))
    each = max(1, -(-num_layers // num_ranges))
    firsts = range(0, max(1, num_layers), each)
    return [manifest.in_layers(first, first + each) for first in firsts]


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
    offered_at: float = 0.0  # for the first time

    @property
    def layers(self) -> slice:
        """Return its layers, counted from the first one that goes to the peer."""
        return slice(self.manifest.first_layer, self.manifest.end_layer)

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
