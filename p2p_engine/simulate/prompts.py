"""The prompts of a request, and the KV that a made-up model computes from each. Pure."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from p2p_engine.memory.paged import PagedCache
from p2p_engine.wire.identity import digest_of
from p2p_engine.wire.messages import CacheSpec

Words = npt.NDArray[np.uint64]

BYTES_PER_TOKEN = 4
BLOCK_TOKENS = 16
_BLOCK_BYTES = BLOCK_TOKENS * BYTES_PER_TOKEN
_WORD_BYTES = 8


@dataclass(frozen=True)
class SimulatedPrompt:
    """One prompt; four of its bytes are a token."""

    content: bytes

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens, at least one."""
        return max(1, -(-len(self.content) // BYTES_PER_TOKEN))

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks of its KV; the last one is rarely full."""
        return -(-self.num_tokens // BLOCK_TOKENS)


def read_prompts(asked: Mapping[str, Any]) -> list[SimulatedPrompt]:
    """Return the prompts of a request: texts, token ids, or several of either; or a conversation.

    Raises:
        ValueError: there is none, or it has another type.
    """
    for name in ("messages", "input"):
        if name in asked:
            return [SimulatedPrompt(json.dumps(asked[name]).encode())]
    given = asked.get("prompt")
    if isinstance(given, list) and given and not isinstance(given[0], int):
        return [_read_prompt(one) for one in given]
    return [_read_prompt(given)]


def _read_prompt(given: Any) -> SimulatedPrompt:
    if isinstance(given, str):
        return SimulatedPrompt(given.encode())
    if isinstance(given, list) and given and all(isinstance(token, int) for token in given):
        return SimulatedPrompt(np.array(given, np.uint32).tobytes())
    raise ValueError("`prompt` is neither a text nor a list of token ids")


@dataclass(frozen=True)
class MadeUpModel:
    """The geometry of the KV: layers and bytes. Each word depends on all tokens before it."""

    name: str
    num_layers: int = 2
    kv_bytes_per_token: int = 1024

    @property
    def page_bytes(self) -> int:
        """Return the words of one layer of one block."""
        nbytes = self.kv_bytes_per_token * BLOCK_TOKENS // self.num_layers
        return max(_WORD_BYTES, nbytes // _WORD_BYTES * _WORD_BYTES)

    @property
    def spec(self) -> CacheSpec:
        """Return the cache description on which peers must agree."""
        return CacheSpec(
            identity=digest_of({"model": self.name}),
            dtype="uint64",
            block_size=BLOCK_TOKENS,
            num_kv_heads=1,
            head_size=self.page_bytes // BLOCK_TOKENS,
            layer_cuts=(0, self.num_layers),
            page_bytes=[self.page_bytes] * self.num_layers,
        )

    def compute(self, prompt: SimulatedPrompt) -> Words:
        """Return the KV of a prompt: uint64[layer, block, word]."""
        seeds, seed = [], 0
        for start in range(0, prompt.num_blocks * _BLOCK_BYTES, _BLOCK_BYTES):
            seed = zlib.crc32(prompt.content[start : start + _BLOCK_BYTES], seed)
            seeds.append(seed + 1)  # never zero, the value of unwritten memory
        words = np.arange(self.page_bytes // _WORD_BYTES, dtype=np.uint64)
        layers = np.arange(self.num_layers, dtype=np.uint64)[:, None, None] << np.uint64(24)
        blocks = np.array(seeds, np.uint64)[None, :, None] << np.uint64(31)
        computed: Words = blocks + layers + words
        return computed

    def blank(self, prompt: SimulatedPrompt) -> Words:
        """Return memory for the KV of a prompt that another instance computes."""
        shape = (self.num_layers, prompt.num_blocks, self.page_bytes // _WORD_BYTES)
        return np.zeros(shape, np.uint64)

    def cache(self, memory: Words) -> PagedCache:
        """Return this memory as a paged cache of one request."""
        pages = np.full(self.num_layers, self.page_bytes, np.int64)
        starts = np.arange(self.num_layers, dtype=np.int64) * memory.strides[0]
        num_blocks = memory.shape[1]
        return PagedCache(memory.ctypes.data + starts, pages, pages, num_blocks, self.spec)
