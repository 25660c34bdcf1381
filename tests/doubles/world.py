"""A deterministic world for one sender and one store: a clock, a network that loses, doubles and
reorders, memory that is moved piece by piece, and processes that end or fall silent.

Sender, store, arena, links' handles and messages are the real ones. Only what has a thread, a
socket or a clock of its own is replaced, and then every interleaving is the test's choice.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import google_crc32c
import numpy as np
import numpy.typing as npt

from mempool import Mover, write_word
from p2p_engine.bounded import Budget
from p2p_engine.config import EngineConfig
from p2p_engine.dispatch import answers_to
from p2p_engine.errors import P2pError, PeerLost, RemoteProtocolError, TransportError
from p2p_engine.health import Counters
from p2p_engine.memory.arena import LandingArena, Space
from p2p_engine.memory.layout import Regions
from p2p_engine.memory.paged import PagedCache, PagedSink, PagedSource
from p2p_engine.memory.ready_layers import ReadyLayers
from p2p_engine.peers.link import Link, LinkState, PeerAddress
from p2p_engine.peers.links import Links
from p2p_engine.receive.expectations import Expectations, Kept
from p2p_engine.receive.placement import Placement
from p2p_engine.receive.store import Store
from p2p_engine.send.endings import Endings
from p2p_engine.send.sender import Sender
from p2p_engine.transfer import Transfer
from p2p_engine.transports.base import Arrival, Order, PlainTransport, Transport
from p2p_engine.wire.messages import (
    Abandon,
    AbandonOk,
    AnyMessage,
    Cancelled,
    ContentKey,
    Done,
    Greet,
    Message,
    Offer,
    Ping,
    Renew,
    TransferKey,
    Want,
    decode,
    encode,
)

PAGES = [1024, 512]  # bytes of one block of each layer
NUM_TOKENS = 64
MAX_BLOCKS = 4
CANARY, GARBAGE = 0xA5, 0xEE
STORE_EPOCH = 7
PEER = PeerAddress("127.0.0.1:1")
Bytes = npt.NDArray[np.uint8]

SETTINGS = EngineConfig(
    kv_buffer_size=8192,
    mem_pool_size_gb=8192 / (1 << 30),
    transfer_timeout_seconds=6,
    lease_seconds=4,
    retry_seconds=0.5,
)


@functools.cache
def right_block(key: TransferKey, binding: bytes, block: int) -> Bytes:
    """What a block of a content holds; every block of every content differs."""
    seed = [*f"{key}".encode(), *binding, block]
    return np.random.default_rng(seed).integers(1, 255, sum(PAGES), np.uint8)


def cache_over(memory: Bytes) -> PagedCache:
    """Describe memory[block, byte] as a paged cache: a block's layers lie one after another."""
    pages = np.array(PAGES, np.int64)
    starts = memory.ctypes.data + np.cumsum(pages) - pages
    strides = np.full(len(pages), memory.shape[1], np.int64)
    return PagedCache(starts, strides, pages, memory.shape[0])


@dataclass(eq=False)
class WorldJob:
    """A copy, send or expect that moves only when the test says so."""

    kind: str
    world: World
    epoch: int  # of the process that runs it
    seq: int
    addresses: Regions
    destinations: Regions | None
    tag: Callable[[WorldJob], None]
    word: tuple[int, int] | None = None
    channel: WorldChannel | None = None
    state: str = "running"
    error: str | None = None
    moved: int = 0
    cancel_asked: bool = False
    checked: bool = False
    checksum: int | None = None  # of what was moved, as another library computes it

    @property
    def done(self) -> bool:
        """Whether no byte is touched any more."""
        return self.state != "running"

    @property
    def nbytes(self) -> int:
        """All bytes of it."""
        return self.addresses.nbytes

    def cancel(self) -> None:
        """Ask for the end; it comes with the next move."""
        self.cancel_asked = True

    def end(self, state: str) -> None:
        """Stop; the owner hears of it at its next drain."""
        if not self.done:
            self.state = state
            if self.checked and state == "done":
                self.checksum = google_crc32c.value(gather(self.addresses))
            self.world.ended.append(self)


