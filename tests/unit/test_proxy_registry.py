"""Registry: who lives, who may be used and who is counted, by an injected clock."""

from __future__ import annotations

from typing import Any

import pytest

from p2p_engine.errors import RemoteProtocolError
from p2p_engine.wire.messages import Heartbeat
from proxy.fleet.instances import PATIENCE, PAUSED, Instance, Role
from proxy.fleet.registry import AddressTaken, Registry, RegistryFull

LIFETIME = 10.0  # three beats of 3 s, and a third of one in which the last may be late


def beat(kind: str = "P", port: int = 8000, **more: Any) -> Heartbeat:
    return Heartbeat(kind, f"10.0.0.1:{port}", f"10.0.0.1:{port + 1}", protocol=1, **more)


def joined(registry: Registry, heartbeat: Heartbeat, now: float = 0.0) -> Instance:
    instance, _ = registry.observe(heartbeat, now)
    instance.record_answer(200)
    return instance


def test_an_instance_is_routable_when_it_beats_and_answers() -> None:
    registry = Registry()
    instance, is_new = registry.observe(beat(), 0.0)
    assert is_new
    assert not instance.is_routable(Role.PREFILL, 0.0)  # nobody has seen its server answer
    instance.record_answer(503)
    assert not instance.is_routable(Role.PREFILL, 0.0)
    instance.record_answer(200)
    assert instance.is_routable(Role.PREFILL, 0.0)
    assert not instance.is_routable(Role.DECODE, 0.0)


def test_ranks_behind_one_http_address_are_instances_of_their_own() -> None:
    registry = Registry()
    ranks = [joined(registry, beat(dp_rank=rank, epoch=rank)) for rank in (0, 1)]
    assert registry.instances() == ranks
    assert [rank.identity.name for rank in ranks] == ["10.0.0.1:8000#0", "10.0.0.1:8000#1"]
    assert registry.find("10.0.0.1:8000#1") is ranks[1]
    assert registry.find("10.0.0.1:8000") is None
    registry.observe(beat(dp_rank=1, epoch=1, leaving=True), 1.0)
    assert [rank.is_alive(2.0) for rank in ranks] == [True, False]
    registry.sweep(2.0)
    assert [registry.is_current(rank) for rank in ranks] == [True, False]


def test_two_that_claim_one_http_address_do_not_take_turns() -> None:
    """As ranks that were all told the same http_port: a leg would go to one, its KV to another."""
    registry = Registry()
    first, second = beat(epoch=1), beat(epoch=2)
    second.zmq_address = "10.0.0.1:9001"
    joined(registry, first)
    kept = joined(registry, second, now=1.0)  # it may be the first one's successor
    with pytest.raises(AddressTaken, match=r"0\.1:9001 is taken, .*0\.1:8001 is refused"):
        registry.observe(first, 3.0)
    assert registry.observe(second, 4.0) == (kept, False)
    assert registry.observe(first, 4.0 + LIFETIME + 0.01)[1]  # the second has gone


def test_three_that_claim_one_http_address_do_not_take_turns() -> None:
    """As instances on three hosts that were all told the same http_host."""
    registry = Registry()
    _, _, kept = (joined(registry, beat(epoch=epoch), now=float(epoch)) for epoch in (1, 2, 3))
    for epoch in (1, 2, 1):
        with pytest.raises(AddressTaken):
            registry.observe(beat(epoch=epoch), 4.0)
    assert registry.observe(beat(epoch=3), 5.0) == (kept, False)
    assert registry.observe(beat(epoch=1), 5.0 + LIFETIME + 0.01)[1]  # the third has gone


def test_it_lives_for_three_missed_beats() -> None:
    instance = joined(Registry(), beat(), now=100.0)
    assert instance.is_routable(Role.PREFILL, 100.0 + LIFETIME - 0.01)
    assert not instance.is_routable(Role.PREFILL, 100.0 + LIFETIME + 0.01)


def test_silence_while_we_were_away_is_excused_but_not_that_from_before() -> None:
    registry = Registry()
    living, left = joined(registry, beat(), now=5.0), joined(registry, beat(port=9000), now=5.0)
    registry.observe(beat(port=9000, leaving=True), 6.0)
    registry.excuse(50.0, now=60.0)
    assert living.is_routable(Role.PREFILL, 60.0)
    assert not living.is_routable(Role.PREFILL, 5.0 + LIFETIME + 50.01)
    assert not left.is_alive(60.0)


