"""Choice of a pair: least loaded, of one kind, of one model, of two instances."""

from __future__ import annotations

from collections import Counter

import pytest

from p2p_engine.wire.messages import PROTOCOL_VERSION
from proxy.fleet.instances import BEING_CHANGED, PAUSED, Instance, Role
from proxy.openai.prompt import Prompt
from proxy.routing.router import Busy
from tests.rigs.routing import NOW, RoutingFleet
from tests.support import SeededRandom


def test_the_least_loaded_of_each_role_is_chosen() -> None:
    fleet = RoutingFleet()
    prefills = [fleet.add("P") for _ in range(3)]
    decodes = [fleet.add("D") for _ in range(3)]
    for instance, load in zip(prefills + decodes, [2, 1, 3, 1, 2, 0], strict=True):
        for _ in range(load):
            fleet.registry.take_leg(instance, Role.DECODE)
    assert fleet.choose() == (prefills[1], decodes[2])


def test_equal_loads_take_turns() -> None:
    fleet = RoutingFleet()
    for kind in "PPPDD":
        fleet.add(kind)
    chosen: Counter[Instance] = Counter()
    for _ in range(12):
        for instance, role in zip(fleet.choose(), Role, strict=True):
            fleet.registry.take_leg(instance, role).release()
            chosen[instance] += 1
    assert sorted(chosen.values()) == [4, 4, 4, 6, 6]


def test_every_prefill_meets_every_decode() -> None:
    """Two of each must not end up as two fixed pairs."""
    fleet = RoutingFleet()
    for kind in "PPDDD":
        fleet.add(kind)
    pairs = set()
    for _ in range(12):
        pairs.add(fleet.choose())
        for instance, role in zip(fleet.choose(), Role, strict=True):
            fleet.registry.take_leg(instance, role).release()
    assert len(pairs) == 6


def test_one_who_joins_late_is_not_flooded() -> None:
    fleet = RoutingFleet()
    fleet.add("P")
    old = fleet.add("D")
    for _ in range(100):
        fleet.registry.take_leg(old, Role.DECODE).release()
    new = fleet.add("D")
    chosen = []
    for _ in range(10):
        _, decode = fleet.choose()
        fleet.registry.take_leg(decode, Role.DECODE).release()
        chosen.append(decode)
    assert chosen.count(new) == chosen.count(old) == 5


def test_instances_of_both_roles_share_the_decodes() -> None:
    fleet = RoutingFleet()
    both = [fleet.add("PD") for _ in range(2)]
    for _ in range(10):
        prefill, decode = fleet.choose()
        assert prefill is not decode
        fleet.registry.take_leg(decode, Role.DECODE)
    assert [instance.load for instance in both] == [5, 5]


@pytest.mark.parametrize(
    ("kinds", "missing"),
    [
        ("", [Role.PREFILL, Role.DECODE]),
        ("P", [Role.DECODE]),
        ("DD", [Role.PREFILL]),
        (["PD"], [Role.DECODE]),
    ],
)
def test_the_missing_role_is_named(kinds: str, missing: list[Role]) -> None:
    fleet = RoutingFleet()
    for kind in kinds:
        fleet.add(kind)
    assert fleet.missing() == missing


def test_the_silent_and_the_unready_are_missing() -> None:
    fleet = RoutingFleet()
    fleet.add("P").expires.clear()
    fleet.add("D").record_unreachable()
    assert fleet.missing() == [Role.PREFILL, Role.DECODE]


def test_ours_and_old_ones_are_never_paired() -> None:
    fleet = RoutingFleet()
    ours = fleet.add("P")
    fleet.add("D", protocol=None)
    assert fleet.missing() == list(Role)
    old = fleet.add("P", protocol=None)
    old_pair = fleet.pair(Prompt())
    assert (old_pair.prefill, old_pair.is_old_wire) == (old, True)
    decode = fleet.add("D")
    fleet.registry.take_leg(old_pair.decode, Role.DECODE)
    new_pair = fleet.pair(Prompt())
    assert (new_pair.prefill, new_pair.decode, new_pair.is_old_wire) == (ours, decode, False)


def test_a_pair_has_one_model_and_it_is_the_one_asked_for() -> None:
    fleet = RoutingFleet()
    pairs = {m: (fleet.add("P", model=m), fleet.add("D", model=m)) for m in ("a", "b")}
    for model, pair in pairs.items():
        for _ in range(5):
            assert fleet.choose(model) == pair
    assert fleet.choose("a LoRA adapter") in pairs.values()
    assert fleet.choose(None) in pairs.values()


