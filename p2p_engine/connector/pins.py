"""Pins: references of our own to blocks of windows that are being sent.

vLLM frees what lies behind a window as soon as the next token cannot see it, also while the request
goes on and before it asks the connector at the end. The prompt's last token, which the decode side
computes again, sees one token more: where that token ends a block, this block would go to the next
request while it is being sent. vLLM's block pool counts references for such use (its Mooncake store
connector does the same).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from p2p_engine.connector.layer_group import NULL_BLOCK

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class Pins:
    """The pinned blocks of each request, with one reference to each block for each request."""

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._pinned: dict[str, dict[int, KVCacheBlock]] = {}

    def bind(self, pool: BlockPool) -> None:
        """Use this pool; vLLM binds it before its first step."""
        self._pool = pool

    def __len__(self) -> int:
        return len(self._pinned)

    def pin(self, request_id: str, block_ids: Iterable[int]) -> None:
        """Pin these blocks for a request, in addition to earlier ones."""
        assert self._pool is not None, "vLLM binds its block pool before its first step"
        known = self._pinned.setdefault(request_id, {})
        wanted = dict.fromkeys(block_ids)
        added = [self._pool.blocks[n] for n in wanted if n != NULL_BLOCK and n not in known]
        self._pool.touch(added)
        known.update((block.block_id, block) for block in added)

    def release(self, request_id: str) -> None:
        """Unpin a request's blocks; does nothing if it has none."""
        pinned = self._pinned.pop(request_id, None)
        if pinned and self._pool is not None:  # from the end: a prefix is reused last
            self._pool.free_blocks(reversed(pinned.values()))
