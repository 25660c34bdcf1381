"""Sender: the chunks that leave this engine, from OFFER to COMMIT.

QUEUED → OFFERED → GRANTED → WRITING → WRITTEN → (ended)     the usual way
any before WRITTEN → cancel → (ended), CANCELLED is sent once no byte can be written any more
any → the channel breaks → QUEUED again, a few times; WRITTEN: if the bytes were lost and are held
A chunk that is being read is neither ended nor tried again: it waits for the end of its job.
The engine's lock guards everything here.
"""

from __future__ import annotations

import enum
import itertools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from p2p_engine.config import EngineConfig
from p2p_engine.errors import (
    P2pError,
    PeerError,
    PeerLost,
    RemoteProtocolError,
    TransferCancelled,
    TransferCorrupted,
    TransferError,
    TransferRejected,
    TransferTimeout,
    TransferTooLarge,
    TransportError,
)
from p2p_engine.jobs import Job, Moment
from p2p_engine.layout import Source, ask, ask_regions
from p2p_engine.messages import (
    Abandon,
    Cancel,
    Cancelled,
    Commit,
    Deny,
    Done,
    Fail,
    Grant,
    Manifest,
    Offer,
    TransferKey,
    shorten,
)
from p2p_engine.parts import for_each
from p2p_engine.peers import Link, Links, LinkState, PeerAddress
from p2p_engine.stats import Counters
from p2p_engine.transfer import Transfer, lane_of
from p2p_engine.transports.base import Channel, Order

logger = logging.getLogger(__name__)

_REFUSALS = {
    kind.__name__: kind
    for kind in (TransferTooLarge, TransferTimeout, TransferCancelled, TransferCorrupted, PeerLost)
}  # what a FAIL may name beside the usual TransferRejected
MAX_ATTEMPTS = 3  # data connections that may break under one chunk


class ChunkState(enum.Enum):
    """See the module's docstring."""

    QUEUED = enum.auto()
    OFFERED = enum.auto()
    GRANTED = enum.auto()
    WRITING = enum.auto()
    WRITTEN = enum.auto()
    ENDED = enum.auto()


@dataclass(eq=False)
class Chunk:
    """One chunk on its way out; it may read `source` until the transfer is released."""

    seq: int
    key: TransferKey
    source: Source
    manifest: Manifest
    binding: bytes
    link: Link
    transfer: Transfer
    deadline: float
    ready: bool
    on_end: Callable[[Chunk], None] | None = None
    is_held: bool = False  # its source outlives WRITTEN
    after: tuple[Moment, ...] = ()  # when its source is valid, once it is ready
    is_cut: bool = False  # to what goes to this peer
    state: ChunkState = ChunkState.QUEUED
    attempt: int = 0
    grant: Grant | None = None
    job: Job | None = None
    channel: Channel | None = None  # over which it was written last
    checksum: int = 0  # of what was written, if the peer or we want one
    ending: P2pError | None = None
    writing_since: float = 0.0
    resend_at: float = 0.0

    @property
    def is_being_read(self) -> bool:
        """Whether the mover may read its source still."""
        return self.job is not None and not self.job.done


@dataclass(eq=False)
class Abandonment:
    """A key that a peer must be told will never be completed."""

    link: Link
    reason: str
    deadline: float
    resend_at: float = 0.0


