"""Engines that are ranks of instances: found by a directory, sent what the plan names, refused."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from p2p_engine import P2pNcclEngine, TransferKey
from p2p_engine.cli.ports import PortPlan
from p2p_engine.errors import P2pError, PeerUnreachable, TransferError
from p2p_engine.memory.paged import Beginning
from p2p_engine.peers.directory import Directory, RankAddress
from p2p_engine.peers.link import InstanceAddress, PeerAddress
from p2p_engine.receive.store import Store
from p2p_engine.send import holds
from p2p_engine.transfer import Transfer
from tests import marks
from tests.rigs.caches import Model, RankCache, Split
from tests.rigs.engines import assert_idle, settings
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("no_leaks")
MODEL, KEY, NUM_TOKENS = Model(2, 2, 8), TransferKey("request-1"), 32
IDS = np.arange(8, dtype=np.int64)


class EngineInstance:
    """An engine for each rank, their caches, and the directory."""

    def __init__(self, side: Split, stack: contextlib.ExitStack, **changes: Any) -> None:
        config = settings(changes.pop("transport", "shm"), **changes)
        self.caches = [RankCache(MODEL, side, rank, 8) for rank in range(side.num_ranks)]
        self.engines = [
            stack.enter_context(P2pNcclEngine(config, spec=cache.spec)) for cache in self.caches
        ]
        ranks = [
            RankAddress(rank, engine.zmq_address, engine.epoch, self.caches[rank].spec)
            for rank, engine in enumerate(self.engines)
        ]
        ports = stack.enter_context(contextlib.closing(PortPlan("127.0.0.1")))
        directory = Directory(config, ranks, kv_port=ports.take(), role="D")
        self.address = InstanceAddress(stack.enter_context(directory).address)

    def sources(self) -> list[Any]:
        return [cache.source(IDS, 0, NUM_TOKENS) for cache in self.caches]

    def sinks(self) -> list[Any]:
        return [cache.sink(IDS, 0, NUM_TOKENS) for cache in self.caches]


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def fill(instance: EngineInstance) -> None:
    for cache in instance.caches:
        cache.fill(IDS, MODEL.values(NUM_TOKENS))


def check(instance: EngineInstance) -> None:
    for cache in instance.caches:
        assert (cache.token_views(IDS) == cache.of_mine(MODEL.values(NUM_TOKENS))).all()


SIDES = [(1, 2), (2, 1), (4, 2), (2, 4), (2, 2)]


@marks.every_transport
@pytest.mark.parametrize("sizes", SIDES, ids=str)
@pytest.mark.parametrize("pull", [False, True])
def test_every_rank_gets_its_part(
    stack: contextlib.ExitStack, sizes: tuple[int, int], pull: bool, transport: str
) -> None:
    prefill, decode = (EngineInstance(Split(size), stack, transport=transport) for size in sizes)
    fill(prefill)
    waiting = [
        engine.receive(KEY, sink, peer=prefill.address, pull=pull)
        for engine, sink in zip(decode.engines, decode.sinks(), strict=True)
    ]
    sent = [
        engine.hold(KEY, source) if pull else engine.send(KEY, decode.address, source)
        for engine, source in zip(prefill.engines, prefill.sources(), strict=True)
    ]
    for transfer in [*waiting, *sent]:
        transfer.wait(10)
    check(decode)
    assert_idle(*prefill.engines, *decode.engines)


def test_a_directory_that_does_not_answer(stack: contextlib.ExitStack) -> None:
    here = EngineInstance(Split(), stack, connect_timeout_seconds=0.3)
    nobody = InstanceAddress("127.0.0.1:9")
    sent = here.engines[0].send(KEY, nobody, here.sources()[0])
    waiting = here.engines[0].receive(KEY, here.sinks()[0], peer=nobody)
    here.engines[0].abandon(KEY, nobody, "nobody hears it")
    for transfer in (sent, waiting):
        with pytest.raises(PeerUnreachable, match=r"127.0.0.1:9.*LOCATING"):
            transfer.wait(10)
    with pytest.raises(PeerUnreachable):
        here.engines[0].send(KEY, InstanceAddress("nowhere"), here.sources()[0])
    ends = here.engines[0].stats()["transfers_by_outcome"]
    assert ends["sent PeerUnreachable"] == 2  # also what never became a shipment
    assert_idle(here.engines[0])


def test_a_send_that_is_withdrawn_before_the_directory_answers(
    stack: contextlib.ExitStack,
) -> None:
    here = EngineInstance(Split(), stack)
    sent = here.engines[0].send(KEY, InstanceAddress("127.0.0.1:9"), here.sources()[0])
    sent.cancel("the test says so")
    with pytest.raises(TransferError, match="the test says so"):
        sent.wait(10)
    assert here.engines[0].stats()["transfers_by_outcome"] == {"sent TransferCancelled": 1}
    assert_idle(here.engines[0])


def test_what_one_rank_refuses_fails_all_and_abandon_reaches_all(
    stack: contextlib.ExitStack,
) -> None:
    prefill, decode = (
        EngineInstance(Split(1), stack),
        EngineInstance(Split(2), stack),
    )
    decode.engines[0].discard(KEY, reason="not wanted by the first")
    waiting = decode.engines[1].receive(KEY, decode.sinks()[1])
    sent = prefill.engines[0].send(KEY, decode.address, prefill.sources()[0], ready=False)
    eventually(lambda: sent.error is not None)
    assert "not wanted by the first" in str(sent.error)
    sent.cancel("one of two failed")
    prefill.engines[0].abandon(KEY, decode.address, "one of two failed")
    with pytest.raises(TransferError, match="one of two failed"):
        waiting.wait(10)
    eventually(lambda: sent.done)
    assert_idle(prefill.engines[0], *decode.engines)


def test_a_hold_ends_when_the_last_reader_has_ended(stack: contextlib.ExitStack) -> None:
    prefill, decode = (
        EngineInstance(Split(1), stack),
        EngineInstance(Split(2), stack),
    )
    fill(prefill)
    held = prefill.engines[0].hold(KEY, prefill.sources()[0])
    first = decode.engines[0].receive(KEY, decode.sinks()[0], peer=prefill.address, pull=True)
    first.wait(10)
    assert not held.wait_released(0.2)
    decode.engines[1].discard(KEY, peer=prefill.address, pull=True)
    held.wait(10)
    assert_idle(prefill.engines[0], *decode.engines)


def test_a_hold_that_was_withdrawn_knows_who_has_got_it(stack: contextlib.ExitStack) -> None:
    """Its request was preempted and computes its prompt again: one rank will not ask for it."""
    prefill, decode = (
        EngineInstance(Split(1), stack),
        EngineInstance(Split(2), stack),
    )
    fill(prefill)
    held = prefill.engines[0].hold(KEY, prefill.sources()[0])
    sinks = decode.sinks()
    decode.engines[0].receive(KEY, sinks[0], peer=prefill.address, pull=True).wait(10)
    (item,) = prefill.engines[0]._parts.holds._holds.values()
    eventually(lambda: set(item.served) == {0})
    held.cancel("preempted")
    held = prefill.engines[0].hold(KEY, prefill.sources()[0])
    decode.engines[1].receive(KEY, sinks[1], peer=prefill.address, pull=True).wait(10)
    held.wait(10)
    check(decode)
    assert_idle(prefill.engines[0], *decode.engines)


def test_who_has_its_part_and_still_renews_does_not_ask_for_the_next_attempt(
    stack: contextlib.ExitStack,
) -> None:
    """The other rank was slower, and what was held is gone: it must hear so at once."""
    prefill, decode = (
        EngineInstance(Split(1), stack),
        EngineInstance(Split(2), stack),
    )
    fill(prefill)
    (holder,), (quick, slow) = prefill.engines, decode.engines
    held = holder.hold(KEY, prefill.sources()[0])
    quick.receive(KEY, decode.sinks()[0], peer=prefill.address, pull=True).wait(10)
    (item,) = holder._parts.holds._holds.values()
    eventually(lambda: set(item.served) == {0})
    held.cancel("vLLM has reset its caches")
    holder.abandon(KEY, None, "vLLM has reset its caches")
    quick.keep(KEY, peer=prefill.address)
    eventually(lambda: holder.is_renewed(KEY))
    with pytest.raises(TransferError, match="reset its caches"):
        slow.receive(KEY, decode.sinks()[1], peer=prefill.address, pull=True).wait(5)


def provide(engine: P2pNcclEngine, source: Any, kind: str) -> Transfer:
    if kind == "hold":
        return engine.hold(KEY, source, lease=100.0)
    beginnings = {b"five": Beginning(5, 20)}
    stashed = engine.stash(KEY, source, binding=b"", beginnings=beginnings, lease=100.0)
    assert stashed.wait_released(10)
    return stashed


def loads_of(decode: EngineInstance, holder: EngineInstance) -> list[Callable[[], Transfer]]:
    """What each rank calls to pull its part."""
    return [
        partial(engine.receive, KEY, sink, peer=holder.address, pull=True)
        for engine, sink in zip(decode.engines, decode.sinks(), strict=True)
    ]


def test_who_has_given_its_part_of_a_promise_refuses_nothing_while_others_give_theirs(
    stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver asks every rank again until all have given theirs."""
    monkeypatch.setattr(holds, "PROMISED_SECONDS", 0.05)
    prefill = EngineInstance(Split(2), stack, retry_seconds=0.1)
    decode = EngineInstance(Split(1), stack, retry_seconds=0.1)
    fill(prefill)
    pushes = []
    for rank, (engine, cache) in enumerate(zip(prefill.engines, prefill.caches, strict=True)):
        engine.hold(KEY, cache.source(IDS[:4], 0, NUM_TOKENS), generation=1)
        pushed = cache.source(IDS[4:], 4, NUM_TOKENS)
        pushes.append(
            engine.send(KEY, decode.address, pushed, ready=rank == 0, generation=1)
        )  # fmt: skip
    loading = decode.engines[0].receive(
        KEY, decode.sinks()[0], peer=prefill.address, pull=True, has_held=True
    )
    unheld = prefill.engines[0]._parts.holds._unheld
    eventually(lambda: len(unheld) == 1)
    asked_at = time.monotonic()
    eventually(lambda: time.monotonic() > asked_at + 0.5)
    assert not loading.done
    prefill.engines[1].mark_ready(pushes[1])
    loading.wait(10)
    check(decode)


