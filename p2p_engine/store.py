"""Store: everything that arrives, from OFFER until its bytes are where they belong.

It alone decides that KV has arrived. The states are in landing.py; the engine's lock guards all.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from typing import Any

from mempool import Job, Mover
from p2p_engine.arena import LandingArena
from p2p_engine.config import EngineConfig
from p2p_engine.errors import (
    P2pError,
    PeerLost,
    TransferCancelled,
    TransferError,
    TransferRejected,
    TransferTimeout,
    TransferTooLarge,
    TransportError,
)
from p2p_engine.landing import (
    BLOCKS,
    Landing,
    LandingId,
    LandingState,
    Outcome,
    Receive,
    Tombstone,
)
from p2p_engine.layout import Regions, Sink, one_region, packed_pages, pair
from p2p_engine.messages import (
    Cancel,
    Commit,
    ContentKey,
    Deny,
    Fail,
    Grant,
    Manifest,
    Message,
    Offer,
    TransferKey,
    shorten,
)
from p2p_engine.recent import Recent
from p2p_engine.stats import Counters
from p2p_engine.transfer import Transfer, lane_of
from p2p_engine.transports.base import TRAILER_BYTES, Transport, trailer_offset

logger = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 0.02
MISMATCH_GRACE_SECONDS = 1.0


class Store:
    """All incoming transfers of one engine."""

    def __init__(
        self,
        config: EngineConfig,
        changed: threading.Condition,
        arena: LandingArena | None,
        mover: Mover,
        counters: Counters,
        *,
        reply: Callable[[int, type[Message], tuple[Any, ...]], None],
        clock: Callable[[], float],
    ) -> None:
        """`reply(epoch, kind, fields)` sends a message to a sender."""
        self._config = config
        self._changed = changed
        self._arena = arena
        self._mover = mover
        self._counters = counters
        self._reply = reply
        self._clock = clock
        self._landings: dict[LandingId, Landing] = {}
        self._receives: dict[ContentKey, Receive] = {}
        self._tombstones: Recent[ContentKey, Tombstone] = Recent()
        self._outcomes: Recent[LandingId, Outcome] = Recent()
        self._live_block_bytes = 0

    # What the caller asks for

    def receive(self, key: TransferKey, sink: Sink, binding: bytes, timeout: float) -> Transfer:
        """Wait for a content; what has landed already is taken at once.

        Raises:
            TransferError: the same content is being waited for.
            TransferRejected: it was refused here, or given up by its sender, before.
        """
        content = (key, binding)
        if content in self._receives:
            raise TransferError(f"{key} is being received already")
        grave = self._exhume(content)
        if grave is not None and grave.refused:
            raise TransferRejected(f"{key}: {grave.reason}")
        transfer = Transfer(key, 0, self._changed, self._cancel_transfer)
        receive = Receive(content, sink, transfer, self._clock() + timeout)
        self._receives[content] = receive
        for landing in self._of(content):
            if landing.state in (LandingState.GRANTED, LandingState.LANDED):
                self._claim(landing, receive)
        others = (item.content for item in self._landings.values() if item.content != content)
        if any(other[0] == key for other in others):
            self._note_mismatch(key)
        return transfer

    def discard(self, content: ContentKey, reason: str) -> None:
        """Nobody here will ask for this content: free what came, refuse what comes."""
        self._bury(content, reason)
        self._drop(content)

    def fail_key(self, key: TransferKey, error: P2pError) -> None:
        """The sender will not complete this key: whoever waits for it, or will, learns why."""
        contents = {content for content in self._receives if content[0] == key}
        contents |= {item.content for item in self._landings.values() if item.content[0] == key}
        for content in contents or {(key, b"")}:
            if content in self._receives:
                self._stop_receive(self._receives[content], error)
            else:
                self._bury(content, str(error), refused=True)
            self._drop(content)

    def drop_landed(self) -> int:
        """Forget what has landed and nobody has claimed; returns how many bytes."""
        orphans = [landing for landing in self._landings.values() if landing.orphaned]
        for landing in orphans:
            self._bury(landing.content, "what had landed was dropped", refused=True)
            self._free(landing)
        return sum(landing.nbytes for landing in orphans)

    # What the sender says

    def on_offer(self, epoch: int, offer: Offer, transport: Transport) -> None:
        """Reserve a region, or say why not."""
        landing_id, content = (epoch, offer.seq), (offer.key, offer.binding)
        if self._answer_again(landing_id, offer.attempt):
            return
        grave = self._exhume(content)
        if grave is not None:
            self._bury(content, grave.reason, refused=True)
            self._fail(landing_id, offer.attempt, TransferRejected(grave.reason))
            return
        receive = self._receives.get(content)
        if receive is None:
            self._note_mismatch(offer.key)
        elif receive.ending is not None:
            self._fail(landing_id, offer.attempt, receive.ending)
            return
        try:
            self._grant(landing_id, offer, transport, receive)
        except TransportError as error:  # the sender has not noticed yet that it must connect again
            self._deny(landing_id, offer.attempt, str(error))
        except P2pError as error:
            refusal = _as_refusal(offer.key, error)
            self._fail(landing_id, offer.attempt, refusal)
            if receive is not None:
                self._stop_receive(receive, refusal)

    def on_done(self, epoch: int, seq: int, attempt: int) -> None:
        """The sender has written everything: COMMIT is said as soon as it has landed."""
        landing, outcome = self._landings.get((epoch, seq)), self._outcomes.get((epoch, seq))
        if landing is not None and landing.attempt == attempt:
            landing.done_heard = True
            self._check_landed(landing)
        elif outcome is not None:
            self._reply(epoch, outcome.kind, outcome.fields)
        else:
            unknown = TransferRejected("nothing is known of this chunk")
            self._fail((epoch, seq), attempt, unknown)

    def on_cancelled(self, epoch: int, seq: int, attempt: int) -> None:
        """The sender will not write any more."""
        landing = self._landings.get((epoch, seq))
        if landing is None or landing.attempt > attempt:
            return
        if landing.state is LandingState.GRANTED:
            self._give_up(landing, proven=True)
        elif landing.state is LandingState.QUARANTINED and not landing.transport.receiver_writes:
            self._free(landing)

    def sender_lost(self, epoch: int, error: PeerLost) -> None:
        """A sender is silent, restarted or closing: end what only it could have completed."""
        for receive in self._receives.values():
            if epoch in receive.senders:
                receive.bereft = error
        for landing in list(self._landings.values()):
            if landing.id[0] == epoch and landing.state is LandingState.GRANTED:
                self._check_landed(landing)
                if landing.state is LandingState.GRANTED:
                    self._give_up(landing, proven=False)
        self._end_bereft()

    def bereave(self, key: TransferKey, error: P2pError) -> None:
        """Nothing more of a key will come; what has come may complete its receives."""
        for content, receive in self._receives.items():
            if content[0] == key:
                receive.bereft = error
        self._end_bereft()

    # What happens here

    def poll(self) -> None:
        """See what has landed; deliver what had to wait for others to stop writing."""
        for landing in list(self._landings.values()):
            if landing.state is LandingState.GRANTED:
                self._check_landed(landing)
            elif landing.state is LandingState.LANDED and landing.receive is not None:
                self._deliver(landing, landing.receive)

    def tick(self, now: float) -> None:
        """End what is overdue; repeat what is unanswered; free what is proven safe."""
        for landing in list(self._landings.values()):
            if landing.state is LandingState.QUARANTINED:
                self._check_quarantined(landing, now)
            elif now >= landing.deadline and landing.state is LandingState.GRANTED:
                self._give_up(landing, proven=False)
            elif now >= landing.deadline and landing.orphaned:
                self._counters.expired += 1
                reason = "its lease ended before anybody asked for it"
                self._bury(landing.content, reason, refused=True)
                self._free(landing)
        for receive in list(self._receives.values()):
            if now >= receive.deadline:
                self._stop_receive(receive, self._overdue(receive))

    def close(self, error: P2pError) -> None:
        """End everything; the mover is stopped, so that our own I/O is over."""
        for receive in list(self._receives.values()):
            self._end_receive(receive, receive.ending or error)
        for landing in list(self._landings.values()):
            self._free(landing)

    def live_bytes(self) -> dict[str, int]:
        """Bytes that are reserved now, by place."""
        arena = self._arena.live_bytes if self._arena is not None else {}
        return {BLOCKS: self._live_block_bytes, **arena}

    def quarantined_bytes(self, epoch: int | None = None) -> int:
        """Bytes that no one may use because a sender (this one, or any) might still write there."""
        return sum(
            landing.nbytes
            for landing in self._landings.values()
            if landing.state is LandingState.QUARANTINED and epoch in (None, landing.id[0])
        )

    def num_open(self) -> int:
        """How many landings and receives have not ended."""
        return len(self._landings) + len(self._receives)

    # Granting

    def _answer_again(self, landing_id: LandingId, attempt: int) -> bool:
        """Answer an offer that is said again; a higher attempt says that the older one is over."""
        landing = self._landings.get(landing_id)
        if landing is not None and landing.attempt < attempt:
            if landing.state in (LandingState.GRANTED, LandingState.QUARANTINED):
                self._give_up(landing, proven=True)
            return landing_id in self._landings  # until our own I/O is joined: it is offered again
        if landing is not None:
            if landing.attempt == attempt and landing.state is not LandingState.QUARANTINED:
                self._send_grant(landing)
            return True
        outcome = self._outcomes.get(landing_id)
        if outcome is None or outcome.attempt < attempt:
            return False
        self._reply(landing_id[0], outcome.kind, outcome.fields)
        return True

    def _grant(
        self, landing_id: LandingId, offer: Offer, transport: Transport, receive: Receive | None
    ) -> None:
        landing = Landing(
            landing_id,
            offer.attempt,
            (offer.key, offer.binding),
            _narrowed(offer.manifest, receive),
            transport,
            trailer=secrets.randbits(62) | 1,
            deadline=self._clock() + self._config.transfer_timeout_seconds,
        )
        if receive is not None and _goes_straight(landing, receive):
            self._place_in_blocks(landing, receive)
        elif not self._place_in_arena(landing, receive):
            return
        self._landings[landing_id] = landing
        if receive is not None:
            self._attach(landing, receive)
        self._send_grant(landing)

    def _place_in_blocks(self, landing: Landing, receive: Receive) -> None:
        manifest = landing.manifest
        if landing.nbytes:
            regions = receive.regions(manifest, manifest.first_block, manifest.num_blocks)
            self._expect(landing, regions, keep=receive)
        self._live_block_bytes += landing.nbytes

    def _place_in_arena(self, landing: Landing, receive: Receive | None) -> bool:
        """Reserve room in the arena; False when the sender was told that there is none.

        Raises:
            TransportError: the sender has no data connection.
            TransferTooLarge: there never will be, and blocks are no way out.
        """
        arena, size = self._arena, trailer_offset(landing.nbytes) + TRAILER_BYTES
        needs_it = not landing.transport.receiver_writes or (
            receive is not None and receive.has_delivered(landing.manifest)
        )
        if needs_it and (arena is None or not arena.fits(size)):
            text = f"a chunk of {landing.nbytes} bytes fits neither the buffer nor the pool"
            raise TransferTooLarge(text)
        if arena is None or self._hoards(landing.id[0], arena):
            text = "no landing memory, or too much of it is in quarantine"
            return self._deny(landing.id, landing.attempt, text)
        landing.space = arena.reserve(size)
        if landing.space is None:
            return self._deny(landing.id, landing.attempt, "buffer and pool are full")
        if landing.transport.receiver_writes and landing.nbytes:
            regions = one_region(arena.address(landing.space), landing.nbytes)
            try:
                self._expect(landing, regions, keep=arena)
            except TransportError:
                arena.release(landing.space)
                raise
        else:
            arena.clear_word(landing.space, trailer_offset(landing.nbytes))
        return True

    def _hoards(self, epoch: int, arena: LandingArena) -> bool:
        """Whether a sender that answers no CANCEL blocks more than its share of the arena."""
        return self.quarantined_bytes(epoch) > sum(arena.budgets.values()) / 4

    def _deny(self, landing_id: LandingId, attempt: int, reason: str) -> bool:
        fields = (landing_id[1], attempt, shorten(reason), RETRY_AFTER_SECONDS)
        self._reply(landing_id[0], Deny, fields)
        return False

    def _expect(self, landing: Landing, regions: Regions, *, keep: object) -> None:
        landing.job = landing.transport.expect(
            *landing.id,
            regions.coalesced(),
            tag=lambda job: self._received(landing, job),
            keep=keep,
        )

    def _send_grant(self, landing: Landing) -> None:
        offset = landing.space.offset if landing.space is not None else 0
        first, num = landing.manifest.first_block, landing.manifest.num_blocks
        epoch, seq = landing.id
        self._reply(epoch, Grant, (seq, landing.attempt, first, num, offset, landing.trailer))

    # Landing

    def _check_landed(self, landing: Landing) -> None:
        if landing.state is LandingState.GRANTED and self._is_whole(landing):
            landing.state = LandingState.LANDED
            landing.deadline = self._clock() + self._config.lease_seconds
            self._counters.landed_bytes_by_place[landing.place] += landing.nbytes
            self._conclude(landing.id, landing.attempt, Commit)
            if landing.receive is not None:
                self._deliver(landing, landing.receive)
        outcome = self._outcomes.get(landing.id)
        if landing.done_heard and landing.state is not LandingState.GRANTED and outcome is not None:
            landing.done_heard = False
            self._reply(landing.id[0], outcome.kind, outcome.fields)

    def _is_whole(self, landing: Landing) -> bool:
        if not landing.nbytes:
            return landing.done_heard
        if landing.transport.receiver_writes:
            return landing.job is not None and landing.job.state == "done"
        if self._arena is None or landing.space is None:
            return False
        end = trailer_offset(landing.nbytes)
        return self._arena.word_is(landing.space, end, landing.trailer)

    def _received(self, landing: Landing, job: Job) -> None:
        """Our mover has ended its part: whole, or never."""
        if job is not landing.job:
            return
        if landing.state is LandingState.GRANTED and job.state == "done":
            self._check_landed(landing)
        elif landing.state is LandingState.GRANTED:
            reason = f"the data connection broke: {job.error or job.state}"
            self._fail(landing.id, landing.attempt, TransportError(reason))
            self._free(landing)
        elif landing.state is LandingState.QUARANTINED:
            self._free(landing)

    def _claim(self, landing: Landing, receive: Receive) -> None:
        """A receive meets a landing that came first."""
        try:
            receive.wanted(landing.manifest)
        except P2pError as error:
            self._stop_receive(receive, _as_refusal(receive.content[0], error))
            return
        self._attach(landing, receive)
        if landing.state is LandingState.LANDED:
            self._deliver(landing, receive)

    def _attach(self, landing: Landing, receive: Receive) -> None:
        landing.receive = receive
        receive.landings.add(landing)
        receive.senders.add(landing.id[0])

    def _deliver(self, landing: Landing, receive: Receive) -> None:
        """Bring landed bytes to where they belong, once nobody else writes there."""
        rivals = receive.writers_of(landing.manifest) - {landing}
        for rival in rivals:
            if rival.state is LandingState.GRANTED:  # the first that is whole wins
                self._give_up(rival, proven=False)
        if receive.ending is not None:
            self._free(landing)
        elif not rivals:  # else poll comes back to it
            self._bring(landing, receive)

    def _bring(self, landing: Landing, receive: Receive) -> None:
        first, num = landing.manifest.first_block, landing.manifest.num_blocks
        try:
            if landing.space is not None and self._arena is not None:
                first, num = receive.wanted(landing.manifest)
                if num and landing.nbytes:
                    base = self._arena.address(landing.space)
                    packed = packed_pages(base, landing.manifest, first, num)
                    self._scatter(landing, receive, packed, (first, num))
                    return
            self._delivered(landing, receive, first, num)
        except P2pError as error:  # the sink's, or another chunk has changed what it wants
            self._stop_receive(receive, _as_refusal(receive.content[0], error))

    def _scatter(
        self, landing: Landing, receive: Receive, packed: Regions, blocks: tuple[int, int]
    ) -> None:
        pieces = pair(packed, receive.regions(landing.manifest, *blocks))
        landing.state = LandingState.SCATTERING
        landing.job = self._mover.copy(
            *pieces,
            lane=lane_of(receive.content[0]),
            tag=lambda job: self._scattered(landing, receive, job, blocks),
            keep=(receive, self._arena),
        )

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
        receive.transfer.nbytes += landing.nbytes
        if receive.ending is None:
            try:
                if receive.landed(first, num):
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
                landing.job.cancel()
        if receive.over:
            self._end_receive(receive, error)

    def _end_bereft(self) -> None:
        for receive in list(self._receives.values()):
            if receive.hopeless is not None:
                self._stop_receive(receive, receive.hopeless)

    def _end_receive(self, receive: Receive, error: P2pError | None) -> None:
        if self._receives.pop(receive.content, None) is None:
            return
        landings, receive.landings = receive.landings, set()
        for landing in landings:
            landing.receive = None
            if landing.orphaned:  # it came twice
                self._free(landing)
        if error is not None:
            self.discard(receive.content, str(error))
            logger.info("receive ended: key=%s error=%s", receive.content[0], error)
        self._counters.count("received", error)
        receive.transfer.end(error)

    def _give_up(self, landing: Landing, *, proven: bool) -> None:
        """Nobody wants a granted region any more; it is freed once nobody can write into it."""
        text = "the receiver gave the chunk up"
        self._conclude(landing.id, landing.attempt, Fail, TransferRejected.__name__, text)
        landing.state = LandingState.QUARANTINED
        receiving = landing.job is not None and not landing.job.done
        if landing.job is not None and receiving:
            landing.job.cancel()
        elif proven or landing.transport.receiver_writes or not landing.nbytes:
            self._free(landing)
        if not proven:
            self._send_cancel(landing)

    def _send_cancel(self, landing: Landing) -> None:
        landing.resend_at = self._clock() + self._config.retry_seconds
        self._reply(landing.id[0], Cancel, (landing.id[1], landing.attempt))

    def _check_quarantined(self, landing: Landing, now: float) -> None:
        if landing.transport.receiver_writes:
            if landing.job is None or landing.job.done:
                self._free(landing)
        elif landing.transport.is_gone(landing.id[0]) or self._is_whole(landing):
            self._free(landing)
        elif now >= landing.resend_at:
            self._send_cancel(landing)

    def _free(self, landing: Landing) -> None:
        if self._landings.get(landing.id) is not landing:
            return  # freed already; a later attempt may have its name by now
        del self._landings[landing.id]
        if landing.space is not None and self._arena is not None:
            self._arena.release(landing.space)
        else:
            self._live_block_bytes -= landing.nbytes
        receive, landing.receive = landing.receive, None
        if receive is not None:
            receive.landings.discard(landing)
            if receive.over:
                self._end_receive(receive, receive.ending)
            elif receive.hopeless is not None:
                self._stop_receive(receive, receive.hopeless)

    def _drop(self, content: ContentKey) -> None:
        for landing in self._of(content):
            if landing.orphaned:
                self._free(landing)
            elif landing.state is LandingState.GRANTED and landing.receive is None:
                self._give_up(landing, proven=False)

    def _cancel_transfer(self, transfer: Transfer, reason: str) -> None:
        with self._changed:
            for receive in list(self._receives.values()):
                if receive.transfer is transfer:
                    text = f"{transfer.key} was withdrawn: {reason or 'no reason given'}"
                    self._stop_receive(receive, TransferCancelled(text))

    # Remembering

    def _fail(self, landing_id: LandingId, attempt: int, error: P2pError) -> None:
        fields = (type(error).__name__, shorten(str(error)))
        outcome = self._conclude(landing_id, attempt, Fail, *fields)
        self._reply(landing_id[0], outcome.kind, outcome.fields)

    def _conclude(
        self, landing_id: LandingId, attempt: int, kind: type[Message], *fields: str
    ) -> Outcome:
        outcome = Outcome(attempt, kind, (landing_id[1], attempt, *fields))
        self._outcomes.put(landing_id, outcome)
        return outcome

    def _bury(self, content: ContentKey, reason: str, *, refused: bool = False) -> None:
        until = self._clock() + self._config.lease_seconds
        self._tombstones.put(content, Tombstone(shorten(reason), until, refused))

    def _exhume(self, content: ContentKey) -> Tombstone | None:
        """Take the tombstone of a content, or of its whole key, when it still stands."""
        for name in (content, (content[0], b"")):
            grave = self._tombstones.pop(name)
            if grave is not None and grave.until > self._clock():
                return grave
        return None

    def _note_mismatch(self, key: TransferKey) -> None:
        """Another content came under a name that is waited for: cut the wait short, not off."""
        for receive in self._receives.values():
            if receive.content[0] == key and not receive.mismatched:
                receive.mismatched = True
                soon = self._clock() + MISMATCH_GRACE_SECONDS
                receive.deadline = min(receive.deadline, soon)

    def _overdue(self, receive: Receive) -> P2pError:
        key = receive.content[0]
        if receive.mismatched:
            text = f"{key}: the peer's content is another one (prompt, LoRA, salt or model)"
            return TransferRejected(text)
        return TransferTimeout(f"{key}: KV did not arrive by its deadline")

    def _of(self, content: ContentKey) -> list[Landing]:
        return [landing for landing in self._landings.values() if landing.content == content]


def _as_refusal(key: TransferKey, error: P2pError) -> P2pError:
    """What both sides are told when a chunk does not fit what is wanted, or the store."""
    kind = TransferTooLarge if isinstance(error, TransferTooLarge) else TransferRejected
    return kind(f"{key}: {error}")


def _goes_straight(landing: Landing, receive: Receive) -> bool:
    """Whether the bytes may land in final memory: a stream that is cut off ends in zeros, so only
    where nothing has arrived yet and nobody else writes."""
    if not landing.nbytes:
        return True
    untouched = not (
        receive.has_delivered(landing.manifest) or receive.writers_of(landing.manifest)
    )
    return landing.transport.receiver_writes and untouched


def _narrowed(manifest: Manifest, receive: Receive | None) -> Manifest:
    """The part of the chunk that is wanted; without a receive, the whole of it."""
    if receive is None:
        return manifest
    first, num = receive.wanted(manifest)
    return Manifest(
        first, num, manifest.page_bytes, manifest.num_tokens, manifest.dtype, manifest.shape
    )
