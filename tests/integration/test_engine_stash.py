"""A stash: KV that is copied at once, and of which a peer may pull a beginning."""

from __future__ import annotations

import contextlib
import time
from functools import partial

import pytest

from p2p_engine import P2pNcclEngine, TransferKey
from p2p_engine.errors import TransferCancelled, TransferRejected
from p2p_engine.memory.paged import Beginning
from p2p_engine.peers.link import Link, PeerAddress
from p2p_engine.receive.store import Store
from p2p_engine.send import holds
from p2p_engine.send.sender import Sender
from p2p_engine.send.shipment import Chunk
from p2p_engine.transfer import Transfer
from p2p_engine.wire.messages import Grant
from tests import marks
from tests.rigs.engines import MIB, PagedMemory, assert_idle, engines, is_idle, settings
from tests.support import SeededRandom, eventually

KEY = TransferKey("request-1")
NUM_BLOCKS = 8  # of 8 KiB, over both layers
BEGINNINGS = {b"three": Beginning(3, 24), b"five": Beginning(5, 40)}
pytestmark = pytest.mark.usefixtures("no_leaks")


def stash(
    engine: P2pNcclEngine, memory: PagedMemory, ids: list[int], key: TransferKey = KEY
) -> Transfer:
    return engine.stash(
        key, memory.source(ids), binding=b"all", beginnings=BEGINNINGS, lease=100.0
    )  # fmt: skip


def ask_for_three(receiver: P2pNcclEngine, ours: PagedMemory, sender: P2pNcclEngine) -> Transfer:
    """Claim a beginning of what the sender has promised."""
    return receiver.receive(
        KEY, ours.sink([1, 2, 3], 0, 24), binding=b"three",
        peer=PeerAddress(sender.zmq_address), pull=True, is_promised=True,
    )  # fmt: skip


@marks.every_transport
@pytest.mark.parametrize(
    ("binding", "num_blocks", "num_tokens"), [(b"all", 8, 64), (b"five", 5, 40), (b"three", 3, 24)]
)
def test_a_beginning_arrives_though_the_blocks_are_overwritten(
    transport: str, binding: bytes, num_blocks: int, num_tokens: int, rng: SeededRandom
) -> None:
    theirs, ours = PagedMemory(16).fill(rng), PagedMemory(16)
    sources, places = rng.sample(range(16), NUM_BLOCKS), rng.sample(range(16), num_blocks - 1)
    expected = theirs.data[:, sources[1:num_blocks]].copy()
    with engines(2, transport) as (sender, receiver):
        stashed = stash(sender, theirs, sources)
        assert stashed.wait_released(10)
        assert not stashed.done
        theirs.data[:] = 0
        sink, peer = ours.sink(places, 1, num_tokens), PeerAddress(sender.zmq_address)
        receiver.receive(KEY, sink, binding=binding, peer=peer, pull=True).wait(10)
        stashed.wait(10)
        assert (ours.data[:, places] == expected).all()
        assert receiver.stats()["landed_bytes_by_place"] != {}
        assert sender.stats()["sent_bytes"] == (num_blocks - 1) * 2 * 4096  # the rest is there
        assert_idle(sender, receiver)


def test_who_asks_during_the_copy_is_served_after_it(rng: SeededRandom) -> None:
    theirs, ours = PagedMemory(16).fill(rng), PagedMemory(16)
    with engines(2, "shm") as (sender, receiver):
        peer = PeerAddress(sender.zmq_address)
        sink = ours.sink([1, 2, 3], 0, 24)
        waiting = receiver.receive(KEY, sink, binding=b"three", peer=peer, pull=True)
        eventually(lambda: len(sender._parts.holds._unheld) == 1)
        stash(sender, theirs, list(range(NUM_BLOCKS)))
        waiting.wait(10)
        assert (ours.data[:, 1:4] == theirs.data[:, :3]).all()
        assert_idle(sender, receiver)