def test_who_was_heard_after_our_absence_is_not_excused_for_it() -> None:
    registry = Registry()
    instance = joined(registry, beat(), now=5.0)
    registry.observe(beat(), 60.0)  # what waited in the kernel is read first
    registry.excuse(50.0, now=60.0)
    assert instance.is_routable(Role.PREFILL, 60.0 + LIFETIME - 0.01)
    assert not instance.is_alive(60.0 + LIFETIME + 0.01)


def test_a_late_beat_keeps_it() -> None:
    registry = Registry()
    instance = joined(registry, beat(), now=0.0)
    same, is_new = registry.observe(beat(), 6.0)
    assert same is instance
    assert not is_new
    assert instance.is_routable(Role.PREFILL, 6.0 + LIFETIME - 0.01)


@pytest.mark.parametrize(("interval", "lifetime"), [(1.0, 10 / 3), (0.0, 1 / 6), (86400.0, 100.0)])
def test_the_announced_interval_counts_within_bounds(interval: float, lifetime: float) -> None:
    instance = joined(Registry(), beat(interval=interval))
    assert instance.is_alive(lifetime - 0.01)
    assert not instance.is_alive(lifetime + 0.01)


def test_the_number_of_missed_beats_is_a_setting() -> None:
    instance = joined(Registry(missed_beats=1), beat())
    assert instance.is_alive(3.9)
    assert not instance.is_alive(4.1)


def test_both_roles_live_and_die_apart() -> None:
    registry = Registry()
    instance = joined(registry, beat("P"), now=0.0)
    same, is_new = registry.observe(beat("D"), 5.0)
    assert same is instance
    assert not is_new
    assert instance.is_routable(Role.PREFILL, 9.0)
    assert instance.is_routable(Role.DECODE, 14.0)
    assert not instance.is_routable(Role.PREFILL, 14.0)
    registry.observe(beat("PD"), 20.0)
    assert all(instance.is_routable(role, 21.0) for role in Role)


def test_who_leaves_is_gone_at_once_and_may_return() -> None:
    registry = Registry()
    instance = joined(registry, beat(), now=0.0)
    registry.observe(beat(leaving=True), 1.0)
    assert not instance.is_alive(1.0)
    same, _ = registry.observe(beat(), 2.0)
    assert same is instance
    assert instance.is_routable(Role.PREFILL, 2.0)


@pytest.mark.parametrize(
    "change", [{"epoch": 2}, {"model": "other"}, {"tp_size": 2}, {"send_type": "GET"}]
)
def test_what_changes_makes_a_new_incarnation(change: dict[str, Any]) -> None:
    registry = Registry()
    old = joined(registry, beat(epoch=1))
    leg = registry.take_leg(old, Role.PREFILL)
    new, is_new = registry.observe(beat(**{"epoch": 1, **change}), 1.0)
    assert is_new
    assert new is not old
    assert (new.load, new.is_ready) == (0, False)
    assert registry.instances() == [new]
    assert not registry.is_current(old)
    leg.release()  # of the old one: the new one has never heard of it
    assert (old.load, new.load) == (0, 0)


def test_the_expired_are_forgotten_unless_they_are_at_work() -> None:
    registry = Registry()
    instance = joined(registry, beat(), now=0.0)
    leg = registry.take_leg(instance, Role.DECODE)
    registry.sweep(LIFETIME + 1)
    assert registry.instances() == [instance]
    assert not instance.is_routable(Role.PREFILL, LIFETIME + 1)
    leg.release()
    registry.sweep(LIFETIME + 1)
    assert registry.instances() == []
    assert not registry.is_current(instance)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_what_an_order_said_of_an_instance_holds_for_the_same_process_only(
    *, is_replaced: bool
) -> None:
    registry = Registry()
    failed = joined(registry, beat(epoch=1), now=0.0)
    failed.held = "/collective_rpc: HTTP 500"
    if is_replaced:  # by another one of this address
        assert joined(registry, beat(epoch=2), now=1.0).held == ""
    registry.sweep(LIFETIME + 2)
    assert registry.instances() == []
    assert joined(registry, beat(epoch=3), now=LIFETIME + 3).held == ""
    registry.sweep(3 * LIFETIME)
    assert registry.observe(beat(epoch=1), 3 * LIFETIME) == (failed, True)
    assert failed.is_alive(3 * LIFETIME)
    assert failed.held == "/collective_rpc: HTTP 500"


def test_who_was_paused_when_it_went_is_asked_anew() -> None:
    """vLLM may have gone on since."""
    registry = Registry()
    joined(registry, beat(), now=0.0).held = PAUSED
    registry.sweep(LIFETIME + 1)
    assert joined(registry, beat(), now=LIFETIME + 2).held == ""


