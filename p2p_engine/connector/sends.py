"""Sends: on one rank, the KV of one group that leaves it, chunk after chunk, while the prompt is
computed.

For each request a cursor: all blocks before it have been handed to the engine, or lie behind the
window of the prompt's end. It moves before each forward by the blocks that become full in it (the
last, ragged one in the prompt's last step), and goes back when vLLM takes the blocks away. With a
host buffer, blocks are copied there once, after the forward that has filled them; vLLM may have
them back then. With `layerwise`, what is pushed leaves layer by layer during the forward.

Of the prompt's beginning, which the peer should have, nothing is pushed: it is held, under the same
key, until the peer asks for it or says that it has it, or vLLM needs the blocks: then it is pushed.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from p2p_engine.config import SendMode
from p2p_engine.connector.layer_group import NULL_BLOCK
from p2p_engine.connector.orders import EndedSend, Int64s, Party, SendStep
from p2p_engine.errors import (
    EngineClosed,
    P2pError,
    PeerError,
    TransferError,
    TransferRejected,
    named,
)
from p2p_engine.memory.paged import PagedSource
from p2p_engine.peers.link import InstanceAddress
from p2p_engine.transfer import Transfer, note_stage
from p2p_engine.wire.messages import ContentKey

if TYPE_CHECKING:
    from p2p_engine.connector.layer_group import GroupCache
    from p2p_engine.engine import P2pNcclEngine

logger = logging.getLogger(__name__)

WITHDRAW_SECONDS = 2.0  # a copy stops at its next slice; far more than that takes
KNOWN_TO_PEER = (TransferRejected, PeerError, EngineClosed)


@dataclass(eq=False)
class _Chunk:
    """Blocks up to `end_block` that the engine has been given."""

    end_block: int
    transfer: Transfer
    is_saved: bool = False  # in the host buffer: the engine reads them there

    @property
    def is_released(self) -> bool:
        """Tell whether vLLM's blocks are no longer read."""
        return self.is_saved or self.transfer.released

    @property
    def has_left(self) -> bool:
        """Tell whether its blocks may be overwritten without loss."""
        return self.is_released and self.transfer.error is None


@dataclass(eq=False)
class _KeptBack(_Chunk):
    """The beginning, which is held."""

    source: PagedSource | None = None


@dataclass(eq=False)
class _SendInProgress:
    """One request; invariant: the cursor is the end of the last chunk."""

    party: Party
    first_block: int  # that is wanted, and not one of those that the peer should have
    generation: int  # of the attempt to send its key
    num_kept_back: int = 0  # blocks that the peer should have
    chunks: list[_Chunk] = field(default_factory=list)
    kept_back: _KeptBack | None = None  # these, as soon as they are held
    withdrawn: Transfer | None = None  # the same, when they were pushed after all
    failed: bool = False

    @property
    def all_chunks(self) -> list[_Chunk]:
        """All that the engine has been given."""
        return [*self.chunks, *([self.kept_back] if self.kept_back is not None else ())]

    @property
    def cursor(self) -> int:
        """The first block that the engine has not been given."""
        return self.chunks[-1].end_block if self.chunks else self.first_block

    @property
    def is_released(self) -> bool:
        """Tell whether none of vLLM's blocks is read any more."""
        is_read = self.withdrawn is not None and not self.withdrawn.released
        return not is_read and all(chunk.is_released for chunk in self.all_chunks)

    @property
    def is_over(self) -> bool:
        """Tell whether it has arrived, or never will: until then the engine may read it, in vLLM's
        blocks, in the host buffer, or where it was spilled to."""
        return all(chunk.transfer.done for chunk in self.all_chunks)

    @property
    def error(self) -> P2pError | None:
        """The reason why a chunk did not arrive."""
        errors = (chunk.transfer.error for chunk in self.all_chunks)
        return next((error for error in errors if error is not None), None)


@dataclass(frozen=True, eq=False)
class _Due:
    """Blocks that may be read after this step's forward, in host memory at `places`.

    Pushed blocks already have a transfer; held blocks are given to the engine only now.
    """

    sending: _SendInProgress
    block_ids: Int64s
    places: Int64s
    first_block: int
    chunk: _Chunk | None = None


