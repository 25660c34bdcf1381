"""Binding: what a content's KV was computed of: a digest of the prompt, and the weights' name.

Two contents of one name and other bindings are never joined. The weights' name can be read, so a
peer that has other weights says so at once, and by name.
"""

from __future__ import annotations

import hashlib
import secrets

PROMPT_BYTES = 16  # of the digest
MAX_NAME_BYTES = 47  # what a binding has room for
NO_NAME = "unknown-"  # how a name begins that equals no other
_MARK = b"@"
_DIGITS = 12


def bind(prompt: bytes, weights: str) -> bytes:
    """Return the binding of a prompt's digest, of PROMPT_BYTES, and a name from `short_name`."""
    return prompt + _MARK + weights.encode()


def weights_in(binding: bytes) -> str:
    """Return the name of the weights in a binding; "" if it has none."""
    if binding[PROMPT_BYTES : PROMPT_BYTES + 1] != _MARK:
        return ""
    return binding[PROMPT_BYTES + 1 :].decode(errors="replace")


def prompt_in(binding: bytes) -> bytes:
    """Return a binding without the name of the weights, if it has one."""
    return binding[:PROMPT_BYTES] if weights_in(binding) else binding


def renamed(binding: bytes, weights: str) -> bytes:
    """Return the binding of the same prompt, and of these weights."""
    return bind(binding[:PROMPT_BYTES], weights)


def no_name() -> str:
    """Return a name that equals no other."""
    return f"{NO_NAME}{secrets.token_hex(8)}"


def short_name(name: str) -> str:
    """Return a name of weights that a binding has room for: of a longer one its beginning, and a
    digest."""
    encoded = name.encode(errors="replace")
    if len(encoded) <= MAX_NAME_BYTES:
        return encoded.decode()
    digest = hashlib.blake2b(encoded, digest_size=_DIGITS // 2).hexdigest()
    kept = encoded[: MAX_NAME_BYTES - _DIGITS - 1].decode(errors="ignore")
    return f"{kept}~{digest}"
