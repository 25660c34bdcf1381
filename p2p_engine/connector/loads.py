"""Loads: on one rank, the KV that comes into vLLM's blocks, from the order to its one report."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from p2p_engine.config import SendMode
from p2p_engine.connector.metadata import Load, Party
from p2p_engine.errors import P2pError
from p2p_engine.paged import PagedCache, PagedSink
from p2p_engine.peers import InstanceAddress
from p2p_engine.transfer import Transfer

if TYPE_CHECKING:
    from p2p_engine.engine import P2pNcclEngine

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Loading:
    """One request whose blocks belong to the engine until its transfer is done."""

    load: Load
    sink: PagedSink
    transfer: Transfer | None  # None: the engine refused it at once
    error: P2pError | None = None
    is_cancelled: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether no byte of its blocks can be written any more."""
        return self.transfer is None or self.transfer.done


@dataclass
class LoadResults:
    """What has ended since the last look, in vLLM's terms."""

    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    invalid_block_ids: set[int] = field(default_factory=set)


class Loads:
    """All requests that this rank loads."""

    def __init__(
        self, engine: P2pNcclEngine, cache: PagedCache, *, can_fail_requests: bool
    ) -> None:
        """`can_fail_requests`: vLLM takes failed requests beside invalid blocks (since 0.30)."""
        self._engine = engine
        self._cache = cache
        self._can_fail_requests = can_fail_requests
        self._loading: dict[str, _Loading] = {}

    def start(self, loads: Iterable[Load]) -> None:
        """Give blocks to the engine, to be filled."""
        for load in loads:
            party = load.party
            sink = PagedSink(self._cache, load.block_ids, load.first_block, party.num_tokens)
            loading = _Loading(load, sink, None)
            try:
                loading.transfer = self._engine.receive(
                    party.key,
                    sink,
                    binding=party.binding,
                    peer=self._peer(party),
                    pull=party.send_type is SendMode.GET,
                )
            except P2pError as error:
                loading.error = error
            self._loading[party.request_id] = loading

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Stop; each is still reported, once no byte can land in its blocks any more."""
        for request_id in request_ids:
            loading = self._loading.get(request_id)
            if loading is not None:  # else it was reported while the cancellation was on its way
                loading.is_cancelled = True
                if loading.transfer is not None:
                    loading.transfer.cancel("the request ended")

    def discard(self, parties: Iterable[Party]) -> None:
        """Say that these will not be loaded, so that nobody keeps their KV."""
        for party in parties:
            try:
                self._engine.discard(
                    party.key,
                    binding=party.binding,
                    peer=self._peer(party),
                    pull=party.send_type is SendMode.GET,
                )
            except P2pError as error:
                logger.info("not discarded: request=%s error=%s", party.request_id, error)

    def take_results(self) -> LoadResults:
        """Return what has ended, each request exactly once."""
        results = LoadResults()
        ended = [loading for loading in self._loading.values() if loading.has_ended]
        for loading in ended:
            request_id = loading.load.party.request_id
            del self._loading[request_id]
            results.finished.add(request_id)
            error = loading.transfer.error if loading.transfer is not None else loading.error
            if error is not None and not loading.is_cancelled:
                logger.warning("load failed: request=%s error=%s", request_id, error)
                self._add_failure(results, loading)
        return results

    def _add_failure(self, results: LoadResults, loading: _Loading) -> None:
        """Name the missing blocks, so that a good prefix survives; without one, the request."""
        load, missing = loading.load, loading.sink.missing_blocks()
        if not len(missing):  # it failed all the same: trust none of it
            missing = load.block_ids
        has_prefix = load.first_block > 0 or missing[0] != load.block_ids[0]
        if self._can_fail_requests and not has_prefix:
            results.failed.add(load.party.request_id)
        else:
            results.invalid_block_ids.update(missing.tolist())

    def _peer(self, party: Party) -> InstanceAddress | None:
        return InstanceAddress(party.peer) if party.peer is not None else None
