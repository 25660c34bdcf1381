"""One group of layers, as the two halves know it: which of its blocks a request needs, and where
they are on this rank. Nothing here needs vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from p2p_engine.connector.host_buffer import Staging
from p2p_engine.memory.paged import PagedCache

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import (  # noqa: TC004  # nobody evaluates them
        AttentionSpec,
        MambaSpec,
    )

NULL_BLOCK = 0  # vLLM's stand-in for blocks behind a window


@dataclass(frozen=True)
class LayerGroup:
    """One group: its layers on this rank, and the `window` of tokens that they look back at.

    A window of 0 is all tokens. With one, vLLM frees the blocks that lie behind it. `table` is the
    place of its block table among vLLM's.

    Layers that keep a state have one block for all tokens that were computed, the last of the
    table: to a peer it is block 0. `is_whole`: blocks move only as they are, between equal
    instances; so do all blocks beside states.
    """

    number: int
    layer_names: tuple[str, ...]
    spec: AttentionSpec | MambaSpec
    window: int = 0
    table: int = 0
    is_draft: bool = False
    is_state: bool = False
    is_whole: bool = False

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.spec.block_size

    def first_block(self, num_tokens: int) -> int:
        """Return the first block that the last of these tokens attends to."""
        return max(0, num_tokens - self.window) // self.block_size if self.window else 0

    def num_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks for these tokens; the last one may be partial."""
        return 1 if self.is_state else -(-num_tokens // self.block_size)

    def num_spare_blocks(self, num_speculative_tokens: int) -> int:
        """Return how many blocks vLLM may want beside those of a request's tokens.

        It wants slots for the next token, for those that it verifies, and for as many that a draft
        computes ahead. For a state, which goes with no speculation, it wants a block for a copy of
        a cached state that it goes on from, and one for a state that it is to cache.
        """
        if self.is_state:
            return 2
        return -(-(1 + 2 * num_speculative_tokens) // self.block_size)

    def num_full_blocks(self, num_tokens: int) -> int:
        """Return how many blocks will not change any more once these tokens are computed and more
        are to come."""
        return 0 if self.is_state else num_tokens // self.block_size

    def blocks_of(self, table: Sequence[int], num_tokens: int) -> Sequence[int]:
        """Return the blocks for these tokens, counted as a peer counts them."""
        end = -(-num_tokens // self.block_size)
        return table[end - 1 : end] if self.is_state else table[:end]


@dataclass(frozen=True)
class GroupCache:
    """A group's blocks on this rank: the engine reads and fills `cache`; `staging` lends its blocks
    for vLLM's. `layer_names` are those of the cache's layers, in its order."""

    group: LayerGroup
    cache: PagedCache
    staging: Staging
    layer_names: tuple[str, ...] = ()
