"""BodyMemory: how many bytes of requests the proxy keeps at a time, in all."""

from __future__ import annotations

# So much of each request is not counted: small requests are taken however many large ones there
# are. Their number is bounded by that of the connections.
FREE_BYTES = 64 << 10


class BodyMemory:
    """Counts what is kept of large bodies. Invariant: num_bytes <= max_bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0


class Keep:
    """What is kept of one body; `free` it when it is not needed any more."""

    __slots__ = ("_memory", "_num_bytes")

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self._num_bytes = 0

    def grow_to(self, num_bytes: int) -> bool:
        """Count that so many bytes have come in all; return whether there is room for them."""
        more = max(0, num_bytes - FREE_BYTES) - self._num_bytes
        if more > self._memory.max_bytes - self._memory.num_bytes:
            return False
        self._num_bytes += more
        self._memory.num_bytes += more
        return True

    def free(self) -> None:
        """Count the body no longer; idempotent."""
        self._memory.num_bytes -= self._num_bytes
        self._num_bytes = 0
