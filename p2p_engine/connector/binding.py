"""The binding of a transfer: a digest of all that decides what its KV must be.

Two requests of one name and different content have different bindings, so that they can never take
each other's KV: neither a duplicate id, nor a replay, nor two chat templates.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

DIGEST_BYTES = 16


def binding_of(request: Request, model: str, *, is_salted: bool = True) -> bytes:
    """Digest the prompt's tokens, the LoRA adapter, the media and the cache salt.

    If not `is_salted`, the salt is left out: this is the binding of KV that was computed behind
    none.
    """
    lora = request.lora_request.lora_name if request.lora_request is not None else None
    media = [
        (item.identifier, item.mm_position.offset, item.mm_position.length)
        for item in request.mm_features
    ]
    context = (model, lora, request.cache_salt if is_salted else None, media)
    digest = hashlib.blake2b(repr(context).encode(), digest_size=DIGEST_BYTES)
    digest.update(array("q", request.prompt_token_ids or ()).tobytes())
    return digest.digest()
