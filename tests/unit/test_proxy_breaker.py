"""Breaker: opens after failures in a row, tries one, and forgives."""

from __future__ import annotations

import pytest

from proxy.fleet.breaker import Breaker
from proxy.fleet.instances import Role
from tests.rigs.routing import NOW, RoutingFleet


def tripped() -> Breaker:
    breaker = Breaker(max_failures=3, pause_seconds=10.0)
    for _ in range(3):
        assert breaker.allows(0.0)
        breaker.fail(0.0)
    return breaker


def test_failures_in_a_row_open_it_for_a_while() -> None:
    breaker = tripped()
    assert (breaker.state(9.9), breaker.allows(9.9)) == ("open", False)
    assert (breaker.state(10.0), breaker.allows(10.0)) == ("half_open", True)


def test_a_success_between_keeps_it_closed() -> None:
    breaker = Breaker(max_failures=3, pause_seconds=10.0)
    for _ in range(10):
        breaker.fail(0.0)
        breaker.fail(0.0)
        breaker.succeed()
    assert breaker.state(0.0) == "closed"


def test_one_leg_decides_and_the_others_wait() -> None:
    breaker = tripped()
    assert breaker.begin()
    assert not breaker.allows(11.0)
    assert not breaker.begin()
    breaker.fail(11.0)
    assert breaker.state(20.9) == "open"
    assert breaker.begin()
    breaker.succeed()
    assert breaker.allows(21.0)
    breaker.fail(21.0)
    assert breaker.allows(21.0)


def test_a_leg_without_a_verdict_leaves_the_decision_to_the_next() -> None:
    breaker = tripped()
    breaker.begin()
    breaker.give_up()
    assert breaker.allows(10.0)


def test_an_answer_that_begins_well_is_trusted_until_it_breaks() -> None:
    breaker = tripped()
    breaker.begin()
    breaker.recover()
    assert breaker.allows(10.0)
    breaker.fail(10.0)
    assert breaker.state(10.0) == "open"


def test_each_role_of_an_instance_has_its_own() -> None:
    fleet = RoutingFleet()
    one, other = fleet.add("PD"), fleet.add("PD")
    for _ in range(5):
        one.breakers[Role.PREFILL].fail(NOW)
    assert not one.is_routable(Role.PREFILL, NOW)
    assert one.is_routable(Role.DECODE, NOW)
    assert fleet.choose() == (other, one)


def test_a_leg_that_decides_and_is_cancelled_frees_the_place() -> None:
    fleet = RoutingFleet()
    instance = fleet.add("P")
    for _ in range(5):
        instance.breakers[Role.PREFILL].fail(NOW - 31.0)
    leg = fleet.registry.take_leg(instance, Role.PREFILL)
    assert not instance.is_routable(Role.PREFILL, NOW)
    leg.release()
    assert instance.is_routable(Role.PREFILL, NOW)


@pytest.mark.parametrize(
    ("answered", "missed_probes", "is_to_blame"),
    [(0, 0, True), (502, 0, True), (503, 0, True), (504, 0, True), (307, 0, True),
     (500, 0, False), (500, 1, True), (501, 0, False), (501, 1, False), (508, 1, False)],
)  # fmt: skip
def test_what_may_be_due_to_the_request_is_not_the_instances_fault(
    answered: int, missed_probes: int, *, is_to_blame: bool
) -> None:
    instance = RoutingFleet().add("P")
    instance.missed_probes = missed_probes
    assert instance.is_to_blame_for(answered) is is_to_blame
