"""Traces: of which trace a request and its legs are a part.

Without spans of our own (`spans.py`), the trace of a client passes, and a share of the other
requests get one, so that the spans of both instances join.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.fleet.instances import Instance

PARENT, STATE = "traceparent", "tracestate"
NAMES = (PARENT, STATE)  # the headers of the W3C's Trace Context
Context = dict[str, str]


class RequestEnd(Protocol):
    """What the record of a request says at its end."""

    client: str
    num_tries: int
    status: int
    outcome: str
    queue_seconds: float | None
    first_byte_seconds: float | None


class LegTrace:
    """A leg's place in a trace; `context` has the headers by which its instance is told."""

    __slots__ = ("context", "status")
    has_span = False  # whose end matters

    def __init__(self, context: Context) -> None:
        self.context = context
        self.status = 0  # of the instance's answer

    def end(self, error: str = "") -> None:
        """Note that the leg is over, and the code of its error; idempotent."""


class RequestTrace:
    """A request's place in a trace."""

    trace_id: str | None = None  # if the proxy sends spans of it

    def __init__(self, passed: Context, share: float) -> None:
        self._passed = passed
        self._share = share

    def context(self, transfer_id: str) -> Context:
        """Return the headers for an instance: the client's own, or by the share a trace that has
        the transfer's id."""
        if self._passed or int(transfer_id[:8], 16) >= self._share * (1 << 32):
            return self._passed
        return {PARENT: f"00-{transfer_id}-{transfer_id[16:]}-01"}

    def leg(self, name: str, instance: Instance, transfer_id: str) -> LegTrace:
        """Begin a leg."""
        return LegTrace(self.context(transfer_id))

    def end(self, record: RequestEnd) -> None:
        """Note the end of the request."""


class Traces:
    """Says for each request of which trace it is a part; a proxy has one."""

    num_lost = 0  # spans that no collector took

    def __init__(self, share: float) -> None:
        """`share`: of the requests without a trace, how many get one, from 0 to 1."""
        self._share = share

    def begin(self, path: str, headers: Mapping[str, str], waited: float = 0.0) -> RequestTrace:
        """Begin a request that came so many seconds ago; the names of the client's `headers` are in
        lower case."""
        return RequestTrace({name: headers[name] for name in NAMES if name in headers}, self._share)

    async def close(self) -> None:
        """Send what is left to send; bounded and idempotent."""


UNTRACED = RequestTrace({}, 0)
