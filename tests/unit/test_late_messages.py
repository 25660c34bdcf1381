"""A message of an attempt, or of a receive, that has ended comes late or a second time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from p2p_engine.send.holds import Holds
from p2p_engine.send.shipment import Shipment
from p2p_engine.wire.messages import Abandon, Commit, decode
from tests.doubles.turns_world import TurnsWorld
from tests.doubles.world import PAGES, PEER, SETTINGS
from tests.property.transfer_machine import KEYS

CONTENT = (KEYS[0], b"all")
TO_HOLDER = 2  # a lane
SECONDS = 30
CONFIG = dataclasses.replace(
    SETTINGS, mem_pool_size_gb=(1 << 16) / (1 << 30), lease_seconds=20,
    transfer_timeout_seconds=SECONDS, chunk_bytes=sum(PAGES),
)  # fmt: skip


@pytest.fixture
def world() -> Iterator[TurnsWorld]:
    made = TurnsWorld(receiver_writes=False, config=CONFIG)
    made.meet()
    yield made
    made.close()


def work(world: TurnsWorld, turns: int = 30, seconds: float = 0.05) -> None:
    """Let both sides answer each other."""
    for _ in range(turns):
        world.connect()
        world.work()
        world.advance(seconds)
        while world.network:
            world.deliver_all()
            world.work()


def deliver_want(world: TurnsWorld) -> tuple[str, bytes]:
    """Hand the first WANT over; return a copy."""
    index = world.first_of(TO_HOLDER)
    assert index is not None
    copy = world.network[index]
    world.deliver(index)
    return copy


def test_a_want_that_comes_after_its_receive_has_ended_brings_nothing(
    world: TurnsWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank still reads what is held, so it is offered again. The next attempt has other
    bytes."""
    monkeypatch.setattr(Holds, "_readers", lambda self, content, spec: frozenset({0, 1}))
    world.hold(CONTENT, 0, 4, 1)
    world.claim(CONTENT, (0, 4), pull=True)
    late = deliver_want(world)
    work(world)
    assert world.receivings[0].is_right()
    world.network.append(late)
    work(world)
    assert not sum(world.store.live_bytes().values())
    world.sendings[-1].transfer.cancel("its request was aborted")
    world.holds.let_go(CONTENT, "its request was aborted", 1)
    work(world, turns=2)
    world.hold(CONTENT, 0, 4, 2)
    world.sendings[-1].memory[:] = 99
    world.claim(CONTENT, (0, 4), pull=True)
    work(world, seconds=0.1)
    assert world.receivings[-1].transfer.done
    assert world.receivings[-1].transfer.error is None
    assert (world.receivings[-1].memory == 99).all()


def test_a_want_that_comes_behind_a_later_one_stops_nothing(world: TurnsWorld) -> None:
    world.hold(CONTENT, 0, 4, 1)
    world.claim(CONTENT, (0, 4), pull=True)
    late = deliver_want(world)
    world.receivings[0].transfer.cancel("its request was aborted")
    world._note_ends()
    world.claim(CONTENT, (0, 4), pull=True)
    world.advance(0)
    while world.first_of(TO_HOLDER) is not None:
        deliver_want(world)
    for _ in range(3):  # until a chunk is granted
        world.deliver_all()
    assert world.store._ledger.receives[CONTENT].senders
    world.network.insert(0, late)
    world.deliver(0)
    work(world)
    assert world.receivings[1].transfer.done
    assert world.receivings[1].is_right()


def test_the_answer_to_an_earlier_abandon_does_not_end_the_later_one(world: TurnsWorld) -> None:
    world.sender.abandon(CONTENT, PEER, "attempt 1 was aborted", 1)
    world.deliver(0)
    world.sender.abandon(CONTENT, PEER, "attempt 2 was aborted", 2)
    lost = next(index for index, (to, _) in enumerate(world.network) if to == "store")
    world.network.pop(lost)
    world.deliver_all()
    world.advance(SECONDS / 2)
    repeated = [decode(frame) for _, frame in world.network]
    assert [item.generation for item in repeated if isinstance(item, Abandon)] == [2]
    world.deliver_all()
    world.deliver_all()
    assert not len(world.sender._abandoned)


def test_what_was_released_before_its_last_commit_counts_as_released(
    world: TurnsWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has landed, for a receive that was given up: another instance may be asked next."""
    monkeypatch.setattr(Holds, "_readers", lambda self, content, spec: frozenset({0, 1}))
    world.hold(CONTENT, 0, 4, 1)
    world.claim(CONTENT, (0, 4), pull=True)
    deliver_want(world)
    (hold,) = set(world.holds._holds.values())
    (asked,) = hold.asked
    (shipment,) = hold.shipments.values()
    for _ in range(100):
        if is_last_commit_on_its_way(world, shipment):
            break
        world.connect()
        world.deliver_all()
        world.work()
        world.advance(0.05)
    assert is_last_commit_on_its_way(world, shipment)
    world.holds.on_release(CONTENT, asked, None)
    work(world, turns=2)
    assert not hold.shipments
    assert hold.served == {0: asked}
    assert not hold.pulled


def is_last_commit_on_its_way(world: TurnsWorld, shipment: Shipment) -> bool:
    commits = [isinstance(decode(frame), Commit) for _, frame in world.network]
    return shipment.is_written and sum(commits) == len(shipment.chunks) > 0
