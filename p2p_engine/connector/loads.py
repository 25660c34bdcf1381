"""Loads: receives KV into one group's blocks on one rank, from the order to the report."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from p2p_engine.config import SendMode
from p2p_engine.connector.orders import BlockRange, Int64s, Load, Party
from p2p_engine.errors import P2pError, TransferRejected, TransferTimeout, named
from p2p_engine.memory.paged import PagedSink
from p2p_engine.peers.link import InstanceAddress
from p2p_engine.transfer import Transfer, note_stage

if TYPE_CHECKING:
    from p2p_engine.connector.layer_group import GroupCache
    from p2p_engine.engine import P2pNcclEngine

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _LoadInProgress:
    """One request being loaded; its blocks, or host blocks, belong to the engine until the end."""

    party: Party
    blocks: BlockRange
    deadline: float  # for room in the host buffer
    places: Int64s | None = None  # where its blocks are filled; None: there was no room yet
    sink: PagedSink | None = None
    transfer: Transfer | None = None  # None: the engine has not begun, or refused it at once
    failure: P2pError | None = None
    is_cancelled: bool = False

    @property
    def has_ended(self) -> bool:
        """Tell whether no more bytes can be written to its blocks."""
        if self.transfer is not None:
            return self.transfer.done
        return self.failure is not None or self.is_cancelled

    @property
    def error(self) -> P2pError | None:
        """The reason of the failure; None also if the request was cancelled."""
        if self.is_cancelled:
            return None
        found = self.transfer.error if self.transfer is not None else None
        return self.failure or found

    @property
    def arrived(self) -> tuple[Int64s, Int64s]:
        """The blocks that have arrived: their places, and their ids."""
        block_ids = self.blocks.block_ids
        if self.places is None or self.sink is None:
            return block_ids[:0], block_ids[:0]
        is_here = ~np.isin(self.places, self.sink.missing_blocks())
        return self.places[is_here], block_ids[is_here]


@dataclass
class LoadResults:
    """The loads that ended since the last call, in vLLM's terms."""

    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    invalid_block_ids: set[int] = field(default_factory=set)


