"""Breaker: keeps requests away from an instance whose legs of one role fail in a row; pure."""

from __future__ import annotations


class Breaker:
    """Closed until `max_failures` in a row; then open for `pause_seconds`; then half open: one leg
    is let through, and its end closes the breaker or opens it again.

    What the client has done wrong is no failure, and says nothing about the instance either.
    """

    def __init__(self, max_failures: int = 5, pause_seconds: float = 30.0) -> None:
        self._max_failures = max_failures
        self._pause_seconds = pause_seconds
        self._num_failures = 0
        self._opens_at: float | None = None
        self._has_probe = False

    def allows(self, now: float) -> bool:
        """Tell whether a leg may be begun."""
        return self.state(now) != "open" and not self._has_probe

    def state(self, now: float) -> str:
        """Return `closed`, `open` or `half_open`."""
        if self._opens_at is None:
            return "closed"
        return "half_open" if now >= self._opens_at else "open"

    def begin(self) -> bool:
        """Note a leg that begins; return whether it is the one that decides."""
        is_probe = self._opens_at is not None and not self._has_probe
        self._has_probe |= is_probe
        return is_probe

    def recover(self) -> None:
        """Note an answer that has begun well: others may follow, but one failure is enough now."""
        if self._opens_at is not None:
            self._opens_at, self._has_probe = None, False
            self._num_failures = self._max_failures - 1

    def succeed(self) -> None:
        """Note a leg that ended well."""
        self._opens_at, self._has_probe, self._num_failures = None, False, 0

    def fail(self, now: float) -> None:
        """Note a leg that the instance failed."""
        self._num_failures += 1
        if self._num_failures >= self._max_failures:
            self._opens_at, self._has_probe = now + self._pause_seconds, False

    def give_up(self) -> None:
        """Note that the deciding leg ended without a verdict: the next one decides."""
        self._has_probe = False
