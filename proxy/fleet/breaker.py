"""Breaker: keeps legs of a role away from an instance after several failures in a row; pure."""

from __future__ import annotations


class Breaker:
    """A circuit breaker with the states closed, open and half open.

    It opens after `max_failures` in a row. After `pause_seconds` it is half open and lets one leg
    through: the leg's end closes the breaker or opens it again. Errors of the client do not count,
    and say nothing about the instance.
    """

    def __init__(self, max_failures: int = 5, pause_seconds: float = 30.0) -> None:
        self._max_failures = max_failures
        self._pause_seconds = pause_seconds
        self._num_failures = 0
        self._opens_at: float | None = None
        self._has_probe = False

    def allows(self, now: float) -> bool:
        """Tell whether a leg may start."""
        return not self._has_probe and (self._opens_at is None or now >= self._opens_at)

    def state(self, now: float) -> str:
        """Return `closed`, `open` or `half_open`."""
        if self._opens_at is None:
            return "closed"
        return "half_open" if now >= self._opens_at else "open"

    def seconds_open(self, now: float) -> float:
        """Return the seconds until it is half open; 0 if it is, or is closed."""
        return 0.0 if self._opens_at is None else max(0.0, self._opens_at - now)

    def begin(self) -> bool:
        """Record the start of a leg; return whether it is the trial leg of a half-open breaker."""
        is_probe = self._opens_at is not None and not self._has_probe
        self._has_probe |= is_probe
        return is_probe

    def recover(self) -> None:
        """Record an answer that has begun well: close the breaker, but one more failure opens it
        again."""
        if self._opens_at is not None:
            self._opens_at, self._has_probe = None, False
            self._num_failures = self._max_failures - 1

    def succeed(self) -> None:
        """Record a success."""
        self._opens_at, self._has_probe, self._num_failures = None, False, 0

    def fail(self, now: float) -> None:
        """Record a failure of the instance."""
        self._num_failures += 1
        if self._num_failures >= self._max_failures:
            self._opens_at, self._has_probe = now + self._pause_seconds, False

    def give_up(self) -> None:
        """Record that the trial leg ended without a verdict; the next leg is the trial."""
        self._has_probe = False
