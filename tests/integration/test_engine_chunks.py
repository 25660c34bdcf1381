"""What is larger than a chunk: it arrives whole through little memory, and breaks off cleanly."""

from __future__ import annotations

import time

import pytest

from p2p_engine import P2pNcclEngine, TransferKey
from p2p_engine.errors import PeerError, TransferTimeout, TransferTooLarge, TransportError
from p2p_engine.memory.arena import SHARE_OF_LANDING, WINDOW
from p2p_engine.peers.link import PeerAddress
from tests import marks
from tests.rigs.engines import MIB, PagedMemory, assert_idle, engines, settings, start
from tests.support import SeededRandom, eventually

KEY = TransferKey("request-1")
PAGE = 1 << 16
BLOCKS = 128
ALL = list(range(BLOCKS))
ROOM = {"kv_buffer_size": MIB, "mem_pool_size_gb": MIB / (1 << 30)}  # an eighth of what comes
CHUNK = PAGE * 2  # of one block, over both layers


def paged() -> PagedMemory:
    return PagedMemory(BLOCKS, num_layers=2, page_bytes=PAGE)


@marks.every_transport
@pytest.mark.parametrize("receiver_first", [True, False])
@pytest.mark.parametrize("pull", [True, False])
def test_eight_times_buffer_and_pool(
    transport: str, receiver_first: bool, pull: bool, rng: SeededRandom
) -> None:
    source, target = paged().fill(rng), paged()
    with engines(2, transport, **ROOM) as (sender, receiver):
        there, here = PeerAddress(receiver.zmq_address), PeerAddress(sender.zmq_address)

        def receive() -> None:
            transfers.append(receiver.receive(KEY, target.sink(ALL), peer=here, pull=pull))

        def send() -> None:
            transfers.append(
                sender.hold(KEY, source.source(ALL))
                if pull
                else sender.send(KEY, there, source.source(ALL))
            )

        transfers: list = []  # type: ignore[type-arg]
        (receive if receiver_first else send)()
        if not receiver_first and not pull:  # nobody makes room
            eventually(lambda: transfers[0].denied, what="the receiver is full")
            assert not transfers[0].released
            assert transfers[0].wait_released_or_denied(0)
        (send if receiver_first else receive)()
        for transfer in transfers:
            transfer.wait(20)
        assert (target.data == source.data).all()
        assert sum(receiver.stats()["landed_bytes_by_place"].values()) == source.data.nbytes
        assert_idle(sender, receiver)


@marks.every_host_transport
def test_the_receiver_says_how_large_a_chunk_may_be(transport: str, rng: SeededRandom) -> None:
    """Sender and receiver have unequal memory, and unequal settings."""
    source, target = paged().fill(rng), paged()
    large = settings(transport, kv_buffer_size=512 * MIB)
    small = settings(transport, kv_buffer_size=CHUNK + 4096, mem_pool_size_gb=0)
    with start(large) as sender, start(small) as receiver:
        waiting = receiver.receive(KEY, target.sink(ALL))
        sender.send(KEY, PeerAddress(receiver.zmq_address), source.source(ALL)).wait(20)
        waiting.wait(20)
        assert (target.data == source.data).all()
        assert_idle(sender, receiver)


