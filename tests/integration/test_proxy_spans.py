"""Spans of the proxy, as a collector gets them: real sockets, real protobuf."""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.trace.sampling import Decision, StaticSampler
from opentelemetry.semconv.attributes import (
    error_attributes,
    http_attributes,
    server_attributes,
    service_attributes,
    url_attributes,
    user_agent_attributes,
)

from p2p_engine.errors import ConfigError
from proxy import ProxyConfig
from proxy.observe import collector as collectors
from proxy.observe.request_log import RequestRecord
from proxy.observe.spans import SpanTraces, parent_of
from tests.doubles.collector import PROTOBUF, CollectorDouble, SeenSpan
from tests.doubles.server import Behaviour, ServerDouble
from tests.rigs.proxies import ASKED, STREAMED, RunningProxy, fleet, running_proxy, until

THEIRS = f"00-{'a' * 32}-{'b' * 16}-01"
OURS = "POST /v1/completions"
OF_SERVERS = {
    http_attributes.HTTP_REQUEST_METHOD, http_attributes.HTTP_ROUTE, url_attributes.URL_PATH,
    url_attributes.URL_SCHEME, http_attributes.HTTP_RESPONSE_STATUS_CODE,
    user_agent_attributes.USER_AGENT_ORIGINAL, "p2p.outcome", "p2p.tries",
}  # fmt: skip
OF_CLIENTS = {
    http_attributes.HTTP_REQUEST_METHOD, url_attributes.URL_FULL, server_attributes.SERVER_ADDRESS,
    server_attributes.SERVER_PORT, http_attributes.HTTP_RESPONSE_STATUS_CODE, "p2p.instance",
    "p2p.transfer_id",
}  # fmt: skip
ERROR = error_attributes.ERROR_TYPE


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have batches sent soon, and only what a test sets."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


@pytest.fixture
def collector() -> Iterator[CollectorDouble]:
    with CollectorDouble() as collector:
        yield collector


@asynccontextmanager
async def traced(
    collector: CollectorDouble, num_prefill: int = 1, **settings: Any
) -> AsyncIterator[tuple[RunningProxy, list[ServerDouble], ServerDouble]]:
    """Run a fleet whose proxy sends spans."""
    async with fleet(num_prefill, otlp_traces_endpoint=collector.url, **settings) as running:
        proxy, prefill, [decode] = running
        yield proxy, prefill, decode


async def seen(collector: CollectorDouble, *names: str) -> list[SeenSpan]:
    """Wait until exactly these spans have come, and return them in this order."""
    await until(lambda: len(collector.spans) >= len(names), f"{names} have come")
    assert sorted(span.name for span in collector.spans) == sorted(names)
    return [collector.named(name)[names[:i].count(name)] for i, name in enumerate(names)]


@pytest.mark.parametrize("dispatch", ["sequential", "concurrent"])
@pytest.mark.parametrize("asked", [ASKED, STREAMED], ids=["whole", "stream"])
async def test_a_request_is_one_trace_with_a_span_for_each_leg(
    collector: CollectorDouble, asked: dict[str, Any], dispatch: str
) -> None:
    async with traced(collector, dispatch=dispatch) as (proxy, [prefill], decode):
        assert (await proxy.ask(asked))[0] == 200
        request, one, other = await seen(collector, OURS, "prefill", "decode")
        [recent] = [r for r in (await last_requests(proxy)) if r["trace_id"]]
    assert {span.trace_id for span in (one, other)} == {request.trace_id} == {recent["trace_id"]}
    assert (request.kind, request.parent_id) == ("SERVER", "")
    assert {(span.kind, span.parent_id) for span in (one, other)} == {("CLIENT", request.span_id)}
    for span, instance in ((one, prefill), (other, decode)):
        # What the instance does with this header lies within the span of its leg.
        assert instance.received[0].headers["traceparent"][:-2] == span.traceparent[:-2]
        assert int(instance.received[0].headers["traceparent"][-2:], 16) & 1
        assert set(span.attributes) == OF_CLIENTS
        assert span.attributes["server.port"] == instance.port
        assert span.attributes["url.full"] == f"http://{instance.http_address}/v1/completions"
        assert span.attributes["p2p.transfer_id"] == recent["transfer_id"]
        assert span.attributes["http.response.status_code"] == 200
        assert request.began <= span.began <= span.ended <= request.ended
    assert dispatch == "concurrent" or one.ended <= other.began
    assert set(request.attributes) == OF_SERVERS
    assert request.attributes["http.route"] == "/v1/completions"
    assert (request.attributes["p2p.outcome"], request.attributes["p2p.tries"]) == ("ok", 1)
    assert not any(span.is_error for span in (request, one, other))
    chosen, first = request.events["instances chosen"], request.events["first byte"]
    assert request.began <= chosen <= first <= request.ended
    assert request.resource[service_attributes.SERVICE_NAME] == "p2p-proxy"
    assert request.resource[service_attributes.SERVICE_VERSION]