@pytest.mark.parametrize("given_up", [b"", b"five"])
def test_what_another_instance_gave_up_takes_nothing_from_this_one(
    stack: contextlib.ExitStack, given_up: bytes
) -> None:
    """It asks rank after rank, before and after the stash is made."""
    holder, decode = EngineInstance(Split(), stack), EngineInstance(Split(2), stack)
    fill(holder)
    parts, (source,) = holder.engines[0]._parts, holder.sources()
    with parts.changed:
        for rank, cache in enumerate(decode.caches):
            stranger = PeerAddress(f"127.0.0.1:{rank + 1}")
            parts.holds.on_release((KEY, given_up), stranger, cache.spec)
    first, last = (
        partial(engine.receive, KEY, sink, peer=holder.address, pull=True)
        for engine, sink in zip(decode.engines, decode.sinks(), strict=True)
    )
    waiting = first()
    eventually(lambda: len(parts.holds._unheld) == 1)
    stashed = holder.engines[0].stash(
        KEY, source, binding=b"", beginnings={b"five": Beginning(5, 40)}, lease=100.0
    )
    waiting.wait(10)
    assert not stashed.done
    last().wait(10)
    stashed.wait(10)
    check(decode)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no hold end because this machine is busy."""
    monkeypatch.setattr(holds, "UNASKED_SECONDS", 20.0)


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("kind", ["stash", "hold"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_late_release_of_another_instance_takes_nothing_from_this_one(
    stack: contextlib.ExitStack, kind: str, num_ranks: int
) -> None:
    """A router has tried this one instead."""
    holder, decode, other = (
        EngineInstance(Split(num), stack) for num in (1, 2, num_ranks)
    )  # fmt: skip
    fill(holder)
    (engine,), parts = holder.engines, holder.engines[0]._parts
    held = provide(engine, holder.sources()[0], kind)
    first, last = loads_of(decode, holder)
    first().wait(10)
    (item,) = set(parts.holds._holds.values())
    eventually(lambda: set(item.served) == {0})
    with parts.changed:
        peer = PeerAddress(other.engines[-1].zmq_address)
        parts.holds.on_release((KEY, b""), peer, other.caches[-1].spec)
    assert not held.done
    last().wait(10)
    held.wait(10)
    check(decode)


@pytest.mark.parametrize("kind", ["stash", "hold"])
def test_what_another_instance_gave_up_before_takes_nothing_from_this_one(
    stack: contextlib.ExitStack, kind: str
) -> None:
    """The last rank asks first."""
    holder, decode = EngineInstance(Split(), stack), EngineInstance(Split(2), stack)
    fill(holder)
    (engine,), parts = holder.engines, holder.engines[0]._parts
    with parts.changed:
        parts.holds.on_release((KEY, b""), PeerAddress("127.0.0.1:1"), decode.caches[0].spec)
    held = provide(engine, holder.sources()[0], kind)
    first, last = loads_of(decode, holder)
    last().wait(10)
    (item,) = set(parts.holds._holds.values())
    eventually(lambda: 1 in item.served)
    first().wait(10)
    held.wait(10)
    check(decode)


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("kind", ["stash", "hold"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_a_rank_of_another_instance_asked_for_and_gave_up_is_there_for_this_one(
    stack: contextlib.ExitStack,
    kind: str,
    order: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its other ranks never got so far."""
    honest, given_up = Store.on_offer, list[Transfer]()

    def on_offer(self: Store, *args: Any) -> None:
        if self is other.engines[0]._parts.store:
            given_up[0].cancel("its request was aborted")
        honest(self, *args)

    monkeypatch.setattr(Store, "on_offer", on_offer)
    holder, other, decode = (EngineInstance(Split(size), stack) for size in (1, 2, 2))
    fill(holder)
    held = provide(holder.engines[0], holder.sources()[0], kind)
    (item,) = set(holder.engines[0]._parts.holds._holds.values())
    with other.engines[0]._parts.changed:
        given_up.append(loads_of(other, holder)[0]())
    eventually(lambda: 0 in item.served and not (item.pulled or item.shipments))
    loads = loads_of(decode, holder)
    for rank in order:
        loads[rank]().wait(10)
        eventually(lambda: held.done or item.served.get(rank) in item.pulled)  # noqa: B023
    check(decode)


