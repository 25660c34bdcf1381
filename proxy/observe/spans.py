"""Spans: what the proxy tells a collector of OpenTelemetry of each request.

A request is a span of kind SERVER, each of its legs one of kind CLIENT within it, and the spans of
an instance lie within its leg's. Importing this module needs the extra `traces`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING

from async_timeout import timeout
from opentelemetry.context import Context as Within
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import (
    OTEL_BSP_MAX_EXPORT_BATCH_SIZE,
    OTEL_BSP_MAX_QUEUE_SIZE,
)
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    Tracer,
    set_span_in_context,
)

from proxy.observe.collector_session import CollectorSession
from proxy.observe.traces import PARENT, STATE, Context, LegTrace, RequestEnd, RequestTrace, Traces

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

    from proxy.fleet.instances import Instance

logger = logging.getLogger(__name__)

DISTRIBUTION = "p2p-kv-engine"
SERVICE = "p2p-proxy"
QUEUED_SPANS = 2048  # OpenTelemetry's own default
BATCH_SPANS = 512
CLOSE_SECONDS = 3.0  # at the proxy's end, for the spans that wait
MAX_CHARS = 256  # of a value that a client chooses
MAX_STATE_CHARS = 512
# Names of who makes a session with credentials; then that one is used.
PROVIDERS = tuple(
    f"OTEL_PYTHON_EXPORTER_OTLP_HTTP_{signal}CREDENTIAL_PROVIDER" for signal in ("", "TRACES_")
)
_PARENT = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_CLIENTS_DOING = ("client_left", "client_stalled")


class SpanTraces(Traces):
    """Sends spans to a collector, in batches, from a thread of their own.

    The queue is bounded: what finds no room, or does not arrive, is counted in `num_lost`. The
    standard variables `OTEL_*` say all that the arguments do not.
    """

    def __init__(self, endpoint: str, share: float, scheme: str) -> None:
        """Start the thread. `endpoint`: where the collector takes spans; "": as `OTEL_*` say.
        `share`: of the requests without a trace, how many get one; 0: as `OTEL_*` say.

        Raises:
            ValueError: a variable `OTEL_BSP_*` cannot be.
        """
        super().__init__(share)
        self._scheme = scheme
        named = {
            "service.name": SERVICE,
            "service.version": version(DISTRIBUTION),
            "service.instance.id": str(uuid.uuid4()),
        }
        resource = Resource.create(named).merge(OTELResourceDetector().detect())
        sampler = ParentBasedTraceIdRatio(share) if share else None
        self._provider = TracerProvider(sampler, resource, shutdown_on_exit=False)
        session = None if any(map(os.environ.get, PROVIDERS)) else CollectorSession()
        self._post = _Post(OTLPSpanExporter(endpoint or None, session=session), session)
        self._queue = _Queue(self._post)
        self._provider.add_span_processor(self._queue)
        self._tracer = self._provider.get_tracer("p2p_engine.proxy", version(DISTRIBUTION))

    @property
    def num_lost(self) -> int:  # type: ignore[override]
        """How many spans no collector took; after the end, with those of which it is not known."""
        queue, post = self._queue, self._post
        return queue.num_refused + (post.num_failed if post.is_open else queue.num_left)

    def begin(self, path: str, headers: Mapping[str, str], waited: float = 0.0) -> RequestTrace:
        """Begin the span of a request that came so many seconds ago."""
        return RequestSpan(self._tracer, self._scheme, path, headers, waited)

    async def close(self) -> None:
        """Send the spans that wait, for at most `CLOSE_SECONDS`, and log how many were lost in all;
        idempotent."""
        if not self._queue.is_open:
            return
        self._queue.is_open = False
        loop, is_over = asyncio.get_running_loop(), asyncio.Event()

        def finish() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # nobody waits any more
                loop.call_soon_threadsafe(is_over.set)

        threading.Thread(target=finish, name="last spans", daemon=True).start()
        with suppress(asyncio.TimeoutError):
            async with timeout(CLOSE_SECONDS):
                await is_over.wait()
        self._post.shutdown()  # wakes the thread if it waits for another try
        if self.num_lost:
            logger.warning("%d spans have not reached the collector", self.num_lost)


class RequestSpan(RequestTrace):
    """The span of a request, and those of its legs."""

    def __init__(
        self, tracer: Tracer, scheme: str, path: str, headers: Mapping[str, str], waited: float
    ) -> None:
        self._tracer = tracer
        self._path = path
        self._began = time.time_ns() - int(waited * 1e9)
        parent = parent_of(headers.get(PARENT, ""))
        # A collector's state is passed on as it is; the SDK would log each that it does not like.
        state = headers.get(STATE, "") if parent else ""
        self._state = {STATE: state} if 0 < len(state) <= MAX_STATE_CHARS else {}
        attributes: dict[str, AttributeValue] = {
            "http.request.method": "POST",
            "http.route": path,
            "url.path": path,
            "url.scheme": scheme,
        }
        if agent := headers.get("user-agent"):
            attributes["user_agent.original"] = agent[:MAX_CHARS]
        within = Within()
        if parent is not None:
            within = set_span_in_context(NonRecordingSpan(parent), within)
        self._span = tracer.start_span(
            f"POST {path}", within, SpanKind.SERVER, attributes, start_time=self._began
        )
        self._within = set_span_in_context(self._span, Within())
        if self._span.is_recording():
            self.trace_id = f"{self._span.get_span_context().trace_id:032x}"

    def context(self, transfer_id: str) -> Context:
        """Return the headers for what an instance does within the request, and beside its legs."""
        return {**_headers(self._span), **self._state}

    def leg(self, name: str, instance: Instance, transfer_id: str) -> LegTrace:
        """Begin the span of a leg."""
        address = instance.identity.http_address
        host, _, port = address.rpartition(":")
        attributes: dict[str, AttributeValue] = {
            "http.request.method": "POST",
            "url.full": f"http://{address}{self._path}",
            "server.address": host.strip("[]"),
            "server.port": int(port),
            "p2p.instance": instance.identity.name,
            "p2p.transfer_id": transfer_id,
        }
        span = self._tracer.start_span(name, self._within, SpanKind.CLIENT, attributes)
        return LegSpan(span, {**_headers(span), **self._state})

    def end(self, record: RequestEnd) -> None:
        """End the span with what the record says; idempotent."""
        if not self._span.is_recording():
            return
        now = time.time_ns()
        for name, seconds in (
            ("instances chosen", record.queue_seconds),
            ("first byte", record.first_byte_seconds),
        ):
            if seconds is not None:
                self._span.add_event(name, timestamp=min(now, self._began + int(seconds * 1e9)))
        self._span.set_attributes({"p2p.outcome": record.outcome, "p2p.tries": record.num_tries})
        if record.client:
            self._span.set_attribute("enduser.id", record.client)
        is_clients = 400 <= record.status < 500 or record.outcome in _CLIENTS_DOING
        error = "" if is_clients or record.outcome == "ok" else record.outcome
        _end(self._span, record.status, error, now)


class LegSpan(LegTrace):
    """The span of a leg."""

    __slots__ = ("_span",)
    has_span = True

    def __init__(self, span: Span, context: Context) -> None:
        super().__init__(context)
        self._span = span

    def end(self, error: str = "") -> None:
        """End the span; idempotent."""
        if self._span.is_recording():
            _end(self._span, self.status, error, time.time_ns())


class _Post(SpanExporter):
    """Counts the spans that it takes to the collector, and those of them that do not arrive."""

    def __init__(self, exporter: SpanExporter, session: CollectorSession | None) -> None:
        self._exporter = exporter
        self._session = session
        self.is_open = True
        self.num_taken = 0
        self.num_failed = 0
        self.num_arrived = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans; blocks for as long as `OTEL_EXPORTER_OTLP_TIMEOUT` says."""
        self.num_taken += len(spans)
        num_lost = len(spans)
        try:
            result = self._exporter.export(spans)
            if result is SpanExportResult.SUCCESS:
                num_lost = self._num_rejected(len(spans))
        finally:
            self.num_failed += num_lost
            self.num_arrived += len(spans) - num_lost
        return result

    def _num_rejected(self, num_sent: int) -> int:
        if self._session is None or self._session.num_rejected <= 0:
            return 0
        num_lost = min(num_sent, self._session.num_rejected)
        logger.warning("the collector rejects %d spans: %s", num_lost, self._session.reason)
        return num_lost

    def shutdown(self) -> None:
        """Try nothing more; idempotent."""
        if self.is_open:
            self.is_open = False
            self._exporter.shutdown()