def gather(regions: Regions) -> bytes:
    """Read the bytes of all regions."""
    pieces = zip(regions.addresses.tolist(), regions.lengths.tolist(), strict=True)
    return b"".join(ctypes.string_at(address, length) for address, length in pieces)


def scatter(regions: Regions, start: int, payload: bytes) -> None:
    """Write the payload from byte `start` of the regions on."""
    position = 0
    for address, length in zip(regions.addresses.tolist(), regions.lengths.tolist(), strict=True):
        low = max(start, position)
        piece = payload[low - start : max(low, position + length) - start]
        ctypes.memmove(address + low - position, piece, len(piece))
        position += length


@dataclass(eq=False)
class WorldChannel:
    """The sending half; `receiver_writes` puts a stream between, else it writes the arena."""

    world: World
    epoch: int
    closed: bool = False
    stream: list[tuple[int, bytes, str]] = field(default_factory=list)

    def write(self, order: Order) -> WorldJob:
        """Start a job that the test will move."""
        if self.closed:
            raise TransportError("write: the channel is closed")
        source, grant = order.source, order.grant
        destination, word = None, None
        if not self.world.transport.receiver_writes:
            base = self.world.arena.arena.address + grant.offset
            destination = Regions(np.array([base]), np.array([source.nbytes]))
            word = (self.world.arena.arena.address + grant.word_offset, grant.trailer)
        job = WorldJob(
            "write",
            self.world,
            self.epoch,
            grant.seq,
            source,
            destination,
            cast("Any", order.tag),
            word,
        )
        job.channel, job.checked = self, order.checked and self.world.transport.checks
        self.world.jobs.append(job)
        return job

    def close(self, timeout: float = 1.0) -> bool:
        """End what is under way, join it, and hang up; unless the world's copies are stuck."""
        self.closed = True
        if self.world.is_stuck and any(
            job.channel is self and not job.done for job in self.world.jobs
        ):
            return False
        self.stream.clear()
        self.world.end_jobs(lambda job: job.channel is self, "cancelled")
        if self.world.channels.get(self.epoch) is self:
            self.world.hung_up(self.epoch)
        return True


@dataclass(eq=False)
class WorldTransport(PlainTransport):
    """The receiving half."""

    world: World
    receiver_writes: bool
    connected: set[int] = field(default_factory=set)
    name: str = "sim"
    checks: bool = True

    @property
    def scatters(self) -> bool:
        """As a stream does."""
        return self.receiver_writes

    def expect(self, arrival: Arrival) -> WorldJob:
        """Wait for a stream's payload."""
        source_epoch, regions = arrival.source_epoch, arrival.regions
        if source_epoch not in self.connected:
            raise TransportError("expect: the sender is not connected")
        tag = cast("Any", arrival.tag)
        job = WorldJob(
            "expect", self.world, self.world.store_epoch, arrival.seq, regions, regions, tag
        )
        job.channel = self.world.channels[source_epoch]
        job.checked = arrival.checked and self.checks
        self.world.jobs.append(job)
        return job

    def is_gone(self, source_epoch: int) -> bool:
        """Whether the sender has provably ended."""
        return source_epoch not in self.connected


@dataclass(eq=False)
class WorldMover:
    """The store's own mover."""

    world: World

    def copy(
        self, sources: Any, destinations: Any, lengths: Any, *, lane: int, tag: Any, keep: Any
    ) -> WorldJob:
        """Start a job that the test will move."""
        source, destination = Regions(sources, lengths), Regions(destinations, lengths)
        job = WorldJob("scatter", self.world, self.world.store_epoch, 0, source, destination, tag)
        self.world.jobs.append(job)
        return job

    def check(self, sources: Any, lengths: Any, *, lane: int, tag: Any, keep: Any) -> WorldJob:
        """Start a job that only looks."""
        epoch, regions = self.world.store_epoch, Regions(sources, lengths)
        job = WorldJob("check", self.world, epoch, 0, regions, None, tag)
        job.checked = True
        self.world.jobs.append(job)
        return job


