"""Prometheus metrics: counters that the proxy feeds, and gauges read from the registry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from proxy.fleet.instances import Instance, Role

if TYPE_CHECKING:
    from proxy.observe.request_log import RequestRecord

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """All series of one proxy, in a registry of their own. Label values come from fixed sets."""

    def __init__(self, instances: Callable[[], list[Instance]], clock: Callable[[], float]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_InstanceGauges(instances, clock))
        self.requests = self._counter(
            "requests", "Requests that ended", "route", "status", "outcome"
        )
        self._requests: dict[tuple[str, str, str], Counter] = {}
        self.resends = self._counter("resends", "Requests sent again on a new connection", "role")
        self.retries = self._counter("retries", "Requests retried with another pair")
        self.releases = self._counter(
            "releases", "Unused KV that decode was told to release", "result"
        )
        self._closed = self._counter(
            "closed_connections", "Connections of clients that the proxy closed, by limit", "limit"
        )
        self._refused = self._counter(
            "refused_requests", "Requests that were refused before they became one", "reason"
        )
        self.heartbeats = self._counter("heartbeats", "Frames on the registration port", "result")
        self.prefill = self._histogram("prefill_seconds", "From the request to prefill's answer")
        self.first_byte = self._histogram(
            "first_byte_seconds", "From the request to first byte out"
        )
        self.request = self._histogram("request_seconds", "From the request to its end")
        self.queue = self._histogram("queue_seconds", "From the request to the choice")
        self.bytes = self._counter("answer_bytes", "Bytes of answers sent to clients")

    def count_request(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        labels = (record.route, str(record.status), record.outcome)
        counter = self._requests.get(labels)
        if counter is None:  # there are few label sets, and `labels` is slow
            counter = self._requests[labels] = self.requests.labels(*labels)
        counter.inc()
        self.request.observe(record.total_seconds)
        self.bytes.inc(record.bytes_sent)
        if record.queue_seconds is not None:
            self.queue.observe(record.queue_seconds)
        if record.prefill_seconds is not None:
            self.prefill.observe(record.prefill_seconds)
        if record.first_byte_seconds is not None:
            self.first_byte.observe(record.first_byte_seconds)

    def count_closed(self, limit: str) -> None:
        """Count a client's connection that was closed because of a limit."""
        self._closed.labels(limit).inc()

    def count_refused(self, reason: str) -> None:
        """Count a request that is not among `requests`, because it was none, or for a page."""
        self._refused.labels(reason).inc()

    def watch(self, name: str, help_text: str, value: Callable[[], float]) -> None:
        """Export a gauge; `value` is called for each scrape."""
        Gauge(f"p2p_proxy_{name}", help_text, registry=self._registry).set_function(value)

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"p2p_proxy_{name}", help_text, labels, registry=self._registry)

    def _histogram(self, name: str, help_text: str) -> Histogram:
        return Histogram(f"p2p_proxy_{name}", help_text, buckets=_SECONDS, registry=self._registry)


class _InstanceGauges(Collector):
    """Reads the counts from the instances for each scrape, so that the two cannot differ."""

    def __init__(self, instances: Callable[[], list[Instance]], clock: Callable[[], float]) -> None:
        self._instances = instances
        self._clock = clock

    def collect(self) -> Iterator[GaugeMetricFamily]:
        instances, now = self._instances(), self._clock()
        yield self._by_role(
            "routable",
            "1 if the proxy sends it legs",
            lambda i, role: i.is_routable(role, now) if i.has_role(role, now) else None,
        )
        yield self._by_role("in_flight", "Legs in flight", lambda i, role: i.in_flight[role])
        yield self._by_role(
            "breaker_open",
            "1 if its breaker is open or half open",
            lambda i, role: i.breakers[role].state(now) != "closed",
        )
        tokens = _family("tokens_in_flight", "Estimated tokens of its legs", "instance")
        ages = _family("heartbeat_age_seconds", "Seconds since its last heartbeat", "instance")
        draining = _family("draining", "1 if it gets no new legs", "instance")
        for instance in instances:
            address = [instance.identity.name]
            tokens.add_metric(address, instance.load)
            draining.add_metric(address, instance.drains_until is not None)
            if instance.last_beat is not None:
                ages.add_metric(address, now - instance.last_beat)
        yield from (tokens, ages, draining)

    def _by_role(
        self, name: str, help_text: str, value: Callable[[Instance, Role], float | None]
    ) -> GaugeMetricFamily:
        family = _family(name, help_text, "instance", "role")
        for instance in self._instances():
            for role in Role:
                if (number := value(instance, role)) is not None:
                    family.add_metric([instance.identity.name, role.label], number)
        return family


def _family(name: str, help_text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"p2p_proxy_{name}", help_text, labels=labels)