class _Queue(BatchSpanProcessor):
    """Refuses and counts the spans for which there is no room.

    The event loop alone adds to what was put, and the thread alone to what was taken.
    """

    def __init__(self, post: _Post) -> None:
        self._room = int(os.environ.get(OTEL_BSP_MAX_QUEUE_SIZE) or QUEUED_SPANS)
        batch = int(os.environ.get(OTEL_BSP_MAX_EXPORT_BATCH_SIZE) or BATCH_SPANS)
        super().__init__(post, self._room, max_export_batch_size=min(batch, self._room))
        self._post = post
        self._num_put = 0
        self.is_open = True
        self.num_refused = 0

    @property
    def num_left(self) -> int:
        """How many spans were put and have not arrived."""
        return self._num_put - self._post.num_arrived

    def on_end(self, span: ReadableSpan) -> None:
        """Take a span that has ended; never blocks."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if not self.is_open or self._num_put - self._post.num_taken >= self._room:
            self.num_refused += 1
            return
        self._num_put += 1
        super().on_end(span)


def parent_of(header: str) -> SpanContext | None:
    """Return the span that a client's `traceparent` names; None if it names none."""
    found = _PARENT.fullmatch(header.strip()[:MAX_CHARS])
    if found is None or (found[1] == "00" and found[5]):
        return None
    trace_id, span_id = int(found[2], 16), int(found[3], 16)
    if not trace_id or not span_id:
        return None
    return SpanContext(trace_id, span_id, True, TraceFlags(int(found[4], 16)))


def _headers(span: Span) -> Context:
    its = span.get_span_context()
    return {PARENT: f"00-{its.trace_id:032x}-{its.span_id:016x}-{its.trace_flags:02x}"}


def _end(span: Span, status: int, error: str, now: int) -> None:
    if status:
        span.set_attribute("http.response.status_code", status)
    if error:
        span.set_attribute("error.type", error)
        span.set_status(StatusCode.ERROR)
    span.end(now)
