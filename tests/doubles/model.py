"""Double of a model: what it writes to the KV cache and what it reads there is exact.

The cache holds what only the right tokens at the right positions give, and each next token follows
from all that lies in the cache. So a block that did not arrive, or arrived wrong, changes the
tokens, as it would in a real model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

BLOCK = 16
NUM_LAYERS = 2
VOCABULARY = 1000


class ModelDouble:
    """The caches of one instance's layers, and the model that uses them."""

    def __init__(self, num_blocks: int) -> None:
        shape = (num_blocks, 1, BLOCK, 2)  # blocks, heads, tokens, key and value
        self._caches = [torch.zeros(shape) for _ in range(NUM_LAYERS)]
        names = [f"layers.{index}" for index in range(NUM_LAYERS)]
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.kv_caches = dict(zip(names, self._caches, strict=True))
        self.kv_cache_config = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(names, spec)],
        )

    def write(self, block_ids: Sequence[int], tokens: Sequence[int], places: Iterable[int]) -> None:
        """Compute the KV of the tokens at these places of a request."""
        for place in places:
            for layer, cache in enumerate(self._caches):
                cache[block_ids[place // BLOCK], 0, place % BLOCK] = _kv(
                    tokens[place], place, layer
                )

    def next_token(self, block_ids: Sequence[int], num_tokens: int) -> int:
        """Attend to everything that the cache holds for a request's first tokens."""
        total = 0.0
        for layer, cache in enumerate(self._caches):
            for place in range(num_tokens):
                kv = cache[block_ids[place // BLOCK], 0, place % BLOCK]
                total += float(kv.sum()) * (place + 7 * layer + 1)
        return int(total % VOCABULARY)

    def holds(self, block_ids: Sequence[int], tokens: Sequence[int], places: Iterable[int]) -> bool:
        """Whether these places of a request's blocks hold the KV of its tokens there."""
        return all(
            torch.equal(
                cache[block_ids[place // BLOCK], 0, place % BLOCK], _kv(tokens[place], place, layer)
            )
            for place in places
            for layer, cache in enumerate(self._caches)
        )


def _kv(token: int, place: int, layer: int) -> torch.Tensor:
    """The key and value of a token: exact in float32, and of no other token, place or layer."""
    return torch.tensor([token * 1024 + place, -token - 1024 * (layer + 1)], dtype=torch.float32)