def test_a_rank_that_renews_what_another_instance_released_is_waited_for(
    stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request queues there, for longer than a hold waits for ranks that say nothing."""
    monkeypatch.setattr(holds, "UNASKED_SECONDS", 0.2)
    holder, other, decode = (
        EngineInstance(Split(size), stack, lease_seconds=2) for size in (1, 2, 2)
    )  # fmt: skip
    fill(holder)
    held = holder.engines[0].hold(KEY, holder.sources()[0], lease=2.0)
    (item,) = set(holder.engines[0]._parts.holds._holds.values())
    first, last = loads_of(decode, holder)
    decode.engines[1].keep(KEY, peer=holder.address)
    first().wait(10)
    other.engines[1].discard(KEY, peer=holder.address, pull=True)
    eventually(lambda: bool(item.unasked))
    eventually(lambda: not item.unasked)  # by the next RENEW
    released_at = time.monotonic()
    eventually(lambda: time.monotonic() > released_at + 0.5)
    assert not held.done
    last().wait(10)
    held.wait(10)
    check(decode)


def test_who_gets_nothing_here_ends_nothing_for_others(stack: contextlib.ExitStack) -> None:
    """Its WANT fails at once; one rank of another instance has released, and one still asks."""
    holder, stranger, decode = (EngineInstance(Split(2), stack) for _ in range(3))
    fill(holder)
    engine, parts = holder.engines[0], holder.engines[0]._parts
    wrong, last = stranger.engines[1], decode.engines[0]
    with parts.changed:
        link = parts.links.get(PeerAddress(wrong.zmq_address), data=True)
    eventually(lambda: link.channel is not None)
    refused: list[str] = []
    with parts.changed:
        parts.holds.on_want(
            (KEY, b""), PeerAddress(wrong.zmq_address), stranger.caches[1].spec,
            lambda ending: refused.append(ending.reason), epoch=wrong.epoch,
        )  # fmt: skip
    loading = last.receive(KEY, decode.sinks()[0], peer=holder.address, pull=True)
    eventually(lambda: len(parts.holds._unheld) == 2)
    with parts.changed:
        peer = PeerAddress(stranger.engines[0].zmq_address)
        parts.holds.on_release((KEY, b""), peer, stranger.caches[0].spec)
        held = engine.hold(KEY, holder.sources()[0], lease=100.0)
        assert not held.done
    assert len(refused) == 1
    loading.wait(10)
    held.wait(10)
    cache = decode.caches[0]
    assert (cache.token_views(IDS) == cache.of_mine(MODEL.values(NUM_TOKENS))).all()


def test_replicas_that_nobody_reads_are_released(stack: contextlib.ExitStack) -> None:
    """Two heads on four ranks: two of them serve the one decode rank."""
    prefill, decode = (
        EngineInstance(Split(4), stack),
        EngineInstance(Split(1), stack),
    )
    fill(prefill)
    held = [
        engine.hold(KEY, source)
        for engine, source in zip(prefill.engines, prefill.sources(), strict=True)
    ]
    decode.engines[0].receive(KEY, decode.sinks()[0], peer=prefill.address, pull=True).wait(10)
    for transfer in held:
        transfer.wait(10)
    check(decode)
    sent = [engine.stats()["sent_bytes"] > 0 for engine in prefill.engines]
    assert sent == [True, False, True, False]


@marks.every_transport
def test_a_spilled_hold_is_cut_as_well(stack: contextlib.ExitStack, transport: str) -> None:
    prefill = EngineInstance(Split(1), stack, transport=transport)
    decode = EngineInstance(Split(2, (0, 2), 16, "LBNHP"), stack, transport=transport)
    fill(prefill)
    held = prefill.engines[0].hold(KEY, prefill.sources()[0])
    assert prefill.engines[0].spill(held)
    assert held.wait_released(10)
    prefill.caches[0].memory[:] = 0
    ids = np.arange(2, dtype=np.int64)
    waiting = [
        engine.receive(KEY, cache.sink(ids, 0, NUM_TOKENS), peer=prefill.address, pull=True)
        for engine, cache in zip(decode.engines, decode.caches, strict=True)
    ]
    for transfer in waiting:
        transfer.wait(10)
    for cache in decode.caches:
        assert (cache.token_views(ids) == cache.of_mine(MODEL.values(NUM_TOKENS))).all()
    held.wait(10)


def test_a_lost_source_rank_fails_the_receive(stack: contextlib.ExitStack) -> None:
    """Half of the heads are no KV."""
    prefill, decode = (
        EngineInstance(Split(2), stack),
        EngineInstance(Split(1), stack),
    )
    fill(prefill)
    sink = decode.sinks()[0]
    waiting = decode.engines[0].receive(KEY, sink, peer=prefill.address)
    prefill.engines[0].send(KEY, decode.address, prefill.sources()[0]).wait(10)
    eventually(lambda: decode.engines[0].stats()["links"] == {"ready": 2})
    prefill.engines[1].close()
    with pytest.raises(P2pError, match=r"rank 1|gone|closing"):
        waiting.wait(10)
    assert len(sink.missing_blocks()) == 8
