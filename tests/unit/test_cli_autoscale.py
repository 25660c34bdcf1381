"""Autoscaler: what it does to a fleet for what the proxy says. The fleet is a double."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import Mock

import pytest

from p2p_engine.cli import autoscale
from p2p_engine.cli.autoscale import AutoscaleOptions, Autoscaler
from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.replicas import read_ranges


class ScaledFleet:
    """Members that start at once, and what a proxy says of them."""

    def __init__(self) -> None:
        self.proxy = Mock(url="http://proxy")
        self.instances: list[Any] = []
        self.states: dict[str, str] = {}
        self.in_flight = 0
        self.answers = True

    def start(self, role: MemberRole) -> Any:
        member = Mock(plan=Mock(role=role), http_address=f"h:{len(self.states)}")
        member.name = f"{role.value}-{len(self.states) + 1}"
        self.instances.append(member)
        self.states[member.http_address] = "ready"
        return member

    def drain(self, member: Any) -> None:
        self.states[member.http_address] = "draining"

    def stop(self, member: Any) -> None:
        self.instances.remove(member)
        del self.states[member.http_address]

    def fetch(self, url: str) -> str | None:
        if not self.answers:
            return None
        if url.endswith("/metrics"):
            lines = [f'{autoscale.SIGNAL}{{instance="h:0",role="prefill"}} 99.0']
            lines += [f'{autoscale.SIGNAL}{{instance="h:0",role="decode"}} {self.in_flight}.0']
            return "\n".join([f"# TYPE {autoscale.SIGNAL} gauge", *lines, ""])
        instances = [{"http_address": name, "state": state} for name, state in self.states.items()]
        return json.dumps({"instances": instances})


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> ScaledFleet:
    made = ScaledFleet()
    made.start(MemberRole.DECODE)
    monkeypatch.setattr(autoscale, "fetch_text", made.fetch)
    return made


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def scaler(fleet: ScaledFleet, said: list[str]) -> Autoscaler:
    options = AutoscaleOptions(read_ranges("decode=1:3:2"), interval_seconds=0, window_seconds=0)
    return Autoscaler(fleet, fleet.drain, options, said.append)  # type: ignore[arg-type]


def test_it_adds_at_once_and_drains_one_after_the_other(
    fleet: ScaledFleet, scaler: Autoscaler, said: list[str]
) -> None:
    fleet.in_flight = 40
    scaler.step()
    assert said == [
        "adds decode-2: 40 in flight at 1 decode",
        "adds decode-3: 40 in flight at 1 decode",
    ]
    fleet.in_flight = 0
    for _ in range(2):  # it drains no other while one drains
        scaler.step()
    assert list(fleet.states.values()) == ["ready", "ready", "draining"]
    fleet.states["h:2"] = "drained"
    scaler.step()
    assert list(fleet.states.values()) == ["ready", "draining"]
    assert said[2:] == [
        "drains decode-3: 0 in flight at 3 decode",
        "stopped decode-3: it has drained",
        "drains decode-2: 0 in flight at 2 decode",
    ]


def test_it_does_nothing_while_the_proxy_does_not_answer(
    fleet: ScaledFleet, scaler: Autoscaler, said: list[str]
) -> None:
    fleet.in_flight, fleet.answers = 40, False
    scaler.step()
    assert said == []


def test_it_drains_none_that_has_not_served_yet(fleet: ScaledFleet, scaler: Autoscaler) -> None:
    started = fleet.start(MemberRole.DECODE)
    fleet.states[started.http_address] = "not_ready"
    scaler.step()
    assert list(fleet.states.values()) == ["ready", "not_ready"]


def test_what_an_admin_has_taken_back_or_drained_is_not_stopped(
    fleet: ScaledFleet, scaler: Autoscaler
) -> None:
    taken_back = fleet.start(MemberRole.DECODE)
    scaler.step()
    assert fleet.states[taken_back.http_address] == "draining"
    fleet.in_flight = 4
    fleet.states[taken_back.http_address] = "ready"
    scaler.step()
    fleet.states[taken_back.http_address] = "drained"
    scaler.step()
    assert taken_back in fleet.instances
    assert len(fleet.instances) == 3  # another one takes its place
