"""RequestLog: open requests, the last ones that ended, and a log line for each."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from proxy.observe.traces import UNTRACED, RequestTrace

if TYPE_CHECKING:
    from proxy.errors import ProxyError
    from proxy.fleet.instances import Instance

logger = logging.getLogger("proxy.access")

LOG_SECONDS = 0.1
NUM_RECENT = 50
_encoder = msgspec.json.Encoder()


@dataclass(eq=False)
class RequestRecord:
    """The record of one request.

    Times are seconds on `clock` since `started`; None if the request did not reach that stage.
    """

    route: str
    client_id: str
    clock: Callable[[], float]
    started: float
    client: str = ""  # the name of its key
    prefill: str | None = None
    decode: str | None = None
    instance: str | None = None  # that answers alone what is neither prefilled nor decoded
    transfer_id: str | None = None
    num_tries: int = 0
    # The status that the client received; 0 before any.
    status: int = 0
    outcome: str = ""
    queue_seconds: float | None = None
    prefill_seconds: float | None = None
    first_byte_seconds: float | None = None
    total_seconds: float = 0.0
    bytes_sent: int = 0
    trace: RequestTrace = UNTRACED

    def chose(self, prefill: Instance | None, decode: Instance, transfer_id: str) -> None:
        """Record the chosen instances and the transfer id."""
        self.prefill = prefill.identity.name if prefill else None
        self.decode = decode.identity.name
        self._begin_try(transfer_id)

    def chose_one(self, instance: Instance, transfer_id: str) -> None:
        """Record the instance that answers alone, and the transfer id."""
        self.instance = instance.identity.name
        self._begin_try(transfer_id)

    def prefilled(self) -> None:
        """Record the end of the prefill leg."""
        self.prefill_seconds = self._elapsed()

    def sent(self, num_bytes: int) -> None:
        """Record a piece of the answer."""
        if self.first_byte_seconds is None:
            self.first_byte_seconds = self._elapsed()
        self.bytes_sent += num_bytes

    def failed(self, error: ProxyError) -> None:
        """Record an error; a status that the client has already received stays."""
        self.outcome = error.code
        self.status = self.status or error.status

    def answered(self) -> None:
        """Record that the whole answer was sent."""
        refused = "decode_refused" if self.instance is None else "instance_refused"
        self.outcome = "ok" if self.status < 400 else refused

    def cut(self, outcome: str) -> None:
        """Record why the request was cut, unless an outcome is known already."""
        self.outcome = self.outcome or outcome

    def end(self) -> None:
        """Record the end of the request."""
        self.total_seconds = self._elapsed()
        self.outcome = self.outcome or "internal_error"

    def describe(self) -> dict[str, Any]:
        """Return the record as JSON values, without any content of the request."""
        return {
            "route": self.route,
            "status": self.status,
            "outcome": self.outcome,
            "transfer_id": self.transfer_id,
            "trace_id": self.trace.trace_id,
            "client_id": self.client_id,
            "client": self.client,
            "prefill": self.prefill,
            "decode": self.decode,
            "instance": self.instance,
            "tries": self.num_tries,
            "queue_ms": _milliseconds(self.queue_seconds),
            "prefill_ms": _milliseconds(self.prefill_seconds),
            "first_byte_ms": _milliseconds(self.first_byte_seconds),
            "total_ms": _milliseconds(self.total_seconds or self._elapsed()),
            "bytes": self.bytes_sent,
        }

    def _begin_try(self, transfer_id: str) -> None:
        self.transfer_id = transfer_id
        self.num_tries += 1
        if self.queue_seconds is None:
            self.queue_seconds = self._elapsed()

    def _elapsed(self) -> float:
        return self.clock() - self.started


class RequestLog:
    """Writes a line of JSON for each request that has ended.

    Lines are written in batches, because a log record for each costs as much as choosing instances.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Open requests, in order of arrival.
        self.open: dict[RequestRecord, None] = {}
        # The last requests that ended, oldest first.
        self.recent: deque[RequestRecord] = deque(maxlen=NUM_RECENT)
        self._unwritten: list[tuple[float, RequestRecord]] = []
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, route: str, client_id: str) -> RequestRecord:
        """Open the record of a new request."""
        record = RequestRecord(route, client_id, self._clock, started=self._clock())
        self.open[record] = None
        return record

    def end(self, record: RequestRecord) -> None:
        """Close a record; its line is written within `LOG_SECONDS`."""
        del self.open[record]
        record.end()
        self.recent.append(record)
        self._unwritten.append((time.time(), record))
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(LOG_SECONDS, self.flush)

    def flush(self) -> None:
        """Write the pending lines now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ended, self._unwritten = self._unwritten, []
        if ended and logger.isEnabledFor(logging.INFO):
            lines = [_line(when, record) for when, record in ended]
            logger.info("%s", b"\n".join(lines).decode())


def _line(when: float, record: RequestRecord) -> bytes:
    second, millisecond = divmod(int(when * 1000), 1000)
    now = f"{_time(second)}.{millisecond:03d}+00:00"
    return _encoder.encode({"time": now, **record.describe()})


@lru_cache(1)
def _time(second: int) -> str:
    """Return a time without its zone; a batch of lines has few of them."""
    return datetime.fromtimestamp(second, timezone.utc).replace(tzinfo=None).isoformat()


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else int(seconds * 10_000 + 0.5) / 10
