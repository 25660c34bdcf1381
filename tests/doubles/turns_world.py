"""The deterministic world of world.py, with what turns of a session need: prefill's holds or
decode's stashes on the sending side, pulls and renewals on the receiving side, and the directories
of both. Either process may be restarted at its address, and the other one notices later.

These parts are the real ones, too. Links between the two are made and lost by the test; the
connection of each direction keeps the order of its messages (`lanes`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from mempool import Mover
from p2p_engine.bounded import Budget
from p2p_engine.config import EngineConfig
from p2p_engine.control.tick_parts import TickParts
from p2p_engine.dispatch import Dispatch
from p2p_engine.errors import PeerRestarted, RemoteProtocolError
from p2p_engine.memory.arena import POOL
from p2p_engine.memory.layout import Regions
from p2p_engine.memory.paged import Beginning, PagedSink, PagedSource
from p2p_engine.peers.link import Link, LinkState, PeerAddress
from p2p_engine.peers.links import Links
from p2p_engine.peers.locator import Locator
from p2p_engine.peers.sessions import Session, Sessions
from p2p_engine.peers.stash_notes import Recalling, StashNotes
from p2p_engine.receive.placement import Placement
from p2p_engine.receive.pulls import Pulls
from p2p_engine.receive.renewals import Renewals
from p2p_engine.send.holds import Holds
from p2p_engine.transfer import Transfer
from p2p_engine.wire.messages import (
    ContentKey,
    Gone,
    Message,
    Recall,
    Stashed,
    TransferKey,
    decode,
)
from tests.doubles.world import (
    CANARY,
    GARBAGE,
    NUM_TOKENS,
    PAGES,
    PEER,
    Receiving,
    Sending,
    World,
    WorldJob,
    WorldMemory,
    cache_over,
    right_block,
)

HOLDER = PeerAddress("127.0.0.1:2")  # the sending process, as the receiving one dials it
DIRECTORY = "127.0.0.1:3"  # of the sending process
# Where messages of one connection go: to the receiving process and to the sending one over the link
# of the latter, then over that of the former; and between their directories.
LANES = ("store", "sender", "holder", "asker", "notes", "recaller")
NO_PARTS: Any = None  # of an engine that the world does not play


@dataclass(eq=False)
class HolderMover:
    """The sending process's own mover: it copies what is stashed."""

    world: TurnsWorld
    epoch: int

    def copy(
        self, sources: Any, destinations: Any, lengths: Any, *, lane: int, tag: Any, keep: Any
    ) -> WorldJob:
        """Start a job that the test will move."""
        source, destination = Regions(sources, lengths), Regions(destinations, lengths)
        job = WorldJob("stash", self.world, self.epoch, 0, source, destination, tag)
        self.world.jobs.append(job)
        return job


@dataclass(eq=False)
class AskLinks:
    """Hands out the link over which the receiving process asks the sending one."""

    world: TurnsWorld
    epoch: int
    link: Link | None = None

    def get(self, target: PeerAddress, *, data: bool) -> Link:
        """Return the link, dialling when there is none; the test lets it connect."""
        if self.link is None:
            lease = self.world.config.lease_seconds
            self.link = Link(target, target.address, LinkState.GREETING, 1e9, lease=lease)
        return self.link

    def send(self, link: Link, kind: type[Message], *fields: Any) -> None:
        """Put a message on the network."""
        self.world.post("holder", kind(self.epoch, link.epoch, *fields))

    def all_ready(self) -> list[Link]:
        """The link, if messages may be sent."""
        return [self.link] if self.link is not None and self.link.ready else []

    def names(self, link: Link) -> list[PeerAddress]:
        """All that leads there."""
        return [link.target]


