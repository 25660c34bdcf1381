"""Stashing: on one rank, copies one group's KV of finished requests into the engine's pool, where
it waits for the next turn of its session."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from p2p_engine.connector.orders import Stash
from p2p_engine.errors import P2pError, named
from p2p_engine.memory.paged import Beginning, PagedSource
from p2p_engine.transfer import Transfer

if TYPE_CHECKING:
    from p2p_engine.connector.layer_group import GroupCache
    from p2p_engine.engine import P2pNcclEngine
    from p2p_engine.wire.messages import TransferKey

logger = logging.getLogger(__name__)


class Stashing:
    """The stashes of one group. vLLM keeps the blocks of each until it is reported."""

    def __init__(self, engine: P2pNcclEngine, cache: GroupCache) -> None:
        self._engine = engine
        self._group = cache.group
        self._cache = cache.cache
        self._copying: dict[str, Transfer | None] = {}  # by request; None: refused
        # Until `take_ended`; a key may come again before.
        self._open: list[tuple[TransferKey, Transfer | None]] = []

    def start(self, stashes: Iterable[Stash]) -> None:
        """Begin to copy; what cannot be stashed is reported all the same."""
        for item in stashes:
            name, party = item.party.request_id, item.party
            transfer = None
            blocks = item.tables[self._group.table]
            size = self._group.block_size
            beginnings = {
                binding: Beginning(-(-end // size), end) for end, binding in item.marks.items()
            }
            try:
                transfer = self._engine.stash(
                    party.key_of(self._group.number),
                    PagedSource(self._cache, blocks, 0, party.num_tokens),
                    binding=party.binding,
                    beginnings=beginnings,
                    lease=item.seconds,
                )
            except P2pError as error:
                logger.warning("not stashed: request=%s error=%s", name, named(error))
            self._copying[name] = transfer
            self._open.append((party.key, transfer))

    def give_up(self, reason: str) -> None:
        """End all stashes."""
        for _, transfer in self._open:
            if transfer is not None:
                transfer.cancel(reason)

    def open_transfers(self) -> list[Transfer]:
        """Return what may be read from vLLM's blocks."""
        return [transfer for transfer in self._copying.values() if transfer is not None]

    @property
    def is_awaited(self) -> bool:
        """Whether vLLM waits for a report from here."""
        return bool(self._copying)

    def take_released(self) -> list[str]:
        """Return the requests whose blocks are no longer read; each exactly once."""
        over = [name for name, item in self._copying.items() if item is None or item.released]
        for name in over:
            del self._copying[name]
        return over

    def take_ended(self) -> list[TransferKey]:
        """Return the keys of which nothing is stashed any more, or was; each exactly once."""
        were_open, self._open, ended = self._open, [], []
        for key, transfer in were_open:
            if transfer is None or transfer.done:
                ended.append(key)
            else:
                self._open.append((key, transfer))
        return ended
