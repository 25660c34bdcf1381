"""Autoscaler: stand-ins come and go as the proxy's metrics ask for it."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.members import Member, fetch_text
from p2p_engine.cli.replicas import ReplicaRange, ReplicaRule

SIGNAL = "p2p_proxy_in_flight"
_LEAVING = ("draining", "drained")


@dataclass(frozen=True)
class AutoscaleOptions:
    """Which roles are scaled, and when. Stand-ins start within seconds, so by default all of it is
    faster than in Kubernetes, which looks every 15 seconds."""

    ranges: Mapping[MemberRole, ReplicaRange] = field(default_factory=dict)
    interval_seconds: float = 2.0
    window_seconds: float = 30.0


class Autoscaler:
    """Scales a fleet that has a proxy of its own. It owns nothing, and has no thread.

    `drain` makes the proxy send no more requests to a member, and raises OSError if it refuses.
    """

    def __init__(
        self,
        fleet: Fleet,
        drain: Callable[[Member], object],
        options: AutoscaleOptions,
        say: Callable[[str], object],
    ) -> None:
        """`say` is told in a line what is done to each instance, and why."""
        self._fleet = fleet
        self._drain = drain
        self._say = say
        self._interval_seconds = options.interval_seconds
        self._rules = {
            role: ReplicaRule(limits, options.window_seconds)
            for role, limits in options.ranges.items()
        }
        self._next_look = 0.0
        self._leaving: list[Member] = []

    def step(self) -> None:
        """If it is time, look at the proxy, and start, drain and stop what that asks for. Does
        nothing if the proxy does not answer. Blocks while an instance that has drained stops.

        Raises:
            OSError: an instance could not be started or drained.
        """
        now = time.monotonic()
        if not self._rules or now < self._next_look or self._fleet.proxy is None:
            return
        self._next_look = now + self._interval_seconds
        metrics = fetch_text(f"{self._fleet.proxy.url}/metrics")
        status = fetch_text(f"{self._fleet.proxy.url}/status")
        if metrics is None or status is None:
            return
        states = {item["http_address"]: item["state"] for item in json.loads(status)["instances"]}
        self._stop_drained(states)
        in_flight = _sums(metrics)
        for role, rule in self._rules.items():
            members = [
                member
                for member in self._fleet.instances
                if member.plan is not None
                and member.plan.role is role
                and states.get(member.http_address) not in _LEAVING
            ]
            wanted = rule.decide(len(members), in_flight[role.value], now)
            why = f"{in_flight[role.value]} in flight at {len(members)} {role.value}"
            for _ in range(wanted - len(members)):
                self._say(f"adds {self._fleet.start(role).name}: {why}")
            if wanted < len(members):
                self._remove(members[-1], states, why)

    def _remove(self, member: Member, states: Mapping[str, str], why: str) -> None:
        """Drain the newest of a role, as a ReplicaSet takes its newest pod; one at a time, and none
        that has not served yet."""
        assert member.plan is not None
        roles = [leaving.plan.role for leaving in self._leaving if leaving.plan is not None]
        if member.plan.role not in roles and states.get(member.http_address) == "ready":
            self._drain(member)
            self._leaving.append(member)
            self._say(f"drains {member.name}: {why}")

    def _stop_drained(self, states: Mapping[str, str]) -> None:
        for member in self._leaving:
            if member in self._fleet.instances and states.get(member.http_address) == "drained":
                self._fleet.stop(member)
                self._say(f"stopped {member.name}: it has drained")
        self._leaving = [
            member
            for member in self._leaving  # unless it was lost, or an admin has taken it back
            if member in self._fleet.instances and states.get(member.http_address) in _LEAVING
        ]


def _sums(metrics: str) -> Counter[str]:
    """Return the requests in flight of each role, over all instances."""
    sums: Counter[str] = Counter()
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples if family.name == SIGNAL else ():
            sums[sample.labels["role"]] += int(sample.value)
    return sums