def test_a_model_whose_decode_is_gone_is_not_served_by_another() -> None:
    fleet = RoutingFleet()
    fleet.add("P", model="a")
    fleet.add("P", model="b")
    fleet.add("D", model="b")
    assert fleet.missing("a") == [Role.DECODE]


def test_a_pair_has_the_same_weights_while_there_is_one() -> None:
    fleet = RoutingFleet(max_in_flight_per_instance=1)
    prefill = fleet.add("P", weights="step-2")
    decode = fleet.add("D", weights="step-2")
    for unlike in ("step-1", "unknown-0a"):
        fleet.add("D", weights=unlike)
    assert fleet.choose() == (prefill, decode)
    pair = fleet.pair(Prompt(needs_whole_prompt=True))
    assert (pair.prefill, pair.decode) == (None, decode)
    # Even if it is busy: the others would compute with other weights.
    leg = fleet.registry.take_leg(decode, Role.DECODE)
    with pytest.raises(Busy):
        fleet.choose()
    leg.release()
    # An instance that does not say it matches any.
    silent, _ = fleet.registry.add("h:9", [Role.PREFILL], NOW)
    silent.record_answer(200)
    prefill.record_unreachable()
    assert fleet.choose()[0] is silent


def test_decode_computes_alone_where_no_prefill_has_its_weights() -> None:
    fleet = RoutingFleet(max_in_flight_per_instance=1)
    fleet.add("P", weights="step-2")
    decodes = [fleet.add("D", weights=name) for name in ("step-1", "unknown-0a")]
    fleet.add("D", weights="step-2", protocol=None)
    legs = []
    for number in (1, 2):
        pair = fleet.pair(Prompt())
        assert pair.prefill is None
        assert pair.decode in decodes
        legs.append(fleet.registry.take_leg(pair.decode, Role.DECODE))
        assert fleet.router.num_alone == number
    assert {leg.instance for leg in legs} == set(decodes)
    with pytest.raises(Busy):
        fleet.pair(Prompt())


def test_a_pair_may_come_soon_where_only_a_pause_is_in_its_way() -> None:
    fleet = RoutingFleet()
    prefill, decode = (fleet.add(kind, model="a") for kind in "PD")
    fleet.add("D", model="b").held = PAUSED
    assert not fleet.router.may_pair_soon("a")
    for why, may in ((PAUSED, True), (BEING_CHANGED, True), ("/collective_rpc: HTTP 500", False)):
        decode.held = why
        assert fleet.router.may_pair_soon("a") is may
        assert fleet.missing("a") == [Role.DECODE]
    decode.held = PAUSED
    assert not fleet.router.may_pair_soon("b")
    prefill.record_unreachable()
    assert not fleet.router.may_pair_soon("a")


def test_any_fleet_gives_a_pair_that_fits_or_says_why_not(rng: SeededRandom) -> None:
    for _ in range(300):
        fleet = RoutingFleet()
        for _ in range(rng.randint(0, 8)):
            protocol, model = rng.choice([None, PROTOCOL_VERSION]), rng.choice(["a", "b"])
            instance = fleet.add(rng.choice(["P", "D", "PD"]), protocol=protocol, model=model)
            if rng.random() < 0.2:
                instance.record_unreachable()
        instances = fleet.registry.instances()
        fitting = [
            (p, d)
            for p in instances
            for d in instances
            if p is not d
            and p.is_routable(Role.PREFILL, NOW)
            and d.is_routable(Role.DECODE, NOW)
            and p.identity.protocol == d.identity.protocol
            and p.identity.model == d.identity.model
        ]
        if fitting:
            assert fleet.choose() in fitting
        else:
            assert fleet.missing()


def test_one_that_was_added_without_its_model_serves_whatever_is_asked_for() -> None:
    fleet = RoutingFleet()
    prefill = fleet.add("P", model="a")
    decode, _ = fleet.registry.add("h:9", [Role.DECODE], NOW)
    decode.record_answer(200)
    assert fleet.choose("a") == (prefill, decode)
    named, _ = fleet.registry.add("h:10", [Role.DECODE], NOW, model="b")
    named.record_answer(200)
    assert fleet.choose("a") == (prefill, decode)
