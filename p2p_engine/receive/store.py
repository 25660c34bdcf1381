"""Store: receives chunks, from OFFER until their bytes are in the sink.

Only the store decides that KV has arrived. ledger.py shows the states of a landing. The engine's
lock guards everything here.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
from collections.abc import Callable

from p2p_engine.bounded import OFFERED_BYTES, Budget, heap_bytes
from p2p_engine.config import EngineConfig
from p2p_engine.control.tick_parts import for_each
from p2p_engine.control.timers import Timers
from p2p_engine.errors import (
    P2pError,
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
from p2p_engine.memory.jobs import Copier, Job, Moment, after
from p2p_engine.memory.layout import Regions, Sink, ask, pair
from p2p_engine.peers.listeners import SessionListener
from p2p_engine.receive.expectations import Expectations
from p2p_engine.receive.ledger import (
    MAX_STRANGERS,
    Landing,
    LandingId,
    LandingState,
    Ledger,
    Receive,
    Writer,
)
from p2p_engine.receive.placement import Placement
from p2p_engine.receive.replies import Cause, Replies, Reply
from p2p_engine.transfer import Transfer, lane_of, note_stage
from p2p_engine.transports.base import Transport
from p2p_engine.wire.bindings import renamed
from p2p_engine.wire.messages import ContentKey, Offer, TransferKey

logger = logging.getLogger(__name__)

MISMATCH_GRACE_SECONDS = 1.0
LANDING_BYTES = 3000  # of our own memory that a landing takes, without its names and its manifest
MAX_OWED = 64  # open chunks of one receive that no budget refuses


class Store(SessionListener):
    """The incoming transfers of one engine."""

    def __init__(
        self,
        config: EngineConfig,
        changed: threading.Condition,
        places: Placement,
        copier: Copier,
        counters: Counters,
        *,
        reply: Reply,
        clock: Callable[[], float],
        expectations: Expectations,
        budget: Budget,
    ) -> None:
        """`reply(epoch, kind, fields)` sends a message to a sender. A content that `expectations`
        keeps outlives its lease. `budget` is for notes; what is offered has one of its own."""
        self._config = config
        self._changed = changed
        self._copier = copier
        self._counters = counters
        self._clock = clock
        self._placement = places
        self._expectations = expectations
        self.offered = Budget(OFFERED_BYTES)
        self._replies = Replies(config, reply, clock, expectations, budget)
        self._ledger = Ledger()
        self._timers: Timers[Landing | Receive] = Timers()
        self._late: dict[Landing | Receive, None] = {}  # past their deadlines, but not ended
        self._held_up: dict[Landing, None] = {}  # landed, but another landing still writes there
        # Contents that an ended receive leaves to the next one, and whether that receive was
        # pulled.
        self._left: dict[ContentKey, bool] = {}

    # Calls from the engine

    def receive(
        self,
        key: TransferKey,
        sink: Sink,
        binding: bytes,
        timeout: float,
        moments: tuple[Moment, ...] = (),
        *,
        is_named: bool = False,
        is_pulled: bool = False,
    ) -> Transfer:
        """Wait for a content; chunks that have landed already are claimed at once. Never blocks.

        The sink is written only after all `moments`. If the sender `is_named`, no other peer can
        end the wait. If it `is_pulled`, the sender sends only what it is asked for.

        Raises:
            TransferError: another receive waits for the same content.
            TransferRejected: it was refused here before, or its sender has given it up.
        """
        content = (key, binding)
        if content in self._ledger.receives:
            raise TransferError(f"{key} is being received already")
        tombstones = self._replies.exhume(content)
        for tombstone in tombstones:
            if tombstone.refuses_receive(is_named=is_named):
                raise TransferRejected(f"{key}: {tombstone.reason}")
        transfer = Transfer(key, 0, self._changed, self._cancel_transfer)
        now = self._clock()
        deadline = now + timeout
        receive = Receive(
            content, sink, transfer, deadline, moments,
            is_named=is_named, is_pulled=is_pulled, began_at=now,
        )  # fmt: skip
        for tombstone in tombstones:
            if tombstone.cause is Cause.FAILED:
                receive.misfits[tombstone.epoch] = TransferRejected(f"{key}: {tombstone.reason}")
        self._left.pop(content, None)
        self._ledger.open(receive)
        self._timers.set(receive, deadline)
        for landing in self._ledger.of_content(content):
            is_here = landing.state in (LandingState.GRANTED, LandingState.LANDED)
            if is_here and receive.ending is None:
                self._claim(landing, receive)
        for item in self._ledger.of_key(key):
            self._note_mismatch(item.content, item.id[0])
        return transfer

    def discard(self, content: ContentKey, reason: str, *, is_whole_key: bool = False) -> None:
        """Free what has come of a content, or of its whole key, and refuse further offers: no
        request here will ask for it."""
        self._left.pop(content, None)
        self._replies.leave_tombstone(content, reason, Cause.WITHDRAWN)
        coming = self._ledger.of_key(content[0]) if is_whole_key else ()
        for each in {content, *(landing.content for landing in coming)}:
            self._drop(each)

    def leave(self, content: ContentKey, *, is_pulled: bool) -> bool:
        """Note that a request will not ask for a content after all. Returns whether it is kept for
        another one.

        If so, it stays as it is until a receive claims it or it is `dropped`. Until then, offers of
        it are denied.
        """
        if self._expectations.kept(content) is not None:
            self._left[content] = is_pulled
        return content in self._left

    def is_left(self, content: ContentKey) -> bool:
        """Whether a content is left for the next request."""
        return content in self._left

    def dropped(self, content: ContentKey) -> None:
        """Discard what was left of a content that is no longer kept."""
        if content in self._left:
            self.discard(content, "the requests that wanted it have ended")

    def revive(self, content: ContentKey) -> None:
        """Accept offers of a content as if it had not been discarded. If an offer was refused
        meanwhile, it stays refused: its sender has given it up."""
        self._replies.revive(content)

    def fail_content(self, content: ContentKey, error: P2pError, said_by: int = 0) -> None:
        """Fail a content that its sender will not complete: its receive ends, and later ones are
        refused. If the sender itself has `said` so, a later receive that names it asks again; and
        what has arrived may be all of it: the sender forgets what was committed."""
        receive = self._ledger.receives.get(content)
        if receive is not None and said_by:
            for_each(list(receive.landings), self._check_landed)  # not yet looked at
        if receive is not None and said_by and receive.is_settling:
            receive.source_lost = error
        elif receive is not None:
            self._stop_receive(receive, error)
        else:
            cause = Cause.ABANDONED if said_by else Cause.FAILED
            if said_by and isinstance(error, PeerLost):
                cause = Cause.LOST
            self._replies.leave_tombstone(content, str(error), cause, said_by)
        self._drop(content)

    def is_over(self, content: ContentKey, epoch: int, generation: int) -> bool:
        """Note which attempt to send a content a sender speaks of; returns whether it has offered a
        later one."""
        return self._replies.note_generation(content, epoch, generation) < 0

    def on_abandon(self, content: ContentKey, epoch: int, error: P2pError) -> None:
        """Fail a content that a sender will not complete, if no receive names its sender. The
        sender is believed if it has offered it, or if no sender has.

        Raises:
            RemoteProtocolError: another sender has offered it.
        """
        key, receive = content[0], self._ledger.receives.get(content)
        senders = {item.id[0] for item in self._ledger.of_key(key) if item.content == content}
        senders |= receive.senders if receive is not None else set()
        if senders and epoch not in senders:
            raise RemoteProtocolError(f"ABANDON of {key} from {epoch:x}, which does not send it")
        if receive is None:
            self._replies.leave_tombstone(content, str(error), Cause.ABANDONED, epoch)
        elif not receive.senders or epoch in receive.senders:
            self._stop_receive(receive, error)
        self._drop(content, epoch)

    def sender_known(self, content: ContentKey) -> None:
        """Note that the sender of a content is known now: its earlier offers count."""
        receive = self._ledger.receives.get(content)
        if receive is not None:
            self._judge_mismatch(receive)
            self._judge_misfits(receive)

    def drop_landed(self) -> int:
        """Drop all landings that no receive has claimed; returns the bytes of those that had
        landed. Who asks for the same prompt under another name of the weights does not wait for
        it."""
        unclaimed = [item for item in self._ledger.landings.values() if item.receive is None]
        num_bytes = sum(item.nbytes for item in unclaimed if item.orphaned)
        for item in unclaimed:
            content, epoch, reason = item.content, item.id[0], "the landed KV was dropped"
            self._replies.leave_tombstone(content, reason, Cause.FAILED, epoch)
            if item.is_owed:  # else its sender has been told, and says so when it is asked
                self._replies.fail_prompt(content, reason, epoch)
        for content in {item.content for item in unclaimed}:
            self._drop(content)
        return num_bytes

    # Messages from the sender

    def on_offer(self, epoch: int, offer: Offer, transport: Transport) -> None:
        """Reserve a region and say GRANT, or say DENY or FAIL with the reason."""
        landing_id, content = (epoch, offer.seq), (offer.key, offer.binding)
        if self._answer_again(landing_id, offer.attempt):
            return
        refusal_reason = self._replies.refusal_of_offer(content, epoch, offer.generation)
        if refusal_reason is not None:
            self._refuse(landing_id, offer.attempt, TransferRejected(refusal_reason))
            return
        receive = self._ledger.receives.get(content)
        if receive is None and self._left.get(content):
            reason = "no request waits for it now, but another one will"
            self._replies.deny(landing_id, offer.attempt, reason, self._config.retry_seconds)
            return
        if receive is None and offer.answers:
            ended = TransferRejected("the receive that asked for it has ended")
            self._refuse(landing_id, offer.attempt, ended)
            return
        if receive is None:
            self._note_mismatch(content, epoch)
        elif receive.ending is not None:
            self._refuse(landing_id, offer.attempt, receive.ending)
            return
        elif offer.answers and self._expectations.is_of_earlier(content, offer.answers):
            earlier = TransferRejected("an earlier receive asked for it, and may have a part of it")
            self._refuse(landing_id, offer.attempt, earlier)
            return
        try:
            self._grant(landing_id, offer, transport, receive)
        except TransportError as error:  # the sender may not notice that it must reconnect
            self._replies.fail(landing_id, offer.attempt, error)
        except P2pError as error:
            refusal = _as_refusal(offer.key, error)
            self._refuse(landing_id, offer.attempt, refusal)
            if receive is not None:
                if self._may_end(receive, epoch):
                    self._stop_receive(receive, refusal)
            else:  # the sender stops now, so a later receive must not wait
                self._replies.leave_tombstone(content, str(refusal), Cause.FAILED, epoch)
                self._drop(content, epoch)

    def refuse_other(self, epoch: int, offer: Offer, weights: str, reason: str) -> None:
        """Refuse an offer of other weights' KV than of these. If the sender may end the receive
        that waits for the same prompt, that ends, too, now or when it begins: what it waits for
        will not come. Receives of other prompts wait for a second."""
        content, error = (offer.key, offer.binding), TransferRejected(reason)
        self._refuse((epoch, offer.seq), offer.attempt, error)
        receive = self._ledger.receives.get((offer.key, renamed(offer.binding, weights)))
        if receive is None and not offer.answers:  # else its sender waits to be asked again
            self._replies.fail_prompt(content, reason, epoch)
        elif receive is not None and self._may_end(receive, epoch):
            self._stop_receive(receive, error)
        self._note_mismatch(content, epoch)

    def on_done(self, epoch: int, seq: int, attempt: int, checksum: int) -> None:
        """Note that the sender has written everything; COMMIT is sent as soon as it has landed."""
        landing = self._ledger.landings.get((epoch, seq))
        if landing is not None and landing.attempt == attempt:
            landing.done_heard, landing.checksum = True, checksum
            landing.transport.look()
            self._check_landed(landing)
            self._check_lost(landing)
        elif not self._replies.repeat((epoch, seq)):
            unknown = TransferRejected("this chunk is unknown here")
            self._replies.fail((epoch, seq), attempt, unknown)

    def on_cancelled(self, epoch: int, seq: int, attempt: int) -> None:
        """Note that the sender will not write any more, or will not repeat a denied offer."""
        self._placement.wait_no_more((epoch, seq))
        landing = self._ledger.landings.get((epoch, seq))
        if landing is not None and landing.attempt <= attempt:
            landing.transport.confirm(epoch, lambda: self._writer_stopped(landing))

    def _writer_stopped(self, landing: Landing) -> None:
        """Give a landing up that its sender does not write any more."""
        with self._changed:
            is_open = landing.state in (LandingState.GRANTED, LandingState.QUARANTINED)
            if is_open and self._ledger.landings.get(landing.id) is landing:
                self._give_up(landing, proven=True)

    def session_lost(self, epoch: int, error: PeerLost) -> None:
        """End what only a lost sender could have completed: it is silent, restarted or closing."""
        self._placement.sender_lost(epoch)
        source_lost = [
            receive
            for receive in self._ledger.receives_from(epoch)
            if not self._expectations.is_from_others(receive.content, epoch)
        ]
        for receive in source_lost:
            receive.source_lost = error
        for landing in self._ledger.of_sender(epoch):
            if landing.state is LandingState.GRANTED:
                self._check_landed(landing)
                if landing.state is LandingState.GRANTED:
                    self._give_up(landing, proven=False)
        self._end_sourceless(source_lost)

    def source_lost(self, content: ContentKey, error: P2pError) -> None:
        """Note that no more of a content will come. Chunks that have arrived may still complete its
        receive."""
        receive = self._ledger.receives.get(content)
        if receive is not None:
            receive.source_lost = error
            self._end_sourceless([receive])

    # Local events

    def poll(self) -> None:
        """Find chunks that have landed, and deliver those that waited for another writer.

        If a landing raises, its receive ends. The first exception is raised after all landings were
        looked at.
        """
        held_up, self._held_up = self._held_up, {}
        for_each([*self._placement.take_written(), *held_up], self._look)

    def _look(self, landing: Landing) -> None:
        try:
            if landing.state is LandingState.GRANTED:
                self._check_landed(landing)
            elif landing.state is LandingState.QUARANTINED:
                self._check_quarantined(landing)
            elif landing.state is LandingState.LANDED and landing.receive is not None:
                self._deliver(landing, landing.receive)
        except Exception as error:
            if landing.receive is not None:
                reason = f"{landing.content[0]}: a landed chunk cannot be delivered: {error!r}"
                self._stop_receive(landing.receive, TransferCancelled(reason))
            raise

    def tick(self, now: float) -> None:
        """End what is overdue, repeat unanswered CANCELs, and free what is proven safe."""
        self._timers.look(now, lambda item: self._tick_one(item, now))
        for_each(self._ledger.quarantined_writers(), self._check_writer)

    def due_at(self, now: float) -> float:
        """Return when the next tick has something to do; 0 means that each tick has."""
        polls = (
            self._held_up or self._placement.awaits_words() or self._ledger.quarantined_writers()
        )
        return 0.0 if polls else self._timers.due_at()

    def _tick_one(self, item: Landing | Receive, now: float) -> None:
        """Handle an entry that is due; until it has ended, it has a next time."""
        if isinstance(item, Landing) and item.state is LandingState.QUARANTINED:
            self._check_quarantined(item)
            if item.id in self._ledger.landings:
                self._cancel(item)
        elif now < item.deadline:
            self._timers.set(item, item.deadline)
        elif isinstance(item, Receive):
            self._late[item] = None
            self._stop_receive(item, self._overdue(item))
        elif item.state is LandingState.GRANTED:
            self._late[item] = None
            self._give_up(item, proven=False)
        elif item.orphaned and self._expectations.outlives_lease(item.content):
            item.deadline = now + self._config.lease_seconds
            self._timers.set(item, item.deadline)
        elif item.orphaned:
            self._late[item] = None
            self._counters.expired += 1
            reason = "its lease ended before a request asked for it"
            self._replies.leave_tombstone(item.content, reason, Cause.FAILED, item.id[0])
            self._drop(item.content, item.id[0])  # all: its next attempt may have other bytes

    def _check_writer(self, writer: Writer) -> None:
        """Free the quarantined landings of a sender that is proven unable to write."""
        transport, epoch = writer
        if not transport.receiver_writes and transport.is_gone(epoch):
            for landing in self._ledger.quarantined_from(writer):
                self._free(landing)

    def overdue(self, now: float) -> list[str]:
        """Return the names of receives and of landings (quarantine excepted) past their
        deadlines."""
        return [
            f"receive {item.content[0]}"
            if isinstance(item, Receive)
            else f"landing {item.content[0]} from {item.id[0]:x}"
            for item in self._late
            if now >= item.deadline and (isinstance(item, Receive) or item.is_owed)
        ]

    def close(self, error: P2pError) -> None:
        """End everything. The mover must have stopped, so that our own I/O is over."""
        for receive in list(self._ledger.receives.values()):
            self._end_receive(receive, receive.ending or error)
        for landing in list(self._ledger.landings.values()):
            self._free(landing)

    def has_any(self, content: ContentKey) -> bool:
        """Whether a chunk of a content has landed or is on its way, or a receive waits for it."""
        return content in self._ledger.receives or bool(self._ledger.of_content(content))

    def offered_until(self, content: ContentKey, epoch: int) -> float:
        """Return until when an engine need not be asked for a content that a receive waits for.

        For ever, once a chunk of it was granted; after a denial, until the next offer is overdue,
        because the sender may have given up; 0.0 if it has offered nothing.
        """
        receive = self._ledger.receives.get(content)
        if receive is None:
            return 0.0
        return math.inf if epoch in receive.senders else receive.denied.get(epoch, 0.0)

    def live_bytes(self) -> dict[str, int]:
        """Return the bytes that are reserved now, by place."""
        return self._placement.live_bytes()

    def quarantined_bytes(self, epoch: int | None = None) -> int:
        """Return the bytes out of use because a sender (this one, or any) might still write
        there."""
        return self._ledger.quarantined_bytes(epoch)

    def uses_session(self, epoch: int) -> bool:
        """Whether a landing of a sender, or a receive that it sends to, has not ended."""
        return self._ledger.num_from(epoch) > 0 or bool(self._ledger.receives_from(epoch))

    def num_open(self) -> int:
        """Return how many landings and receives have not ended."""
        return len(self._ledger.landings) + len(self._ledger.receives)

    # Granting

    def _answer_again(self, landing_id: LandingId, attempt: int) -> bool:
        """Answer a repeated offer; returns False if it is a new one. A higher attempt ends the
        older one."""
        landing = self._ledger.landings.get(landing_id)
        if landing is not None and landing.attempt < attempt:
            landing.transport.confirm(landing_id[0], lambda: self._writer_stopped(landing))
            return (
                landing_id in self._ledger.landings
            )  # until our own I/O is joined: it is offered again
        if landing is not None:
            if landing.attempt == attempt and landing.state is not LandingState.QUARANTINED:
                self._replies.grant(landing, self._placement.word_offset(landing))
            return True
        return self._replies.repeat(landing_id, attempt=attempt)

    def _grant(
        self, landing_id: LandingId, offer: Offer, transport: Transport, receive: Receive | None
    ) -> None:
        if self._config.checksum and transport.checks and not offer.checksum:
            raise TransferRejected(f"{offer.key}: checksums are on here, the sender computes none")
        if offer.checksum and not transport.checks:
            raise TransferRejected(f"{offer.key}: it has checksums, {transport.name} has none here")
        landing = Landing(
            landing_id,
            offer.attempt,
            (offer.key, offer.binding),
            receive.narrowed(offer.manifest) if receive is not None else offer.manifest,
            transport,
            trailer=secrets.randbits(62) | 1,
            deadline=self._clock() + self._config.transfer_timeout_seconds,
            checked=offer.checksum,
            heap_bytes=LANDING_BYTES + heap_bytes((offer.key, offer.binding, offer.manifest)),
        )
        denial = self._place(landing, receive)
        if denial:
            pause = self._placement.wait(landing, is_awaited=receive is not None)
            self._replies.deny(landing_id, offer.attempt, denial, pause)
            if receive is not None:
                until = self._clock() + pause + self._config.retry_seconds
                receive.note_denied(landing_id[0], until)
            return
        self._ledger.add(landing)
        self._timers.set(landing, landing.deadline)
        if receive is not None:
            self._ledger.attach(landing, receive)
        note_stage(offer.key, "GRANT said", offer.seq)
        self._replies.grant(landing, self._placement.word_offset(landing))

    def _refuse(self, landing_id: LandingId, attempt: int, error: P2pError) -> None:
        """Say FAIL for a chunk that will never be granted, and end its claim on memory."""
        self._placement.wait_no_more(landing_id)
        self._replies.fail(landing_id, attempt, error)

    def _place(self, landing: Landing, receive: Receive | None) -> str:
        """Find memory for a landing; returns why there is none now, or ""."""
        epoch = landing.id[0]
        is_owed = receive is not None and len(receive.landings) < MAX_OWED
        if not self.offered.take(epoch, landing.heap_bytes, is_owed=is_owed):
            return "this sender has its share of what is remembered of open chunks"
        quarantined, denial = self._ledger.quarantined_bytes(epoch), "it failed"
        try:
            denial = self._placement.place(
                landing, receive, quarantined, lambda job: self._received(landing, job)
            )
        finally:
            if denial:
                self.offered.give_back(epoch, landing.heap_bytes)
        return denial

    # Landing

    def _check_landed(self, landing: Landing) -> None:
        is_whole = landing.state is LandingState.GRANTED and self._placement.is_whole(landing)
        if is_whole and self._is_intact(landing):
            landing.state = LandingState.LANDED
            note_stage(landing.content[0], "landed", landing.id[1])
            landing.deadline = self._clock() + self._config.lease_seconds
            self._timers.set(landing, landing.deadline)
            self._counters.landed_bytes_by_place[landing.place] += landing.nbytes
            self._replies.conclude(landing.id, landing.attempt, None)
            if landing.receive is not None:
                self._deliver(landing, landing.receive)
            elif landing.is_spare:
                self._free(landing)
        if landing.done_heard and landing.state is not LandingState.GRANTED:
            landing.done_heard = not self._replies.repeat(landing.id)

    def _check_lost(self, landing: Landing) -> None:
        """End a chunk that was written, but whose completion word was lost with the connection."""
        if landing.state is not LandingState.GRANTED or landing.transport.receiver_writes:
            return
        if landing.transport.is_gone(landing.id[0]) and not self._placement.is_whole(landing):
            error = TransportError("the data connection ended before the completion word came")
            self._replies.fail(landing.id, landing.attempt, error)
            self._free(landing)

    def _is_intact(self, landing: Landing) -> bool:
        """Whether the checksum, if one was agreed on, is right. A wrong one ends the chunk."""
        if not landing.checked or not landing.nbytes:
            return True
        checksum = self._placement.checksum(landing, lambda job: self._checked(landing, job))
        if checksum is None or not landing.done_heard:
            return False
        if checksum != landing.checksum:
            self._corrupted(landing, f"checksum {checksum:08x} here, {landing.checksum:08x} there")
        return checksum == landing.checksum

    def _checked(self, landing: Landing, job: Job) -> None:
        """Handle the end of a checksum; without one, nobody knows whether the chunk is whole."""
        if landing.state is LandingState.GRANTED and job.checksum is None:
            reason = f"the checksum was not computed: {job.error or job.state}"
            self._replies.fail(landing.id, landing.attempt, TransportError(reason))
            self._free(landing)
        else:
            self._check_landed(landing)

    def _corrupted(self, landing: Landing, reason: str) -> None:
        self._counters.corrupted += 1
        error = TransferCorrupted(f"{landing.content[0]}: {reason}, {landing.nbytes} bytes")
        logger.error(
            "a chunk arrived with wrong bytes: sender=%x error=%s", landing.id[0], named(error)
        )
        self._replies.fail(landing.id, landing.attempt, error)
        self._ledger.quarantine(landing)  # freed at the end of this function
        receive = landing.receive
        if receive is None:
            epoch = landing.id[0]
            self._replies.leave_tombstone(landing.content, str(error), Cause.FAILED, epoch)
        elif self._may_end(receive, landing.id[0]):
            self._stop_receive(receive, error)
        self._free(landing)

    def _received(self, landing: Landing, job: Job) -> None:
        """Handle the end of our mover's job: the chunk is whole, or never will be."""
        if job is not landing.job:
            return
        if landing.state is LandingState.GRANTED and job.state == "done":
            self._check_landed(landing)
        elif landing.state is LandingState.GRANTED:
            reason = f"the data connection broke: {job.error or job.state}"
            self._replies.fail(landing.id, landing.attempt, TransportError(reason))
            self._free(landing)
        elif landing.state is LandingState.QUARANTINED:
            self._free(landing)

    def _claim(self, landing: Landing, receive: Receive) -> None:
        """Attach a landing that came before its receive."""
        try:
            receive.wanted(landing.manifest)
        except P2pError as error:
            receive.misfits[landing.id[0]] = _as_refusal(receive.content[0], error)
            if landing.orphaned:
                self._free(landing)
            else:
                self._give_up(landing, proven=False)
            self._judge_misfits(receive)
            return
        self._ledger.attach(landing, receive)
        if landing.state is LandingState.LANDED:
            self._deliver(landing, receive)

    def _deliver(self, landing: Landing, receive: Receive) -> None:
        """Bring landed bytes into the sink, once no other landing writes there."""
        rivals = receive.writers_of(landing.manifest) - {landing}
        for rival in rivals:
            if rival.state is LandingState.GRANTED:  # the first whole copy wins
                self._give_up(rival, proven=False)
        if receive.ending is not None:
            self._free(landing)
        elif rivals:
            self._held_up[landing] = None  # poll tries again
        else:
            self._bring(landing, receive)

    def _bring(self, landing: Landing, receive: Receive) -> None:
        blocks = landing.manifest.first_block, landing.manifest.num_blocks
        try:
            if landing.space is not None or not landing.nbytes:
                blocks = receive.wanted(landing.manifest)
            packed = self._placement.packed(landing, *blocks)
            if packed is None or not packed.nbytes:
                self._delivered(landing, receive, *blocks)
            else:
                self._scatter(landing, receive, packed, blocks)
        except P2pError as error:  # the sink failed, or another chunk changed what it wants
            self._stop_receive(receive, _as_refusal(receive.content[0], error))

    def _scatter(
        self, landing: Landing, receive: Receive, packed: Regions, blocks: tuple[int, int]
    ) -> None:
        landing.job = ask(
            lambda: self._copier.copy(
                *pair(packed, receive.regions(landing.manifest, *blocks)),
                lane=lane_of(receive.content[0]),
                tag=lambda job: self._scattered(landing, receive, job, blocks),
                keep=(receive, self._placement.arena),
                **after(receive.after),
            )
        )
        note_stage(receive.content[0], "scatter begins", landing.id[1])
        receive.scatters(landing)

    def _scattered(
        self, landing: Landing, receive: Receive, job: Job, blocks: tuple[int, int]
    ) -> None:
        if job is not landing.job:
            return
        if job.state == "done":
            self._delivered(landing, receive, *blocks)
        else:
            self._free(landing)
            reason = f"{receive.content[0]}: scatter {job.state} {job.error or ''}"
            self._stop_receive(receive, TransferCancelled(reason))

    def _delivered(self, landing: Landing, receive: Receive, first: int, num: int) -> None:
        note_stage(receive.content[0], "delivered", landing.id[1])
        receive.transfer.nbytes += landing.nbytes
        if receive.ending is None:
            try:
                if receive.landed(landing.manifest, first, num):
                    receive.complete = True
            except P2pError as error:
                self._stop_receive(receive, error)
        self._free(landing)

    # Ending

    def _stop_receive(self, receive: Receive, error: P2pError) -> None:
        """End a receive as soon as no byte can be written into its memory any more."""
        if receive.ending is not None or receive.complete:
            return
        receive.ending = error
        for landing in list(receive.landings):
            if landing.state is LandingState.GRANTED:
                self._give_up(landing, proven=False)
            elif landing.state is LandingState.SCATTERING and landing.job is not None:
                if landing.job.done:  # its callback is still on its way, or was lost
                    self._free(landing)
                else:
                    landing.job.cancel()
        if receive.over:
            self._end_receive(receive, error)

    def _end_sourceless(self, receives: list[Receive]) -> None:
        for receive in receives:
            if receive.hopeless is not None:
                self._stop_receive(receive, receive.hopeless)

    def _end_receive(self, receive: Receive, error: P2pError | None) -> None:
        if not self._ledger.close(receive):
            return
        self._timers.cancel(receive)
        self._late.pop(receive, None)
        landings, receive.landings = receive.landings, set()
        for landing in landings:
            landing.receive, landing.is_spare = None, error is None
            if landing.orphaned:  # a second copy
                self._free(landing)
        note_stage(receive.content[0], "received")
        self._counters.count("received", error)
        try:
            if error is None:
                self._observe(receive)
            else:
                logger.info("receive ended: key=%s error=%s", receive.content[0], named(error))
                if receive.senders or not self.leave(receive.content, is_pulled=receive.is_pulled):
                    self.discard(receive.content, str(error))  # no other receive can have it
        finally:
            receive.transfer.end(error)

    def _observe(self, receive: Receive) -> None:
        label = f"{'pull' if receive.is_pulled else 'push'} {receive.transport}"
        seconds = self._clock() - receive.began_at
        self._counters.observed.append(("receive_seconds", label, seconds))
        self._counters.observed.append(("receive_bytes", label, receive.transfer.nbytes))

    def _give_up(self, landing: Landing, *, proven: bool) -> None:
        """Give a granted region up; it is freed once nobody can write into it."""
        error = TransferRejected("the receiver gave the chunk up")
        self._replies.conclude(landing.id, landing.attempt, error)
        self._ledger.quarantine(landing)
        receiving = landing.job is not None and not landing.job.done
        if landing.job is not None and receiving:
            landing.job.cancel()
        elif proven or landing.transport.receiver_writes or not landing.nbytes:
            self._free(landing)
        if not proven:
            self._cancel(landing)

    def _cancel(self, landing: Landing) -> None:
        """Tell the sender to stop, and repeat that until it has."""
        self._replies.cancel(landing)
        if landing.id in self._ledger.landings:
            self._timers.set(landing, self._clock() + self._config.retry_seconds)

    def _check_quarantined(self, landing: Landing) -> None:
        if landing.transport.receiver_writes:
            if landing.job is None or landing.job.done:
                self._free(landing)
        elif self._placement.is_whole(landing):
            self._free(landing)

    def _free(self, landing: Landing) -> None:
        if not self._ledger.remove(landing):
            return  # freed already
        self._timers.cancel(landing)
        self._late.pop(landing, None)
        self._held_up.pop(landing, None)
        self._placement.give_back(landing)
        self.offered.give_back(landing.id[0], landing.heap_bytes)
        receive = landing.receive
        if receive is not None:
            receive.detach(landing)
            if receive.over:
                self._end_receive(receive, receive.ending)
            elif receive.hopeless is not None:
                self._stop_receive(receive, receive.hopeless)

    def _drop(self, content: ContentKey, epoch: int = 0) -> None:
        """Free the unclaimed landings of a content, of one sender or (0) of all."""
        for landing in self._ledger.of_content(content):
            if epoch not in (0, landing.id[0]):
                continue
            if landing.orphaned:
                self._free(landing)
            elif landing.state is LandingState.GRANTED and landing.receive is None:
                self._give_up(landing, proven=False)

    def _cancel_transfer(self, transfer: Transfer, reason: str) -> None:
        with self._changed:
            receive = self._ledger.receive_of(transfer)
            if receive is not None:
                text = f"{transfer.key} was withdrawn: {reason or 'no reason given'}"
                self._stop_receive(receive, TransferCancelled(text))

    def _note_mismatch(self, content: ContentKey, epoch: int) -> None:
        """Note that a sender offers a content under a key that is waited for with other bindings
        only. If a request here waits for this one, too, the sender has several under the key."""
        if content in self._ledger.receives or self._expectations.is_wanted(content):
            return
        for receive in self._ledger.receives_of_key(content[0]):
            if len(receive.strangers) < MAX_STRANGERS:
                receive.strangers.add(epoch)
                self._judge_mismatch(receive)

    def _judge_mismatch(self, receive: Receive) -> None:
        """If the named sender offers another content, shorten the wait; do not end it at once."""
        is_theirs = any(self._may_end(receive, epoch) for epoch in receive.strangers)
        if is_theirs and not receive.mismatched:
            receive.mismatched = True
            soon = self._clock() + MISMATCH_GRACE_SECONDS
            receive.deadline = min(receive.deadline, soon)
            self._timers.set(receive, receive.deadline)

    def _judge_misfits(self, receive: Receive) -> None:
        """End a receive if a chunk that came before it, from a sender that may end it, misfits."""
        for epoch, refusal in receive.misfits.items():
            if self._may_end(receive, epoch):
                self._stop_receive(receive, refusal)

    def _may_end(self, receive: Receive, epoch: int) -> bool:
        """Whether a sender's offers can end a receive; if no sender is named, those of any can."""
        return not receive.is_named or self._expectations.is_from(receive.content, epoch)

    def _overdue(self, receive: Receive) -> P2pError:
        key = receive.content[0]
        if receive.mismatched:
            text = f"{key}: the peer's content is another one (prompt, media, LoRA, salt or model)"
            return TransferRejected(text)
        return TransferTimeout(f"{key}: KV did not arrive by its deadline")


def _as_refusal(key: TransferKey, error: P2pError) -> P2pError:
    """Return the error for both sides if a chunk does not fit the receive or the store."""
    kind = TransferTooLarge if isinstance(error, TransferTooLarge) else TransferRejected
    return kind(f"{key}: {error}")