class Loads:
    """All requests that this rank loads, in one group."""

    def __init__(
        self,
        engine: P2pNcclEngine,
        cache: GroupCache,
        *,
        can_fail_requests: bool,
        names_lost_blocks: bool,
    ) -> None:
        """`can_fail_requests`: vLLM takes failed requests beside invalid blocks (since 0.30);
        `names_lost_blocks`: it can go on behind a good prefix."""
        self._engine = engine
        self._group = cache.group
        self._cache = cache.cache
        self._staging = cache.staging
        self._can_fail_requests = can_fail_requests
        self._names_lost_blocks = names_lost_blocks
        self._loading: dict[str, _LoadInProgress] = {}

    def keep(self, parties: Iterable[Party]) -> None:
        """Renew KV beyond its lease, here and at its sender, while its request waits for a slot."""
        for party in parties:
            if self._group.is_draft and party.peer is None:
                continue  # it is never loaded
            key, peer = party.key_of(self._group.number), self._peer(party)
            try:
                self._engine.keep(key, binding=party.binding, peer=peer)
            except P2pError as error:
                logger.info("not kept: request=%s error=%s", party.request_id, named(error))

    def drop(self, parties: Iterable[Party]) -> None:
        """Stop to renew KV: it was loaded, or will not be."""
        for party in parties:
            try:
                self._engine.drop(party.key_of(self._group.number), binding=party.binding)
            except P2pError as error:
                logger.info("not dropped: request=%s error=%s", party.request_id, named(error))

    def start(self, loads: Iterable[Load]) -> None:
        """Give blocks to the engine, to be filled."""
        deadline = time.monotonic() + self._engine.config.transfer_timeout_seconds
        for load in loads:
            party, blocks = load.party, load.ranges[self._group.table]
            loading = _LoadInProgress(party, blocks, deadline)
            self._loading[party.request_id] = loading
            if load.refusal:
                loading.failure = TransferRejected(load.refusal)
                self.discard([party])
            elif self._group.is_draft and party.peer is None:
                # Nobody can say whether they will come.
                self.cancel([party.request_id])
        self._begin()

    def _begin(self) -> None:
        """Begin loads in order while there is room; later ones wait, so that a large one cannot
        starve."""
        for loading in self._loading.values():
            if loading.places is not None or loading.has_ended:
                continue
            loading.places = self._staging.take(loading.blocks.block_ids)
            if loading.places is not None:
                self._receive(loading, loading.places)
            elif time.monotonic() >= loading.deadline:
                loading.failure = TransferTimeout("the host buffer was full for too long")
                self.discard([loading.party])
            else:
                return

    def _receive(self, loading: _LoadInProgress, places: Int64s) -> None:
        party, first_block = loading.party, loading.blocks.first_block
        note_stage(party.key, "receive begins")
        loading.sink = PagedSink(self._cache, places, first_block, party.num_tokens)
        lacks_held = first_block * self._group.block_size < party.held_tokens
        try:
            loading.transfer = self._engine.receive(
                party.key_of(self._group.number),
                loading.sink,
                binding=party.binding,
                peer=self._peer(party),
                pull=party.send_type is SendMode.GET or lacks_held,
                has_held=party.held_tokens > 0,
                is_promised=party.is_recalled,
            )
        except P2pError as error:
            loading.failure = error

    def cancel(self, request_ids: Iterable[str], reason: str = "the request ended") -> None:
        """Cancel loads. Each is still reported, once no byte can be written to its blocks."""
        for request_id in request_ids:
            loading = self._loading.get(request_id)
            if loading is None:  # it was reported while the cancellation was on its way
                continue
            loading.is_cancelled = True
            if loading.transfer is not None:
                loading.transfer.cancel(reason)
            elif loading.failure is None:
                self.discard([loading.party])

    def give_up(self, reason: str) -> None:
        """Fail all loads: what has come must not be used. Each is reported, once no byte can be
        written to its blocks."""
        for loading in self._loading.values():
            loading.failure = TransferRejected(reason)
            if loading.transfer is not None:
                loading.transfer.cancel(reason)
            elif not loading.is_cancelled:
                self.discard([loading.party])

    def discard(self, parties: Iterable[Party]) -> None:
        """Tell the engine that these will not be loaded, so that no one keeps their KV."""
        for party in parties:
            try:
                self._engine.discard(
                    party.key_of(self._group.number),
                    binding=party.binding,
                    peer=self._peer(party),
                    pull=party.send_type is SendMode.GET,
                )
            except P2pError as error:
                logger.info("not discarded: request=%s error=%s", party.request_id, named(error))

    def open_transfers(self) -> Iterator[Transfer]:
        """Yield what may be written to vLLM's blocks."""
        for loading in self._loading.values():
            if loading.transfer is not None:
                yield loading.transfer

    @property
    def is_awaited(self) -> bool:
        """Whether vLLM waits for a report from here."""
        return bool(self._loading)

    def take_results(self) -> LoadResults:
        """Return the loads that ended, each exactly once."""
        results = LoadResults()
        ended = [loading for loading in self._loading.values() if loading.has_ended]
        # What was given up, or never began, is of no use; asleep, the blocks have no memory.
        usable = [item for item in ended if not item.is_cancelled and item.failure is None]
        self._bring_over(usable)
        for loading in ended:
            request_id = loading.party.request_id
            note_stage(loading.party.key, "reported")
            del self._loading[request_id]
            results.finished.add(request_id)
            if loading.places is not None:
                self._staging.give_back(loading.places)
            if loading.error is not None and self._group.is_draft:
                logger.debug(
                    "draft not loaded: request=%s error=%s", request_id, named(loading.error)
                )
            elif loading.error is not None:
                logger.warning("load failed: request=%s error=%s", request_id, named(loading.error))
                self._add_failure(results, loading)
        self._begin()
        return results

    def _bring_over(self, ended: list[_LoadInProgress]) -> None:
        """Copy all KV that has arrived in host blocks into vLLM's blocks, in one operation."""
        if not ended or not self._staging.is_copy:
            return
        places, block_ids = zip(*(loading.arrived for loading in ended), strict=True)
        try:
            self._staging.load(np.concatenate(places), np.concatenate(block_ids))
        except P2pError as error:
            for loading in ended:
                loading.failure, loading.sink = error, None  # nothing of it is in place

    def _add_failure(self, results: LoadResults, loading: _LoadInProgress) -> None:
        """Name the missing blocks, so that a good prefix survives; without one, the request."""
        wanted, (_, arrived) = loading.blocks.block_ids, loading.arrived
        missing = wanted[~np.isin(wanted, arrived)]
        # Its sender may have given it up because what has left is out of date. And if all is here,
        # and it failed all the same, trust none of it.
        if isinstance(loading.error, TransferRejected) or not len(missing):
            missing = wanted
        has_prefix = loading.blocks.first_block > 0 or missing[0] != wanted[0]
        if self._can_fail_requests and not (has_prefix and self._names_lost_blocks):
            results.failed.add(loading.party.request_id)
        else:
            results.invalid_block_ids.update(missing.tolist())

    def _peer(self, party: Party) -> InstanceAddress | None:
        return InstanceAddress(party.peer) if party.peer is not None else None
