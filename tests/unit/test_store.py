"""The store and its sender, step by step, in a world where every move is the test's choice."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import cast

import pytest

from p2p_engine.bounded import Budget
from p2p_engine.errors import (
    PeerLost,
    TransferCancelled,
    TransferError,
    TransferRejected,
    TransferTimeout,
    TransferTooLarge,
    TransportError,
)
from p2p_engine.memory.layout import TensorSink
from p2p_engine.receive.ledger import LandingState
from p2p_engine.receive.store import MAX_OWED, MISMATCH_GRACE_SECONDS
from p2p_engine.transports.base import Transport
from p2p_engine.wire.bindings import bind
from p2p_engine.wire.messages import Cancelled, Manifest, Offer, TransferKey, decode
from tests.doubles.world import MAX_BLOCKS, PEER, SETTINGS, World, WorldJob, right_block

KEY, PROMPT = TransferKey("request-1"), b"p" * 16
SETTINGS_OF_4_KIB = dataclasses.replace(
    SETTINGS, kv_buffer_size=4096, mem_pool_size_gb=4096 / (1 << 30)
)
ALL = (0, MAX_BLOCKS)


@pytest.fixture(params=[False, True], ids=["sender writes", "receiver writes"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Both kinds of transport."""
    made = World(receiver_writes=request.param)
    yield made
    made.close()


@pytest.fixture
def shm() -> Iterator[World]:
    """The sender writes into the store's arena."""
    made = World(receiver_writes=False)
    yield made
    made.close()


@pytest.fixture
def tcp() -> Iterator[World]:
    """The receiver writes what comes on a stream."""
    made = World(receiver_writes=True)
    yield made
    made.close()


def converse(world: World, turns: int = 2) -> None:
    """Connect, and deliver messages and their answers."""
    world.connect()
    for _ in range(turns):
        world.deliver_all()


def run_jobs(world: World) -> None:
    """Let everything that moves come to its end."""
    for job in list(world.jobs):
        world.move(job, 1 << 20)
    for epoch in list(world.channels):
        world.move_stream(epoch)
    world.drain()


def sent_by_sender(world: World) -> list[object]:
    return [decode(frame) for to, frame in world.network if to == "store"]


def test_sender_first(world: World) -> None:
    world.send(KEY, b"", *ALL, ready=True)
    for _ in range(4):
        converse(world)
        run_jobs(world)
    assert world.sendings[0].transfer.done
    world.receive(KEY, b"", 0)
    run_jobs(world)
    assert world.receivings[0].transfer.error is None
    assert world.receivings[0].is_right()
    assert world.receivings[0].transfer.nbytes == world.sendings[0].transfer.nbytes


def test_what_comes_twice_is_freed_when_it_has_landed(shm: World) -> None:
    """A preempted prompt's chunks are; nobody will ask for the second ones."""
    last = MAX_BLOCKS - 1
    for _ in range(2):
        shm.send(KEY, b"", last, 1, ready=True)
    converse(shm)
    first, second = list(shm.jobs)
    shm.receive(KEY, b"", last)
    shm.move(first, 1 << 20)
    run_jobs_but(shm, second)
    assert shm.receivings[0].transfer.done
    assert len(shm.landings()) == 1
    run_jobs(shm)
    converse(shm)
    assert shm.landings() == []
    assert [item.transfer.error for item in shm.sendings] == [None, None]


def run_jobs_but(world: World, spared: WorldJob) -> None:
    for _ in range(3):
        for job in [job for job in world.jobs if job is not spared]:
            world.move(job, 1 << 20)
        world.drain()
        world.store.poll()


def test_receiver_first(world: World) -> None:
    world.receive(KEY, b"", 1)
    world.send(KEY, b"", *ALL, ready=True)
    world.settle()
    assert world.receivings[0].transfer.error is None
    assert world.receivings[0].is_right()


def test_chunks_in_any_order(world: World) -> None:
    world.send(KEY, b"", 2, 2, ready=True)
    world.receive(KEY, b"", 0)
    converse(world)
    run_jobs(world)
    assert not world.receivings[0].transfer.done
    world.send(KEY, b"", 0, 2, ready=True)
    world.settle()
    assert world.receivings[0].is_right()