@pytest.mark.parametrize("is_there", [True, False])
def test_another_prompt_gets_nothing(is_there: bool, rng: SeededRandom) -> None:
    """Neither from a stash, nor from one that has ended."""
    theirs, ours = PagedMemory(16).fill(rng), PagedMemory(16)
    with engines(2, "shm") as (sender, receiver):
        stashed = stash(sender, theirs, list(range(NUM_BLOCKS)))
        if not is_there:
            stashed.cancel("reset")
        sink, peer = ours.sink([1, 2, 3], 0, 24), PeerAddress(sender.zmq_address)
        loading = receiver.receive(KEY, sink, binding=b"other", peer=peer, pull=True)
        with pytest.raises(TransferRejected):
            loading.wait(10)
        assert not ours.data.any()
        stashed.cancel("the test is over")
        assert_idle(sender, receiver)


def test_what_is_released_makes_room_at_once(rng: SeededRandom) -> None:
    theirs = PagedMemory(16).fill(rng)
    with engines(2, "shm") as (sender, receiver):
        stashed = stash(sender, theirs, list(range(NUM_BLOCKS)))
        peer = PeerAddress(sender.zmq_address)
        receiver.discard(KEY, binding=b"five", peer=peer, pull=True)
        stashed.wait(10)
        assert_idle(sender, receiver)


def test_the_oldest_make_room_within_their_share_of_the_pool(rng: SeededRandom) -> None:
    theirs = PagedMemory(16).fill(rng)
    keys = [TransferKey(f"{number}") for number in range(6)]
    pool_bytes = 4 * NUM_BLOCKS * 8192  # of which two stashes may take half
    with P2pNcclEngine(settings("shm", mem_pool_size_gb=pool_bytes / (1 << 30))) as engine:
        stashed = []
        for key in keys:
            stashed.append(stash(engine, theirs, list(range(NUM_BLOCKS)), key))
            assert stashed[-1].wait_released(10)
        assert [item.done for item in stashed] == [True] * 4 + [False] * 2
        assert isinstance(stashed[0].error, TransferCancelled)
        assert engine.stats()["live_bytes_by_place"]["pool"] == pool_bytes // 2
        held = engine.hold(KEY, theirs.source(list(range(16))), binding=b"owed")
        assert engine.spill(held)
        held.cancel("the test is over")
        for item in stashed:
            item.cancel("the test is over")
        eventually(lambda: is_idle(engine))


def test_one_larger_than_their_share_of_the_pool_takes_no_room(rng: SeededRandom) -> None:
    theirs = PagedMemory(16).fill(rng)
    pool_bytes = NUM_BLOCKS * 8192  # of which stashes may take half
    with P2pNcclEngine(settings("shm", mem_pool_size_gb=pool_bytes / (1 << 30))) as engine:
        small = stash(engine, theirs, [0, 1, 2], TransferKey("small"))
        assert small.wait_released(10)
        large = stash(engine, theirs, list(range(5)))
        with pytest.raises(TransferCancelled, match="no room"):
            large.wait(1)
        assert not small.done
        small.cancel("the test is over")
        eventually(lambda: is_idle(engine))


@pytest.mark.parametrize("end", ["pulled", "released", "cancelled"])
@pytest.mark.parametrize("binding", [b"all", b"five", b"three"])
def test_after_its_end_who_asks_is_refused_at_once(
    end: str, binding: bytes, rng: SeededRandom
) -> None:
    """It comes once only: nobody waits for another attempt, not even who had a part of it."""
    theirs, ours = PagedMemory(16).fill(rng), PagedMemory(16)
    with engines(2, "shm") as (sender, receiver):
        peer = PeerAddress(sender.zmq_address)
        stashed = stash(sender, theirs, list(range(NUM_BLOCKS)))
        if end == "pulled":
            sink = ours.sink([1, 2, 3], 0, 24)
            receiver.receive(KEY, sink, binding=b"three", peer=peer, pull=True).wait(10)
        elif end == "released":
            receiver.discard(KEY, binding=b"three", peer=peer, pull=True)
        else:
            stashed.cancel("reset")
        eventually(lambda: stashed.done)
        num_blocks = {b"all": 8, b"five": 5, b"three": 3}[binding]
        for _ in range(2):
            sink = ours.sink(list(range(num_blocks)), 0, 8 * num_blocks)
            again = receiver.receive(KEY, sink, binding=binding, peer=peer, pull=True)
            with pytest.raises(TransferRejected):
                again.wait(5)
            assert not sender._parts.holds._unheld
        assert_idle(sender, receiver)


