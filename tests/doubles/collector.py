"""CollectorDouble: a collector of OpenTelemetry, as whoever sends it spans sees it."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

PATH = "/v1/traces"
PROTOBUF = {"Content-Type": "application/x-protobuf"}


@dataclass(frozen=True)
class SeenSpan:
    """A span as it came; ids are in hexadecimal, times in nanoseconds."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    began: int
    ended: int
    attributes: Mapping[str, Any]
    events: Mapping[str, int]
    is_error: bool
    resource: Mapping[str, Any]

    @property
    def traceparent(self) -> str:
        """The header that names it to whoever works within it."""
        return f"00-{self.trace_id}-{self.span_id}-01"


class CollectorDouble:
    """Takes spans by HTTP on 127.0.0.1. `with CollectorDouble() as collector:` serves.

    `status` and `answer` are what it answers, `hold` what it waits for before it does; `play`
    answers in its place.
    """

    def __init__(self) -> None:
        self.spans: list[SeenSpan] = []
        self.headers: list[dict[str, str]] = []
        self.num_asked = 0
        self.status = 200
        self.answer: tuple[bytes, dict[str, str]] | None = None
        self.play: Callable[[BufferedIOBase], None] | None = None
        self.num_connections = 0
        self.hold = threading.Event()
        self.hold.set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        """Where it takes spans."""
        return self.base + PATH

    @property
    def base(self) -> str:
        """The same, as OTEL_EXPORTER_OTLP_ENDPOINT has it."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> CollectorDouble:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.hold.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def named(self, name: str) -> list[SeenSpan]:
        """Return the spans of this name, in the order in which they began."""
        return sorted((s for s in self.spans if s.name == name), key=lambda span: span.began)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        collector = self

        class Taker(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                collector.num_connections += 1
                super().setup()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.num_asked += 1
                collector.hold.wait()
                if collector.play is not None:
                    self.close_connection = True
                    collector.play(self.wfile)
                    return
                if collector.status == 200:
                    assert self.path == PATH
                    if self.headers.get("Content-Encoding") == "gzip":
                        body = gzip.decompress(body)
                    collector.headers.append({k.lower(): v for k, v in self.headers.items()})
                    collector.spans += _spans(ExportTraceServiceRequest.FromString(body))
                empty = ExportTraceServiceResponse().SerializeToString()
                answer, headers = collector.answer or (empty, PROTOBUF)
                self.send_response(collector.status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        return Taker


def _spans(request: ExportTraceServiceRequest) -> list[SeenSpan]:
    return [
        _seen(span, _values(sent.resource.attributes))
        for sent in request.resource_spans
        for scope in sent.scope_spans
        for span in scope.spans
    ]


def _seen(span: Span, resource: Mapping[str, Any]) -> SeenSpan:
    return SeenSpan(
        name=span.name,
        kind=Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        began=span.start_time_unix_nano,
        ended=span.end_time_unix_nano,
        attributes=_values(span.attributes),
        events={event.name: event.time_unix_nano for event in span.events},
        is_error=span.status.code == 2,
        resource=resource,
    )


def _values(attributes: Any) -> dict[str, Any]:
    pairs: list[KeyValue] = list(attributes)
    return {p.key: getattr(p.value, str(p.value.WhichOneof("value"))) for p in pairs}