def test_receiver_that_has_all_blocks_of_a_chunk_is_sent_no_byte(world: World) -> None:
    world.receive(KEY, b"", 2)
    world.send(KEY, b"", 0, 2, ready=True)
    converse(world, 3)
    assert world.sendings[0].transfer.released
    assert world.sent.sent_bytes == 0
    assert not world.receivings[0].transfer.done


def test_no_bytes_move_before_ready(world: World) -> None:
    world.receive(KEY, b"", 0)
    world.send(KEY, b"", *ALL, ready=False)
    converse(world, 4)
    assert [job for job in world.jobs if job.kind == "write"] == []
    world.mark_ready(world.sendings[0])
    world.settle()
    assert world.receivings[0].is_right()


def test_full_store_denies_until_there_is_room(shm: World) -> None:
    for name in ("a", "b", "c"):
        shm.send(TransferKey(name), b"", 0, 2, ready=True)
    converse(shm, 2)
    assert len(shm.landings()) == 3  # two in the buffer, one in the pool
    shm.send(KEY, b"", 0, 2, ready=True)
    converse(shm, 2)
    assert shm.sent.denied == 1
    run_jobs(shm)
    shm.advance(0)
    converse(shm)
    shm.store.drop_landed()
    shm.advance(0.1)
    shm.receive(KEY, b"", 0)
    shm.send(KEY, b"", 2, 2, ready=True)
    shm.settle()
    assert shm.receivings[0].is_right()


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_a_denied_chunk_that_nobody_wants_any_more_claims_no_memory(shm: World, who: str) -> None:
    for name in ("a", "b", "c", "denied"):
        shm.send(TransferKey(name), b"", 0, 2, ready=True)
    converse(shm, 2)
    assert len(shm.store._placement._credit._waiting) == 1
    if who == "sender":
        shm.sendings[-1].transfer.cancel("its request was aborted")
    else:
        shm.store.discard((TransferKey("denied"), b""), "its request was aborted")
        shm.advance(0.1)
    converse(shm, 1)
    assert len(shm.store._placement._credit._waiting) == 0


def test_chunk_that_can_never_fit_is_a_named_error() -> None:
    small = World(receiver_writes=False, config=SETTINGS_OF_4_KIB)
    small.send(KEY, b"", *ALL, ready=True)
    converse(small, 3)
    assert isinstance(small.sendings[0].transfer.error, TransferTooLarge)
    small.close()


def test_who_asks_for_what_was_too_large_before_learns_it_at_once() -> None:
    """The sender has heard of it and says no more."""
    small = World(receiver_writes=False, config=SETTINGS_OF_4_KIB)
    small.send(KEY, b"", 0, 1, ready=True)
    converse(small, 3)
    assert len(small.landings()) == 1
    small.send(KEY, b"", 1, MAX_BLOCKS - 1, ready=True)
    converse(small, 3)
    assert [item.state for item in small.landings()] == [LandingState.QUARANTINED]
    with pytest.raises(TransferRejected, match="4608"):
        small.receive(KEY, b"", 0)
    small.settle()
    small.close()


def test_quarantine_ends_only_when_the_sender_is_proven_gone(shm: World) -> None:
    """A sender that is stopped in the middle of a copy wakes up and writes on."""
    shm.receive(KEY, b"", 0)
    shm.send(KEY, b"", *ALL, ready=True)
    converse(shm)
    shm.move(shm.jobs[0], 512)
    shm.forget_session(shm.epoch)
    assert isinstance(shm.receivings[0].transfer.error, PeerLost)
    for _ in range(100):
        shm.store.tick(shm.now)
        shm.now += 10
    assert [item.state for item in shm.landings()] == [LandingState.QUARANTINED]
    assert shm.store.quarantined_bytes() == 8192  # 6,144 and a completion word, in whole blocks
    shm.move(shm.jobs[0], 512)  # into memory that is still nobody else's
    shm.hung_up(shm.epoch)
    shm.end_jobs(lambda job: True, "cancelled")
    shm.store.tick(shm.now)
    assert shm.landings() == []
    assert sum(shm.store.live_bytes().values()) == 0


