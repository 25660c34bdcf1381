"""The binding of a transfer: a digest of the prompt, and the name of the weights.

Two requests of one name and different content have different bindings, so that they can never take
each other's KV: neither a duplicate id, nor a replay, nor two chat templates.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

from p2p_engine.wire.bindings import PROMPT_BYTES, bind

if TYPE_CHECKING:
    from vllm.v1.request import Request


def binding_of(
    request: Request,
    weights: str,
    adapter: str,
    num_tokens: int | None = None,
    *,
    is_salted: bool = True,
) -> bytes:
    """Digest the prompt's tokens, the LoRA adapter, the media and the cache salt, beside the name
    of the weights; of the prompt that its first `num_tokens` are, if any are given. `adapter` names
    the adapter's weights.

    If not `is_salted`, the salt is left out: this is the binding of KV that was computed behind
    none.
    """
    tokens = (request.prompt_token_ids or ())[:num_tokens]
    digest = _context(request, adapter, len(tokens), is_salted=is_salted)
    digest.update(array("q", tokens).tobytes())
    return bind(digest.digest(), weights)


def bindings_at(
    request: Request, weights: str, adapter: str, ends: Iterable[int], *, is_salted: bool = True
) -> dict[int, bytes]:
    """Return the bindings of prompts that are the first tokens of this request, its answer
    included, by their lengths, in order. The request has no media."""
    digest, done, found = _context(request, adapter, 0, is_salted=is_salted), 0, {}
    for end in sorted(ends):
        digest.update(array("q", request.all_token_ids[done:end]).tobytes())
        found[end], done = bind(digest.digest(), weights), end
    return found


def _context(
    request: Request, adapter: str, num_tokens: int, *, is_salted: bool
) -> hashlib.blake2b:
    lora = (request.lora_request.lora_name, adapter) if request.lora_request is not None else None
    media = [
        (item.identifier, item.mm_position.offset, item.mm_position.length)
        for item in request.mm_features
        if item.mm_position.offset < num_tokens
    ]
    context = (lora, request.cache_salt if is_salted else None, media)
    return hashlib.blake2b(repr(context).encode(), digest_size=PROMPT_BYTES)
