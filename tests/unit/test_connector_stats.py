"""Statistics: increments add up over ranks and time, the newest gauge of each rank wins."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.registry import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from p2p_engine import TransferKey
from p2p_engine.config import EngineConfig
from p2p_engine.connector.connector import P2pNcclConnector
from p2p_engine.connector.refused import RefusedPeers
from p2p_engine.connector.stats import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    P2pConnectorStats,
    StatsReporter,
    ours_in,
)
from p2p_engine.engine import P2pNcclEngine
from p2p_engine.memory.layout import TensorSink
from p2p_engine.wire.messages import MAX_REASON
from tests.rigs.engines import engines

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


def snapshot(sent: int = 0, landed: int = 0, ok: int = 0, failed: int = 0, live: int = 0) -> Any:
    return {
        "sent_bytes": sent,
        "landed_bytes_by_place": {"blocks": 0, "buffer": landed},
        "transfers_by_outcome": {"sent ok": ok, "sent TransferTimeout": failed},
        "live_bytes_by_place": {"buffer": live},
        "links": {"ready": 1, "greeting": 1},
    }


def report(reporter: StatsReporter, **values: int) -> P2pConnectorStats:
    made = reporter.report(snapshot(**values))
    assert made is not None
    received = pickle.loads(pickle.dumps(made))  # as on its way between processes
    assert isinstance(received, P2pConnectorStats)
    return received


def test_every_metric_reads_what_the_engine_counts() -> None:
    """A renamed statistic would be reported as zero for ever."""
    with P2pNcclEngine(EngineConfig(kv_buffer_size=1 << 20, mem_pool_size_gb=0)) as engine:
        known = engine.stats()
    for key, label, _ in [*COUNTERS.values(), *GAUGES.values()]:
        assert key in known
        assert not label or isinstance(known[key], dict)


def test_only_changes_are_reported() -> None:
    reporter = StatsReporter(0)
    first = report(reporter, sent=100, ok=1)
    assert first.data["counters"] == {
        "p2p_sent_bytes": {"": 100}, "p2p_transfers": {"sent ok": 1},
    }  # fmt: skip
    assert reporter.report(snapshot(sent=100, ok=1)) is None
    assert report(reporter, sent=150, ok=1).data["counters"] == {"p2p_sent_bytes": {"": 50}}
    gauges = report(reporter, sent=150, ok=1, live=7).data["gauges"]["0"]
    assert gauges["p2p_live_bytes"] == {"buffer": 7}
    assert gauges["p2p_links"] == {"": 1}


def test_ranks_and_intervals_add_up() -> None:
    ranks = [StatsReporter(0), StatsReporter(1)]
    total = P2pConnectorStats()
    assert total.is_empty()
    for step in (1, 2, 3):
        for rank, reporter in enumerate(ranks):
            live = step * (rank + 1) * 10**6
            total.aggregate(report(reporter, landed=step * 10**6, ok=step, failed=rank, live=live))
    assert total.reduce() == {
        "Sent (MB)": 0.0, "Landed (MB)": 6.0, "Transfers ok": 6, "Transfers failed": 1,
        "Live (MB)": 9.0,
    }  # fmt: skip
    total.reset()
    assert total.is_empty()


def test_vllm_can_make_them_again_from_their_payload() -> None:
    made = report(StatsReporter(0), sent=5)
    again = P2pNcclConnector.build_kv_connector_stats(made.data)
    assert again == made
    empty = P2pNcclConnector.build_kv_connector_stats()
    assert empty is not None
    assert empty.is_empty()


@pytest.fixture(scope="module")
def metrics() -> Any:
    """Made once: prometheus_client has one registry."""
    types: Any = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    config: Any = type("Config", (), {"kv_transfer_config": None})
    labels: list[str] = ["model_name", "engine"]
    return P2pNcclConnector.build_prom_metrics(config, types, labels, {0: ["m", "0"]})


def test_prometheus_has_each_value_under_its_labels(metrics: Any) -> None:
    reporters = [StatsReporter(0), StatsReporter(1)]
    for live in (7, 0):
        for rank, reporter in enumerate(reporters):
            made = report(reporter, sent=100 - live, ok=3, live=live + rank)
            metrics.observe(made.data, 0)
    engine = {"model_name": "m", "engine": "0"}

    def value(name: str, **more: str) -> float | None:
        return REGISTRY.get_sample_value(f"vllm:{name}", {**engine, **more})

    assert value("p2p_sent_bytes_total") == 200
    assert value("p2p_transfers_total", outcome="sent ok") == 6
    assert [value("p2p_live_bytes", rank=rank, place="buffer") for rank in "01"] == [0, 1]
    assert value("p2p_links", rank="0") == 1


def test_prometheus_has_requests_by_reason(metrics: Any) -> None:
    """vLLM adds the scheduler half's statistics to those of the workers."""
    of_workers = report(StatsReporter(0), live=7)
    assert P2pConnectorStats.of_untransferred({}) is None
    counted = P2pConnectorStats.of_untransferred({"no_id": 3})
    assert counted is not None
    assert not counted.is_empty()
    metrics.observe(of_workers.aggregate(counted).data, 0)
    labels = {"model_name": "m", "engine": "0", "reason": "no_id"}
    name = "vllm:p2p_untransferred_requests_total"
    assert REGISTRY.get_sample_value(name, labels) == 3
    assert of_workers.data["gauges"]["0"]["p2p_live_bytes"] == {"buffer": 7}