class TurnsWorld(World):
    """Everything, and the moves that a test can make."""

    def __init__(self, *, receiver_writes: bool, config: EngineConfig) -> None:
        self.recallings: list[Recalling] = []
        # Of this sending process: stashes that it is still to make, and holds that it pushes now.
        self.expected: set[TransferKey] = set()
        self.withdrawn: set[ContentKey] = set()
        self.is_disturbed = False  # a claim may end without success
        super().__init__(receiver_writes=receiver_writes, config=config)
        self.holds._started_at = -math.inf  # it has run for longer than any promise lasts

    # Processes and links

    def start_sender(self) -> None:
        """Start a new sending process; it holds nothing."""
        super().start_sender()
        self.expected.clear()
        self.withdrawn.clear()
        self.pool = WorldMemory(0, self.config.pool_bytes)
        self.arenas.append(self.pool)
        mover = cast("Mover", HolderMover(self, self.epoch))
        places = Placement(self.config, self.pool, mover, lambda: self.now, receives=False)
        self.holds = Holds(
            self.config, self.lock, self.sender, self.endings, places, mover, self.sent,
            lambda: self.now, Budget(),
        )  # fmt: skip
        self.notes = StashNotes(lambda: self.now)
        self._serving = self._dispatch(self.holds, self._say_to_asker, NO_PARTS)

    def start_receiver(self) -> None:
        """Start a new receiving process; it has asked for nothing."""
        super().start_receiver()
        self.asks = AskLinks(self, self.store_epoch)
        waits = (
            self.config, cast("Links", self.asks), cast("Locator", NO_PARTS), None,
            lambda: self.now, self.store, self.expectations,
        )  # fmt: skip
        self.renewals, self.pulls = Renewals(*waits), Pulls(*waits, Budget())
        self.recaller = StashNotes(lambda: self.now)
        self.recallings = []

    def _dispatch(self, holds: Any, reply: Callable[..., None], store: Any) -> Dispatch:
        sessions = cast("Sessions", SimpleNamespace(reply=reply))
        sender = self.sender if hasattr(self, "sender") else NO_PARTS
        return Dispatch(
            self.lock, self.sent, cast("TickParts", NO_PARTS), cast("Links", NO_PARTS), NO_PARTS,
            sender, NO_PARTS, NO_PARTS, sessions, holds, store, {},
        )  # fmt: skip

    def restart_receiver(self) -> None:
        """Kill the receiving process and start another at the same address."""
        old = self.store_epoch
        self.end_jobs(lambda job: job.epoch == old, "cancelled")
        self.ended = [job for job in self.ended if job.epoch != old]
        self.jobs = [job for job in self.jobs if job.epoch != old]
        self.receivings.clear()  # their memory died with the process
        self.sessions.clear()
        self.channels.clear()
        self.transport.connected.clear()
        self.store_epoch += 1
        self.start_receiver()

    def meet(self) -> None:
        """Let each know the other one from an earlier turn."""
        self.links.get(PEER, data=True)
        self.asks.get(HOLDER, data=False)
        self.connect()
        self.greet()

    def greet(self) -> None:
        """Let the link of the asking side become ready."""
        link = self.asks.link
        if link is not None and not link.ready:
            link.state, link.epoch = LinkState.READY, self.epoch
            self.pulls.link_ready(link)
            self.renewals.link_ready(link)

    def is_stale(self) -> bool:
        """Whether a process has not noticed that the other one is a new one."""
        asks, link = self.asks.link, self.links.link
        is_deaf = asks is not None and asks.ready and asks.epoch != self.epoch
        return is_deaf or (link is not None and link.epoch != self.store_epoch)

    def notice(self) -> None:
        """Let both processes notice whom they speak to."""
        asks, link = self.asks.link, self.links.link
        if asks is not None and asks.ready and asks.epoch != self.epoch:
            self.asks.link, asks.state = None, LinkState.CLOSED
            asks.error = PeerRestarted(f"peer {asks.target} was restarted")
            self.pulls.link_closed(asks)
            self.renewals.link_closed(asks)
        if link is not None and link.epoch != self.store_epoch:
            self.close_link(PeerRestarted(f"peer {link.target} was restarted"))
        self._note_ends()

    def connect(self) -> None:
        """Let the sender's link become ready; nobody is there for one to a process that ended."""
        link = self.links.link
        if link is None or link.epoch == self.store_epoch:
            super().connect()

    # The network

    def first_of(self, lane: int) -> int | None:
        """Where the first message of a connection is, that is on its way to one of LANES."""
        found = (index for index, (to, _) in enumerate(self.network) if to == LANES[lane])
        return next(found, None)

    def deliver(self, index: int, *, keep: bool = False) -> None:
        """Hand a message over, unless it is for a process that has ended."""
        to, frame = self.network[index]
        message = decode(frame)
        asks = self.asks.link
        link = self.links.link
        is_known = to == "store" or (link is not None and link.epoch == message.source_epoch)
        is_for = self.store_epoch if to == "store" else self.epoch
        if to in ("store", "sender") and is_known and message.destination_epoch == is_for:
            if to == "sender" and link is not None:
                link.heard_at += 1  # what was pushed until now was for this process
            super().deliver(index, keep=keep)
            return
        if not keep:
            self.network.pop(index)
        if to == "holder" and message.destination_epoch == self.epoch:
            session = Session(NO_PARTS, PEER.address, 0.0, None)
            with contextlib.suppress(RemoteProtocolError):
                self._serving._hand_over(self._serving._requests, session, message)
        elif to == "asker" and asks is not None and asks.epoch == message.source_epoch:
            assert isinstance(message, Gone)
            if message.destination_epoch == self.store_epoch:
                self._hear_gone(asks, message)
        elif isinstance(message, Recall):
            marks = self.notes.find(message.key)
            self.post("recaller", Stashed(self.epoch, message.source_epoch, message.key, marks))
        elif isinstance(message, Stashed) and message.destination_epoch == self.store_epoch:
            self.recaller.answer(DIRECTORY, message.key, message.marks)
        self._note_ends()

    def _hear_gone(self, link: Link, gone: Gone) -> None:
        parts = self._dispatch(NO_PARTS, NO_PARTS, self.store)
        parts._links, parts._renewals, parts._pulls = self.asks, self.renewals, self.pulls  # type: ignore[assignment]
        with contextlib.suppress(RemoteProtocolError):
            parts._on_gone(link, gone)

    def _say_to_asker(self, epoch: int, kind: type[Message], fields: tuple[Any, ...]) -> None:
        self.post("asker", kind(self.epoch, epoch, *fields))

    # The callers on the sending side

    def send(self, key: TransferKey, binding: bytes, first: int, num: int, **more: Any) -> None:
        """As the engine does."""
        self.endings.forget_ended((key, binding))
        super().send(key, binding, first, num, **more)

    def hold(self, content: ContentKey, first: int, num: int, generation: int) -> None:
        """Hold blocks [first, first + num)."""
        key, binding = content
        self._lend(content, first, num, is_held=True, give=lambda source: self.holds.hold(
            key, source, binding, self.config.lease_seconds, generation=generation))  # fmt: skip

    def stash(self, content: ContentKey, cuts: Mapping[bytes, int], begins_as: bytes) -> None:
        """Stash all blocks, which can be cut after so many by other bindings; up to there they are
        those of another content of this key.

        Raises:
            TransferError: the key is held already.
        """
        key, binding = content
        tokens = NUM_TOKENS // self.num_blocks
        beginnings = {name: Beginning(num, num * tokens) for name, num in cuts.items()}
        names = dict.fromkeys(range(max(cuts.values(), default=0)), begins_as)
        self._lend(content, 0, self.num_blocks, is_held=False, names=names,
                   give=lambda source: self.holds.stash(
            key, source, binding, self.config.lease_seconds, beginnings))  # fmt: skip

    def _lend(
        self,
        content: ContentKey,
        first: int,
        num: int,
        *,
        is_held: bool,
        give: Callable[[PagedSource], Transfer],
        names: Mapping[int, bytes] | None = None,
    ) -> None:
        memory = np.full((self.num_blocks, sum(PAGES)), GARBAGE, np.uint8)
        sending = Sending(cast("Transfer", None), memory, *content)
        self._fill(sending)
        for block, name in (names or {}).items():
            memory[block] = right_block(content[0], name, block)
        source = PagedSource(cache_over(memory), np.arange(first, first + num), first, NUM_TOKENS)
        transfer = sending.transfer = give(source)
        sending.is_held = is_held

        def note_end() -> None:
            sending.ended_with.append(repr(transfer.error))

        transfer.on_end = note_end
        if transfer.done:
            note_end()
        self.sendings.append(sending)
        self._note_ends()

    # The callers on the receiving side

    def recall(self, key: TransferKey) -> None:
        """Ask the other side's directory for a stash."""
        self.recallings.append(self.recaller.ask(DIRECTORY, key))
        self.post("notes", Recall(self.store_epoch, 0, key))

    def claim(
        self,
        content: ContentKey,
        blocks: tuple[int, int],
        *,
        pull: bool,
        has_held: bool = False,
        source: bytes | None = None,
    ) -> None:
        """Receive the blocks from one to another of a content from the sending process, as the
        engine does. What comes is part of the content with the binding `source`.

        Raises:
            TransferError: it is being received, or came and was refused.
        """
        (key, binding), (first, end) = content, blocks
        memory = np.full((self.num_blocks, sum(PAGES)), CANARY, np.uint8)
        tokens = NUM_TOKENS // self.num_blocks * end
        sink = PagedSink(cache_over(memory), np.arange(first, end), first, tokens)
        transfer = self.store.receive(
            key, sink, binding, self.config.transfer_timeout_seconds,
            is_named=True, is_pulled=pull,
        )  # fmt: skip
        named = binding if source is None else source
        self.receivings.append(Receiving(transfer, memory, key, named, sink, first, end_block=end))
        if not transfer.done:
            self.pulls.add(
                transfer, HOLDER, binding, pull=pull, has_held=has_held, is_promised=True
            )
        elif has_held:
            self.pulls.release(content, HOLDER)
        self._note_ends()

    def keep_there(self, content: ContentKey) -> None:
        """Say that a content will be claimed; here and there it outlives its lease."""
        self.renewals.keep(content, HOLDER)
        self.store.revive(content)

    def drop(self, content: ContentKey) -> None:
        """Say that it will not."""
        self.renewals.drop(content)

    # Time

    def advance(self, seconds: float) -> None:
        """Let time pass and both control threads turn."""
        super().advance(seconds)
        for part in (self.holds, self.pulls, self.renewals):
            part.tick(self.now)
        self._note_ends()

    def settle(self) -> None:
        """Let everything work as it should until nothing is open, and nothing is awaited.

        Raises:
            AssertionError: something stays open for ever.
        """
        super().settle()
        for _ in range(400):
            if not self.waits():
                return
            self.notice()
            self.greet()
            self.advance(0.25)
            while self.network:
                self.deliver_all()
        raise AssertionError(f"awaited for ever: {self.waits()}")

    def deliver_all(self) -> None:
        """Once each process has noticed whom it speaks to."""
        self.notice()
        self.greet()
        super().deliver_all()

    def waits(self) -> list[str]:
        """What either side keeps for the other one."""
        kept = {
            "holds": self.holds.num_open(), "parked WANTs": len(self.holds._unheld),
            "bytes of the pool": self.pool.live_bytes[POOL],
            "awaited": self.expectations.num_awaited(), "kept": self.expectations.num_kept(),
            "to release": len(self.expectations.let_go),
        }  # fmt: skip
        return [f"{name}: {number}" for name, number in kept.items() if number]