def test_memory_is_freed_only_when_the_transport_confirms_what_the_sender_says(
    shm: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a write that failed, bytes may still be on their way after the sender has called it
    ended."""
    asked: list[Callable[[], None]] = []
    monkeypatch.setattr(shm.transport, "confirm", lambda epoch, confirmed: asked.append(confirmed))
    shm.send(KEY, b"", *ALL, ready=False)
    converse(shm)
    assert [item.state for item in shm.landings()] == [LandingState.GRANTED]
    shm.sendings[0].transfer.cancel()
    converse(shm, 4)
    assert asked
    assert len(shm.landings()) == 1
    for confirmed in asked * 2:
        confirmed()
    assert shm.landings() == []


def test_word_that_was_lost_with_the_connection_is_said_at_once(shm: World) -> None:
    shm.send(KEY, b"", *ALL, ready=False)
    converse(shm)
    (landing,) = shm.landings()
    shm.transport.connected.clear()
    shm.store.on_done(landing.id[0], landing.id[1], landing.attempt, 0)
    assert shm.landings() == []


def test_cancelled_is_said_only_after_the_last_byte(shm: World) -> None:
    """A GRANT that is said twice must not be taken for one that came too late."""
    shm.send(KEY, b"", *ALL, ready=True)
    shm.connect()
    shm.deliver(0)
    shm.deliver(0, keep=True)  # the GRANT; a second copy stays on its way
    shm.sendings[0].transfer.cancel()
    converse(shm)
    assert not any(isinstance(item, Cancelled) for item in sent_by_sender(shm))
    assert len(shm.landings()) == 1
    run_jobs(shm)
    assert any(isinstance(item, Cancelled) for item in sent_by_sender(shm))
    converse(shm)
    assert shm.landings() == []


def test_second_attempt_outlives_the_end_of_the_first(tcp: World) -> None:
    """The first attempt's job is seen to have failed only after the second was granted."""
    tcp.receive(KEY, b"", 0)
    tcp.send(KEY, b"", *ALL, ready=True)
    converse(tcp)
    tcp.break_channel(TransportError("the data connection broke"))
    converse(tcp)  # granted again; the end of the first attempt's job was not drained yet
    tcp.drain()
    assert [landing.attempt for landing in tcp.landings()] == [1]
    tcp.settle()
    assert tcp.receivings[0].is_right()


def test_broken_data_connections_are_not_tried_for_ever(world: World) -> None:
    world.send(KEY, b"", *ALL, ready=False)
    for _ in range(3):
        converse(world)
        world.break_channel(TransportError("broken"))
        world.drain()
    assert isinstance(world.sendings[0].transfer.error, TransportError)


def test_connection_that_breaks_at_the_receiver_only_is_made_anew(tcp: World) -> None:
    tcp.receive(KEY, b"", 0)
    tcp.send(KEY, b"", *ALL, ready=False)
    converse(tcp)
    tcp.hung_up(tcp.epoch)  # nobody tells the sender
    tcp.drain()
    converse(tcp)
    tcp.advance(0)
    tcp.mark_ready(tcp.sendings[0])
    tcp.settle()
    assert tcp.sendings[0].transfer.error is None
    assert tcp.receivings[0].is_right()


@pytest.mark.parametrize("noticed", ["before DONE", "after DONE"])
def test_bytes_that_are_lost_after_they_left_are_an_error_at_once(tcp: World, noticed: str) -> None:
    """The sender's memory is its caller's again: only the receiver's recomputation helps."""
    tcp.receive(KEY, b"", 0)
    tcp.send(KEY, b"", *ALL, ready=True)
    converse(tcp)
    tcp.move(write_jobs(tcp)[0], 1 << 20)
    tcp.drain()  # WRITTEN: DONE is on its way, the bytes are in the kernel's hands
    if noticed == "after DONE":
        converse(tcp)
    tcp.lose_connection()
    tcp.drain()
    converse(tcp, 6)
    assert isinstance(tcp.sendings[0].transfer.error, TransportError)
    assert isinstance(tcp.receivings[0].transfer.error, PeerLost)  # what ABANDON is here
    tcp.settle()


def test_bytes_that_are_lost_after_they_left_leave_again_if_they_are_held(tcp: World) -> None:
    tcp.receive(KEY, b"", 0)
    tcp.send(KEY, b"", *ALL, ready=True, is_held=True)
    converse(tcp)
    tcp.move(write_jobs(tcp)[0], 1 << 20)
    tcp.drain()
    tcp.lose_connection()
    tcp.settle()
    assert tcp.sendings[0].transfer.error is None
    assert tcp.receivings[0].is_right()


def test_break_that_the_receiver_tells_of_first_is_one_attempt(tcp: World) -> None:
    """What is held is not offered over the connection that is known to be dead."""
    tcp.receive(KEY, b"", 0)
    tcp.send(KEY, b"", *ALL, ready=True, is_held=True)
    for attempt in range(2):
        converse(tcp)
        assert [landing.attempt for landing in tcp.landings()] == [attempt]
        tcp.move(write_jobs(tcp)[-1], 1 << 20)
        tcp.drain()  # WRITTEN
        tcp.hung_up(tcp.epoch)  # nobody tells the sender but FAIL
        tcp.drain()
        converse(tcp)
    tcp.settle()
    assert tcp.sendings[0].transfer.error is None
    assert tcp.receivings[0].is_right()


@pytest.mark.parametrize("what_ends", ["the channel", "the link"])
def test_copy_that_does_not_stop_keeps_its_memory(world: World, what_ends: str) -> None:
    """Both the source and the region are kept until it has ended, however long that takes."""
    world.receive(KEY, b"", 0)
    world.send(KEY, b"", *ALL, ready=True)
    converse(world)
    job, world.is_stuck = write_jobs(world)[0], True
    if what_ends == "the channel":
        world.break_channel(TransportError("broken"))
    else:
        world.close_link(PeerLost("silent"))
    converse(world, 4)
    transfer = world.sendings[0].transfer
    assert not transfer.released
    assert len(world.landings()) == 1 or world.transport.receiver_writes
    world.is_stuck = False
    job.end("cancelled")
    world.drain()
    assert isinstance(transfer.error, TransportError | PeerLost)
    world.settle()


def test_restarted_sender_ends_what_it_had_open(world: World) -> None:
    world.receive(KEY, b"", 0)
    world.send(KEY, b"", *ALL, ready=True)
    converse(world)
    world.restart_sender()
    world.settle()
    assert isinstance(world.receivings[0].transfer.error, PeerLost)
    assert sum(world.store.live_bytes().values()) == 0


def test_sender_that_is_gone_between_two_chunks_ends_its_receive(world: World) -> None:
    """Nobody said who would send it; the first chunk tells."""
    world.receive(KEY, b"", 0)
    world.receive(TransferKey("another's"), b"", 0)
    world.send(KEY, b"", 0, 2, ready=True)
    for _ in range(4):
        converse(world)
        run_jobs(world)
        world.store.poll()
    assert world.landings() == []
    world.forget_session(world.epoch)
    assert isinstance(world.receivings[0].transfer.error, PeerLost)
    assert not world.receivings[1].transfer.done


def test_sender_that_is_gone_takes_nothing_back(world: World) -> None:
    """What has come whole is delivered, whether or not its end was seen before the sender's."""
    world.send(KEY, b"", 0, 2, ready=True)
    converse(world)
    run_jobs(world)
    world.receive(KEY, b"", 0)  # is being scattered now
    world.send(KEY, b"", 2, 2, ready=True)
    converse(world)
    jobs = [job for job in write_jobs(world) if not job.done]
    world.move(jobs[0], 1 << 20)
    if world.transport.receiver_writes:
        world.move_stream(world.epoch)
    world.forget_session(world.epoch)
    world.settle()
    assert world.receivings[0].transfer.error is None
    assert world.receivings[0].is_right()


def test_receive_after_a_failed_one_of_the_same_name(world: World) -> None:
    world.receive(KEY, b"", 0)
    world.receivings[0].transfer.cancel()
    assert isinstance(world.receivings[0].transfer.error, TransferCancelled)
    world.receive(KEY, b"", 0)
    world.send(KEY, b"", *ALL, ready=True)
    world.settle()
    assert world.receivings[1].is_right()


def test_same_content_is_received_once_at_a_time(world: World) -> None:
    world.receive(KEY, b"", 0)
    with pytest.raises(TransferError, match="already"):
        world.receive(KEY, b"", 0)


def test_orphan_ends_with_its_lease_and_says_so(world: World) -> None:
    world.send(KEY, b"", *ALL, ready=True)
    for _ in range(4):
        converse(world)
        run_jobs(world)
        world.advance(0)
    world.advance(SETTINGS.lease_seconds)
    assert world.landings() == []
    assert world.counters.expired == 1
    with pytest.raises(TransferRejected, match="lease"):
        world.receive(KEY, b"", 0)


def test_overdue_receive_is_a_timeout_that_names_the_key(world: World) -> None:
    world.receive(KEY, b"", 0)
    world.advance(SETTINGS.transfer_timeout_seconds)
    error = world.receivings[0].transfer.error
    assert isinstance(error, TransferTimeout)
    assert str(KEY) in str(error)


def test_overdue_send_of_many_chunks_leaves_nothing_overdue() -> None:
    """One of its chunks ends all of them, while the others are still to be looked at."""
    settings = dataclasses.replace(SETTINGS, chunk_bytes=1)
    world = World(receiver_writes=False, config=settings)
    world.send(KEY, b"", *ALL, ready=False)
    converse(world)
    assert len(world.sender._chunks) > 1
    world.advance(SETTINGS.transfer_timeout_seconds)
    assert isinstance(world.sendings[0].transfer.error, TransferTimeout)
    assert world.sender.overdue(world.now) == []
    world.close()


def test_overdue_send_is_a_timeout_that_names_its_state(world: World) -> None:
    world.send(KEY, b"", *ALL, ready=False)
    converse(world)
    world.advance(SETTINGS.transfer_timeout_seconds)
    error = world.sendings[0].transfer.error
    assert isinstance(error, TransferTimeout)
    assert "GRANTED" in str(error)


@pytest.mark.parametrize("sender_first", [True, False])
def test_other_content_under_the_same_name_is_named(world: World, sender_first: bool) -> None:
    """Long before the deadline, whoever came first."""
    if sender_first:
        world.send(KEY, b"theirs", *ALL, ready=True)
        converse(world)
        world.receive(KEY, b"ours", 0)
    else:
        world.receive(KEY, b"ours", 0)
        world.send(KEY, b"theirs", *ALL, ready=True)
        converse(world)
    world.advance(1.5)
    error = world.receivings[0].transfer.error
    assert isinstance(error, TransferRejected)
    assert "another" in str(error)


def test_abandoned_key_ends_its_receive(world: World) -> None:
    world.receive(KEY, b"", 0)
    world.sender.abandon((KEY, b""), PEER, "preempted")
    converse(world)
    assert isinstance(world.receivings[0].transfer.error, PeerLost)


def test_abandoned_key_ends_a_later_receive(world: World) -> None:
    world.sender.abandon((KEY, b""), PEER, "preempted")
    converse(world)
    with pytest.raises(TransferRejected):
        world.receive(KEY, b"", 0)


def test_what_was_on_its_way_is_dropped_with_what_has_landed(world: World) -> None:
    """It was computed before the reset, too."""
    world.send(KEY, b"", *ALL, ready=True)
    converse(world)
    assert [item.state for item in world.landings()] == [LandingState.GRANTED]
    assert world.store.drop_landed() == 0
    with pytest.raises(TransferRejected, match="dropped"):
        world.receive(KEY, b"", 0)
    world.settle()


def test_dropped_landings_are_not_waited_for(world: World) -> None:
    """After a reset of the cache a receive of what had landed fails at once, by name."""
    world.send(KEY, b"", *ALL, ready=True)
    for _ in range(4):
        converse(world)
        run_jobs(world)
        world.advance(0)
    assert world.store.drop_landed() == 6144
    assert world.landings() == []
    with pytest.raises(TransferRejected, match="dropped"):
        world.receive(KEY, b"", 0)


@pytest.mark.parametrize("is_told", [True, False], ids=["sender told", "sender not told"])
def test_who_asks_under_another_name_for_what_was_dropped_waits_if_its_sender_knows(
    shm: World, is_told: bool
) -> None:
    """The sender of a chunk that was given up answers who asks; of another one, it says no more."""
    shm.send(KEY, bind(PROMPT, "step-1"), *ALL, ready=True)
    converse(shm)
    shm.move(shm.jobs[0], 512)
    if is_told:
        shm.now += SETTINGS.transfer_timeout_seconds
        shm.store.tick(shm.now)
        assert [item.state for item in shm.landings()] == [LandingState.QUARANTINED]
    shm.store.drop_landed()
    wait = contextlib.nullcontext() if is_told else pytest.raises(TransferRejected, match="dropped")
    with wait:
        shm.receive(KEY, bind(PROMPT, "step-2"), 0)
    assert [item.transfer.done for item in shm.receivings] == [False] * is_told
    shm.settle()


@pytest.mark.parametrize("answers", [0, 1], ids=["pushed", "asked for"])
def test_an_offer_of_other_weights_ends_a_later_wait_only_if_it_is_not_made_again(
    shm: World, answers: int
) -> None:
    """Who has offered what was asked for waits to be asked again; a push is made once."""
    manifest, binding = Manifest(0, 1, [512]), bind(PROMPT, "step-1")
    offer = Offer(1, 0, 1, 1, KEY, manifest, binding, "sim", answers=answers)
    shm.store.refuse_other(1, offer, "step-2", "weights: step-2 here, step-1 there")
    wait = contextlib.nullcontext() if answers else pytest.raises(TransferRejected, match="weights")
    with wait:
        shm.receive(KEY, bind(PROMPT, "step-2"), 0)
    assert [item.transfer.done for item in shm.receivings] == [False] * answers
    shm.settle()


def test_another_content_than_what_was_dropped_may_still_come(world: World) -> None:
    """A router may send a second prompt under the id of one whose KV nobody wanted."""
    world.send(KEY, b"old", *ALL, ready=True)
    for _ in range(4):
        converse(world)
        run_jobs(world)
        world.advance(0)
    assert world.store.drop_landed() == 6144
    world.receive(KEY, b"new", 0)
    world.advance(2 * MISMATCH_GRACE_SECONDS)
    world.send(KEY, b"new", *ALL, ready=True)
    world.settle()
    [receiving] = world.receivings
    assert receiving.is_right()


def test_discarded_key_is_refused(world: World) -> None:
    world.store.discard((KEY, b""), "the request was aborted")
    world.send(KEY, b"", *ALL, ready=True)
    converse(world, 3)
    assert isinstance(world.sendings[0].transfer.error, TransferRejected)
    assert "aborted" in str(world.sendings[0].transfer.error)


def write_jobs(world: World) -> list[WorldJob]:
    return [job for job in world.jobs if job.kind == "write"]


def land(world: World, job: WorldJob) -> None:
    """Let one chunk's bytes move and arrive; what it leads to does not move yet."""
    world.move(job, 1 << 20)
    if world.transport.receiver_writes:
        world.move_stream(world.epoch)
    world.drain()
    world.store.poll()


def test_block_that_has_arrived_is_not_overwritten_by_zeros(tcp: World) -> None:
    """A stream that is cut off ends in zeros; here it was granted when two blocks were missing
    that have arrived since. vLLM keeps those as a good prefix."""
    tcp.receive(KEY, b"", 0)
    tcp.send(KEY, b"", 0, 2, ready=True)
    tcp.send(KEY, b"", *ALL, ready=True)
    converse(tcp)
    first, second = write_jobs(tcp)
    land(tcp, first)
    tcp.sendings[1].transfer.cancel()
    tcp.move(second, 1 << 20)  # zeros, and that it was aborted
    tcp.move_stream(tcp.epoch)
    tcp.drain()
    assert (tcp.receivings[0].memory[0] == right_block(KEY, b"", 0)).all()
    assert (tcp.receivings[0].memory[1] == right_block(KEY, b"", 1)).all()
    tcp.send(KEY, b"", 2, 2, ready=True)
    tcp.settle()
    assert tcp.receivings[0].transfer.error is None
    assert tcp.receivings[0].is_right()


def test_first_of_two_equal_chunks_that_is_whole_wins(world: World) -> None:
    """The one that was granted before never comes."""
    world.receive(KEY, b"", 0)
    for blocks, ready in (((0, 2), False), ((0, 2), True), ((2, 2), True)):
        world.send(KEY, b"", *blocks, ready=ready)
        converse(world)
    for job in write_jobs(world):
        land(world, job)
    for _ in range(2):
        run_jobs(world)
        world.store.poll()
    assert world.receivings[0].transfer.done
    assert world.receivings[0].is_right()
    world.settle()


@pytest.mark.parametrize("is_granted", ["before", "after"])
def test_equal_chunk_that_never_comes_does_not_delay_the_end(world: World, is_granted: str) -> None:
    world.receive(KEY, b"", 0)
    world.send(KEY, b"", 0, 2, ready=True)
    world.send(KEY, b"", 2, 2, ready=False)
    converse(world)
    first = write_jobs(world)[0]
    if is_granted == "before":
        world.send(KEY, b"", 0, 2, ready=False)
        converse(world)
    land(world, first)
    run_jobs(world)
    world.send(KEY, b"", 0, 2, ready=False)
    converse(world)
    world.mark_ready(world.sendings[1])
    land(world, write_jobs(world)[0])
    run_jobs(world)
    assert world.receivings[0].transfer.done
    assert world.receivings[0].is_right()
    world.settle()


def test_stream_does_not_go_over_blocks_that_have_arrived(tcp: World) -> None:
    """The chunk's missing blocks lie around one that is there: it goes by way of the arena."""
    tcp.receive(KEY, b"", 0)
    tcp.send(KEY, b"", 1, 1, ready=True)
    converse(tcp)
    run_jobs(tcp)
    tcp.send(KEY, b"", *ALL, ready=True)
    converse(tcp)
    assert [landing.place for landing in tcp.landings()] == ["buffer"]
    tcp.settle()
    assert tcp.receivings[0].is_right()


def test_chunk_that_can_go_nowhere_is_a_named_error() -> None:
    """Not straight into blocks, since one has arrived, and never into an arena this small."""
    small = World(receiver_writes=True, config=SETTINGS_OF_4_KIB)
    small.receive(KEY, b"", 0)
    small.send(KEY, b"", 1, 1, ready=True)
    converse(small)
    run_jobs(small)
    small.send(KEY, b"", *ALL, ready=True)
    converse(small)
    assert isinstance(small.receivings[0].transfer.error, TransferTooLarge)
    small.settle()
    small.close()


def test_transport_without_checksums_is_not_waited_for(world: World) -> None:
    world.config = dataclasses.replace(SETTINGS, checksum=True)
    world.sender._config = world.store._config = world.config
    world.transport.checks = False
    world.receive(KEY, b"", 0)
    world.send(KEY, b"", *ALL, ready=True)
    world.settle()
    assert world.receivings[0].is_right()
    assert world.receivings[0].transfer.error is None


def test_chunks_without_bytes_are_denied_beyond_the_budget(shm: World) -> None:
    """No landing memory bounds them, and a manifest may take a hundred kilobytes of ours."""
    shm.store.offered = budget = Budget(1_000_000)
    numbers, transport = iter(range(10_000)), cast("Transport", shm.transport)

    def offer(epoch: int, count: int) -> int:
        before = shm.store.num_open()
        for _ in range(count):
            number = next(numbers)
            key = TransferKey(f"request-{number}")
            manifest = Manifest(0, 0, [1] * 1000, 0)
            shm.store.on_offer(
                epoch, Offer(epoch, 0, number, 1, key, manifest, b"", "sim"), transport
            )
        return shm.store.num_open() - before

    first, second = offer(1, 100), offer(2, 100)
    assert 10 < first < 20
    assert first // 2 - 2 <= second <= first // 2 + 2
    shm.store.session_lost(1, PeerLost("it is gone"))
    assert offer(3, 100) >= second
    for epoch in (2, 3):
        shm.store.session_lost(epoch, PeerLost("it is gone"))
    assert budget.used_bytes == shm.store.num_open() == 0


def test_a_chunk_that_a_receive_waits_for_is_granted_whatever_is_left_of_the_budget(
    shm: World,
) -> None:
    """What waits for its request for long could fill the budget, and no request would end. Many
    chunks of one receive do not pass the budget either."""
    budget = shm.store.offered = Budget(100_000)
    while budget.take(1, 1000) or budget.take(2, 1000):
        pass
    transport = cast("Transport", shm.transport)
    empty = Manifest(0, 1, [0], dtype="uint8", shape=[0])

    def offer(number: int, key: TransferKey) -> int:
        shm.store.on_offer(1, Offer(1, 0, number, 1, key, empty, b"", "sim"), transport)
        return shm.store.num_open()

    before = offer(1, TransferKey("nobody's"))
    shm.store.receive(KEY, TensorSink(), b"", timeout=5)
    waiting = shm.store.num_open()
    opened = [offer(number, KEY) - waiting for number in range(2, 200)]
    assert (before, opened[0], opened[-1]) == (0, 1, MAX_OWED)
    assert budget.used_bytes > 100_000