def test_who_asked_before_it_found_no_room_is_refused(rng: SeededRandom) -> None:
    theirs, ours = PagedMemory(16).fill(rng), PagedMemory(16)
    with engines(2, "shm", mem_pool_size_gb=0, kv_buffer_size=MIB) as (sender, receiver):
        peer = PeerAddress(sender.zmq_address)
        sink = ours.sink([1, 2, 3], 0, 24)
        waiting = receiver.receive(KEY, sink, binding=b"three", peer=peer, pull=True)
        eventually(lambda: len(sender._parts.holds._unheld) == 1)
        stash(sender, theirs, list(range(NUM_BLOCKS)))
        with pytest.raises(TransferRejected, match="no room"):
            waiting.wait(5)
        assert_idle(sender, receiver)


@pytest.mark.parametrize("has_held", [False, True], ids=["stashed", "held back"])
def test_who_asks_for_what_an_earlier_start_has_promised_is_refused_soon(has_held: bool) -> None:
    """The engine is new at its address, and nobody has noticed."""
    ours = PagedMemory(16)
    with engines(2, "shm") as (successor, receiver):
        loading = receiver.receive(
            KEY, ours.sink([1, 2, 3], 0, 24), binding=b"three",
            peer=PeerAddress(successor.zmq_address), pull=True,
            has_held=has_held, is_promised=not has_held,
        )  # fmt: skip
        with pytest.raises(TransferRejected, match="not held here any more"):
            loading.wait(10)  # a transfer has 20 s
        assert_idle(successor, receiver)


def test_a_promise_that_is_kept_late_is_kept(rng: SeededRandom) -> None:
    """A stash is noted before it is made."""
    theirs, ours = PagedMemory(16).fill(rng), PagedMemory(16)
    with engines(2, "shm") as (sender, receiver):
        waiting = ask_for_three(receiver, ours, sender)
        eventually(lambda: len(sender._parts.holds._unheld) == 1)
        stash(sender, theirs, list(range(NUM_BLOCKS)))
        waiting.wait(10)
        assert_idle(sender, receiver)