async def last_requests(proxy: RunningProxy) -> list[dict[str, Any]]:
    async with proxy.client.get(f"{proxy.url}/status/events") as response:
        line = await response.content.readuntil(b"\n\n")
        found: list[dict[str, Any]] = json.loads(line.partition(b"data: ")[2])["recent"]
        return found


async def test_a_clients_trace_is_continued(collector: CollectorDouble) -> None:
    async with traced(collector) as (proxy, [prefill], decode):
        lines = ("vendor=1", "other=2")
        theirs = [("traceparent", THEIRS), *(("tracestate", line) for line in lines)]
        assert (await proxy.ask(headers=theirs))[0] == 200
        request, one, other = await seen(collector, OURS, "prefill", "decode")
        assert request.parent_id == "b" * 16
        assert {span.trace_id for span in (request, one, other)} == {"a" * 32}
        for span, instance in ((one, prefill), (other, decode)):
            assert instance.received[0].headers["traceparent"] == span.traceparent
            assert instance.received[0].headers["tracestate"] == "vendor=1,other=2"


async def test_what_a_client_does_not_sample_is_not_sampled(collector: CollectorDouble) -> None:
    async with traced(collector) as (proxy, [prefill], decode):
        assert (await proxy.ask(headers={"traceparent": THEIRS[:-2] + "00"}))[0] == 200
        for instance in (prefill, decode):
            assert re.fullmatch(
                f"00-{'a' * 32}-[0-9a-f]{{16}}-00", instance.received[0].headers["traceparent"]
            )
        assert [r["trace_id"] for r in await last_requests(proxy)] == [None]
        assert (await proxy.ask())[0] == 200
        await seen(collector, OURS, "prefill", "decode")


NO_PARENTS = (
    "", "garbage", THEIRS + "-more", "ff" + THEIRS[2:], THEIRS.upper(), f"00-{'0' * 32}-1-01",
    f"00-{'0' * 32}-{'b' * 16}-01", f"00-{'a' * 32}-{'0' * 16}-01", THEIRS + "0" * 1000,
)  # fmt: skip


async def test_a_traceparent_that_names_no_span_goes_no_further(
    collector: CollectorDouble, caplog: pytest.LogCaptureFixture
) -> None:
    assert parent_of("01" + THEIRS[2:] + "-of the future") is not None
    caplog.set_level(logging.DEBUG, "opentelemetry")
    async with traced(collector) as (proxy, [prefill], _):
        for header in NO_PARENTS:
            assert parent_of(header) is None
            headers = {"traceparent": header, "tracestate": "no, state"}
            assert (await proxy.ask(headers=headers))[0] == 200
        # A state without its parent means nothing; with one, it passes if it is not too long.
        for state in ("x" * 513, "no=pair,no pair"):
            assert (await proxy.ask(headers={"traceparent": THEIRS, "tracestate": state}))[0] == 200
        states = [received.headers.get("tracestate") for received in prefill.received]
        assert states == [None] * (len(NO_PARENTS) + 1) + ["no=pair,no pair"]
        roots = [r for r in await until_roots(collector, len(states)) if not r.parent_id]
        assert len({root.trace_id for root in roots}) == len(NO_PARENTS)
    # A client may send as many as it likes.
    assert [r for r in caplog.records if r.name.startswith("opentelemetry.trace")] == []


async def until_roots(collector: CollectorDouble, number: int) -> list[SeenSpan]:
    await until(lambda: len(collector.named(OURS)) == number, f"{number} requests have come")
    return collector.named(OURS)


