"""Usage: how many tokens were cached and answered. Decode reports the whole prompt as cached;
prefill's count is the true one."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# The end of a piece that may be part of a key and its number.
_MAX_OPEN_BYTES = 64
_ANSWERED = re.compile(rb'"(?:completion|output)_tokens": ?(\d{1,9})(?!\d)')
_USAGE = b'"usage":'
_MAX_USAGE_BYTES = 64 << 10  # what follows it in an answer is small
# What marks an event that brings tokens, where events have names.
_NAMED_EVENT = b"delta\ndata:"
# Events of a stream that bring no token: the role, the usage, and the end.
_OTHER_EVENTS = 3


def tokens_in_answer(body: bytes) -> int:
    """Return how many tokens a whole answer says that it has; 0 if it does not say."""
    found = _ANSWERED.search(body, max(0, body.rfind(b'"usage"')))
    return int(found[1]) if found is not None else 0


def num_events(piece: bytes, *, are_named: bool) -> int:
    """Return how many events of a piece may bring tokens."""
    return piece.count(_NAMED_EVENT if are_named else b"\n\n")


def tokens_in_stream(num_seen: int) -> int:
    """Return how many tokens so many events have brought at least."""
    return max(0, num_seen - _OTHER_EVENTS)


class CachedTokens:
    """Replaces decode's counts by prefill's, in JSON or events that arrive in pieces.

    Quotes inside a text are escaped, so what looks like a key can only be the key itself.

    Other bytes pass unchanged and at once. Only the end of a piece that may be part of the key or
    the number is held until the next piece or `finish`.
    """

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = {name.encode(): b"%d" % number for name, number in counts.items()}
        self._keys = [b'"%b":' % name for name in self._counts]
        names = b"|".join(self._counts)
        self._number = re.compile(rb'"(%b)": ?(\d+)(?!\d)' % names)
        # A key, and a number that may continue in the next piece.
        self._open_number = re.compile(rb'"(?:%b)": ?\d*\Z' % names)
        self._held = b""

    def feed(self, piece: bytes) -> bytes:
        """Return the bytes that can be forwarded now."""
        whole = self._held + piece
        end = self._open_end(whole)
        self._held = whole[end:]
        return self._replace(whole[:end])

    def finish(self) -> bytes:
        """Return the bytes that were held."""
        held, self._held = self._held, b""
        return self._replace(held)

    def _replace(self, content: bytes) -> bytes:
        has_key = any(key in content for key in self._keys)
        return self._number.sub(self._replaced, content) if has_key else content

    def _replaced(self, found: re.Match[bytes]) -> bytes:
        return found[0].removesuffix(found[2]) + self._counts[found[1]]

    def _open_end(self, content: bytes) -> int:
        """Return where a possible beginning of a key and its number starts, or the length."""
        last = max(0, len(content) - _MAX_OPEN_BYTES)
        if (match := self._open_number.search(content, last)) is not None:
            return match.start()
        quote = content.rfind(b'"', last)
        if content.endswith(b'"') and (before := content.rfind(b'"', last, quote)) >= 0:
            quote = before if self._may_begin(content[before:]) else quote
        return quote if quote >= 0 and self._may_begin(content[quote:]) else len(content)

    def _may_begin(self, end: bytes) -> bool:
        return any(key.startswith(end) for key in self._keys)


class CountsAtEnd(CachedTokens):
    """The same for a whole answer with JSON of the model's or the client's, which may look like a
    count: only what is behind the last `usage` is replaced, and held until the end."""

    def feed(self, piece: bytes) -> bytes:
        """Return the bytes that can be forwarded now."""
        whole = self._held + piece
        end = whole.rfind(_USAGE)
        if end < 0 or len(whole) - end > _MAX_USAGE_BYTES:
            end = max(0, len(whole) - len(_USAGE))
        self._held = whole[end:]
        return whole[:end]