def test_the_workers_counters_are_found_within_others() -> None:
    made = report(StatsReporter(0), sent=5)
    within = KVConnectorStats(data={"OtherConnector": KVConnectorStats(), "Ours": made})
    assert ours_in(made).data["counters"] == {"p2p_sent_bytes": {"": 5}}
    assert ours_in(within) == made
    assert ours_in(None).is_empty()
    assert ours_in(KVConnectorStats(data={"bytes": 1})).is_empty()


def test_refusals_are_told_when_they_change_and_the_newest_of_each_rank_wins() -> None:
    reporters = [StatsReporter(0), StatsReporter(1)]
    total = P2pConnectorStats()

    def tell(rank: int, refused: dict[str, str]) -> Any:
        made = reporters[rank].report({**snapshot(), "refused_instances": refused})
        if made is not None:
            total.aggregate(made)
        return made

    for rank in (0, 1):
        made = tell(rank, {"a:1": "dtype", "b:2": "x" * 9000})
        assert made.data["gauges"][str(rank)]["p2p_refused_instances"] == {"": 2}
        assert made.data["refused"][str(rank)] == {"a:1": "dtype", "b:2": "x" * MAX_REASON}
    assert tell(0, {"a:1": "dtype", "b:2": "x" * 9000}) is None
    tell(0, {})
    assert {rank: len(refused) for rank, refused in total.data["refused"].items()} == {
        "0": 0, "1": 2,
    }  # fmt: skip


def test_those_who_are_refused_for_one_reason_are_named_together() -> None:
    refused = RefusedPeers()
    many = {f"h:{port}": "dtype: 'a' here, 'b' there" for port in range(1, 6)}
    assert refused.hear({"0": many}) == (
        "refuses h:1, h:2, h:3 and 2 more: dtype: 'a' here, 'b' there"
    )
    assert refused.hear({"1": {"h:9": "window"}}).endswith("there; refuses h:9: window")
    assert refused.hear({"0": {}}) == "refuses h:9: window"
    assert refused.hear({"1": {}}) == ""


def test_prometheus_has_histograms_by_mode_and_transport(metrics: Any) -> None:
    observed = [("receive_seconds", "pull tcp", seconds) for seconds in (0.5, 0.003)]
    made = StatsReporter(0).report(snapshot(), observed)
    assert made is not None
    received = P2pConnectorStats(data=json.loads(json.dumps(made.data)))
    metrics.observe(received.aggregate(made).data, 0)
    labels = {"model_name": "m", "engine": "0", "mode": "pull", "transport": "tcp"}
    name = "vllm:p2p_receive_seconds"
    assert REGISTRY.get_sample_value(f"{name}_count", labels) == 4
    assert REGISTRY.get_sample_value(f"{name}_bucket", {**labels, "le": "0.004"}) == 2


def test_an_engine_measures_what_the_histograms_show() -> None:
    key, tensor = TransferKey("request"), torch.ones(1000)
    with engines(2, "tcp") as (sender, receiver):
        waiting = receiver.receive(key, TensorSink())
        sender.send_tensor(key, tensor, receiver.zmq_address)
        waiting.wait(9)
        observed = {name: (label, value) for name, label, value in receiver.take_observed()}
        assert observed.keys() == {"receive_seconds", "receive_bytes"}
        assert observed["receive_bytes"] == ("push tcp", 4000)
        assert receiver.take_observed() == []
        [(name, label, seconds)] = sender.take_observed()
        assert (name, label) == ("grant_seconds", "push tcp")
        assert 0 < seconds < 9
        assert {shown for shown, _, _ in HISTOGRAMS.values()} == {name, *observed}