async def test_a_retry_is_in_the_same_trace(collector: CollectorDouble) -> None:
    async with traced(collector, num_prefill=2) as (proxy, prefill, _):
        prefill[0].behaviour = Behaviour(status=503)
        num_asked = 0
        while not prefill[0].received:
            assert (await proxy.ask())[0] == 200
            num_asked += 1
        request = (await until_roots(collector, num_asked))[-1]
        failed, one, other = sorted(
            (s for s in collector.spans if s.parent_id == request.span_id), key=lambda s: s.began
        )
        assert [span.name for span in (failed, one, other)] == ["prefill", "prefill", "decode"]
        assert (failed.is_error, failed.attributes[ERROR]) == (True, "prefill_failed")
        assert failed.attributes["http.response.status_code"] == 503
        ids = [span.attributes["p2p.transfer_id"] for span in (failed, one, other)]
        assert ids[0] != ids[1] == ids[2]
        assert not request.is_error
        assert request.attributes["p2p.tries"] == 2


# What goes wrong, and then the error of the request, of its prefill leg, and of its decode leg.
TROUBLES: dict[str, tuple[Behaviour, Behaviour, list[str | None]]] = {
    "prefill breaks": (Behaviour(reset=True), Behaviour(), ["prefill_failed", "prefill_failed"]),
    "prefill refuses": (Behaviour(status=404, body=b"{}"), Behaviour(), [None, "prefill_refused"]),
    "decode breaks": (
        Behaviour(), Behaviour(reset=True), ["decode_failed", None, "decode_failed"],
    ),
    "decode refuses": (
        Behaviour(), Behaviour(status=404, body=b"{}"), [None, None, "decode_refused"],
    ),
    "decode breaks off": (
        Behaviour(), Behaviour(cut_after=2), ["decode_failed", None, "decode_failed"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TROUBLES)
async def test_a_span_says_what_went_wrong(collector: CollectorDouble, name: str) -> None:
    at_prefill, at_decode, errors = TROUBLES[name]
    async with traced(collector, max_retries=0) as (proxy, [prefill], decode):
        prefill.behaviour, decode.behaviour = at_prefill, at_decode
        await proxy.ask(STREAMED)
        spans = await seen(collector, *(OURS, "prefill", "decode")[: len(errors)])
    assert [span.attributes.get(ERROR) for span in spans] == errors
    assert [span.is_error for span in spans] == [error is not None for error in errors]


async def test_a_client_that_leaves_is_no_error_of_the_request(collector: CollectorDouble) -> None:
    async with traced(collector) as (proxy, _, decode):
        decode.behaviour = Behaviour(hang_after=1)
        async with proxy.post(STREAMED) as answer:
            await answer.content.readany()
            answer.close()
        request, _, other = await seen(collector, OURS, "prefill", "decode")
    assert (request.is_error, request.attributes["p2p.outcome"]) == (False, "client_left")
    assert (other.is_error, other.attributes[ERROR]) == (True, "cancelled")


async def test_what_one_instance_answers_alone_has_one_leg(collector: CollectorDouble) -> None:
    async with traced(collector) as (proxy, _, _decode):
        assert (await proxy.ask({"prompt": "x"}, "/tokenize"))[0] == 200
        request, errand = await seen(collector, "POST /tokenize", "errand")
    assert errand.parent_id == request.span_id


async def test_kv_that_is_let_go_is_within_the_request(collector: CollectorDouble) -> None:
    async with traced(collector) as (proxy, _, decode):
        decode.behaviour = Behaviour(status=404, body=b"{}")
        assert (await proxy.ask())[0] == 404
        await until(lambda: len(decode.received) == 2, "the KV is let go")
        request, *_ = await seen(collector, OURS, "prefill", "decode")
        assert decode.received[1].headers["traceparent"][:-2] == request.traceparent[:-2]


@pytest.mark.parametrize(
    ("share", "sampler", "num_traced"),
    [(0.0, "", 20), (0.0, "parentbased_always_off", 0), (1.0, "parentbased_always_off", 20)],
)
async def test_the_share_that_is_traced(
    collector: CollectorDouble,
    monkeypatch: pytest.MonkeyPatch,
    share: float,
    sampler: str,
    num_traced: int,
) -> None:
    if sampler:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    async with traced(collector, trace_share=share) as (proxy, [prefill], _):
        for _ in range(20):
            assert (await proxy.ask())[0] == 200
        assert (await proxy.ask(headers={"traceparent": THEIRS}))[0] == 200
        flags = [int(r.headers["traceparent"][-2:], 16) & 1 for r in prefill.received]
        assert flags == [bool(num_traced)] * 20 + [1]
        assert len(await until_roots(collector, num_traced + 1)) == num_traced + 1


async def test_the_standard_variables_are_honoured(
    collector: CollectorDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.base,
        "OTEL_TRACES_EXPORTER": "console, otlp",
        "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=seven",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
        "OTEL_SERVICE_NAME": "front door",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
    }.items():
        monkeypatch.setenv(name, value)
    async with fleet() as (proxy, _, _):
        assert (await proxy.ask())[0] == 200
        request, *_ = await seen(collector, OURS, "prefill", "decode")
    assert collector.headers[0]["x-tenant"] == "seven"
    assert collector.headers[0]["content-encoding"] == "gzip"
    assert request.resource["service.name"] == "front door"
    assert request.resource["deployment.environment.name"] == "test"


# Values, and of those that somebody may have meant for instances only: what they are not.
OFF = [
    ("OTEL_SDK_DISABLED", "true", ""),
    ("OTEL_TRACES_EXPORTER", "none", ""),
    ("OTEL_TRACES_EXPORTER", "zipkin, console", "otlp"),
    ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc", "http/protobuf"),
    ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "collector:4318", "http[s]://HOST[:PORT]"),
    ("OTEL_EXPORTER_OTLP_ENDPOINT", "grpc://collector", "http[s]://HOST[:PORT]"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), OFF)
async def test_the_standard_variables_turn_spans_off(
    collector: CollectorDouble,
    name: str,
    value: str,
    allowed: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.base)
    monkeypatch.setenv(name, value)
    async with fleet() as (proxy, [prefill], _):
        assert (await proxy.ask())[0] == 200
        assert "traceparent" not in prefill.received[0].headers
    assert not collector.num_asked
    told = [r.getMessage() for r in caplog.records if r.name == collectors.__name__]
    assert told == [f"no spans are sent: {name} is {value}, not {allowed}"] * bool(allowed)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_BSP_MAX_QUEUE_SIZE", "many"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "9" * 20),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "0"),
        ("OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER", "nobody's"),
        ("OTEL_PYTHON_METER_PROVIDER", "nobody's"),
    ],
)
async def test_with_an_impossible_variable_the_proxy_serves_and_says_so(
    collector: CollectorDouble,
    name: str,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(name, value)
    async with traced(collector) as (proxy, _, _):
        assert (await proxy.ask())[0] == 200
    assert "no spans are sent: a variable OTEL_* cannot be: " in caplog.text
    assert not collector.num_asked


async def test_an_empty_variable_counts_as_none(
    collector: CollectorDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "")
    async with traced(collector) as (proxy, _, _):
        assert (await proxy.ask())[0] == 200
    assert collector.num_asked


async def test_a_dead_collector_costs_nothing_but_spans(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    url = f"http://127.0.0.1:{free_port}/v1/traces"
    async with fleet(otlp_traces_endpoint=url) as (proxy, _, _):
        for asked in (ASKED, STREAMED) * 5:
            assert (await proxy.ask(asked))[0] == 200
        await until_lost(proxy, 30)


async def until_lost(proxy: RunningProxy, number: int) -> None:
    async def are_lost() -> bool:
        return (await proxy.metrics())["p2p_proxy_lost_spans"] == number

    await until(are_lost, f"{number} spans are lost")


async def test_a_collector_that_hangs_holds_up_nobody_and_its_queue_is_bounded(
    collector: CollectorDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "6")  # which bounds a batch, too
    collector.hold.clear()
    async with traced(collector) as (proxy, _, _):
        for _ in range(2):
            assert (await proxy.ask())[0] == 200
        await until(lambda: collector.num_asked, "the collector has the first spans")
        for _ in range(10):
            assert (await proxy.ask())[0] == 200
        metrics = await proxy.metrics()
        # One batch is on its way, another waits.
        assert 36 - 12 <= metrics["p2p_proxy_lost_spans"] <= 36 - 6
        collector.hold.set()
        lost = int(metrics["p2p_proxy_lost_spans"])
        await until(lambda: len(collector.spans) == 36 - lost, "what had room has come")


async def test_a_refusal_of_the_collector_is_counted(collector: CollectorDouble) -> None:
    collector.status = 400
    async with traced(collector) as (proxy, _, _):
        assert (await proxy.ask())[0] == 200
        await until_lost(proxy, 3)


REJECTED = ExportTraceServiceResponse(
    partial_success=ExportTracePartialSuccess(rejected_spans=2, error_message="quota")
).SerializeToString()
EMPTY = ExportTraceServiceResponse().SerializeToString()
# An answer, and how many of three spans it loses.
ANSWERS: dict[str, tuple[int, bytes, dict[str, str], int]] = {
    "another place": (302, b"", {"Location": "http://127.0.0.1:1/login"}, 3),
    "nothing at all": (204, b"", {}, 3),
    "no content": (200, b"", {}, 0),
    "a page": (200, b"<html>Sign in</html>", {"Content-Type": "text/html"}, 3),
    "a page that says it is none": (200, b"<html>Sign in</html>", PROTOBUF, 3),
    "compressed": (200, gzip.compress(EMPTY), {**PROTOBUF, "Content-Encoding": "gzip"}, 3),
    "a part": (200, REJECTED, PROTOBUF, 2),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_only_what_a_collector_says_to_have_taken_has_arrived(
    collector: CollectorDouble,
    name: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(
        "OTEL_BSP_SCHEDULE_DELAY", "60000"
    )  # all in one batch, as soon as it is full
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "3")
    collector.status, *collector.answer, num_lost = ANSWERS[name]  # type: ignore[assignment]
    async with traced(collector) as (proxy, _, _):
        assert (await proxy.ask())[0] == 200
        await until(lambda: collector.num_asked, "the spans have come")
        if num_lost:
            await until_lost(proxy, num_lost)
    assert (f"{num_lost} spans have not reached the collector" in caplog.text) is bool(num_lost)
    assert ("the collector rejects 2 spans: quota" in caplog.text) is (name == "a part")


async def test_a_connection_to_the_collector_is_used_again(collector: CollectorDouble) -> None:
    async with traced(collector) as (proxy, _, _):
        for number in (1, 2, 3):
            assert (await proxy.ask())[0] == 200
            await until(lambda: len(collector.spans) == 3 * number, "the spans have come")  # noqa: B023
    assert collector.num_connections == 1
    assert collector.headers[0]["accept-encoding"] == "identity"


async def test_an_endless_answer_is_not_read_to_its_end(collector: CollectorDouble) -> None:
    cut = threading.Event()

    def play(writer: BufferedIOBase) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/x-protobuf\r\n\r\n")
        with suppress(OSError):
            for _ in range(1 << 10):
                writer.write(bytes(1 << 20))
            return
        cut.set()

    collector.play = play
    async with traced(collector) as (proxy, _, _):
        assert (await proxy.ask())[0] == 200
        await until_lost(proxy, 3)
        await until(cut.is_set, "the collector cannot go on")


@pytest.mark.parametrize("head", ["", "200 OK\r\n\r\n"], ids=["head", "body"])
async def test_an_answer_that_drips_is_given_up(
    collector: CollectorDouble, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    is_over = threading.Event()

    def play(writer: BufferedIOBase) -> None:
        writer.write(f"HTTP/1.1 {head}".encode())
        with suppress(OSError):
            while not is_over.wait(0.05):
                writer.write(b"2")

    collector.play = play
    async with traced(collector) as (proxy, _, _):
        assert (await proxy.ask())[0] == 200
        await until_lost(proxy, 3)
        is_over.set()


async def test_a_span_that_ends_after_all_is_counted_and_one_that_is_not_sampled_is_not(
    collector: CollectorDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "2")
    traces = SpanTraces(collector.url, 0, "http")
    record = RequestRecord("/", "", time.monotonic, 0.0)
    late = traces.begin("/v1/completions", {})
    traces._provider.sampler = StaticSampler(Decision.RECORD_ONLY)
    traces._tracer = traces._provider.get_tracer("not sampled")
    for _ in range(5):
        traces.begin("/v1/completions", {}).end(record)
    lost = [traces.num_lost]
    await traces.close()
    late.end(record)
    assert [*lost, traces.num_lost] == [0, 1]
    assert not collector.num_asked


async def test_a_span_begins_when_its_request_came_and_ends_with_its_last_event(
    collector: CollectorDouble,
) -> None:
    traces = SpanTraces(collector.url, 0, "http")
    now = time.time_ns()
    record = RequestRecord("/", "", time.monotonic, 0.0, first_byte_seconds=1000.0)
    traces.begin("/v1/completions", {}, 7.0).end(record)
    await traces.close()
    [span] = collector.spans
    assert now - 8e9 < span.began < now - 5e9
    assert span.events["first byte"] == span.ended


async def test_a_stranger_has_no_span(collector: CollectorDouble, tmp_path: Path) -> None:
    path = tmp_path / "clients"
    path.touch(mode=0o600)
    path.write_text(f"alice {'a' * 16} per_minute=1\n")
    async with traced(collector, client_keys_file=str(path)) as (proxy, _, _):
        theirs = {"traceparent": THEIRS}
        assert (await proxy.ask(headers=theirs))[0] == 401
        for status in (200, 429):
            keyed = {"Authorization": f"Bearer {'a' * 16}", **theirs}
            assert (await proxy.ask(headers=keyed))[0] == status
        assert len(await until_roots(collector, 2)) == 2
        assert [r["trace_id"] for r in await last_requests(proxy)].count(None) == 1
        assert {span.attributes.get("enduser.id") for span in collector.named(OURS)} == {"alice"}


async def test_what_waits_is_sent_when_the_proxy_stops(
    collector: CollectorDouble, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    async with traced(collector) as (proxy, _, _):
        assert (await proxy.ask())[0] == 200
        assert not collector.spans
    await seen(collector, OURS, "prefill", "decode")


async def test_the_proxy_stops_though_its_collector_hangs(
    collector: CollectorDouble, caplog: pytest.LogCaptureFixture
) -> None:
    collector.hold.clear()
    async with traced(collector) as (proxy, _, _):
        assert (await proxy.ask())[0] == 200
        await until(lambda: collector.num_asked, "the collector has the spans")
    # `running_proxy` gives it 10 s: less than the exporter's own limit and the wait for its thread.
    assert not collector.spans
    assert "3 spans have not reached the collector" in caplog.text
    collector.hold.set()


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1/v1/traces", ""])
async def test_without_its_packages_the_proxy_says_what_to_install(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.delitem(sys.modules, "proxy.observe.spans")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    async with fleet(otlp_traces_endpoint=endpoint) as (proxy, _, _):
        assert (await proxy.ask())[0] == 200
    [record] = [r for r in caplog.records if r.name == collectors.__name__]
    assert "pip install 'p2p-kv-engine[traces]'" in record.getMessage()


@pytest.mark.parametrize("url", ["collector:4318", "ftp://c/v1", "http://", "http://c:x/v1/traces"])
def test_an_endpoint_that_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint is .*; allowed: http"):
        ProxyConfig(otlp_traces_endpoint=url)


def test_without_spans_nothing_of_opentelemetry_is_loaded() -> None:
    code = (
        "import sys; from proxy import ProxyConfig, create_app; create_app(ProxyConfig());"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


async def test_without_spans_a_trace_passes_as_it_is() -> None:
    async with fleet() as (proxy, [prefill], _):
        theirs = {"traceparent": "anything", "tracestate": "any"}
        assert (await proxy.ask(headers=theirs))[0] == 200
        assert {name: prefill.received[0].headers[name] for name in theirs} == theirs
        assert (await proxy.metrics())["p2p_proxy_lost_spans"] == 0
        assert [r["trace_id"] for r in await last_requests(proxy)] == [None]


async def test_an_empty_fleets_answer_is_a_span_too(collector: CollectorDouble) -> None:
    async with running_proxy(otlp_traces_endpoint=collector.url) as proxy:
        assert (await proxy.ask())[0] == 503
        [request] = await seen(collector, OURS)
    assert (request.is_error, request.attributes[ERROR]) == (True, "no_instance")
    assert request.attributes["http.response.status_code"] == 503