def test_a_block_that_never_fits_is_refused_by_name(rng: SeededRandom) -> None:
    source, target = paged().fill(rng), paged()
    with engines(2, kv_buffer_size=CHUNK // 2, mem_pool_size_gb=0) as (sender, receiver):
        waiting = receiver.receive(KEY, target.sink(ALL))
        sent = sender.send(KEY, PeerAddress(receiver.zmq_address), source.source(ALL))
        for transfer in (sent, waiting):
            with pytest.raises(TransferTooLarge, match=f"chunk of {CHUNK} bytes"):
                transfer.wait(10)
        assert_idle(sender, receiver)


@marks.every_host_transport
def test_a_few_chunks_are_open_at_a_time(transport: str, rng: SeededRandom) -> None:
    """However long the prompt: also before its bytes are computed."""
    source = paged().fill(rng)
    with engines(2, transport, chunk_bytes=2 * CHUNK) as (sender, receiver):
        peer = PeerAddress(receiver.zmq_address)
        sent = sender.send(KEY, peer, source.source(ALL), ready=False)
        granted = WINDOW * 2 * CHUNK
        eventually(lambda: sum(receiver.stats()["live_bytes_by_place"].values()) >= granted)
        assert len(sender._parts.sender._chunks) == WINDOW
        assert receiver.stats()["live_bytes"] < granted + CHUNK
        target = paged()
        waiting = receiver.receive(KEY, target.sink(ALL))
        sender.mark_ready(sent)
        waiting.wait(20)
        sent.wait(20)
        assert (target.data == source.data).all()
        assert_idle(sender, receiver)


@marks.every_host_transport
@pytest.mark.parametrize("pull", [True, False])
def test_data_connections_that_break_cost_the_open_chunks(
    transport: str, pull: bool, rng: SeededRandom
) -> None:
    """What has come is not sent again."""
    source, target = paged().fill(rng), paged()
    with engines(2, transport, chunk_bytes=CHUNK) as (sender, receiver):
        there, here = PeerAddress(receiver.zmq_address), PeerAddress(sender.zmq_address)
        sent = None if pull else sender.send(KEY, there, source.source(ALL), ready=False)
        if pull:
            sent = sender.hold(KEY, source.source(ALL))
        sink = target.sink(ALL)
        waiting = receiver.receive(KEY, sink, peer=here, pull=pull)
        assert sent is not None
        if not pull:
            sender.mark_ready(sent)
        num_breaks, missing, chunks = 0, BLOCKS, sender._parts.sender._chunks
        while missing > 16:
            eventually(lambda n=missing - 16: len(sink.missing_blocks()) <= n)  # type: ignore[misc]
            broken = set(chunks)
            num_breaks += _break_channels(sender)
            # One that must be offered anew is overtaken by the others: three breaks would fail it.
            eventually(lambda: broken.isdisjoint(list(chunks)))  # noqa: B023
            missing = len(sink.missing_blocks())
        waiting.wait(20)
        sent.wait(20)
        assert (target.data == source.data).all()
        again = sender.stats()["sent_bytes"] - source.data.nbytes
        assert again <= num_breaks * SHARE_OF_LANDING * CHUNK
        assert_idle(sender, receiver)


def _break_channels(engine: P2pNcclEngine) -> int:
    links = [link for link in engine._parts.links._links.values() if link.channel is not None]
    for link in links:
        engine._parts.links.break_channel(link, TransportError("the test breaks it"))
    return len(links)


@marks.every_host_transport
def test_what_has_come_of_a_broken_shipment_is_not_missing(
    transport: str, rng: SeededRandom
) -> None:
    source, target = paged().fill(rng), paged()
    with engines(2, transport, chunk_bytes=CHUNK) as (sender, receiver):
        sink = target.sink(ALL)
        here = PeerAddress(sender.zmq_address)
        waiting = receiver.receive(KEY, sink, peer=here)
        first = sender.send(KEY, PeerAddress(receiver.zmq_address), source.source(ALL[:48]))
        first.wait(20)
        # The rest is never computed.
        sender.send(
            KEY, PeerAddress(receiver.zmq_address), source.source(ALL[48:], 48), ready=False
        )
        sender.close()
        with pytest.raises(PeerError):
            waiting.wait(20)
        missing = sink.missing_blocks().tolist()
        assert missing == ALL[48:]
        assert (target.data[:, :48] == source.data[:, :48]).all()
        assert_idle(receiver)


def test_cancelled_in_the_middle_nothing_is_read_any_more(rng: SeededRandom) -> None:
    source, target = paged().fill(rng), paged()
    with engines(2, "shm", **ROOM) as (sender, receiver):
        sent = sender.send(KEY, PeerAddress(receiver.zmq_address), source.source(ALL))
        eventually(lambda: sent.denied)
        sent.cancel("preempted")
        assert sent.wait_released(10)
        right = source.data.copy()
        source.data[:] = 0
        again = PagedMemory(BLOCKS, num_layers=2, page_bytes=PAGE)
        again.data[:] = right
        second = sender.send(KEY, PeerAddress(receiver.zmq_address), again.source(ALL))
        receiver.receive(KEY, target.sink(ALL)).wait(20)
        assert (target.data == right).all()
        eventually(lambda: second.done)
        receiver.drop_landed()  # what came of both after the receive was whole waits for its lease
        assert_idle(sender, receiver)


@marks.every_transport
@pytest.mark.parametrize("ready", [True, False])
def test_chunks_that_are_late_together_leave_nothing_behind(transport: str, ready: bool) -> None:
    """All chunks of a shipment have one deadline: at the first look at one, all of them end."""
    with engines(2, transport, **ROOM) as (sender, receiver):
        target = PeerAddress(receiver.zmq_address)
        memory = paged()
        sending = sender.send(KEY, target, memory.source(ALL), ready=ready, timeout=1.0)
        with pytest.raises(TransferTimeout):
            sending.wait(10)
        later = time.monotonic() + 10
        with sender._parts.changed:
            assert sender._parts.sender.overdue(later) == []
        receiver.drop_landed()
        assert_idle(sender, receiver)
