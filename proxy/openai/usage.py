"""Usage: after the split, decode has "cached" the whole prompt; prefill knows what really was."""

from __future__ import annotations

import re

# Inside a text, the quotes would be escaped: these bytes can only be the key itself.
_KEY = b'"cached_tokens":'
_NUMBER = re.compile(rb'("cached_tokens": ?)\d+(?!\d)')
# The key, and a number that may go on in the next piece.
_OPEN_END = re.compile(rb'"cached_tokens": ?\d*\Z')


class CachedTokens:
    """Puts prefill's number in the place of decode's, in JSON or events that come in pieces.

    Everything else passes as it is, at once; only a piece's end that may be the beginning of the
    number is held back until the next piece or `finish`.
    """

    def __init__(self, num_tokens: int) -> None:
        self._new = rb"\g<1>%d" % num_tokens
        self._held = b""

    def feed(self, piece: bytes) -> bytes:
        """Return what may go on now."""
        whole = self._held + piece
        end = _open_end(whole)
        self._held = whole[end:]
        return self._replace(whole[:end])

    def finish(self) -> bytes:
        """Return what was held back."""
        held, self._held = self._held, b""
        return self._replace(held)

    def _replace(self, content: bytes) -> bytes:
        return _NUMBER.sub(self._new, content) if _KEY in content else content


def _open_end(content: bytes) -> int:
    """Return where the end begins that may be a part of the key and its number."""
    if (match := _OPEN_END.search(content, max(0, len(content) - 64))) is not None:
        return match.start()
    sizes = range(min(len(_KEY) - 1, len(content)), 0, -1)
    size = next((size for size in sizes if content.endswith(_KEY[:size])), 0)
    return len(content) - size
