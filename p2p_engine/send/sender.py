"""Sender: the shipments that leave this engine, and their chunks, from OFFER to COMMIT.

    QUEUED → OFFERED → GRANTED → WRITING → WRITTEN → (ended)

If a chunk is cancelled before WRITTEN, CANCELLED is sent once no byte can be written any more. If
its channel breaks, it is QUEUED again, a few times; from WRITTEN only if the bytes were lost and
the source can be read again. While a job reads a chunk's source, the chunk neither ends nor is
retried. The engine's lock guards everything here.
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
    PeerRestarted,
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
from p2p_engine.memory.ready_layers import ReadyLayers
from p2p_engine.peers.link import Link, LinkState, PeerAddress
from p2p_engine.peers.links import Links
from p2p_engine.peers.listeners import LinkListener
from p2p_engine.send.abandonments import Abandonments
from p2p_engine.send.endings import Endings
from p2p_engine.send.shipment import Chunk, ChunkState, Shipment
from p2p_engine.transfer import Transfer, lane_of, note_stage
from p2p_engine.transports.base import Order
from p2p_engine.wire.messages import (
    MAX_LAYERS,
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
}  # error names that a FAIL may have, beside the usual TransferRejected
MAX_ATTEMPTS = 3  # data connections that may break under one chunk before it fails


class Sender(LinkListener):
    """The outgoing chunks of one engine."""

    def __init__(
        self,
        config: EngineConfig,
        changed: threading.Condition,
        links: Links,
        endings: Endings,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._changed = changed
        self._links = links
        self._endings = endings
        self._counters = counters
        self._clock = clock
        self._seqs = itertools.count(1)
        self._chunks: dict[int, Chunk] = {}
        self._by_link: Index[Link, Chunk] = Index()
        self._timers: Timers[Chunk] = Timers()
        self._late: dict[Chunk, None] = {}  # past their deadlines, but not ended
        self._shipments: dict[Transfer, Shipment] = {}
        self._going: Index[ContentKey, Shipment] = Index()
        self._abandoned = Abandonments(config, links, clock)

    # Calls from the engine

    def send(
        self,
        key: TransferKey,
        peer: PeerAddress,
        source: Source,
        binding: bytes,
        timeout: float,
        *,
        ready_layers: ReadyLayers,
        on_end: Callable[[Shipment], None] | None = None,
        is_held: bool = False,
        generation: int = 0,
        by_layer: bool = False,
        answers: int = 0,
    ) -> Shipment:
        """Queue a shipment; its first chunks are offered as soon as the link is ready. Never
        blocks.

        Raises:
            PeerUnreachable: the peer's address is not host:port.
        """
        transfer = Transfer(key, source.manifest.nbytes, self._changed, self._cancel_transfer)
        link = self._links.get(peer, data=True)
        now, renewable = self._clock(), max(timeout, self._config.max_renewal_seconds)
        shipment = Shipment(
            key, source, binding, link, transfer, now + timeout, now + renewable, ready_layers,
            on_end, is_held, generation, by_layer, answers,
        )  # fmt: skip
        self._shipments[transfer] = shipment
        self._going.add(shipment.content, shipment)
        self._open(shipment, shipment.manifest)
        return shipment

    def mark_ready(
        self,
        transfer: Transfer,
        moments: tuple[Moment, ...] = (),
        num_layers: int = MAX_LAYERS,
    ) -> None:
        """Let the bytes of the first layers move: they are valid from now on, or after all
        `moments`."""
        shipment = self._shipments.get(transfer)
        if shipment is not None and shipment.ready_layers.mark(num_layers, moments):
            for chunk in list(shipment.chunks.values()):
                self._write(chunk)

    def abandon(
        self, content: ContentKey, peer: PeerAddress, reason: str, generation: int = 0
    ) -> None:
        """Tell the peer, until it has answered, that this content will not be completed in attempts
        up to this generation."""
        self._abandoned.add(content, peer, reason, generation)

    def stop(self, shipment: Shipment, error: P2pError) -> None:
        """End a shipment as soon as none of its chunks can be written any more."""
        shipment.ending = shipment.ending or error
        for chunk in list(shipment.chunks.values()):
            self._stop(chunk, error)

    def _stop(self, chunk: Chunk, error: P2pError) -> None:
        """End a chunk as soon as it cannot be written any more; its shipment ends with it."""
        chunk.ending = chunk.ending or error
        if chunk.is_being_read and chunk.job is not None:
            chunk.job.cancel()
        elif chunk.state is ChunkState.WRITING and chunk.job is not None:
            self._job_ended(chunk, chunk.job)  # its callback is on its way, or was lost
        else:
            self._end(chunk, error, tell=chunk.state is not ChunkState.WRITTEN)

    # Messages from the peer

    def on_abandon_ok(self, link: Link, message: AbandonOk) -> None:
        """Stop repeating ABANDON: the peer has answered."""
        self._abandoned.on_heard(link, (message.key, message.binding), message.generation)

    def on_grant(self, link: Link, message: Grant) -> None:
        """Start to write as soon as the source is ready.

        Raises:
            RemoteProtocolError: the chunk goes to another peer.
        """
        chunk = self._current(link, message)
        if chunk is None:
            self._links.send(link, Cancelled, message.seq, message.attempt)
            return
        if chunk.state is not ChunkState.OFFERED:
            return  # a repetition; a write that is being cancelled reports its own end
        first = message.first_block - chunk.manifest.first_block
        if message.num_blocks and not 0 <= first <= chunk.manifest.num_blocks - message.num_blocks:
            reason = f"peer {link.target} granted blocks that chunk {chunk.key} does not have"
            self._end(chunk, RemoteProtocolError(reason), tell=True)
            return
        chunk.grant, chunk.state = message, ChunkState.GRANTED
        note_stage(chunk.key, "GRANT heard", chunk.seq)
        self._observe_wait(chunk)
        self._write(chunk)

    def on_deny(self, link: Link, message: Deny) -> None:
        """Offer the chunk again later."""
        chunk = self._current(link, message)
        if chunk is not None and chunk.state is ChunkState.OFFERED:
            self._counters.denied += 1
            self._schedule(chunk, message.retry_after)
            chunk.shipment.transfer.deny()

    def on_commit(self, link: Link, message: Commit) -> None:
        """End a chunk: it has landed whole."""
        chunk = self._current(link, message)
        if chunk is not None and chunk.state is ChunkState.WRITTEN:
            note_stage(chunk.key, "COMMIT heard", chunk.seq)
            self._end(chunk, None)

    def on_fail(self, link: Link, message: Fail) -> None:
        """End the shipment: the peer will never take a chunk. If only this attempt's data
        connection broke on its side, try again."""
        chunk = self._current(link, message)
        if chunk is None or chunk.ending is not None:
            return
        if message.code != TransportError.__name__:
            kind = _REFUSALS.get(message.code, TransferRejected)
            if kind is TransferCorrupted:
                self._links.note_corrupted(chunk.link, chunk.channel)
            self.stop(chunk.shipment, kind(f"{chunk.link.target}: {message.reason}"))
            return
        error = TransportError(f"{chunk.key} to {chunk.link.target}: {message.reason}")
        if chunk.state is not ChunkState.WRITTEN:
            self._links.break_channel(chunk.link, error)
            return
        if chunk.channel is chunk.link.channel:  # our side has not noticed the break yet
            self._links.lose_channel(chunk.link, error)
        self._try_again(chunk, error)

    def on_cancel(self, link: Link, message: Cancel) -> None:
        """Stop the shipment. The peer wants its region back: CANCELLED follows once no byte can be
        written."""
        chunk = self._current(link, message)
        if chunk is None:
            self._links.send(link, Cancelled, message.seq, message.attempt)
        else:
            error = TransferRejected(f"peer {link.target} cancelled {chunk.key}")
            self.stop(chunk.shipment, error)

    def offer_now(self, epoch: int, content: ContentKey) -> bool:
        """Offer denied chunks again at once, because a receive waits for them. Returns False if no
        shipment of this content goes to that engine."""
        found = self._going_to(epoch, content)
        for shipment in found:
            for chunk in shipment.chunks.values():
                if chunk.state is ChunkState.OFFERED:
                    self._schedule(chunk, 0.0)
        return bool(found)

    def on_renew(self, epoch: int, contents: Iterable[ContentKey]) -> None:
        """Extend the deadlines of shipments that the receiver has not granted in full, by
        transfer_timeout_seconds: a request there will ask for these contents."""
        self._renew(item for name in contents for item in self._going_to(epoch, name))

    def on_renew_all(self, epoch: int) -> None:
        """Extend the deadlines of all shipments to the engine of an epoch, as `on_renew` does."""
        links = self._links.to_engine(epoch)
        self._renew({chunk.shipment for link in links for chunk in self._on_link(link)})

    def _renew(self, shipments: Iterable[Shipment]) -> None:
        deadline = self._clock() + self._config.transfer_timeout_seconds
        for shipment in shipments:
            if not shipment.is_granted and shipment.ending is None:
                latest = min(deadline, shipment.latest_deadline)
                shipment.deadline = max(shipment.deadline, latest)

    def _going_to(self, epoch: int, content: ContentKey) -> list[Shipment]:
        """Return the shipments of a content to the engine of an epoch."""
        going = self._going.get(content)
        return [item for item in going if item.link.epoch == epoch and item.ending is None]

    # Local events

    def channel_ready(self, link: Link) -> None:
        """Offer the chunks that were queued for this link."""
        for chunk in self._on_link(link):
            if chunk.state is ChunkState.QUEUED:
                self._offer(chunk)

    def link_ready(self, link: Link) -> None:
        """Repeat unanswered messages, which the peer may have lost, and send waiting ABANDONs."""
        for chunk in self._on_link(link):
            self._repeat(chunk)
        self._abandoned.link_ready(link)

    def channel_lost(self, link: Link, error: P2pError) -> None:
        """Try again over another channel. For a chunk that was written, ask the peer whether it
        landed."""
        for chunk in self._on_link(link):
            if chunk.state is ChunkState.ENDED:
                continue  # together with another chunk of its shipment
            if chunk.job is not None and chunk.job.state == "done":
                self._job_ended(chunk, chunk.job)  # the write ended before the channel was lost
            if chunk.state is ChunkState.WRITTEN:
                self._repeat(chunk)
                self._links.get(link.target, data=True)  # makes a peer notice that has not yet
            elif chunk.ending is None:
                self._try_again(chunk, error)
            elif not chunk.is_being_read:
                self._end(chunk, chunk.ending, tell=True)

    def link_closed(self, link: Link) -> None:
        """End the chunks that were on their way to a closed link. If they may be for an engine that
        has taken its peer's place, they go there, or it is told that they will not come."""
        self._abandoned.link_closed(link)
        shipments = list(dict.fromkeys(chunk.shipment for chunk in self._on_link(link)))
        for_each(shipments, lambda shipment: self._lose_link(shipment, link))

    def tick(self, now: float) -> None:
        """Repeat unanswered messages, and end what is overdue."""
        try:
            self._timers.look(now, lambda chunk: self._tick_chunk(chunk, now))
        finally:
            self._abandoned.tick(now)

    def due_at(self, now: float) -> float:
        """Return when the next tick has something to do."""
        return min(self._timers.due_at(), self._abandoned.due_at())

    def _tick_chunk(self, chunk: Chunk, now: float) -> None:
        """Handle a chunk that is due; until it has ended, it has a next time."""
        if now >= chunk.shipment.deadline:
            self._late[chunk] = None
            if chunk.ending is None:
                self.stop(chunk.shipment, self._overdue(chunk))
            return
        self._schedule(chunk, self._config.retry_seconds)
        if chunk.link.ready:
            self._repeat(chunk)

    def _schedule(self, chunk: Chunk, pause_seconds: float) -> None:
        """Set the chunk's next time: its deadline, or before that the repetition of OFFER or
        DONE."""
        at, chunk.resend_at = chunk.shipment.deadline, self._clock() + pause_seconds
        if chunk.state in (ChunkState.OFFERED, ChunkState.WRITTEN):
            at = min(at, chunk.resend_at)
        self._timers.set(chunk, at)

    def overdue(self, now: float) -> list[str]:
        """Return the names of the chunks that are past their deadline."""
        late = [chunk for chunk in self._late if now >= chunk.shipment.deadline]
        return [f"send {item.key} to {item.link.target}, {item.state.name}" for item in late]

    def uses_link(self, link: Link) -> bool:
        """Whether a chunk or an ABANDON is open over a link."""
        return self._by_link.count(link) > 0 or self._abandoned.uses_link(link)

    def close(self, error: P2pError) -> None:
        """End everything. The mover must have stopped, so that nothing is read or written any
        more."""
        for chunk in list(self._chunks.values()):
            self._end(chunk, chunk.ending or error)

    def num_open(self) -> int:
        """Return how many shipments still borrow their sources."""
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
            return  # the channel is not ready yet
        if not shipment.is_cut and not self._cut(chunk):
            return
        chunk.state = ChunkState.OFFERED
        chunk.offered_at = chunk.offered_at or self._clock()
        note_stage(chunk.key, "OFFER said", chunk.seq)
        self._schedule(chunk, self._config.retry_seconds)
        self._links.send(
            link, Offer, chunk.seq, chunk.attempt, chunk.key, chunk.manifest, shipment.binding,
            link.transport.name, self._is_checked(chunk), shipment.generation, shipment.answers,
        )  # fmt: skip
        self._open_more(shipment)

    def _open_more(self, shipment: Shipment) -> None:
        while shipment.may_open:
            self._open(shipment, shipment.next_range())

    def _observe_wait(self, chunk: Chunk) -> None:
        transport, mode = chunk.link.transport, "pull" if chunk.shipment.is_held else "push"
        label = f"{mode} {transport.name if transport is not None else 'none'}"
        self._counters.observed.append(("grant_seconds", label, self._clock() - chunk.offered_at))

    def _cut(self, chunk: Chunk) -> bool:
        """Cut a shipment for its peer, and limit the chunk to the first blocks. Returns False if
        that failed, and the shipment has ended."""
        try:
            chunk.shipment.cut(self._config.chunk_bytes)
        except P2pError as error:
            self._give_up(chunk, error)  # else the peer would wait until its deadline
            return False
        chunk.manifest = chunk.shipment.next_range()
        return True

    def _write(self, chunk: Chunk) -> None:
        grant, channel, shipment = chunk.grant, chunk.link.channel, chunk.shipment
        if chunk.state is not ChunkState.GRANTED or grant is None or channel is None:
            return
        after = shipment.after(chunk.manifest)
        if after is None:
            return
        nbytes = grant.num_blocks * chunk.manifest.block_bytes
        if not nbytes:
            self._written(chunk, 0)
            return
        chunk.state = ChunkState.WRITING
        note_stage(chunk.key, "write begins", chunk.seq)
        try:
            regions = ask_regions(
                lambda: shipment.source.regions(grant.first_block, grant.num_blocks, chunk.layers),
                nbytes,
            )
            order = Order(
                regions,
                grant,
                lane=lane_of(chunk.key),
                checked=self._is_checked(chunk),
                tag=lambda job: self._job_ended(chunk, job),
                keep=shipment.source,
                after=after,
            )
            chunk.job, chunk.channel = ask(lambda: channel.write(order)), channel
            self._counters.writing.begin(self._clock())
        except TransportError as error:
            self._links.break_channel(chunk.link, error)
        except P2pError as error:
            self._give_up(chunk, error)

    def _job_ended(self, chunk: Chunk, job: Job) -> None:
        self._counters.writing.end(self._clock())
        if job is not chunk.job or chunk.state is not ChunkState.WRITING:
            return
        if job.state == "done" and chunk.link.state is not LinkState.CLOSED:
            chunk.checksum = job.checksum or 0
            self._written(chunk, job.nbytes)
        elif chunk.ending is not None:
            self._end(chunk, chunk.ending, tell=True)
        else:
            reason = f"write {chunk.key}: {job.error or job.state}"
            self._links.break_channel(chunk.link, TransportError(reason))

    def _written(self, chunk: Chunk, nbytes: int) -> None:
        chunk.state, chunk.job = ChunkState.WRITTEN, None
        note_stage(chunk.key, "written", chunk.seq)
        chunk.ending = None  # a cancel that came too late: the peer's answer decides
        self._counters.sent_bytes += nbytes
        if chunk.shipment.is_written:
            chunk.shipment.transfer.release()
        self._repeat(chunk)
        self._open_more(chunk.shipment)

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
        """End a chunk whose link or channel is gone, once the job that reads its source has
        ended."""
        chunk.ending = chunk.ending or error
        chunk.shipment.ending = chunk.shipment.ending or chunk.ending
        if not chunk.is_being_read:
            self._end(chunk, chunk.ending, tell=True)

    def _lose_link(self, shipment: Shipment, link: Link) -> None:
        chunks = list(shipment.chunks.values())
        if shipment.ending is not None or not shipment.may_be_for_successor:
            for chunk in chunks:
                self._end_when_read(chunk, _as_lost(link, chunk))
        elif isinstance(link.error, PeerRestarted):
            for chunk in chunks:
                self._forget(chunk)
            shipment.begin_again(self._links.get(link.target, data=True))
            self._open(shipment, shipment.manifest)
        else:  # nobody is known to be there, and the source may be wanted back
            self._give_up(chunks[0], _as_lost(link, chunks[0]))

    def _try_again(self, chunk: Chunk, error: P2pError) -> None:
        """Offer a chunk again after its channel broke, or end it and tell the peer at once."""
        may = isinstance(error, TransportError) and chunk.attempt + 1 < MAX_ATTEMPTS
        if may and chunk.shipment.has_source and not chunk.is_being_read:
            chunk.attempt += 1
            chunk.state, chunk.grant, chunk.job = ChunkState.QUEUED, None, None
            self._links.get(chunk.link.target, data=True)
            self._offer(chunk)
        else:
            self._give_up(chunk, error)

    def _give_up(self, chunk: Chunk, error: P2pError) -> None:
        shipment = chunk.shipment
        shipment.is_given_up = True
        if not shipment.is_held:  # a held source can be asked for again
            self._endings.end(shipment.content, str(error), generation=shipment.generation)
        self.abandon(shipment.content, chunk.link.target, str(error), shipment.generation)
        self._end_when_read(chunk, error)

    def _end(self, chunk: Chunk, error: P2pError | None, *, tell: bool = False) -> None:
        if chunk.state is ChunkState.ENDED:
            return
        if tell and chunk.link.ready and chunk.state is not ChunkState.QUEUED:
            self._links.send(chunk.link, Cancelled, chunk.seq, chunk.attempt)
        self._forget(chunk)
        shipment = chunk.shipment
        if error is None:
            shipment.num_arrived += chunk.manifest.num_pages
            self._open_more(shipment)
        else:
            self.stop(shipment, error)
        if not shipment.chunks:
            self._end_shipment(shipment)

    def _forget(self, chunk: Chunk) -> None:
        chunk.state, chunk.job = ChunkState.ENDED, None
        del self._chunks[chunk.seq], chunk.shipment.chunks[chunk.seq]
        self._by_link.discard(chunk.link, chunk)
        self._timers.cancel(chunk)
        self._late.pop(chunk, None)

    def _end_shipment(self, shipment: Shipment) -> None:
        """End a shipment without open chunks. It may be called more than once for the last
        chunk."""
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
        """Return the chunk that a message is about, or None if that attempt is over.

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
