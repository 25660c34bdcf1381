"""Usage: how many tokens were cached and answered. Decode reports the whole prompt as cached;
prefill's count is the true one."""

from __future__ import annotations

import re

# Quotes inside a text are escaped, so these bytes can only be the key itself.
_KEY = b'"cached_tokens":'
_NUMBER = re.compile(rb'("cached_tokens": ?)\d+(?!\d)')
# The key, and a number that may continue in the next piece.
_OPEN_END = re.compile(rb'"cached_tokens": ?\d*\Z')

_ANSWERED = re.compile(rb'"completion_tokens": ?(\d{1,9})(?!\d)')
# Events of a stream that bring no token: the role, the usage, and the end.
_OTHER_EVENTS = 3


def tokens_in_answer(body: bytes) -> int:
    """Return how many tokens a whole answer says that it has; 0 if it does not say."""
    found = _ANSWERED.search(body, max(0, body.rfind(b'"usage"')))
    return int(found[1]) if found is not None else 0


def tokens_in_stream(num_events: int) -> int:
    """Return how many tokens so many events have brought at least."""
    return max(0, num_events - _OTHER_EVENTS)


class CachedTokens:
    """Replaces decode's count by prefill's, in JSON or events that arrive in pieces.

    Other bytes pass unchanged and at once. Only the end of a piece that may be part of the key or
    the number is held until the next piece or `finish`.
    """

    def __init__(self, num_tokens: int) -> None:
        self._new = rb"\g<1>%d" % num_tokens
        self._held = b""

    def feed(self, piece: bytes) -> bytes:
        """Return the bytes that can be forwarded now."""
        whole = self._held + piece
        end = _open_end(whole)
        self._held = whole[end:]
        return self._replace(whole[:end])

    def finish(self) -> bytes:
        """Return the bytes that were held."""
        held, self._held = self._held, b""
        return self._replace(held)

    def _replace(self, content: bytes) -> bytes:
        return _NUMBER.sub(self._new, content) if _KEY in content else content


def _open_end(content: bytes) -> int:
    """Return where a possible beginning of the key and its number starts, or the length."""
    if (match := _OPEN_END.search(content, max(0, len(content) - 64))) is not None:
        return match.start()
    sizes = range(min(len(_KEY) - 1, len(content)), 0, -1)
    size = next((size for size in sizes if content.endswith(_KEY[:size])), 0)
    return len(content) - size