class Sender:
    """All outgoing chunks of one engine."""

    def __init__(
        self,
        config: EngineConfig,
        changed: threading.Condition,
        links: Links,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._changed = changed
        self._links = links
        self._counters = counters
        self._clock = clock
        self._seqs = itertools.count(1)
        self._chunks: dict[int, Chunk] = {}
        self._by_transfer: dict[Transfer, Chunk] = {}
        self._abandoned: dict[tuple[TransferKey, PeerAddress], Abandonment] = {}

    # What the caller asks for

    def send(
        self,
        key: TransferKey,
        peer: PeerAddress,
        source: Source,
        binding: bytes,
        timeout: float,
        *,
        ready: bool,
        on_end: Callable[[Chunk], None] | None = None,
        is_held: bool = False,
        moments: tuple[Moment, ...] = (),
    ) -> Chunk:
        """Queue a chunk; it is offered as soon as the link is ready. A source that is `ready` is
        valid after all `moments`."""
        manifest = source.manifest
        transfer = Transfer(key, manifest.nbytes, self._changed, self._cancel_transfer)
        link = self._links.get(peer, data=True)
        chunk = Chunk(
            next(self._seqs), key, source, manifest, binding, link, transfer,
            self._clock() + timeout, ready, on_end, is_held, moments,
        )  # fmt: skip
        self._chunks[chunk.seq] = self._by_transfer[transfer] = chunk
        self._offer(chunk)
        return chunk

    def mark_ready(self, transfer: Transfer, moments: tuple[Moment, ...] = ()) -> None:
        """Let the bytes move: the source is valid from now on, or after all `moments`."""
        chunk = self._by_transfer.get(transfer)
        if chunk is not None and not chunk.ready:
            chunk.ready, chunk.after = True, moments
            self._write(chunk)

    def abandon(self, key: TransferKey, peer: PeerAddress, reason: str) -> None:
        """Tell the peer, until it has heard, that this key will not be completed."""
        deadline = self._clock() + self._config.transfer_timeout_seconds
        abandonment = Abandonment(self._links.get(peer, data=False), reason, deadline)
        self._abandoned[key, peer] = abandonment
        self._tell_abandoned(key, abandonment)

    def stop(self, chunk: Chunk, error: P2pError) -> None:
        """End a chunk as soon as nothing is written any more."""
        chunk.ending = chunk.ending or error
        if chunk.is_being_read and chunk.job is not None:
            chunk.job.cancel()
        elif chunk.state is ChunkState.WRITING and chunk.job is not None:
            self._job_ended(chunk, chunk.job)  # its news was lost, or is on its way
        else:
            self._end(chunk, error, tell=chunk.state is not ChunkState.WRITTEN)

    # What the peer says

    def on_abandon_ok(self, link: Link, key: TransferKey) -> None:
        """The peer has heard."""
        for name, abandonment in list(self._abandoned.items()):
            if name[0] == key and abandonment.link.epoch == link.epoch:
                del self._abandoned[name]

    def on_grant(self, link: Link, message: Grant) -> None:
        """Start to write, when the source is ready."""
        chunk = self._current(link, message)
        if chunk is None:
            self._links.send(link, Cancelled, message.seq, message.attempt)
            return
        if chunk.state is not ChunkState.OFFERED:
            return  # said again; a write that is being cancelled says so itself, when it has ended
        first = message.first_block - chunk.manifest.first_block
        if message.num_blocks and not 0 <= first <= chunk.manifest.num_blocks - message.num_blocks:
            reason = f"peer {link.target} granted blocks that chunk {chunk.key} does not have"
            self._end(chunk, RemoteProtocolError(reason), tell=True)
            return
        chunk.grant, chunk.state = message, ChunkState.GRANTED
        self._write(chunk)

    def on_deny(self, link: Link, message: Deny) -> None:
        """Offer again later."""
        chunk = self._current(link, message)
        if chunk is not None and chunk.state is ChunkState.OFFERED:
            self._counters.denied += 1
            chunk.resend_at = self._clock() + message.retry_after

    def on_commit(self, link: Link, message: Commit) -> None:
        """The chunk has landed whole."""
        chunk = self._current(link, message)
        if chunk is not None and chunk.state is ChunkState.WRITTEN:
            self._end(chunk, None)

    def on_fail(self, link: Link, message: Fail) -> None:
        """The peer will never take it; or this attempt's data connection broke on its side."""
        chunk = self._current(link, message)
        if chunk is None or chunk.ending is not None:
            return
        if message.code != TransportError.__name__:
            kind = _REFUSALS.get(message.code, TransferRejected)
            self.stop(chunk, kind(f"{chunk.link.target}: {message.reason}"))
            return
        error = TransportError(f"{chunk.key} to {chunk.link.target}: {message.reason}")
        if chunk.state is not ChunkState.WRITTEN:
            self._links.break_channel(chunk.link, error)
            return
        if chunk.channel is chunk.link.channel:  # it has not told by itself yet
            self._links.lose_channel(chunk.link, error)
        self._try_again(chunk, error)

    def on_cancel(self, link: Link, message: Cancel) -> None:
        """The peer wants its region back: CANCELLED follows once nothing is written any more."""
        chunk = self._current(link, message)
        if chunk is None:
            self._links.send(link, Cancelled, message.seq, message.attempt)
        else:
            self.stop(chunk, TransferRejected(f"peer {link.target} cancelled {chunk.key}"))

    # What happens here

    def channel_ready(self, link: Link) -> None:
        """Offer what was queued for this link."""
        for chunk in self._on_link(link):
            if chunk.state is ChunkState.QUEUED:
                self._offer(chunk)

    def link_ready(self, link: Link) -> None:
        """Tell the peer what will not come, and again what it has forgotten."""
        for chunk in self._on_link(link):
            self._repeat(chunk)
        for (key, _), abandonment in self._abandoned.items():
            if abandonment.link is link:
                self._tell_abandoned(key, abandonment)

    def channel_lost(self, link: Link, error: P2pError) -> None:
        """Try again over another channel; what was written is the peer's to say."""
        for chunk in self._on_link(link):
            if chunk.job is not None and chunk.job.state == "done":
                self._job_ended(chunk, chunk.job)  # before the channel was lost
            if chunk.state is ChunkState.WRITTEN:
                self._repeat(chunk)
                self._links.get(link.target, data=True)  # a peer that noticed nothing does now
            elif chunk.ending is None:
                self._try_again(chunk, error)
            elif not chunk.is_being_read:
                self._end(chunk, chunk.ending, tell=True)

    def link_closed(self, link: Link) -> None:
        """End what was on its way."""
        for chunk in self._on_link(link):
            self._end_when_read(chunk, _as_lost(link, chunk))
        for name in [k for k, item in self._abandoned.items() if item.link is link]:
            del self._abandoned[name]

    def tick(self, now: float) -> None:
        """Repeat what is unanswered and end what is overdue."""
        for_each(self._chunks.values(), lambda chunk: self._tick_chunk(chunk, now))
        for target, item in list(self._abandoned.items()):
            if now >= item.deadline:
                del self._abandoned[target]
            elif now >= item.resend_at:
                self._tell_abandoned(target[0], item)

    def _tick_chunk(self, chunk: Chunk, now: float) -> None:
        if now >= chunk.deadline and chunk.ending is None:
            self.stop(chunk, self._overdue(chunk))
        elif now >= chunk.resend_at and chunk.link.ready:
            self._repeat(chunk)

    def overdue(self, now: float) -> list[str]:
        """Name the chunks that are past their deadline."""
        late = [chunk for chunk in self._chunks.values() if now >= chunk.deadline]
        return [f"send {item.key} to {item.link.target}, {item.state.name}" for item in late]

    def close(self, error: P2pError) -> None:
        """End everything; the mover is stopped, so that nothing is read or written any more."""
        for chunk in list(self._chunks.values()):
            self._end(chunk, chunk.ending or error)

    def num_open(self) -> int:
        """How many chunks still borrow their sources."""
        written = sum(chunk.state is ChunkState.WRITTEN for chunk in self._chunks.values())
        return len(self._chunks) - written

    # Steps

    def _offer(self, chunk: Chunk) -> None:
        link = chunk.link
        if link.transport is None:
            return  # until the channel is ready
        if not chunk.is_cut and not self._cut(chunk):
            return
        chunk.state = ChunkState.OFFERED
        chunk.resend_at = self._clock() + self._config.retry_seconds
        self._links.send(
            link, Offer, chunk.seq, chunk.attempt, chunk.key, chunk.manifest, chunk.binding,
            link.transport.name, self._is_checked(chunk),
        )  # fmt: skip

    def _cut(self, chunk: Chunk) -> bool:
        """Keep what goes to this peer; False: it was not possible, and the chunk has ended."""
        try:
            chunk.source = ask(lambda: chunk.source.towards(chunk.link.spec))
            chunk.manifest, chunk.is_cut = chunk.source.manifest, True
        except P2pError as error:
            self._give_up(chunk, error)  # the peer is told, or it would wait to its deadline
            return False
        chunk.transfer.nbytes = chunk.manifest.nbytes
        return True

    def _write(self, chunk: Chunk) -> None:
        grant, channel = chunk.grant, chunk.link.channel
        if (
            chunk.state is not ChunkState.GRANTED
            or not chunk.ready
            or grant is None
            or channel is None
        ):
            return
        nbytes = grant.num_blocks * chunk.manifest.block_bytes
        if not nbytes:
            self._written(chunk, 0)
            return
        chunk.state, chunk.writing_since = ChunkState.WRITING, self._clock()
        try:
            regions = ask_regions(
                lambda: chunk.source.regions(grant.first_block, grant.num_blocks), nbytes
            )
            order = Order(
                regions,
                grant,
                lane=lane_of(chunk.key),
                checked=self._is_checked(chunk),
                tag=lambda job: self._job_ended(chunk, job),
                keep=chunk.source,
                after=chunk.after,
            )
            chunk.job, chunk.channel = ask(lambda: channel.write(order)), channel
        except TransportError as error:
            self._links.break_channel(chunk.link, error)
        except P2pError as error:
            self._give_up(chunk, error)

    def _job_ended(self, chunk: Chunk, job: Job) -> None:
        if job is not chunk.job or chunk.state is not ChunkState.WRITING:
            return
        if job.state == "done" and chunk.link.state is not LinkState.CLOSED:
            self._counters.writing_seconds += self._clock() - chunk.writing_since
            chunk.checksum = job.checksum or 0
            self._written(chunk, job.nbytes)
        elif chunk.ending is not None:
            self._end(chunk, chunk.ending, tell=True)
        else:
            reason = f"write {chunk.key}: {job.error or job.state}"
            self._links.break_channel(chunk.link, TransportError(reason))

    def _written(self, chunk: Chunk, nbytes: int) -> None:
        chunk.state, chunk.job = ChunkState.WRITTEN, None
        chunk.ending = None  # a cancel that came too late: the peer's word is the end now
        self._counters.sent_bytes += nbytes
        chunk.transfer.release()
        self._repeat(chunk)

    def _repeat(self, chunk: Chunk) -> None:
        if chunk.state is ChunkState.OFFERED:
            self._offer(chunk)
        elif chunk.state is ChunkState.WRITTEN:
            chunk.resend_at = self._clock() + self._config.retry_seconds
            self._links.send(chunk.link, Done, chunk.seq, chunk.attempt, chunk.checksum)

    def _is_checked(self, chunk: Chunk) -> bool:
        transport = chunk.link.transport
        is_wanted = self._config.checksum or chunk.link.checksum
        return is_wanted and transport is not None and transport.checks

    def _end_when_read(self, chunk: Chunk, error: P2pError) -> None:
        """End a chunk whose link or channel is gone; the job of one that is read was cancelled."""
        chunk.ending = chunk.ending or error
        if not chunk.is_being_read:
            self._end(chunk, chunk.ending, tell=True)

    def _try_again(self, chunk: Chunk, error: P2pError) -> None:
        """Offer it once more after the end of a channel, or end it and tell the peer at once."""
        may = isinstance(error, TransportError) and chunk.attempt + 1 < MAX_ATTEMPTS
        has_source = chunk.is_held or chunk.state is not ChunkState.WRITTEN
        if may and has_source and not chunk.is_being_read:
            chunk.attempt += 1
            chunk.state, chunk.grant, chunk.job = ChunkState.QUEUED, None, None
            self._links.get(chunk.link.target, data=True)
            self._offer(chunk)
        else:
            self._give_up(chunk, error)

    def _give_up(self, chunk: Chunk, error: P2pError) -> None:
        self.abandon(chunk.key, chunk.link.target, str(error))
        self._end_when_read(chunk, error)

    def _end(self, chunk: Chunk, error: P2pError | None, *, tell: bool = False) -> None:
        if chunk.state is ChunkState.ENDED:
            return
        if tell and chunk.link.ready and chunk.state is not ChunkState.QUEUED:
            self._links.send(chunk.link, Cancelled, chunk.seq, chunk.attempt)
        chunk.state, chunk.job = ChunkState.ENDED, None
        del self._chunks[chunk.seq]
        del self._by_transfer[chunk.transfer]
        self._counters.count("sent", error)
        if error is not None:
            logger.info("send ended: key=%s peer=%s error=%s", chunk.key, chunk.link.target, error)
        chunk.transfer.end(error)
        if chunk.on_end is not None:
            chunk.on_end(chunk)

    def _cancel_transfer(self, transfer: Transfer, reason: str) -> None:
        with self._changed:
            chunk = self._by_transfer.get(transfer)
            if chunk is not None:
                self.stop(chunk, as_withdrawn(transfer, reason))

    def _tell_abandoned(self, key: TransferKey, abandonment: Abandonment) -> None:
        if abandonment.link.ready:
            abandonment.resend_at = self._clock() + self._config.retry_seconds
            self._links.send(abandonment.link, Abandon, key, shorten(abandonment.reason))

    def _current(self, link: Link, message: Grant | Deny | Commit | Fail | Cancel) -> Chunk | None:
        """The chunk that a peer speaks of, if this attempt is still the last.

        Raises:
            RemoteProtocolError: the chunk goes to another peer.
        """
        chunk = self._chunks.get(message.seq)
        if chunk is not None and chunk.link.epoch != link.epoch:
            kind = type(message).__name__
            raise RemoteProtocolError(f"{kind} of peer {link.target} for a chunk to another one")
        return chunk if chunk is not None and chunk.attempt == message.attempt else None

    def _on_link(self, link: Link) -> list[Chunk]:
        return [chunk for chunk in self._chunks.values() if chunk.link is link]

    def _overdue(self, chunk: Chunk) -> TransferTimeout:
        return TransferTimeout(
            f"{chunk.key} to {chunk.link.target} is {chunk.state.name} at the end of its deadline"
        )


def _as_lost(link: Link, chunk: Chunk) -> P2pError:
    if isinstance(link.error, PeerError):
        return type(link.error)(f"{chunk.key}: {link.error}")
    return link.error or TransferError(f"{chunk.key}: the link to {link.target} is closed")


def as_withdrawn(transfer: Transfer, reason: str) -> TransferCancelled:
    """Return the error of a transfer that its caller has cancelled."""
    return TransferCancelled(f"{transfer.key} was withdrawn: {reason or 'no reason given'}")
