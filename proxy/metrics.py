"""What the proxy tells Prometheus: counters that it feeds, and gauges read from the registry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from proxy.instances import Instance, Role

if TYPE_CHECKING:
    from proxy.journey import Journey

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """All series of one proxy, in a registry of their own. Label values come from fixed sets."""

    def __init__(self, instances: Callable[[], list[Instance]], clock: Callable[[], float]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_InstanceGauges(instances, clock))
        self.requests = self._counter(
            "requests", "Requests that ended", "route", "status", "outcome"
        )
        self.resends = self._counter("resends", "Requests sent again on a fresh connection", "role")
        self.retries = self._counter("retries", "Requests tried with another pair")
        self.releases = self._counter("releases", "KV that decode was told to let go of", "result")
        self.heartbeats = self._counter("heartbeats", "Frames on the registration port", "result")
        self.prefill = self._histogram("prefill_seconds", "From the choice to prefill's answer")
        self.first_byte = self._histogram(
            "first_byte_seconds", "From the request to first byte out"
        )
        self.request = self._histogram("request_seconds", "From the request to its end")

    def count_journey(self, journey: Journey) -> None:
        """Account for a request that has ended."""
        self.requests.labels(journey.route, str(journey.status), journey.outcome).inc()
        self.request.observe(journey.total_seconds)
        if journey.prefill_seconds is not None:
            self.prefill.observe(journey.prefill_seconds)
        if journey.first_byte_seconds is not None:
            self.first_byte.observe(journey.first_byte_seconds)

    def render(self) -> bytes:
        """Return the text that Prometheus reads."""
        return generate_latest(self._registry)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"p2p_proxy_{name}", help_text, labels, registry=self._registry)

    def _histogram(self, name: str, help_text: str) -> Histogram:
        return Histogram(f"p2p_proxy_{name}", help_text, buckets=_SECONDS, registry=self._registry)


class _InstanceGauges(Collector):
    """Reads the counts where they live, so that they cannot drift from them."""

    def __init__(self, instances: Callable[[], list[Instance]], clock: Callable[[], float]) -> None:
        self._instances = instances
        self._clock = clock

    def collect(self) -> Iterator[GaugeMetricFamily]:
        instances, now = self._instances(), self._clock()
        labels = ["instance", "role"]
        routable = GaugeMetricFamily(
            "p2p_proxy_routable", "1 if legs are sent to it", labels=labels
        )
        in_flight = GaugeMetricFamily("p2p_proxy_in_flight", "Legs in flight", labels=labels)
        for instance in instances:
            for role in Role:
                values = [instance.identity.http_address, role.label]
                if instance.has_role(role, now):
                    routable.add_metric(values, instance.is_routable(role, now))
                in_flight.add_metric(values, instance.in_flight[role])
        yield routable
        yield in_flight
