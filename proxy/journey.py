"""Journey: what happened to one request, from its arrival to its end however it ends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.routing import Pair

if TYPE_CHECKING:
    from proxy.errors import ProxyError
    from proxy.instances import Instance

logger = logging.getLogger("proxy.access")


@dataclass(eq=False)
class Journey:
    """Times are seconds on `clock`; a stage that was not reached has None."""

    route: str
    client_id: str
    clock: Callable[[], float]
    started: float
    pair: Pair | None = None
    transfer_id: str = "-"
    # What the client was told; 0 when nothing was.
    status: int = 0
    outcome: str = ""
    prefill_seconds: float | None = None
    first_byte_seconds: float | None = None
    total_seconds: float = 0.0
    bytes_sent: int = 0

    def chose(self, pair: Pair, transfer_id: str) -> None:
        """Note where the request goes and under which name its KV travels."""
        self.pair = pair
        self.transfer_id = transfer_id

    def prefilled(self) -> None:
        """Note the end of the prefill leg."""
        self.prefill_seconds = self.clock() - self.started

    def sent(self, num_bytes: int) -> None:
        """Note a piece of the answer."""
        if self.first_byte_seconds is None:
            self.first_byte_seconds = self.clock() - self.started
        self.bytes_sent += num_bytes

    def failed(self, error: ProxyError) -> None:
        """Note why it failed; the status stands if the client was told one already."""
        self.outcome = error.code
        self.status = self.status or error.status

    def answered(self) -> None:
        """Note that the whole answer of the decode instance went out."""
        self.outcome = "ok" if self.status < 400 else "decode_refused"

    def abandoned(self) -> None:
        """Note that nobody waits for the answer any more, unless more is known already."""
        self.outcome = self.outcome or "client_left"

    def end(self) -> None:
        """Write the request's one line in the log."""
        self.total_seconds = self.clock() - self.started
        self.outcome = self.outcome or "internal_error"
        prefill = _address(self.pair.prefill if self.pair else None)
        decode = _address(self.pair.decode if self.pair else None)
        logger.info(
            "route=%s status=%d outcome=%s transfer=%s client_id=%r prefill=%s decode=%s "
            "prefill_ms=%s first_byte_ms=%s total_ms=%s bytes=%d",
            self.route,
            self.status,
            self.outcome,
            self.transfer_id,
            self.client_id,
            prefill,
            decode,
            _milliseconds(self.prefill_seconds),
            _milliseconds(self.first_byte_seconds),
            _milliseconds(self.total_seconds),
            self.bytes_sent,
        )


def _address(instance: Instance | None) -> str:
    return "-" if instance is None else instance.identity.http_address


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"