def test_who_has_run_for_longer_than_a_promise_lasts_refuses_none(
    rng: SeededRandom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not restarted since, so the stash is about to be made, however long a step takes."""
    monkeypatch.setattr(holds, "PROMISED_SECONDS", 0.05)
    theirs, ours = PagedMemory(16).fill(rng), PagedMemory(16)
    with engines(2, "shm", retry_seconds=0.1) as (sender, receiver):
        sender._parts.holds._started_at -= 100.0
        waiting = ask_for_three(receiver, ours, sender)
        eventually(lambda: len(sender._parts.holds._unheld) == 1)
        asked_at = time.monotonic()
        eventually(lambda: time.monotonic() > asked_at + 0.5)
        stash(sender, theirs, list(range(NUM_BLOCKS)))
        waiting.wait(10)
        assert_idle(sender, receiver)


def test_nothing_is_kept_of_a_stash_that_its_reader_has_given_up_before(rng: SeededRandom) -> None:
    theirs, ours = PagedMemory(16).fill(rng), PagedMemory(16)
    with engines(2, "shm") as (sender, receiver):
        waiting = ask_for_three(receiver, ours, sender)
        eventually(lambda: len(sender._parts.holds._unheld) == 1)
        waiting.cancel("its request ended")
        eventually(lambda: waiting.done and not len(sender._parts.holds._unheld))
        stashed = stash(sender, theirs, list(range(NUM_BLOCKS)))
        eventually(lambda: stashed.done)
        assert_idle(sender, receiver)


def test_who_waits_for_one_beginning_gets_it_though_another_was_given_up(
    rng: SeededRandom,
) -> None:
    theirs, ours = PagedMemory(16).fill(rng), PagedMemory(16)
    with engines(2, "shm") as (sender, receiver):
        unheld, peer = sender._parts.holds._unheld, PeerAddress(sender.zmq_address)
        sink = ours.sink([4, 5, 6, 7, 8], 0, 40)
        given_up = receiver.receive(KEY, sink, binding=b"five", peer=peer, pull=True)
        eventually(lambda: len(unheld) == 1)
        given_up.cancel("its request ended")
        eventually(lambda: given_up.done and not len(unheld))
        waiting = ask_for_three(receiver, ours, sender)
        eventually(lambda: len(unheld) == 1)
        stashed = stash(sender, theirs, list(range(NUM_BLOCKS)))
        waiting.wait(10)
        stashed.wait(10)
        assert (ours.data[:, 1:4] == theirs.data[:, :3]).all()
        assert_idle(sender, receiver)


def test_who_waits_for_the_copy_is_served_though_another_peer_wants_no_more(
    rng: SeededRandom,
) -> None:
    theirs, ours = PagedMemory(16).fill(rng), PagedMemory(16)
    other = PeerAddress("127.0.0.1:1")
    with engines(2, "shm") as (sender, receiver):
        holds, peer = sender._parts.holds, PeerAddress(receiver.zmq_address)
        waiting = receiver.receive(KEY, ours.sink([1, 2, 3], 0, 24), binding=b"three")
        with sender._parts.changed:  # nobody hears of the copy's end
            stashed = stash(sender, theirs, list(range(NUM_BLOCKS)))
            holds.on_want((KEY, b"three"), peer, None, lambda ending: pytest.fail(ending.reason))
            holds.on_release((KEY, b"five"), other, None)
        waiting.wait(10)
        stashed.wait(10)
        assert (ours.data[:, 1:4] == theirs.data[:, :3]).all()
        assert_idle(sender, receiver)


@pytest.mark.parametrize("gives_up", [True, False])
def test_one_peer_may_want_two_beginnings(gives_up: bool, rng: SeededRandom) -> None:
    """A step may cancel the load of one and begin that of another."""
    theirs, ours = PagedMemory(16).fill(rng), PagedMemory(16)
    with engines(2, "shm") as (sender, receiver):
        holds, peer = sender._parts.holds, PeerAddress(receiver.zmq_address)
        sinks = {b"five": ours.sink([4, 5, 6, 7, 8], 0, 40), b"three": ours.sink([1, 2, 3], 0, 24)}
        waiting = {name: receiver.receive(KEY, sinks[name], binding=name) for name in sinks}
        with sender._parts.changed:  # nobody hears of the copy's end
            stashed = stash(sender, theirs, list(range(NUM_BLOCKS)))
            for name in sinks:
                holds.on_want((KEY, name), peer, None, lambda ending: pytest.fail(ending.reason))
            if gives_up:
                holds.on_release((KEY, b"five"), peer, None)
                waiting.pop(b"five").cancel("its request ended")
        for transfer in waiting.values():
            transfer.wait(10)
        stashed.wait(10)
        assert (ours.data[:, 1:4] == theirs.data[:, :3]).all()
        assert gives_up or (ours.data[:, 4:9] == theirs.data[:, :5]).all()
        assert_idle(sender, receiver)


@marks.every_transport
def test_who_pulls_a_stash_that_ends_is_refused_at_once(
    transport: str, rng: SeededRandom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM has reset its caches; the deadline of a transfer is 20 s."""
    theirs, ours = PagedMemory(16).fill(rng), PagedMemory(16)
    honest, stashes = Sender.on_grant, list[Transfer]()

    def reset_then(self: Sender, link: Link, message: Grant) -> None:
        honest(self, link, message)
        stashes.pop().cancel("vLLM has reset its caches")

    monkeypatch.setattr(Sender, "on_grant", reset_then)
    with engines(2, transport) as (sender, receiver):
        stashes += [stash(sender, theirs, list(range(NUM_BLOCKS)))]
        waiting = ask_for_three(receiver, ours, sender)
        with contextlib.suppress(TransferRejected):
            waiting.wait(10)
        if waiting.error is None:  # all of it had left
            assert (ours.data[:, 1:4] == theirs.data[:, :3]).all()
        else:
            assert "vLLM has reset its caches" in str(waiting.error)
        assert not stashes
        assert_idle(sender, receiver)


@pytest.mark.parametrize("is_stash", [True, False], ids=["stash", "hold"])
def test_who_waits_for_a_copy_that_ends_early_is_refused_at_once(
    is_stash: bool, rng: SeededRandom
) -> None:
    theirs, peer = PagedMemory(16).fill(rng), PeerAddress("127.0.0.1:1")
    refused: list[str] = []
    with P2pNcclEngine(settings("shm")) as engine:
        holds, content = engine._parts.holds, (KEY, b"all")
        with engine._parts.changed:  # nobody hears of the copy's end
            if is_stash:
                held = stash(engine, theirs, list(range(NUM_BLOCKS)))
            else:
                held = engine.hold(KEY, theirs.source(list(range(8))), binding=b"all")
                assert engine.spill(held)
            holds.on_want(content, peer, None, lambda ending: refused.append(ending.reason))
            assert not refused
            holds.tick(engine._parts.holds._clock() + 1000)
            assert refused == ["its lease has ended"]
        eventually(lambda: is_idle(engine))


def test_a_promise_that_is_pushed_after_all_is_kept(
    rng: SeededRandom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The WANT comes after the hold's end and before the push, which takes longer than the WANT
    waits."""
    monkeypatch.setattr(holds, "PROMISED_SECONDS", 0.05)
    theirs, ours = PagedMemory(16).fill(rng), PagedMemory(16)
    with engines(2, "shm") as (sender, receiver):
        peer, last = PeerAddress(receiver.zmq_address), theirs.source([4, 5, 6, 7], 4)
        held = sender.hold(KEY, theirs.source([0, 1, 2, 3], 0), binding=b"x", generation=1)
        pushed = sender.send(KEY, peer, last, binding=b"x", generation=1)
        eventually(lambda: pushed.released)
        held.cancel("vLLM needs its blocks")
        waiting = receiver.receive(
            KEY, ours.sink(list(range(8)), 0), binding=b"x",
            peer=PeerAddress(sender.zmq_address), pull=True, has_held=True,
        )  # fmt: skip
        unheld = sender._parts.holds._unheld
        eventually(lambda: len(unheld) == 1)
        rest = sender.send(
            KEY, peer, theirs.source([0, 1, 2, 3], 0), binding=b"x", generation=1, ready=False
        )
        eventually(lambda: len(unheld) == 0)
        sender.mark_ready(rest)
        waiting.wait(10)
        assert (ours.data[:, :8] == theirs.data[:, :8]).all()


def test_who_hears_gone_while_it_settles_releases_the_rest_at_its_end(rng: SeededRandom) -> None:
    """What has arrived may be all of it; here it is not, so the other ranks must hear."""
    theirs, ours = PagedMemory(16).fill(rng), PagedMemory(16)
    with engines(2, "shm") as (sender, receiver):
        peer, source = PeerAddress(sender.zmq_address), theirs.source([4, 5, 6, 7], 4)
        sender.hold(TransferKey("first"), theirs.source(list(range(8))))
        sink = ours.sink(list(range(8)), 0)
        receiver.receive(TransferKey("first"), sink, peer=peer, pull=True).wait(10)  # they have met
        sender.send(KEY, PeerAddress(receiver.zmq_address), source, binding=b"x").wait(10)
        sender._parts.holds._started_at -= 100.0
        with receiver._parts.changed:  # nobody hears that the blocks are in place
            loading = receiver.receive(
                KEY, ours.sink(list(range(8)), 0), binding=b"x", peer=peer, pull=True, has_held=True
            )
            gone = TransferRejected("it is not held here any more")
            receiver._parts.pulls.on_gone((KEY, b"x"), sender.epoch, gone)
            assert not loading.done
        with pytest.raises(TransferRejected, match="not held here any more"):
            loading.wait(10)
        ended = sender._parts.endings._endings
        eventually(lambda: (ending := ended.get((KEY, b"x"))) and ending.departed)


def test_without_room_it_ends_at_once(rng: SeededRandom) -> None:
    theirs = PagedMemory(16).fill(rng)
    with P2pNcclEngine(settings("shm", mem_pool_size_gb=0, kv_buffer_size=MIB)) as engine:
        stashed = stash(engine, theirs, list(range(NUM_BLOCKS)))
        assert stashed.done
        assert stashed.released
        with pytest.raises(TransferCancelled, match="no room"):
            stashed.wait(1)
        assert is_idle(engine)


@pytest.mark.parametrize("end", ["lease", "close"])
def test_its_memory_is_given_back_at_each_end(end: str, rng: SeededRandom) -> None:
    theirs = PagedMemory(16).fill(rng)
    with P2pNcclEngine(settings("shm")) as engine:
        lease = 0.1 if end == "lease" else 100.0
        stashed = engine.stash(
            KEY, theirs.source([1, 2, 3]), binding=b"", beginnings={}, lease=lease
        )
        if end == "lease":
            eventually(lambda: stashed.done)
            assert engine.stats()["expired_leases"] == 0  # nobody was late
        else:
            engine.close()
            assert stashed.done
        eventually(lambda: is_idle(engine))


def test_who_asks_after_a_restart_is_refused_by_its_new_name(rng: SeededRandom) -> None:
    theirs, heard = PagedMemory(16).fill(rng), list[str]()
    with P2pNcclEngine(settings("shm")) as engine:
        holds, peer = engine._parts.holds, PeerAddress("127.0.0.1:1")
        with engine._parts.changed:
            stashed = stash(engine, theirs, list(range(NUM_BLOCKS)))
            for epoch, name in enumerate(("old", "new"), 1):
                refuse = partial(lambda name, _: heard.append(name), name)
                holds.on_want((KEY, b"all"), peer, None, refuse, epoch=epoch)
            stashed.cancel("vLLM has reset its caches")
        assert heard == ["new"]
        assert_idle(engine)


def test_gone_does_not_overtake_what_has_landed(
    rng: SeededRandom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it is written, and the receiver has no time to look."""
    theirs, ours = PagedMemory(16).fill(rng), PagedMemory(16)
    written, looks, stashes = Sender._written, Store.poll, list[Transfer]()

    def reset_then(self: Sender, chunk: Chunk, nbytes: int) -> None:
        written(self, chunk, nbytes)
        stashes.pop().cancel("vLLM has reset its caches")

    def is_busy() -> bool:
        return not waiting or not waiting[0].done

    monkeypatch.setattr(Sender, "_written", reset_then)
    monkeypatch.setattr(Store, "on_done", lambda *_: None)
    with engines(2, "shm") as (sender, receiver):
        waiting, store = list[Transfer](), receiver._parts.store
        skips = lambda self: None if self is store and is_busy() else looks(self)  # noqa: E731
        monkeypatch.setattr(Store, "poll", skips)
        stashes.append(stash(sender, theirs, list(range(NUM_BLOCKS))))
        assert stashes[0].wait_released(10)
        waiting.append(ask_for_three(receiver, ours, sender))
        waiting[0].wait(10)
        assert (ours.data[:, 1:4] == theirs.data[:, :3]).all()
        assert_idle(sender, receiver)