@dataclass(eq=False)
class WorldLinks:
    """Hands out the one link of the sending process that lives now."""

    world: World
    epoch: int
    link: Link | None = None

    def get(self, target: PeerAddress, *, data: bool) -> Link:
        """Return the link, dialling when there is none; the test lets it connect."""
        if self.link is None:
            self.link = Link(
                target, target.address, LinkState.GREETING, 1e9, epoch=self.world.store_epoch
            )
            self.link.largest_landing = self.world.largest_landing
        return self.link

    def send(self, link: Link, kind: type[Message], *fields: Any) -> None:
        """Put a message on the network."""
        self.world.post("store", kind(self.epoch, link.epoch, *fields))

    def note_corrupted(self, link: Link, channel: object) -> None:
        """There is no other transport to leave this one for."""

    def break_channel(self, link: Link, error: TransportError) -> None:
        """Remember it; the control thread would do it soon."""
        self.world.breaking.append((link.channel, error))

    def lose_channel(self, link: Link, error: TransportError) -> None:
        """Do it at once."""
        self.world.break_channel(error)


@dataclass(eq=False)
class Sending:
    """A send, and the memory that its caller lent."""

    transfer: Transfer
    memory: Bytes
    key: TransferKey
    binding: bytes
    is_held: bool = False
    ended_with: list[str] = field(default_factory=list)


@dataclass(eq=False)
class Receiving:
    """A receive, the memory that it fills, and what that memory was when it ended. It wants blocks
    up to `end_block`, or (0) all."""

    transfer: Transfer
    memory: Bytes
    key: TransferKey
    binding: bytes
    sink: PagedSink
    first_block: int
    at_end: Bytes | None = None
    end_block: int = 0

    @property
    def wanted(self) -> range:
        """The blocks that it wants."""
        return range(self.first_block, self.end_block or len(self.memory))

    def is_right(self) -> bool:
        """Whether every wanted block holds its content, and nothing else was touched."""
        expected = np.full_like(self.memory, CANARY)
        for block in self.wanted:
            expected[block] = right_block(self.key, self.binding, block)
        return bool((self.memory == expected).all())

    def landed_blocks_are_right(self) -> bool:
        """Whether every block that the sink does not call missing holds its content."""
        landed = set(self.wanted) - set(self.sink.missing_blocks().tolist())
        return all(
            (self.memory[block] == right_block(self.key, self.binding, block)).all()
            for block in landed
        )


class WorldMemory(LandingArena):
    """Whose pages are not touched ahead of use: without a thread a world is made quickly."""

    def _prefault(self) -> None:
        pass

    def is_touched(self, space: Space) -> bool:
        return True


