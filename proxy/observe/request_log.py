"""RequestLog: the requests that are open, the last that ended, and a line for each in the log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from proxy.errors import ProxyError
    from proxy.fleet.instances import Instance

logger = logging.getLogger("proxy.access")

LOG_SECONDS = 0.1
NUM_RECENT = 50


@dataclass(eq=False)
class RequestRecord:
    """What happened to one request, until it ends. Times are seconds on `clock` since `started`; a
    stage that was not reached has None."""

    route: str
    client_id: str
    clock: Callable[[], float]
    started: float
    prefill: str | None = None
    decode: str | None = None
    transfer_id: str | None = None
    num_tries: int = 0
    # What the client was told; 0 when nothing was.
    status: int = 0
    outcome: str = ""
    queue_seconds: float | None = None
    prefill_seconds: float | None = None
    first_byte_seconds: float | None = None
    total_seconds: float = 0.0
    bytes_sent: int = 0

    def chose(self, prefill: Instance | None, decode: Instance, transfer_id: str) -> None:
        """Note where the request goes and under which name its KV travels."""
        self.prefill = prefill.identity.name if prefill else None
        self.decode = decode.identity.name
        self.transfer_id = transfer_id
        self.num_tries += 1
        if self.queue_seconds is None:
            self.queue_seconds = self._elapsed()

    def prefilled(self) -> None:
        """Note the end of the prefill leg."""
        self.prefill_seconds = self._elapsed()

    def sent(self, num_bytes: int) -> None:
        """Note a piece of the answer."""
        if self.first_byte_seconds is None:
            self.first_byte_seconds = self._elapsed()
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
        """Note that it is over."""
        self.total_seconds = self._elapsed()
        self.outcome = self.outcome or "internal_error"

    def describe(self) -> dict[str, Any]:
        """Return what is known, without a word of the request itself."""
        return {
            "route": self.route,
            "status": self.status,
            "outcome": self.outcome,
            "transfer_id": self.transfer_id,
            "client_id": self.client_id,
            "prefill": self.prefill,
            "decode": self.decode,
            "tries": self.num_tries,
            "queue_ms": _milliseconds(self.queue_seconds),
            "prefill_ms": _milliseconds(self.prefill_seconds),
            "first_byte_ms": _milliseconds(self.first_byte_seconds),
            "total_ms": _milliseconds(self.total_seconds or self._elapsed()),
            "bytes": self.bytes_sent,
        }

    def _elapsed(self) -> float:
        return self.clock() - self.started


class RequestLog:
    """One line of JSON for each request that has ended. Lines are written some at a time: a record
    of its own for each would cost as much as choosing the instances does."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Requests that have not ended, in order of arrival.
        self.open: dict[RequestRecord, None] = {}
        # The last ones that have ended, oldest first.
        self.recent: deque[RequestRecord] = deque(maxlen=NUM_RECENT)
        self._unwritten: list[tuple[float, RequestRecord]] = []
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, route: str, client_id: str) -> RequestRecord:
        """Open the record of a request that has just arrived."""
        record = RequestRecord(route, client_id, self._clock, started=self._clock())
        self.open[record] = None
        return record

    def end(self, record: RequestRecord) -> None:
        """Close a record; its line is written soon."""
        del self.open[record]
        record.end()
        self.recent.append(record)
        self._unwritten.append((time.time(), record))
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(LOG_SECONDS, self.flush)

    def flush(self) -> None:
        """Write what is left."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ended, self._unwritten = self._unwritten, []
        if ended and logger.isEnabledFor(logging.INFO):
            lines = [_line(when, record) for when, record in ended]
            logger.info("%s", b"\n".join(lines).decode())


def _line(when: float, record: RequestRecord) -> bytes:
    now = datetime.fromtimestamp(when, timezone.utc).isoformat(timespec="milliseconds")
    return msgspec.json.encode({"time": now, **record.describe()})


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)
