"""Sends: on one rank, the KV that leaves it, chunk after chunk, while the prompt is computed.

For each request a cursor: all blocks before it have been handed to the engine. It moves before each
forward by the blocks that become full in it (the last, ragged one in the prompt's last step), and
goes back when vLLM takes the blocks away.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from p2p_engine.config import SendMode
from p2p_engine.connector.metadata import EndedSend, Party, SendStep
from p2p_engine.errors import EngineClosed, P2pError, PeerError, TransferRejected
from p2p_engine.paged import PagedCache, PagedSource
from p2p_engine.peers import InstanceAddress
from p2p_engine.transfer import Transfer

if TYPE_CHECKING:
    from p2p_engine.engine import P2pNcclEngine

logger = logging.getLogger(__name__)

WITHDRAW_SECONDS = 2.0  # a copy stops at its next slice; far more than that takes
KNOWN_TO_PEER = (TransferRejected, PeerError, EngineClosed)


@dataclass(eq=False)
class _Chunk:
    """Blocks up to `end_block` that the engine has been given."""

    end_block: int
    transfer: Transfer

    @property
    def has_left(self) -> bool:
        """Whether its blocks may be overwritten, with nothing lost."""
        return self.transfer.released and self.transfer.error is None


@dataclass(eq=False)
class _Sending:
    """One request; invariant: the cursor is the end of the last chunk."""

    party: Party
    chunks: list[_Chunk] = field(default_factory=list)
    failed: bool = False

    @property
    def cursor(self) -> int:
        """The first block that the engine has not been given."""
        return self.chunks[-1].end_block if self.chunks else 0

    @property
    def is_released(self) -> bool:
        """Whether none of its blocks is read any more."""
        return all(chunk.transfer.released for chunk in self.chunks)

    @property
    def error(self) -> P2pError | None:
        """Why a chunk of it has not arrived."""
        errors = (chunk.transfer.error for chunk in self.chunks)
        return next((error for error in errors if error is not None), None)


class Sends:
    """All requests that this rank sends."""

    def __init__(self, engine: P2pNcclEngine, cache: PagedCache, block_size: int) -> None:
        self._engine = engine
        self._cache = cache
        self._block_size = block_size
        self._sendings: dict[str, _Sending] = {}
        self._unready: list[tuple[SendMode, Transfer]] = []
        self._to_hold: list[tuple[_Sending, SendStep]] = []
        self._held: dict[str, _Sending] = {}

    def withdraw(self, request_ids: Iterable[str]) -> None:
        """Take back what has not left: vLLM is about to overwrite these requests' blocks."""
        withdrawn: list[tuple[_Sending, _Chunk]] = []
        for request_id in request_ids:
            sending = self._sendings.get(request_id)
            if sending is not None and self._is_usable(sending):
                withdrawn += ((sending, chunk) for chunk in _take_back(sending))
        for _, chunk in withdrawn:
            chunk.transfer.cancel("preempted")
        deadline = time.monotonic() + WITHDRAW_SECONDS
        for sending, chunk in withdrawn:
            if not chunk.transfer.wait_released(deadline - time.monotonic()):
                # Its bytes may be torn: nobody must take them for the request's KV.
                self._fail(sending, "preempted while its blocks were being read")

    def start_step(self, steps: Iterable[SendStep]) -> None:
        """Offer what this step's forward will complete; bytes move after `finish_step` only."""
        for step in steps:
            party = step.party
            sending = self._sendings.setdefault(party.request_id, _Sending(party))
            if not self._is_usable(sending):
                continue
            is_last = step.num_computed_tokens == party.num_tokens
            end = len(step.block_ids) if is_last else step.num_computed_tokens // self._block_size
            if end <= sending.cursor:
                continue
            if party.send_type is not SendMode.GET:
                self._send(sending, step, end)
            elif is_last:
                self._to_hold.append((sending, step))

    def finish_step(self) -> None:
        """After the forward: let the bytes move. PUT waits until they have left."""
        for _, transfer in self._unready:
            self._engine.mark_ready(transfer)
        for sending, step in self._to_hold:
            self._hold(sending, step)
        blocking = [transfer for mode, transfer in self._unready if mode is SendMode.PUT]
        self._unready, self._to_hold = [], []
        deadline = time.monotonic() + self._engine.config.transfer_timeout_seconds
        for transfer in blocking:
            if not transfer.wait_released(deadline - time.monotonic()):
                logger.warning("PUT is not over at its deadline: key=%s", transfer.key)

    def end(self, ended: Iterable[EndedSend]) -> None:
        """Take note that requests have finished; report the held ones when all has left."""
        for item in ended:
            party = item.party
            sending = self._sendings.pop(party.request_id, None) or _Sending(party)
            if item.failure is not None:
                self._give_up(sending, item.failure)
            if item.is_held:
                self._held[party.request_id] = sending

    def take_released(self) -> set[str]:
        """Return the held requests whose blocks are free now; each exactly once."""
        released = {name for name, sending in self._held.items() if sending.is_released}
        for request_id in released:
            self._is_usable(self._held.pop(request_id))
        return released

    def _send(self, sending: _Sending, step: SendStep, end: int) -> None:
        party, first = sending.party, sending.cursor
        source = PagedSource(self._cache, step.block_ids[first:end], first, party.num_tokens)
        peer = InstanceAddress(party.peer or "")
        try:
            transfer = self._engine.send(
                party.key, peer, source, binding=party.binding, ready=False
            )
        except P2pError as error:
            self._fail(sending, str(error))
            return
        sending.chunks.append(_Chunk(end, transfer))
        self._unready.append((party.send_type, transfer))

    def _hold(self, sending: _Sending, step: SendStep) -> None:
        party = sending.party
        source = PagedSource(self._cache, step.block_ids, 0, party.num_tokens)
        try:
            transfer = self._engine.hold(party.key, source, binding=party.binding)
        except P2pError as error:
            self._fail(sending, str(error))
            return
        sending.chunks.append(_Chunk(len(step.block_ids), transfer))

    def _is_usable(self, sending: _Sending) -> bool:
        """Whether the request's KV can still arrive; the first time that it cannot, say so."""
        if not sending.failed and sending.error is not None:
            self._fail(sending, str(sending.error))
        return not sending.failed

    def _fail(self, sending: _Sending, reason: str) -> None:
        logger.warning("send failed: request=%s reason=%s", sending.party.request_id, reason)
        self._give_up(sending, reason)

    def _give_up(self, sending: _Sending, reason: str) -> None:
        """Let nothing more of a request leave, and tell the peer."""
        party, error = sending.party, sending.error
        has_told, sending.failed = sending.failed, True
        for chunk in sending.chunks:
            if not chunk.transfer.released:
                chunk.transfer.cancel(reason)
        if has_told or isinstance(error, KNOWN_TO_PEER):
            return
        peer = InstanceAddress(party.peer) if party.peer is not None else None
        try:
            self._engine.abandon(party.key, peer, reason)
        except P2pError as failure:
            logger.info("peer not told: request=%s error=%s", party.request_id, failure)


def _take_back(sending: _Sending) -> list[_Chunk]:
    """Move the cursor back to the first block that has not left; return the chunks given up."""
    chunks = sending.chunks
    num_left = next((i for i, chunk in enumerate(chunks) if not chunk.has_left), len(chunks))
    sending.chunks, dropped = chunks[:num_left], chunks[num_left:]
    return [chunk for chunk in dropped if not chunk.transfer.released]
