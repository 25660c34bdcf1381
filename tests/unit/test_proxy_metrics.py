"""The names of all metrics are a promise: dashboards and alerts are built on them."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from proxy.observe.metrics import Metrics
from proxy.observe.request_log import RequestRecord
from tests.rigs.routing import NOW, RoutingFleet

# One a line: name, type, labels.
GOLDEN = """
answer_bytes counter
breaker_open gauge instance role
closed_connections counter limit
draining gauge instance
first_byte_seconds histogram
heartbeat_age_seconds gauge instance
heartbeats counter result
in_flight gauge instance role
prefill_seconds histogram
queue_seconds histogram
refused_requests counter reason
releases counter result
request_seconds histogram
requests counter outcome route status
resends counter role
retries counter
routable gauge instance role
tokens_in_flight gauge instance
"""


def shown(metrics: Metrics) -> dict[str, tuple[str, set[str]]]:
    parsed = text_string_to_metric_families(metrics.render().decode())
    families = [family for family in parsed if not family.name.endswith("_created")]
    return {
        family.name.removeprefix("p2p_proxy_"): (
            family.type,
            {name for sample in family.samples for name in sample.labels} - {"le"},
        )
        for family in families
    }


def test_the_names_types_and_labels_stay() -> None:
    fleet = RoutingFleet()
    fleet.add("PD")
    metrics = Metrics(fleet.registry.instances, lambda: NOW)
    for counter, labels in (
        (metrics.requests, ("/v1/completions", "200", "ok")),
        (metrics.resends, ("decode",)),
        (metrics._closed, ("idle",)),
        (metrics._refused, ("syntax",)),
        (metrics.heartbeats, ("accepted",)),
        (metrics.releases, ("done",)),
    ):
        counter.labels(*labels)
    lines = (line.split() for line in GOLDEN.split("\n") if line)
    assert shown(metrics) == {name: (kind, set(labels)) for name, kind, *labels in lines}


def test_no_label_grows_with_what_clients_send() -> None:
    """10,000 models and ids make no more series than one."""
    metrics = Metrics(RoutingFleet().registry.instances, lambda: NOW)
    sizes = []
    for number in range(10_000):
        record = RequestRecord("/v1/completions", f"client {number}", lambda: NOW, NOW)
        record.transfer_id, record.outcome = f"{number:032x}", "ok"
        metrics.count_request(record)
        if number in (0, 9_999):
            sizes.append(len(metrics.render().splitlines()))
    assert sizes[0] == sizes[1]
