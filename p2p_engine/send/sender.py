"""Sender: the shipments that leave this engine, and their chunks, from OFFER to COMMIT.

QUEUED → OFFERED → GRANTED → WRITING → WRITTEN → (ended)     the usual way
any before WRITTEN → cancel → (ended), CANCELLED is sent once no byte can be written any more
any → the channel breaks → QUEUED again, a few times; WRITTEN: if the bytes were lost and are held
A chunk that is being read is neither ended nor tried again: it waits for the end of its job.
The engine's lock guards everything here.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable

from p2p_engine.bounded import Index
from p2p_engine.config import EngineConfig
from p2p_engine.control.tick_parts import for_each
from p2p_engine.control.timers import Timers
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
    named,
)
from p2p_engine.health import Counters
from p2p_engine.memory.jobs import Job, Moment
from p2p_engine.memory.layout import Source, ask, ask_regions
from p2p_engine.peers.link import Link, LinkState, PeerAddress
from p2p_engine.peers.links import Links
from p2p_engine.peers.listeners import LinkListener
from p2p_engine.send.abandonments import Abandonments
from p2p_engine.send.shipment import Chunk, ChunkState, Shipment
from p2p_engine.transfer import Transfer, lane_of
from p2p_engine.transports.base import Order
from p2p_engine.wire.messages import (
    AbandonOk,
    Cancel,
    Cancelled,
    Commit,
    ContentKey,
    Deny,
    Done,
    Fail,
    Grant,
    Manifest,
    Offer,
    TransferKey,
)

logger = logging.getLogger(__name__)

_REFUSALS = {
    kind.__name__: kind
    for kind in (TransferTooLarge, TransferTimeout, TransferCancelled, TransferCorrupted, PeerLost)
}  # what a FAIL may name beside the usual TransferRejected
MAX_ATTEMPTS = 3  # data connections that may break under one chunk


class Sender(LinkListener):
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
        self._by_link: Index[Link, Chunk] = Index()
        self._timers: Timers[Chunk] = Timers()
        self._late: dict[Chunk, None] = {}  # past their deadlines, and not over
        self._shipments: dict[Transfer, Shipment] = {}
        self._going: Index[ContentKey, Shipment] = Index()
        self._abandoned = Abandonments(config, links, clock)

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
        on_end: Callable[[Shipment], None] | None = None,
        is_held: bool = False,
        moments: tuple[Moment, ...] = (),
    ) -> Shipment:
        """Queue a shipment; its first chunks are offered as soon as the link is ready. A source
        that is `ready` is valid after all `moments`."""
        transfer = Transfer(key, source.manifest.nbytes, self._changed, self._cancel_transfer)
        link = self._links.get(peer, data=True)
        now, renewable = self._clock(), max(timeout, self._config.max_renewal_seconds)
        shipment = Shipment(
            key, source, binding, link, transfer, now + timeout, now + renewable, ready, on_end,
            is_held, moments,
        )  # fmt: skip
        self._shipments[transfer] = shipment
        self._going.add(shipment.content, shipment)
        self._open(shipment, shipment.manifest)
        return shipment

    def mark_ready(self, transfer: Transfer, moments: tuple[Moment, ...] = ()) -> None:
        """Let the bytes move: the source is valid from now on, or after all `moments`."""
        shipment = self._shipments.get(transfer)
        if shipment is not None and not shipment.ready:
            shipment.ready, shipment.after = True, moments
            for chunk in list(shipment.chunks.values()):
                self._write(chunk)

    def abandon(self, key: TransferKey, peer: PeerAddress, reason: str) -> None:
        """Tell the peer, until it has heard, that this key will not be completed."""
        self._abandoned.add(key, peer, reason)

    def stop(self, shipment: Shipment, error: P2pError) -> None:
        """End a shipment as soon as nothing of it is written any more."""
        shipment.ending = shipment.ending or error
        for chunk in list(shipment.chunks.values()):
            self._stop(chunk, error)

    def _stop(self, chunk: Chunk, error: P2pError) -> None:
        """End a chunk as soon as nothing is written any more; its shipment ends with it."""
        chunk.ending = chunk.ending or error
        if chunk.is_being_read and chunk.job is not None:
            chunk.job.cancel()
        elif chunk.state is ChunkState.WRITING and chunk.job is not None:
            self._job_ended(chunk, chunk.job)  # its news was lost, or is on its way
        else:
            self._end(chunk, error, tell=chunk.state is not ChunkState.WRITTEN)

    # What the peer says

    def on_abandon_ok(self, link: Link, message: AbandonOk) -> None:
        """The peer has heard."""
        self._abandoned.on_heard(link, message.key)

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
            self._schedule(chunk, message.retry_after)
            chunk.shipment.transfer.deny()

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
            self.stop(chunk.shipment, kind(f"{chunk.link.target}: {message.reason}"))
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
            error = TransferRejected(f"peer {link.target} cancelled {chunk.key}")
            self.stop(chunk.shipment, error)

    def offer_now(self, epoch: int, content: ContentKey) -> bool:
        """The receiver waits for it: offer at once what it has denied. False: nothing of it is on
        its way there."""
        found = self._going_to(epoch, content)
        for shipment in found:
            for chunk in shipment.chunks.values():
                if chunk.state is ChunkState.OFFERED:
                    self._schedule(chunk, 0.0)
        return bool(found)

    def on_renew(self, epoch: int, contents: Iterable[ContentKey]) -> None:
        """The receiver will ask for these: what it has not granted all memory for may take another
        transfer_timeout_seconds."""
        deadline = self._clock() + self._config.transfer_timeout_seconds
        for shipment in [item for name in contents for item in self._going_to(epoch, name)]:
            if not shipment.is_granted:
                latest = min(deadline, shipment.latest_deadline)
                shipment.deadline = max(shipment.deadline, latest)

    def _going_to(self, epoch: int, content: ContentKey) -> list[Shipment]:
        """What is on its way to the engine of an epoch, of this content."""
        return [item for item in self._going.get(content) if item.link.epoch == epoch]

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
        self._abandoned.link_ready(link)

    def channel_lost(self, link: Link, error: P2pError) -> None:
        """Try again over another channel; what was written is the peer's to say."""
        for chunk in self._on_link(link):
            if chunk.state is ChunkState.ENDED:
                continue  # with another chunk of its shipment
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
        self._abandoned.link_closed(link)
        for_each(
            self._on_link(link), lambda chunk: self._end_when_read(chunk, _as_lost(link, chunk))
        )

    def tick(self, now: float) -> None:
        """Repeat what is unanswered and end what is overdue."""
        try:
            self._timers.look(now, lambda chunk: self._tick_chunk(chunk, now))
        finally:
            self._abandoned.tick(now)

    def _tick_chunk(self, chunk: Chunk, now: float) -> None:
        """Look at what is due; it is due again soon, until it is over."""
        if now >= chunk.shipment.deadline:
            self._late[chunk] = None
            if chunk.ending is None:
                self.stop(chunk.shipment, self._overdue(chunk))
            return
        self._schedule(chunk, self._config.retry_seconds)
        if chunk.link.ready:
            self._repeat(chunk)

    def _schedule(self, chunk: Chunk, pause_seconds: float) -> None:
        """Say it again after a pause, if it is something that is said again, until its deadline."""
        at, chunk.resend_at = chunk.shipment.deadline, self._clock() + pause_seconds
        if chunk.state in (ChunkState.OFFERED, ChunkState.WRITTEN):
            at = min(at, chunk.resend_at)
        self._timers.set(chunk, at)

    def overdue(self, now: float) -> list[str]:
        """Name the chunks that are past their deadline."""
        late = [chunk for chunk in self._late if now >= chunk.shipment.deadline]
        return [f"send {item.key} to {item.link.target}, {item.state.name}" for item in late]

    def uses_link(self, link: Link) -> bool:
        """Whether anything is open over a link."""
        return self._by_link.count(link) > 0 or self._abandoned.uses_link(link)

    def close(self, error: P2pError) -> None:
        """End everything; the mover is stopped, so that nothing is read or written any more."""
        for chunk in list(self._chunks.values()):
            self._end(chunk, chunk.ending or error)

    def num_open(self) -> int:
        """How many shipments still borrow their sources."""
        return sum(not transfer.released for transfer in self._shipments)

    # Steps

    def _open(self, shipment: Shipment, manifest: Manifest) -> None:
        chunk = Chunk(next(self._seqs), shipment, manifest)
        self._chunks[chunk.seq] = shipment.chunks[chunk.seq] = chunk
        self._by_link.add(chunk.link, chunk)
        self._timers.set(chunk, shipment.deadline)
        self._offer(chunk)

    def _offer(self, chunk: Chunk) -> None:
        link, shipment = chunk.link, chunk.shipment
        if link.transport is None:
            return  # until the channel is ready
        if not shipment.is_cut and not self._cut(chunk):
            return
        chunk.state = ChunkState.OFFERED
        self._schedule(chunk, self._config.retry_seconds)
        self._links.send(
            link, Offer, chunk.seq, chunk.attempt, chunk.key, chunk.manifest, shipment.binding,
            link.transport.name, self._is_checked(chunk),
        )  # fmt: skip
        self._open_more(shipment)

    def _open_more(self, shipment: Shipment) -> None:
        while shipment.may_open:
            self._open(shipment, shipment.next_range())

    def _cut(self, chunk: Chunk) -> bool:
        """Keep what goes to this peer, and leave a chunk the first blocks of it; False: it was not
        possible, and the shipment has ended."""
        try:
            chunk.shipment.cut(self._config.chunk_bytes)
        except P2pError as error:
            self._give_up(chunk, error)  # the peer is told, or it would wait to its deadline
            return False
        chunk.manifest = chunk.shipment.next_range()
        return True

    def _write(self, chunk: Chunk) -> None:
        grant, channel, shipment = chunk.grant, chunk.link.channel, chunk.shipment
        if (
            chunk.state is not ChunkState.GRANTED
            or not shipment.ready
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
                lambda: shipment.source.regions(grant.first_block, grant.num_blocks), nbytes
            )
            order = Order(
                regions,
                grant,
                lane=lane_of(chunk.key),
                checked=self._is_checked(chunk),
                tag=lambda job: self._job_ended(chunk, job),
                keep=shipment.source,
                after=shipment.after,
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
        if chunk.shipment.is_written:
            chunk.shipment.transfer.release()
        self._repeat(chunk)

    def _repeat(self, chunk: Chunk) -> None:
        if chunk.state is ChunkState.OFFERED:
            self._offer(chunk)
        elif chunk.state is ChunkState.WRITTEN:
            self._schedule(chunk, self._config.retry_seconds)
            self._links.send(chunk.link, Done, chunk.seq, chunk.attempt, chunk.checksum)

    def _is_checked(self, chunk: Chunk) -> bool:
        transport = chunk.link.transport
        is_wanted = self._config.checksum or chunk.link.checksum
        return is_wanted and transport is not None and transport.checks

    def _end_when_read(self, chunk: Chunk, error: P2pError) -> None:
        """End a chunk whose link or channel is gone; the job of one that is read was cancelled."""
        chunk.ending = chunk.ending or error
        chunk.shipment.ending = chunk.shipment.ending or chunk.ending
        if not chunk.is_being_read:
            self._end(chunk, chunk.ending, tell=True)

    def _try_again(self, chunk: Chunk, error: P2pError) -> None:
        """Offer it once more after the end of a channel, or end it and tell the peer at once."""
        may = isinstance(error, TransportError) and chunk.attempt + 1 < MAX_ATTEMPTS
        if may and chunk.shipment.has_source and not chunk.is_being_read:
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
        shipment = chunk.shipment
        del self._chunks[chunk.seq], shipment.chunks[chunk.seq]
        self._by_link.discard(chunk.link, chunk)
        self._timers.cancel(chunk)
        self._late.pop(chunk, None)
        if error is None:
            shipment.num_arrived += chunk.manifest.num_blocks
            self._open_more(shipment)
        else:
            self.stop(shipment, error)
        if not shipment.chunks:
            self._end_shipment(shipment)

    def _end_shipment(self, shipment: Shipment) -> None:
        """Nothing of it is open; the last of its chunks may be told of that more than once."""
        if self._shipments.pop(shipment.transfer, None) is None:
            return
        self._going.discard(shipment.content, shipment)
        error = None if shipment.has_arrived else shipment.ending
        self._counters.count("sent", error)
        if error is not None:
            target = shipment.link.target
            logger.info("send ended: key=%s peer=%s error=%s", shipment.key, target, named(error))
        shipment.transfer.end(error)
        if shipment.on_end is not None:
            shipment.on_end(shipment)

    def _cancel_transfer(self, transfer: Transfer, reason: str) -> None:
        with self._changed:
            shipment = self._shipments.get(transfer)
            if shipment is not None:
                self.stop(shipment, as_withdrawn(transfer, reason))

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
        return self._by_link.get(link)

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
