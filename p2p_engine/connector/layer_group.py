"""One group of layers, as the two halves know it: which of its blocks a request needs, and where
they are on this rank. Nothing here needs vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from p2p_engine.connector.host_buffer import Staging
from p2p_engine.memory.paged import PagedCache

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import AttentionSpec  # noqa: TC004  # nobody evaluates it

NULL_BLOCK = 0  # vLLM's stand-in for blocks behind a window


@dataclass(frozen=True)
class LayerGroup:
    """One group: its layers on this rank, and the `window` of tokens that they look back at.

    A window of 0 is all tokens. With one, vLLM frees the blocks that lie behind it. `table` is the
    place of its block table among vLLM's.
    """

    number: int
    layer_names: tuple[str, ...]
    spec: AttentionSpec
    window: int = 0
    table: int = 0
    is_draft: bool = False

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.spec.block_size

    def first_block(self, num_tokens: int) -> int:
        """Return the first block that the last of these tokens attends to."""
        return max(0, num_tokens - self.window) // self.block_size if self.window else 0

    def num_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks for these tokens; the last one may be partial."""
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True)
class GroupCache:
    """A group's blocks on this rank: the engine reads and fills `cache`; `staging` lends its blocks
    for vLLM's. `layer_names` are those of the cache's layers, in its order."""

    group: LayerGroup
    cache: PagedCache
    staging: Staging
    layer_names: tuple[str, ...] = ()
