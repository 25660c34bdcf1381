"""Statistics of the engines, on their way to vLLM's log line and to /metrics.

Counters travel as increments, which add up over ranks and over time. Gauges travel by rank, so that
the newest of each rank wins. What a histogram counts travels as single values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from p2p_engine.wire.messages import shorten

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT

# Metric: (key in engine.stats(), label of its parts, what it is)
COUNTERS = {
    "p2p_refused_connections": ("refused_connections", "", "Connections that proved nothing."),
    "p2p_sent_bytes": ("sent_bytes", "", "KV bytes that have left."),
    "p2p_writing_seconds": ("writing_seconds", "", "Seconds in which KV was being written."),
    "p2p_landed_bytes": ("landed_bytes_by_place", "place", "KV bytes that have arrived."),
    "p2p_transfers": ("transfers_by_outcome", "outcome", "Transfers that have ended."),
    "p2p_denied_offers": ("denied_offers", "", "Offers that found no room and were made again."),
    "p2p_expired_leases": ("expired_leases", "", "KV that nobody asked for in time."),
    "p2p_corrupted_chunks": ("corrupted_chunks", "", "Chunks that came with a wrong checksum."),
    "p2p_wrong_messages": ("wrong_messages", "", "Messages that were dropped as wrong."),
    "p2p_spilled_bytes": ("spilled_bytes", "", "KV bytes that left vLLM's blocks under pressure."),
    "p2p_messages": ("messages_sent", "", "Control messages that were sent."),
}
# Metric: (label, what it is). The scheduler half counts these, no engine does.
REQUEST_COUNTERS = {
    "p2p_untransferred_requests": ("reason", "Requests that take part in no transfer."),
}
GAUGES = {
    "p2p_refused_instances": ("refused_instances", "", "Instances that are refused as unlike."),
    "p2p_authenticated": ("authenticated", "", "1 if only members of the fleet are talked to."),
    "p2p_live_bytes": ("live_bytes_by_place", "place", "KV bytes that have landed or may."),
    "p2p_quarantined_bytes": ("quarantined_bytes", "", "Memory that a lost peer may still write."),
    "p2p_pinned_bytes": ("pinned_bytes", "state", "Host memory that CUDA has page-locked, or not."),
    "p2p_open_transfers": ("open_transfers", "", "Transfers that have not ended."),
    "p2p_links": ("links", "", "Peers that are connected."),
    "p2p_overdue_waits": ("overdue_waits", "", "Waits that have outlived their deadline."),
    "p2p_healthy": (
        "healthy",
        "",
        "1: all threads live, all parts of the engine work, no wait is overdue.",
    ),
}
# Metric: (name in engine.take_observed(), bounds, what it is); all by mode and transport.
HISTOGRAMS = {
    "p2p_receive_seconds": (
        "receive_seconds",
        [0.001 * 2**power for power in range(16)],
        "Seconds from the order to load a request's KV until all of it was in place.",
    ),
    "p2p_receive_bytes": (
        "receive_bytes",
        [float(4096 << 2 * power) for power in range(12)],
        "Bytes of a request's KV that arrived.",
    ),
    "p2p_grant_seconds": (
        "grant_seconds",
        [0.0005 * 2**power for power in range(16)],
        "Seconds from a chunk's first offer until it was granted.",
    ),
}
LABELS = ("mode", "transport")  # of the histograms
Observed = Sequence[tuple[str, str, float]]
Values = dict[str, dict[str, float]]  # by metric, by label ("" where there is none)


def _values(table: dict[str, tuple[str, str, str]], snapshot: dict[str, Any]) -> Values:
    values: Values = {}
    for metric, (key, label, _) in table.items():
        value = snapshot.get(key, {} if label else 0)
        if key == "links":  # they are counted by state, and others are still being dialled
            value = value.get("ready", 0) if isinstance(value, dict) else value
        if not label:
            value = {"": len(value) if isinstance(value, dict) else value}
        values[metric] = dict(value)
    return values


@dataclass
class P2pConnectorStats(KVConnectorStats):
    """The statistics of some ranks over an interval."""

    def __post_init__(self) -> None:
        """Start with empty values if no data is given."""
        if not self.data:
            self.reset()

    @classmethod
    def of_untransferred(cls, counts: dict[str, int]) -> P2pConnectorStats | None:
        """Make the scheduler half's statistics of requests by reason; None if there are none."""
        if not counts:
            return None
        made = cls()
        made.data["counters"]["p2p_untransferred_requests"] = counts
        return made

    @classmethod
    def of(
        cls,
        counters: Values,
        gauges: Values,
        rank: int,
        observed: Observed = (),
        refused: Mapping[str, str] | None = None,
    ) -> P2pConnectorStats:
        """Make the statistics of one rank. `refused`: which instances it refuses and why, if that
        has changed."""
        made, name = cls(), str(rank)
        made.data |= {"counters": counters, "gauges": {name: gauges}, "observed": list(observed)}
        if refused is not None:
            made.data["refused"][name] = dict(refused)
        return made

    def reset(self) -> None:
        """Forget everything."""
        self.data = {"counters": {}, "gauges": {}, "observed": [], "refused": {}}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another rank's, or a later interval's."""
        for metric, by_label in other.data["counters"].items():
            mine = self.data["counters"].setdefault(metric, {})
            for label, value in by_label.items():
                mine[label] = mine.get(label, 0) + value
        self.data["gauges"].update(other.data["gauges"])
        self.data["observed"] += other.data["observed"]
        self.data["refused"].update(other.data["refused"])
        return self

    def reduce(self) -> dict[str, int | float]:
        """Summarise for a log line."""
        counters, gauges = self.data["counters"], self.data["gauges"].values()
        outcomes = counters.get("p2p_transfers", {})
        num_ok = sum(value for name, value in outcomes.items() if name.endswith(" ok"))
        live = sum(sum(values["p2p_live_bytes"].values()) for values in gauges)
        return {
            "Sent (MB)": _megabytes(sum(counters.get("p2p_sent_bytes", {}).values())),
            "Landed (MB)": _megabytes(sum(counters.get("p2p_landed_bytes", {}).values())),
            "Transfers ok": num_ok,
            "Transfers failed": sum(outcomes.values()) - num_ok,
            "Live (MB)": _megabytes(live),
        }

    def is_empty(self) -> bool:
        """Tell whether it has no values."""
        return not self.data["counters"] and not self.data["gauges"]


class StatsReporter:
    """Turns one rank's snapshots into the changes since the last one."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._counters: Values = {}
        self._gauges: Values = {}
        self._refused: dict[str, str] = {}

    def report(self, snapshot: dict[str, Any], observed: Observed = ()) -> P2pConnectorStats | None:
        """Return the changes; None if there are none."""
        counters, gauges = _values(COUNTERS, snapshot), _values(GAUGES, snapshot)
        increments: Values = {}
        for metric, by_label in counters.items():
            before = self._counters.get(metric, {})
            grown = {k: v - before.get(k, 0) for k, v in by_label.items() if v != before.get(k, 0)}
            if grown:
                increments[metric] = grown
        refused = snapshot.get("refused_instances", {})
        is_told = refused == self._refused
        if not increments and not observed and gauges == self._gauges and is_told:
            return None
        self._counters, self._gauges, self._refused = counters, gauges, refused
        news = None if is_told else {address: shorten(why) for address, why in refused.items()}
        return P2pConnectorStats.of(increments, gauges, self._rank, observed, news)