def test_what_is_remembered_of_those_that_went_is_bounded() -> None:
    registry = Registry(max_instances=2)
    for port in (1, 2, 3):
        joined(registry, beat(port=port), now=20.0 * port).held = "it failed"
    registry.sweep(100.0)
    kept = [joined(registry, beat(port=port), now=100.0).held for port in (2, 3)]
    assert kept == ["it failed", "it failed"]
    registry.sweep(200.0)
    assert joined(registry, beat(port=1), now=200.0).held == ""


def test_a_leg_is_counted_once_and_released_once() -> None:
    registry = Registry()
    instance = joined(registry, beat())
    first, second = (registry.take_leg(instance, Role.PREFILL) for _ in range(2))
    assert instance.in_flight == {Role.PREFILL: 2, Role.DECODE: 0}
    first.release()
    first.release()
    assert instance.load == 1
    second.release()
    assert instance.load == 0


def test_silence_is_borne_for_a_while_and_refusal_is_not() -> None:
    instance = joined(Registry(), beat())
    for _ in range(PATIENCE - 1):
        instance.record_silence()
        assert instance.is_ready
    instance.record_silence()
    assert not instance.is_ready
    instance.record_answer(200)
    instance.record_unreachable()
    assert not instance.is_ready
    instance.record_answer(200)
    instance.record_answer(500)
    assert not instance.is_ready


def test_what_joins_and_what_goes_costs_no_look_at_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at: list[Instance] = []
    is_alive = Instance.is_alive

    def looked(instance: Instance, now: float) -> bool:
        looked_at.append(instance)
        return is_alive(instance, now)

    monkeypatch.setattr(Instance, "is_alive", looked)
    registry = Registry(max_instances=100)
    made = [joined(registry, beat(port=port), now=0.0) for port in range(1, 100)]
    late = joined(registry, beat(port=100), now=LIFETIME + 1)
    assert looked_at == []
    for instance in (late, made[0]):
        registry.let_go(instance, LIFETIME + 1)
    assert looked_at == [late, made[0]]
    assert registry.instances() == [*made[1:], late]
    registry.let_go(made[0], LIFETIME + 1)  # idempotent
    joined(registry, beat(port=101), now=LIFETIME + 1)
    joined(registry, beat(port=102), now=LIFETIME + 1)  # there is no room but that of the expired
    assert len(registry.instances()) == 3


def test_the_number_of_instances_is_bounded_by_the_living() -> None:
    registry = Registry(max_instances=2)
    for port in (1, 3):
        registry.observe(beat(port=port), 0.0)
    with pytest.raises(RegistryFull, match="at most 2"):
        registry.observe(beat(port=5), 1.0)
    registry.observe(beat(port=1), 1.0)  # one that is known
    registry.observe(beat(port=1, epoch=9), 1.0)  # its next incarnation
    registry.observe(beat(port=5), LIFETIME + 0.5)  # 3 has expired
    assert {i.identity.http_address for i in registry.instances()} == {"10.0.0.1:1", "10.0.0.1:5"}


@pytest.mark.parametrize("kind", ["", "X", "PX", "PP", "DP", "p"])
def test_only_the_known_roles_are_taken(kind: str) -> None:
    with pytest.raises(RemoteProtocolError, match="allowed: P, D or PD"):
        Registry().observe(beat(kind), 0.0)


@pytest.mark.parametrize(
    "address",
    ["", "host", ":80", "a b:80", "h:0", "h:99999", "h:80/x", "h:x", "h:None", "https://h:80",
     "http://h", "a:b:80", "::1", "http://http://h:80", "::1:0"],
)  # fmt: skip
def test_only_addresses_are_taken(address: str) -> None:
    for wrong in (Heartbeat("P", address, "h:1"), Heartbeat("P", "h:1", address)):
        with pytest.raises(RemoteProtocolError, match="is not host:port"):
            Registry().observe(wrong, 0.0)


@pytest.mark.parametrize(
    ("address", "plain"),
    [
        ("http://10.0.0.1:80", "10.0.0.1:80"),
        ("http://gpu-7:80/", "gpu-7:80"),
        ("fd12::1:8000", "[fd12::1]:8000"),
        ("http://::1:80", "[::1]:80"),
    ],
)
def test_what_can_only_be_one_address_is_taken(address: str, plain: str) -> None:
    instance, _ = Registry().observe(Heartbeat("D", address, address), 0.0)
    assert (instance.identity.http_address, instance.identity.zmq_address) == (plain, plain)


@pytest.mark.parametrize("address", ["10.0.0.1:80", "gpu-7.rack_2.example:80", "[fd12::1]:65535"])
def test_names_and_both_kinds_of_ip_are_taken(address: str) -> None:
    instance, _ = Registry().observe(Heartbeat("D", address, address), 0.0)
    assert instance.identity.http_address == address
