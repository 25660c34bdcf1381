"""One trace through the proxy and both instances: all three send real vLLM's and our spans."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.tiny_model import ensure_tiny_model
from tests import marks
from tests.compat.fleet import BOOT_SECONDS, VLLM_ARGS
from tests.compat.workload import Question, ask
from tests.doubles.collector import CollectorDouble, SeenSpan
from tests.support import eventually
from tests.vllm.load import ENVIRONMENT

pytestmark = [marks.vllm, pytest.mark.timeout(1800)]

# vLLM would speak gRPC.
SPEAKS_HTTP = {
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    "OTEL_BSP_SCHEDULE_DELAY": "100",
}
OF_VLLM = "llm_request"
ASKED = {"prompt": [1, 2, 3] * 20, "max_tokens": 5, "return_token_ids": True}


@pytest.fixture(scope="module")
def collector() -> Iterator[CollectorDouble]:
    with CollectorDouble() as collector:
        yield collector


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, collector: CollectorDouble) -> Iterator[Fleet]:
    to = ("--otlp-traces-endpoint", collector.url)
    with Fleet(
        ensure_tiny_model(),
        vllm_args=(*VLLM_ARGS, *to),
        env={**ENVIRONMENT, **SPEAKS_HTTP},
        log_dir=tmp_path_factory.mktemp("logs"),
    ) as fleet:
        fleet.start_proxy(arguments=to)
        for role in (MemberRole.PREFILL, MemberRole.DECODE):
            fleet.start(role, env={"OTEL_SERVICE_NAME": f"vllm-{role.value}"})
        fleet.wait_ready(timeout=BOOT_SECONDS)
        yield fleet


def test_the_spans_of_proxy_and_both_instances_are_one_trace(
    fleet: Fleet, collector: CollectorDouble
) -> None:
    assert fleet.proxy is not None
    ask(fleet.proxy.url, Question("/v1/completions", ASKED))

    def whole() -> list[SeenSpan]:
        roots = collector.named("POST /v1/completions")
        spans = [s for s in collector.spans if roots and s.trace_id == roots[0].trace_id]
        return spans if len(spans) == 5 else []

    spans = eventually(whole, 30, "five spans of one trace")
    ids = {span.span_id: span for span in spans}
    of_vllm = {span.resource["service.name"]: span for span in spans if span.name == OF_VLLM}
    assert set(of_vllm) == {"vllm-prefill", "vllm-decode"}
    for role in ("prefill", "decode"):
        leg = ids[of_vllm[f"vllm-{role}"].parent_id]
        assert (leg.name, leg.resource["service.name"]) == (role, "p2p-proxy")
        assert ids[leg.parent_id].name == "POST /v1/completions"