class P2pPromMetrics(KVConnectorPromMetrics):
    """The same as Prometheus metrics, `vllm:p2p_...`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        make_counter, make_gauge = cast("Any", self._counter_cls), cast("Any", self._gauge_cls)
        counted = {metric: about[1:] for metric, about in COUNTERS.items()} | REQUEST_COUNTERS
        self._counters: dict[str, Any] = {
            metric: make_counter(
                name=f"vllm:{metric}",
                documentation=meaning,
                labelnames=[*labelnames, *([label] if label else [])],
            )
            for metric, (label, meaning) in counted.items()
        }
        self._gauges: dict[str, Any] = {
            metric: make_gauge(
                name=f"vllm:{metric}",
                documentation=meaning,
                multiprocess_mode="mostrecent",
                labelnames=[*labelnames, "rank", *([label] if label else [])],
            )
            for metric, (_, label, meaning) in GAUGES.items()
        }

        make_histogram = cast("Any", self._histogram_cls)
        self._histograms: dict[str, Any] = {
            name: make_histogram(
                name=f"vllm:{metric}",
                documentation=meaning,
                buckets=bounds,
                labelnames=[*labelnames, *LABELS],
            )
            for metric, (name, bounds, meaning) in HISTOGRAMS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one step's statistics."""
        engine = self.per_engine_labelvalues[engine_idx]
        for metric, by_label in transfer_stats_data["counters"].items():
            for label, value in by_label.items():
                self._counters[metric].labels(*engine, *([label] if label else [])).inc(value)
        for name, label, value in transfer_stats_data["observed"]:
            self._histograms[name].labels(*engine, *label.split()).observe(value)
        for rank, gauges in transfer_stats_data["gauges"].items():
            for metric, by_label in gauges.items():
                for label, value in by_label.items():
                    labels = [*engine, rank, *([label] if label else [])]
                    self._gauges[metric].labels(*labels).set(value)


def ours_in(stats: KVConnectorStats | None) -> P2pConnectorStats:
    """Return our workers' statistics, also if `MultiConnector` wraps them; empty ones if there are
    none."""
    data = stats.data if stats is not None else {}
    for found in (stats, *data.values()):
        if isinstance(found, P2pConnectorStats):
            return found
    return P2pConnectorStats()


def _megabytes(nbytes: float) -> float:
    return round(nbytes / 1e6, 3)