class World:
    """Everything, and the moves that a test can make."""

    def __init__(
        self,
        *,
        receiver_writes: bool,
        config: EngineConfig = SETTINGS,
        num_blocks: int = MAX_BLOCKS,
    ) -> None:
        self.now = 100.0
        self.num_blocks = num_blocks  # of every prompt
        self.config = config
        self.lock = threading.Condition(threading.RLock())
        self.lock.acquire()  # the one thread of this world holds it all the time
        self.jobs: list[WorldJob] = []
        self.ended: list[WorldJob] = []
        self.network: list[tuple[str, bytes]] = []
        self.breaking: list[tuple[Any, TransportError]] = []
        self.is_stuck = False  # a sender's copies do not stop
        self.largest_landing = 0  # as the receiver's WELCOME says
        self.num_to_corrupt = 0  # of the next writes
        self.num_corrupted = 0
        self.unclosed: list[WorldChannel] = []
        self.sessions: set[int] = set()
        self.channels: dict[int, WorldChannel] = {}
        self.sendings: list[Sending] = []
        self.receivings: list[Receiving] = []
        self.transport = WorldTransport(self, receiver_writes)
        self.arenas: list[WorldMemory] = []
        self.epoch, self.store_epoch = 100, STORE_EPOCH
        self.start_receiver()
        self.start_sender()

    def kept(self) -> list[ContentKey]:
        """What the receiver's caller will ask for."""
        return [kept.content for kept in self.expectations.all_kept()]

    # Processes and links

    def start_receiver(self) -> None:
        """Start a receiving process; a sender may still have the memory of the one before."""
        config = self.config
        self.arena = WorldMemory(config.kv_buffer_size, config.pool_bytes)
        self.arenas.append(self.arena)
        self.counters = Counters()
        self.expectations = Expectations()  # of the receiver's caller
        mover = cast("Mover", WorldMover(self))
        places = Placement(config, self.arena, mover, lambda: self.now)
        self.store = Store(
            config, self.lock, places, mover, self.counters,
            reply=self._reply, clock=lambda: self.now, expectations=self.expectations,
            budget=Budget(),
        )  # fmt: skip

    def start_sender(self) -> None:
        """Start a new sending process; what the old one had in flight stays there."""
        self.epoch += 1
        self.sent, self.endings = Counters(), Endings(Budget())
        self.links = WorldLinks(self, self.epoch)
        self.sender = Sender(
            self.config, self.lock, cast("Links", self.links), self.endings, self.sent,
            lambda: self.now,
        )  # fmt: skip
        self.answers = answers_to(self.sender)

    def restart_sender(self) -> None:
        """Kill the sending process and start another at the same address."""
        old = self.epoch
        self.end_jobs(lambda job: job.epoch == old, "cancelled")
        self.ended = [job for job in self.ended if job.epoch != old]
        self.jobs = [job for job in self.jobs if job.epoch != old]
        self.hung_up(old)
        self.sendings.clear()  # their memory died with the process
        self.forget_session(old)
        self.start_sender()

    def connect(self) -> None:
        """Let the sender's link become ready, channel included; who was forgotten greets again."""
        link = self.links.link
        if link is not None and link.state is LinkState.GREETING:
            link.state = LinkState.READY
            self.sessions.add(self.epoch)
            self.sender.link_ready(link)
        if self.unclosed and not self.transport.receiver_writes:
            return  # the receiver lets nobody in beside a connection that may still write
        if link is not None and link.channel is None:
            self.sessions.add(self.epoch)
            self.transport.connected.add(self.epoch)
            link.channel = self.channels[self.epoch] = WorldChannel(self, self.epoch)  # type: ignore[assignment]
            link.transport = cast("Transport", self.transport)
            self.sender.channel_ready(link)

    def ping(self) -> None:
        """Let the sender's link ask whether it is known; links do, if nothing else is said."""
        if self.links.link is not None:
            self._to_store(Ping(self.epoch, self.store_epoch))

    def close_link(self, error: P2pError) -> None:
        """End the sender's link as Links does: the channel is joined first."""
        link = self.links.link
        if link is not None:
            self.links.link, link.state, link.error = None, LinkState.CLOSED, error
            self._close_channel(link)
            self.sender.link_closed(link)

    def break_channel(self, error: TransportError) -> None:
        """Let the sender find that its data connection broke."""
        link = self.links.link
        if link is not None and link.channel is not None:
            self._close_channel(link)
            self.sender.channel_lost(link, error)

    def _close_channel(self, link: Link) -> None:
        channel, link.channel, link.transport = link.channel, None, None
        if channel is not None and not channel.close():
            self.unclosed.append(cast("WorldChannel", channel))

    def hung_up(self, epoch: int) -> None:
        """The receiver sees the end of a sender's connection."""
        self.transport.connected.discard(epoch)
        if self.transport.receiver_writes:
            channel = self.channels.pop(epoch, None)
            self.end_jobs(lambda job: job.kind == "expect" and job.channel is channel, "failed")

    def lose_connection(self) -> None:
        """The receiver's end of the data connection breaks; the sender notices with time."""
        if self.transport.receiver_writes and self.epoch in self.channels:
            self.breaking.append((self.channels[self.epoch], TransportError("reset by the peer")))
            self.hung_up(self.epoch)

    def forget_session(self, epoch: int) -> None:
        """The receiver finds that a sender is silent, whether it is dead or not."""
        if epoch in self.sessions:
            self.sessions.discard(epoch)
            self.store.session_lost(epoch, PeerLost("silent"))
            self.lose_connection()

    # Memory

    def move(self, job: WorldJob, limit: int) -> None:
        """Let a job move up to `limit` bytes, and end when nothing is left."""
        if job.done:
            return
        if job.cancel_asked:
            self._abort(job)
        elif job.kind == "expect":
            return  # it moves with the stream
        elif job.kind == "check":
            job.end("done")
        elif job.destinations is None:
            self._stream(job)
        else:
            self._copy(job, limit)

    def move_stream(self, epoch: int) -> None:
        """Let the receiver read the next payload of a stream."""
        channel = self.channels.get(epoch)
        if channel is None or not channel.stream:
            return
        seq, payload, end = channel.stream.pop(0)
        wanted = (job for job in self.jobs if job.kind == "expect" and job.channel is channel)
        job = next((job for job in wanted if job.seq == seq and not job.done), None)
        if job is None:
            return  # dropped
        if job.nbytes < len(payload) or (end == "last" and job.nbytes != len(payload)):
            raise AssertionError(f"{len(payload)} bytes came for {job.nbytes}")
        scatter(job.addresses, 0, payload)
        job.end("done" if end == "last" else "failed")

    def end_jobs(self, which: Callable[[WorldJob], bool], state: str) -> None:
        """End jobs where they stand."""
        for job in self.jobs:
            if not job.done and which(job):
                job.end(state)

    def drain(self) -> None:
        """Tell the owners which jobs have ended."""
        ended, self.ended = self.ended, []
        for job in ended:
            self.jobs.remove(job)
            if job.epoch in (self.store_epoch, self.epoch):
                job.tag(job)
        self._note_ends()

    def work(self) -> None:
        """Let everything that moves come to its end, and its owners hear of it."""
        for job in list(self.jobs):
            self.move(job, 1 << 20)
        for epoch in list(self.channels):
            self.move_stream(epoch)
        self.drain()

    def _copy(self, job: WorldJob, limit: int) -> None:
        assert job.destinations is not None
        payload = gather(job.addresses)[job.moved : job.moved + limit]
        if job.kind == "write":
            payload = self._on_its_way(payload)
        scatter(job.destinations, job.moved, payload)
        job.moved += len(payload)
        if job.moved == job.nbytes:
            if job.word is not None:
                write_word(*job.word)
            job.end("done")

    def _stream(self, job: WorldJob) -> None:
        assert job.channel is not None
        payload = self._on_its_way(gather(job.addresses))
        job.channel.stream.append((job.seq, payload, "last"))
        job.end("done")

    def _on_its_way(self, payload: bytes) -> bytes:
        if not self.num_to_corrupt or not payload:
            return payload
        self.num_to_corrupt -= 1
        self.num_corrupted += 1
        return payload[:-1] + bytes([payload[-1] ^ 0x10])

    def _abort(self, job: WorldJob) -> None:
        if job.kind == "write" and job.destinations is None and job.channel is not None:
            zeros = bytes(job.nbytes // 2)  # a segment in progress goes on with zeros
            job.channel.stream.append((job.seq, zeros, "aborted"))
        job.end("cancelled")

    # The network

    def post(self, to: str, message: Message) -> None:
        """Put a message on its way; it can be delivered, dropped or doubled."""
        self.network.append((to, encode(cast("AnyMessage", message))))

    def deliver(self, index: int, *, keep: bool = False) -> None:
        """Hand a message over; with `keep` it will come a second time."""
        to, frame = self.network[index] if keep else self.network.pop(index)
        message = decode(frame)
        if to == "store":
            self._to_store(message)
        elif message.destination_epoch == self.epoch and self.links.link is not None:
            self._to_sender(self.links.link, message)
        self._note_ends()

    def deliver_all(self) -> None:
        """Hand over, in order, what is on its way now; the answers are on their way then."""
        for _ in range(len(self.network)):
            self.deliver(0)

    def _to_store(self, message: AnyMessage) -> None:
        epoch = message.source_epoch
        if epoch not in self.sessions:
            self.post("sender", Greet(self.store_epoch, epoch))
        elif isinstance(message, Offer):
            self.store.on_offer(epoch, message, cast("Transport", self.transport))
        elif isinstance(message, Done):
            self.store.on_done(epoch, message.seq, message.attempt, message.checksum)
        elif isinstance(message, Cancelled):
            self.store.on_cancelled(epoch, message.seq, message.attempt)
        elif isinstance(message, Abandon):
            with contextlib.suppress(RemoteProtocolError):  # of a sender that was restarted since
                content = (message.key, message.binding)
                if not self.store.is_over(content, epoch, message.generation):
                    self.store.on_abandon(content, epoch, PeerLost("abandoned"))
            self._reply(epoch, AbandonOk, (message.key, message.binding, message.generation))

    def _to_sender(self, link: Link, message: AnyMessage) -> None:
        if isinstance(message, Renew):
            self.sender.on_renew(self.store_epoch, set(message.contents))
        elif isinstance(message, Want):
            self.sender.offer_now(self.store_epoch, (message.key, message.binding))
        elif isinstance(message, Greet):
            link.state = LinkState.GREETING
        elif type(message) in self.answers:
            self.answers[type(message)](link, message)

    def _reply(self, epoch: int, kind: type[Message], fields: tuple[Any, ...]) -> None:
        if epoch in self.sessions:
            self.post("sender", kind(self.store_epoch, epoch, *fields))

    # The callers

    def send(
        self,
        key: TransferKey,
        binding: bytes,
        first: int,
        num: int,
        *,
        ready: bool,
        is_held: bool = False,
        generation: int = 0,
    ) -> None:
        """Send blocks [first, first + num) of a content; a held source outlives its writing."""
        memory = np.full((self.num_blocks, sum(PAGES)), GARBAGE, np.uint8)
        sending = Sending(cast("Transfer", None), memory, key, binding)
        source = PagedSource(cache_over(memory), np.arange(first, first + num), first, NUM_TOKENS)
        if ready:
            self._fill(sending)
        shipment = self.sender.send(
            key, PEER, source, binding, self.config.transfer_timeout_seconds,
            ready_layers=ReadyLayers.whole() if ready else ReadyLayers(),
            on_end=lambda shipment: sending.ended_with.append(repr(shipment.transfer.error)),
            is_held=is_held, generation=generation,
        )  # fmt: skip
        sending.is_held, sending.transfer = is_held, shipment.transfer
        self.sendings.append(sending)

    def mark_ready(self, sending: Sending) -> None:
        """Finish computing, then let the bytes move."""
        if not sending.transfer.released:
            self._fill(sending)
        self.sender.mark_ready(sending.transfer)

    def receive(
        self, key: TransferKey, binding: bytes, first: int, *, is_pulled: bool = False
    ) -> None:
        """Receive blocks [first, num_blocks) of a content.

        Raises:
            TransferError: it is being received, or came and was refused.
        """
        memory = np.full((self.num_blocks, sum(PAGES)), CANARY, np.uint8)
        ids = np.arange(first, self.num_blocks)
        sink = PagedSink(cache_over(memory), ids, first, NUM_TOKENS)
        transfer = self.store.receive(
            key, sink, binding, self.config.transfer_timeout_seconds, is_pulled=is_pulled
        )
        self.receivings.append(Receiving(transfer, memory, key, binding, sink, first))
        self._note_ends()

    def keep(self, content: ContentKey) -> None:
        """Let the receiver's caller say that it will ask for a content, later."""
        self.expectations.drop(content)
        self.expectations.keep(Kept(content, self.now))

    def drop(self, content: ContentKey) -> None:
        """Let the receiver's caller say that it will not."""
        self.expectations.drop(content)
        self.store.dropped(content)

    def renew(self) -> None:
        """Let the receiver tell the sender what is kept."""
        self.post("sender", Renew(self.store_epoch, self.epoch, sorted(self.kept(), key=repr)))

    def want(self, content: ContentKey) -> None:
        """Let the receiver ask the sender for what should be pushed."""
        self.post("sender", Want(self.store_epoch, self.epoch, *content, True))

    def advance(self, seconds: float) -> None:
        """Let time pass and both control threads turn.

        Raises:
            AssertionError: what has landed and is kept has not outlived it.
        """
        self.now += seconds
        self.store.poll()
        self.sender.tick(self.now)
        kept = self.expectations.is_kept
        waiting = [i for i in self.landings() if i.orphaned and kept(i.content)]
        self.store.tick(self.now)
        assert all(item in self.landings() for item in waiting)
        breaking, self.breaking = self.breaking, []
        for channel, error in breaking:
            if self.links.link is not None and self.links.link.channel is channel:
                self.break_channel(error)
        self.unclosed = [channel for channel in self.unclosed if not channel.close()]
        self._note_ends()

    def settle(self) -> None:
        """Let everything work as it should until nothing is open.

        Raises:
            AssertionError: something stays open for ever.
        """
        for content in self.kept():  # every request ends
            self.drop(content)
        for _ in range(400):
            self.ping()
            self.connect()
            self.work()
            while self.network:
                self.deliver_all()
            if self.is_quiet():
                return
            self.advance(0.25)
        raise AssertionError(f"open for ever: {self.describe()}")

    def is_quiet(self) -> bool:
        """Whether everything has ended."""
        return not (self.jobs or self.landings()) and all(item.done for item in self.transfers())

    def describe(self) -> str:
        """Show what is open."""
        landings = [(item.state.name, item.id) for item in self.landings()]
        jobs = [(job.kind, job.state, job.cancel_asked) for job in self.jobs]
        waiting = [transfer for transfer in self.transfers() if not transfer.done]
        return f"landings={landings} jobs={jobs} transfers={waiting}"

    def transfers(self) -> list[Transfer]:
        """The handles of all callers of processes that live."""
        sent = [item.transfer for item in self.sendings]
        return sent + [item.transfer for item in self.receivings]

    def landings(self) -> list[Any]:
        """What the store keeps."""
        return list(self.store._ledger.landings.values())

    def close(self) -> None:
        """Give the memory back."""
        for arena in self.arenas:
            arena.close()

    def _fill(self, sending: Sending) -> None:
        for block in range(self.num_blocks):
            sending.memory[block] = right_block(sending.key, sending.binding, block)

    def _note_ends(self) -> None:
        """Callers use their memory for something else as soon as they may."""
        for sending in self.sendings:
            if sending.transfer.done or (sending.transfer.released and not sending.is_held):
                sending.memory[:] = GARBAGE
        for receiving in self.receivings:
            if receiving.transfer.done and receiving.at_end is None:
                receiving.at_end = receiving.memory.copy()