@dataclass(frozen=True)
class _Waiting:
    """A step whose blocks found no room in the host buffer. It fails at its deadline, or, while its
    peer renews it, at the latest end."""

    step: SendStep
    deadline: float
    latest_end: float


class Sends:
    """All requests that this rank sends, in one group."""

    def __init__(self, engine: P2pNcclEngine, cache: GroupCache) -> None:
        self._engine = engine
        # The layers that vLLM tells of while they can be read. A draft computes after the model,
        # perhaps more than once; of states vLLM does not tell.
        self._group = group = cache.group
        has_none = cache.staging.is_copy or group.is_draft or group.is_state
        self.layer_names = cache.layer_names if engine.config.layerwise and not has_none else ()
        self._cache = cache.cache
        self._staging = cache.staging
        self._generations = itertools.count(1)  # of all keys: a later request has a higher one
        self._sendings: dict[str, _SendInProgress] = {}
        self._due: list[_Due] = []
        self._held: dict[str, _SendInProgress] = {}
        self._waiting: dict[_SendInProgress, _Waiting] = {}  # in order: a large one must not starve
        self._lent: list[tuple[Transfer, Int64s]] = []
        self._to_spill: list[_SendInProgress] = []
        # Reported, and not over.
        self._trailing: list[_SendInProgress] = []
        # What was pushed, and until when it lies at its peer, where nobody may have asked for it.
        self._arrived: dict[ContentKey, float] = {}  # oldest first
        self._refusal = ""  # why nothing is sent any more

    def withdraw(self, request_ids: Iterable[str]) -> None:
        """Withdraw chunks that have not left: vLLM is about to overwrite these requests' blocks."""
        withdrawn: list[tuple[_SendInProgress, _Chunk]] = []
        for request_id in request_ids:
            sending = self._sendings.get(request_id)
            if sending is not None and self._is_usable(sending):
                self._forget_plans(sending)
                withdrawn += ((sending, chunk) for chunk in _take_back(sending))
        for _, chunk in withdrawn:
            chunk.transfer.cancel("preempted")
        deadline = time.monotonic() + WITHDRAW_SECONDS
        for sending, chunk in withdrawn:
            if not chunk.transfer.wait_released(deadline - time.monotonic()):
                # Its bytes may be torn, so no one may use them as the request's KV.
                self._fail(sending, "preempted while its blocks were being read")

    def start_step(self, steps: Iterable[SendStep]) -> None:
        """Offer the blocks that this step's forward completes; bytes move after `finish_step`
        only."""
        if self._due:  # a draft's, of a step that did not finish
            self.finish_step()
        self._resume()
        for step in steps:
            party = step.party
            sending = self._sendings.get(party.request_id) or self._begin(party)
            if not self._is_usable(sending):
                continue
            if not self._waiting and self._start(sending, step):
                continue
            self._wait(sending, step)

    @property
    def leaves_by_layer(self) -> bool:
        """Whether blocks of this step may leave before its forward has ended."""
        return bool(self.layer_names) and any(item.chunk is not None for item in self._due)

    def layers_done(self, num_layers: int) -> None:
        """During the forward: let the first layers of this step's blocks leave."""
        chunks = (item.chunk for item in self._due)
        transfers = [chunk.transfer for chunk in chunks if chunk is not None]
        self._engine.mark_layers_ready(transfers, num_layers)

    def lose_step(self, reason: str) -> None:
        """Give up what this step's forward was to complete: it has not computed it."""
        for sending in dict.fromkeys(item.sending for item in self._due):
            self._fail(sending, reason)

    def refuse_all(self, reason: str) -> None:
        """Give up every request that has not finished, and every later one."""
        self._refusal = reason
        for sending in self._sendings.values():
            if self._is_usable(sending):
                self._fail(sending, reason)

    def finish_step(self) -> None:
        """After the forward: let the bytes move. PUT waits until they have left, or go on as with
        PUT_ASYNC because the receiver denied them: it may have room only when its own request has
        arrived there, and a proxy sends that after ours has ended."""
        due, self._due = self._due, []
        if self._save(due):
            for item in due:
                self._let_go(item)
        blocking = [
            item.chunk.transfer
            for item in due
            if item.chunk is not None and item.sending.party.send_type is SendMode.PUT
        ]
        deadline = time.monotonic() + self._engine.config.transfer_timeout_seconds
        for transfer in blocking:
            if not transfer.wait_released_or_denied(deadline - time.monotonic()):
                logger.warning("PUT is not over at its deadline: key=%s", transfer.key)

    def end(self, ended: Iterable[EndedSend]) -> None:
        """Record that requests have finished; report held ones once all their KV has left."""
        for item in ended:
            party = item.party
            sending = self._sendings.pop(party.request_id, None) or self._new(party)
            if item.failure is not None:
                self._give_up(sending, item.failure, is_sent_again=item.is_sent_again)
            if item.is_held:
                self._held[party.request_id] = sending

    def give_up(self, reason: str) -> None:
        """Give up every request of which something was computed before this step."""
        self._arrived.clear()
        for sending in [*self._held.values(), *self._trailing, *self._sendings.values()]:
            self._give_up(sending, reason)

    def spill(self, request_ids: Iterable[str]) -> None:
        """Have held requests copied into the engine's memory, as soon as there is room, and push
        what was kept back: vLLM needs their blocks."""
        ordered = [self._held[name] for name in request_ids if name in self._held]
        for sending in ordered:
            self._push_kept_back(sending)
        self._to_spill += ordered
        self._to_spill = [item for item in self._to_spill if not item.is_released]
        for sending in list(self._to_spill):
            try:
                for chunk in sending.all_chunks:
                    self._engine.spill(chunk.transfer)
            except P2pError as error:
                self._to_spill.remove(sending)
                name = sending.party.request_id
                logger.warning("not spilled: request=%s error=%s", name, named(error))

    def _push_kept_back(self, sending: _SendInProgress) -> None:
        if sending.failed:
            return  # it is cancelled already
        kept_back, sending.kept_back = sending.kept_back, None
        if kept_back is None or kept_back.source is None or kept_back.is_released:
            return
        sending.withdrawn, party = kept_back.transfer, sending.party
        kept_back.transfer.cancel("vLLM needs its blocks")
        try:
            transfer = self._engine.send(
                party.key_of(self._group.number), InstanceAddress(party.peer or ""),
                kept_back.source, binding=party.binding, generation=sending.generation,
            )  # fmt: skip
        except P2pError as error:
            self._fail(sending, str(error))
        else:
            sending.chunks.insert(0, _Chunk(kept_back.end_block, transfer))

    def open_transfers(self) -> Iterator[Transfer]:
        """Yield what may be read from vLLM's blocks."""
        for sending in [*self._sendings.values(), *self._held.values(), *self._trailing]:
            yield from (chunk.transfer for chunk in sending.all_chunks)
            if sending.withdrawn is not None:
                yield sending.withdrawn

    @property
    def is_awaited(self) -> bool:
        """Whether vLLM waits for a report from here."""
        return bool(self._held)

    def take_released(self) -> set[str]:
        """Return the held requests whose blocks are free now; each exactly once."""
        # Before 0.31, a step without a forward does not finish. A draft computes after the report.
        if self._due and not self._group.is_draft:
            self.finish_step()
        self.spill(())
        for sending in self._held.values():
            if sending.kept_back is not None:  # it is of no use if what was pushed is lost
                self._is_usable(sending)
        released = {
            name
            for name, sending in self._held.items()
            if sending.is_released and sending not in self._waiting
        }
        self._trailing += [self._held.pop(request_id) for request_id in released]
        over = [sending for sending in self._trailing if sending.is_over]
        self._trailing = [sending for sending in self._trailing if not sending.is_over]
        for sending in over:
            if self._is_usable(sending) and sending.party.send_type is not SendMode.GET:
                self._note_arrived(sending.party.content)
        self._take_places_back()
        return released

    def _begin(self, party: Party) -> _SendInProgress:
        sending = self._sendings[party.request_id] = self._new(party)
        if self._refusal:
            self._fail(sending, self._refusal)
        return sending

    def _new(self, party: Party) -> _SendInProgress:
        num_kept_back = 0 if self._staging.is_copy else party.held_tokens // self._group.block_size
        first_block = max(num_kept_back, self._group.first_block(party.num_tokens))
        return _SendInProgress(party, first_block, next(self._generations), num_kept_back)

    def _forget_plans(self, sending: _SendInProgress) -> None:
        """Stop reading vLLM's blocks: they are lost, or no one wants them."""
        self._waiting.pop(sending, None)
        for item in self._due:
            if item.sending is sending and item.chunk is None:
                self._staging.give_back(item.places)
        self._due = [item for item in self._due if item.sending is not sending]

    def _take_places_back(self) -> None:
        lent, self._lent = self._lent, []
        for transfer, places in lent:
            if transfer.released:
                self._staging.give_back(places)
            else:
                self._lent.append((transfer, places))

    def _wait(self, sending: _SendInProgress, step: SendStep) -> None:
        known, config, now = self._waiting.get(sending), self._engine.config, time.monotonic()
        deadline = now + config.transfer_timeout_seconds
        latest_end = max(deadline, now + config.max_renewal_seconds)
        if known is not None:
            deadline, latest_end = known.deadline, known.latest_end
        self._waiting[sending] = _Waiting(step, deadline, latest_end)

    def _resume(self) -> None:
        """Start the steps that wait for room, oldest first."""
        is_full = False
        for sending, waiting in list(self._waiting.items()):
            if self._is_overdue(sending, waiting):
                self._fail(sending, "the host buffer was full for too long")
            elif not self._is_usable(sending) or (
                not is_full and self._start(sending, waiting.step)
            ):
                self._waiting.pop(sending, None)
            else:
                is_full = True

    def _is_overdue(self, sending: _SendInProgress, waiting: _Waiting) -> bool:
        """Whether it has waited for too long: the engine, which follows the leases of all that it
        was given, does not know of it yet."""
        party, now = sending.party, time.monotonic()
        if now < waiting.deadline:
            return False
        key = party.key_of(self._group.number)
        return now >= waiting.latest_end or not self._engine.is_renewed(key, binding=party.binding)

    def _start(self, sending: _SendInProgress, step: SendStep) -> bool:
        """Prepare the blocks that a step completes; return False if the host buffer has no room
        now."""
        party, first, table = sending.party, sending.cursor, step.tables[self._group.table]
        is_last = step.num_computed_tokens == party.num_tokens
        end = len(table) if is_last else self._group.num_full_blocks(step.num_computed_tokens)
        is_held = party.send_type is SendMode.GET
        if is_last and sending.kept_back is None and sending.num_kept_back:
            kept_back = table[: sending.num_kept_back]
            self._due.append(_Due(sending, kept_back, kept_back, 0))
        if end <= first or (is_held and not is_last):
            return True
        block_ids = table[first:end]
        keeps_last_only = self._group.window or self._group.is_state
        if keeps_last_only and (block_ids == NULL_BLOCK).any():
            self._fail(sending, "preempted, and resumed behind the window of its prompt")
            return True
        places = self._staging.take(block_ids)
        if places is None:
            return False
        chunk = None if is_held else self._offer(sending, places, end)
        if is_held or chunk is not None:
            self._due.append(_Due(sending, block_ids, places, first, chunk))
        return True

    def _offer(self, sending: _SendInProgress, places: Int64s, end: int) -> _Chunk | None:
        party = sending.party
        source = PagedSource(self._cache, places, sending.cursor, party.num_tokens)
        key, peer = party.key_of(self._group.number), InstanceAddress(party.peer or "")
        try:
            transfer = self._engine.send(
                key, peer, source,
                binding=party.binding, ready=False, generation=sending.generation,
                by_layer=bool(self.layer_names),
            )  # fmt: skip
        except P2pError as error:
            self._staging.give_back(places)
            self._fail(sending, str(error))
            return None
        return self._add(sending, transfer, places, end)

    def _add(
        self, sending: _SendInProgress, transfer: Transfer, places: Int64s, end: int
    ) -> _Chunk:
        chunk = _Chunk(end, transfer)
        sending.chunks.append(chunk)
        if self._staging.is_copy:
            self._lent.append((transfer, places))
        return chunk

    def _save(self, due: list[_Due]) -> bool:
        """Copy all due blocks into the host buffer at once; if that fails, none is sent."""
        if not due or not self._staging.is_copy:
            return True
        block_ids, places = (
            np.concatenate([getattr(item, name) for item in due])
            for name in ("block_ids", "places")
        )
        try:
            self._staging.save(block_ids, places)
        except P2pError as error:
            self._due = due  # until each is forgotten
            for sending in {item.sending for item in due}:
                self._fail(sending, str(error))
            return False
        return True

    def _let_go(self, item: _Due) -> None:
        """Let the engine read the due blocks."""
        note_stage(item.sending.party.key, "computed")
        chunk = item.chunk if item.chunk is not None else self._hold(item)
        if chunk is None:
            return
        chunk.is_saved = self._staging.is_copy
        if item.chunk is not None:
            self._engine.mark_ready(chunk.transfer)

    def _hold(self, item: _Due) -> _Chunk | None:
        party = item.sending.party
        source = PagedSource(self._cache, item.places, item.first_block, party.num_tokens)
        key = party.key_of(self._group.number)
        try:
            generation = item.sending.generation
            transfer = self._engine.hold(key, source, binding=party.binding, generation=generation)
        except P2pError as error:
            self._staging.give_back(item.places)
            is_held = type(error) is TransferError  # for another request
            self._fail(item.sending, str(error), is_sent_again=is_held)
            return None
        end = item.first_block + len(item.block_ids)
        if end <= item.sending.num_kept_back:
            item.sending.kept_back = _KeptBack(end, transfer, source=source)
            return item.sending.kept_back
        return self._add(item.sending, transfer, item.places, end)

    def _note_arrived(self, content: ContentKey) -> None:
        now = time.monotonic()
        self._arrived.pop(content, None)
        self._arrived[content] = now + self._engine.config.lease_seconds
        for name in list(takewhile(lambda name: self._arrived[name] <= now, self._arrived)):
            del self._arrived[name]

    def _has_another(self, sending: _SendInProgress) -> bool:
        """Whether another request that has finished sends the same: it was asked for twice."""
        content, others = sending.party.content, [*self._held.values(), *self._trailing]
        return time.monotonic() < self._arrived.get(content, 0.0) or any(
            item is not sending and not item.failed and item.party.content == content
            for item in others
        )

    def _is_usable(self, sending: _SendInProgress) -> bool:
        """Whether the request's KV can still arrive; the first time that it cannot, say so."""
        if not sending.failed and sending.error is not None:
            self._fail(sending, named(sending.error))
        return not sending.failed

    def _fail(self, sending: _SendInProgress, reason: str, *, is_sent_again: bool = False) -> None:
        logger.warning("send failed: request=%s reason=%s", sending.party.request_id, reason)
        self._give_up(sending, reason, is_sent_again=is_sent_again)

    def _give_up(
        self, sending: _SendInProgress, reason: str, *, is_sent_again: bool = False
    ) -> None:
        """Stop sending a request's KV, and tell the peer. If the same `is_sent_again` by another
        request, the peer is only told which attempt has ended."""
        party, error = sending.party, sending.error
        has_told, sending.failed = sending.failed, True
        self._forget_plans(sending)
        for chunk in sending.chunks:
            if not chunk.transfer.done:
                chunk.transfer.cancel(reason)
        if sending.kept_back is not None and not sending.kept_back.transfer.done:
            sending.kept_back.transfer.cancel(reason)
        if has_told or self._has_another(sending) or (is_sent_again and not sending.chunks):
            return
        # A peer that knows it by now is not told, and is answered when it asks.
        peer = None
        if party.peer is not None and not isinstance(error, KNOWN_TO_PEER):
            peer = InstanceAddress(party.peer)
        try:
            self._engine.abandon(
                party.key_of(self._group.number), peer, reason,
                binding=party.binding, generation=sending.generation, is_sent_again=is_sent_again,
            )  # fmt: skip
        except P2pError as failure:
            logger.info("peer not told: request=%s error=%s", party.request_id, named(failure))


def _take_back(sending: _SendInProgress) -> list[_Chunk]:
    """Move the cursor back to the first block that has not left; return the chunks given up."""
    chunks = sending.chunks
    num_left = next((i for i, chunk in enumerate(chunks) if not chunk.has_left), len(chunks))
    sending.chunks, dropped = chunks[:num_left], chunks[num_left:]
    if sending.kept_back is not None and not sending.kept_back.has_left:
        dropped.append(sending.kept_back)
        sending.kept_back = None
    return [chunk for chunk in dropped if not chunk.transfer.released]
