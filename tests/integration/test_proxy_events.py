"""The reader of KV events against vLLM's own publisher, and against publishers that are unkind."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from p2p_engine.wire.messages import Publisher
from proxy.fleet import event_reader, zmtp
from proxy.fleet.block_index import BlockIndex
from proxy.fleet.event_reader import Follow, Follower, Troubled
from tests.doubles.publisher import END, SIZE, PublisherDouble, removed, stored
from tests.rigs.proxies import until

HERE = 1
DEEP = b"\x93\x01\x91\x81\xa4type" + b"\x91" * 100_000 + b"\xc0\x00"
ONE, OTHER = list(range(3 * SIZE)), list(range(1000, 1000 + 2 * SIZE))


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_reader, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(event_reader, "REPLAY_REST_SECONDS", 0.001)
    monkeypatch.setattr(event_reader, "REPLAY_PART_SECONDS", 0.5)


class FollowerRig:
    """A follower of one publisher, and what it believes."""

    def __init__(self, place: Publisher) -> None:
        self.index = BlockIndex()
        self.troubles: list[str] = []
        watch = Follow(HERE, "127.0.0.1", place.port, place.replay_port, place.topic)
        self.follower = Follower(watch, self.index, self._note)

    def _note(self, trouble: Troubled) -> None:
        self.troubles.append(trouble.reason)

    def held(self, tokens: list[int]) -> int | None:
        """How many leading tokens are believed to be held; None: nothing is known."""
        return self.index.match(self.index.keys_of(tokens, "", "")).get(HERE)

    async def until(self, one: int | None, other: int | None) -> None:
        """Wait until it believes this."""
        await until(lambda: (self.held(ONE), self.held(OTHER)) == (one, other), f"{one}, {other}")
        self.index.check()


@asynccontextmanager
async def following(place: Publisher) -> AsyncIterator[FollowerRig]:
    """Follow a publisher."""
    rig = FollowerRig(place)
    task = asyncio.ensure_future(rig.follower.run())
    try:
        yield rig
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_late_subscriber_hears_all_that_is_buffered_then_all_that_comes() -> None:
    async with PublisherDouble() as publisher:
        await publisher.publish(stored(ONE))
        async with following(publisher.place) as rig:
            await publisher.subscribed()
            await rig.until(48, 0)
            await publisher.publish(stored(OTHER), removed(ONE))
            await rig.until(32, 32)


async def test_a_gap_is_filled_by_a_replay() -> None:
    async with PublisherDouble() as publisher, following(publisher.place) as rig:
        await publisher.subscribed()
        await rig.until(0, 0)
        publisher.lost = {0, 1}
        await publisher.publish(stored(ONE))
        await publisher.publish(removed(ONE))
        await publisher.publish(stored(OTHER))
        await rig.until(32, 32)
        assert not rig.troubles


async def test_a_gap_within_a_replay_is_asked_for_again() -> None:
    async with PublisherDouble() as publisher:
        for event in (stored(ONE), removed(ONE), stored(OTHER)):
            await publisher.publish(event)
        publisher.lost_once = {1}
        async with following(publisher.place) as rig:
            await rig.until(32, 32)
            assert publisher.num_replays == 2


@pytest.mark.parametrize("lost", [{END}, {1, 2, END}])
async def test_a_replay_without_an_end_is_asked_for_again(lost: set[int]) -> None:
    async with PublisherDouble() as publisher:
        for event in (stored(ONE), removed(ONE), stored(OTHER)):
            await publisher.publish(event)
        publisher.lost_once = lost
        async with following(publisher.place) as rig:
            await rig.until(32, 32)
            assert not rig.troubles
            await until(lambda: publisher.num_replays == 2, "it is asked again")


async def test_a_topic_may_be_long() -> None:
    async with PublisherDouble(b"kv" * 200) as publisher, following(publisher.place) as rig:
        await publisher.subscribed()
        await publisher.publish(stored(ONE))
        await rig.until(48, 0)


async def test_who_is_followed_no_longer_is_not_dialled_though_the_end_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig, num_dialled = FollowerRig(Publisher(1, None, "kv")), 0

    async def follow() -> None:
        nonlocal num_dialled
        num_dialled += 1
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:  # Python 3.10: the limit of time passed just then
            raise asyncio.TimeoutError from None

    monkeypatch.setattr(rig.follower, "_follow", follow)
    rig.follower.start()
    await asyncio.sleep(0)
    rig.follower.stop()
    assert rig.follower._running is not None
    await asyncio.wait_for(asyncio.wait([rig.follower._running]), 20)
    assert num_dialled == 1


async def test_beyond_the_buffer_nothing_of_before_is_believed() -> None:
    async with PublisherDouble() as publisher, following(publisher.place) as rig:
        await publisher.subscribed()
        await publisher.publish(stored(ONE))
        await rig.until(48, 0)
        publisher.lost = {1, 2}
        await publisher.publish(removed(ONE))
        await publisher.publish(stored(OTHER))
        publisher.buffer.clear()
        assert not rig.index.partial()
        await publisher.publish(stored(OTHER, name="again"))
        await rig.until(0, 32)
        assert rig.index.partial() == [HERE]
        await publisher.publish({"type": "AllBlocksCleared"}, stored(ONE))
        await rig.until(48, 0)
        assert not rig.index.partial()


@pytest.mark.parametrize("first", [0, 1, 7])
async def test_a_restarted_publisher_is_followed_from_an_empty_picture(first: int) -> None:
    async with PublisherDouble() as publisher, following(publisher.place) as rig:
        await publisher.subscribed()
        await publisher.publish(stored(ONE))
        await rig.until(48, 0)
        await publisher.restart(first=first)
        await publisher.publish(stored(OTHER))
        await rig.until(0, 32)


async def test_a_count_that_begins_again_without_a_new_connection() -> None:
    async with PublisherDouble() as publisher, following(publisher.place) as rig:
        await publisher.subscribed()
        for _ in range(3):
            await publisher.publish(stored(ONE))
        await rig.until(48, 0)
        publisher.buffer.clear()
        await publisher.publish(stored(OTHER), number=0)
        await rig.until(0, 32)
        assert "Restarted" in rig.troubles[0]


async def test_reordered_batches_change_nothing() -> None:
    async with PublisherDouble() as publisher, following(publisher.place) as rig:
        await publisher.subscribed()
        await publisher.publish(stored(ONE), number=0)
        await publisher.publish(removed(ONE), number=1)
        await rig.until(32, 0)
        publisher.lost = {2}
        await publisher.publish(removed(ONE[: 2 * SIZE]), number=2)
        await publisher.publish(stored(OTHER), number=3)
        publisher.lost = set()
        await publisher.publish(removed(ONE[: 2 * SIZE]), number=2)  # after 3
        await rig.until(16, 32)


async def test_a_repeated_batch_ends_the_connection() -> None:
    async with PublisherDouble() as publisher:
        place = Publisher(publisher.ports[0], None, "kv")
        async with following(place) as rig:
            await publisher.subscribed()
            await publisher.publish(stored(ONE), number=0)
            await publisher.publish(stored(ONE), number=0)
            await until(lambda: rig.troubles, "it is said")
            assert "Restarted" in rig.troubles[0]


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93\x01\x91\x07\x00", bytes(1 << 16), DEEP])
async def test_a_batch_that_cannot_be_read_ends_the_picture(payload: bytes) -> None:
    async with PublisherDouble() as publisher, following(publisher.place) as rig:
        await publisher.subscribed()
        await publisher.publish(stored(ONE))
        await rig.until(48, 0)
        await publisher.publish_bytes(payload)
        await until(lambda: rig.troubles, "it is said")
        publisher.buffer = [(2, publisher.buffer[0][1])]
        await rig.until(48, 0)


async def test_a_huge_batch_is_refused_and_the_next_one_is_heard() -> None:
    async with PublisherDouble() as publisher, following(publisher.place) as rig:
        await publisher.subscribed()
        await publisher.publish(stored(ONE))
        await rig.until(48, 0)
        await publisher.publish_bytes(bytes(zmtp.MAX_MESSAGE_BYTES + 1))
        await until(lambda: rig.troubles, "it is said")
        assert "more than" in rig.troubles[0]
        publisher.buffer.clear()
        await publisher.publish(stored(OTHER))
        await rig.until(0, 32)


async def test_an_end_that_comes_with_the_rest_of_a_message_is_not_lost() -> None:
    stream = asyncio.StreamReader()
    connection = zmtp.ZmtpConnection(stream, None)  # type: ignore[arg-type]
    receiving = asyncio.ensure_future(connection.receive())
    stream.feed_data(b"\x00\x05")
    for _ in range(3):
        await asyncio.sleep(0)
    stream.feed_data(b"whole")
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving


async def test_commands_that_say_nothing_are_bounded() -> None:
    stream = asyncio.StreamReader()
    stream.feed_data(b"\x04\x00" * 50 + b"\x00\x05whole")
    with pytest.raises(zmtp.ZmtpError, match="more than 5 parts"):
        await zmtp.ZmtpConnection(stream, None).receive()  # type: ignore[arg-type]


async def test_without_replays_a_gap_ends_the_picture() -> None:
    async with PublisherDouble() as publisher:
        place = Publisher(publisher.ports[0], None, "kv")
        async with following(place) as rig:
            await publisher.subscribed()
            await publisher.publish(stored(ONE), number=5)
            await rig.until(48, 0)
            await publisher.publish(stored(OTHER), number=7)
            await rig.until(0, 32)
            assert rig.index.partial() == [HERE]


async def test_a_replay_that_never_answers_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_reader, "REPLAY_SECONDS", 0.05)
    async with PublisherDouble() as publisher:
        publisher.replays = False
        await publisher.publish(stored(ONE))
        async with following(publisher.place) as rig:
            await until(lambda: rig.troubles, "it is said")
            assert "Timeout" in rig.troubles[0]
            assert rig.held(ONE) is None
            publisher.replays = True
            await rig.until(48, 0)


async def rounds_until(condition: Callable[[], Any]) -> int:
    """Wait until `condition`; return how often others could run meanwhile."""
    num_rounds = 0
    while not condition():
        num_rounds += 1
        await asyncio.sleep(0)
    return num_rounds


async def test_a_batch_of_many_events_is_applied_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_reader, "SLICE_SECONDS", 0.0)
    cleared = {"type": "AllBlocksCleared"}
    async with PublisherDouble() as publisher, following(publisher.place) as rig:
        await publisher.subscribed()
        await publisher.publish(stored(ONE))
        await rig.until(48, 0)
        await publisher.publish(cleared, *[cleared] * 200, stored(OTHER))
        assert await rounds_until(lambda: rig.held(OTHER) == 32) >= 200
        assert not rig.troubles


async def test_batches_that_a_replay_has_told_already_take_turns_with_all_else() -> None:
    async with PublisherDouble() as publisher:
        await publisher.publish(stored(ONE), number=1000)
        async with following(publisher.place) as rig:
            await publisher.subscribed()
            await rig.until(48, 0)
            for number in range(300):
                await publisher.publish(number=number)
            await publisher.publish(stored(OTHER), number=1001)
            assert await rounds_until(lambda: rig.held(OTHER) == 32) >= 300
            assert not rig.troubles


async def test_a_replay_of_what_was_not_asked_for_ends_the_connection() -> None:
    async with PublisherDouble() as publisher:
        await publisher.publish(stored(ONE), number=5)
        publisher.buffer.append((3, publisher.buffer[0][1]))
        async with following(publisher.place) as rig:
            await until(lambda: rig.troubles, "it is said")
            assert "batch 3 where 6 or a later one was asked for" in rig.troubles[0]


# Peers that are no publishers

Play = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"


async def _greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readexactly(64)
    writer.write(zmtp._GREETING + READY)


async def _say(writer: asyncio.StreamWriter, said: bytes) -> None:
    writer.write(said)
    await writer.drain()


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Accept, and say nothing."""
    await reader.read()


async def other_protocol(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Speak HTTP."""
    await _say(writer, b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n".ljust(80))
    await reader.read()


async def endless_parts(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send a message that never ends."""
    await _greet(reader, writer)
    while True:
        await _say(writer, b"\x01\x00" * 1000)


async def endless_commands(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send commands without a message."""
    await _greet(reader, writer)
    while True:
        await _say(writer, b"\x04\x64" + bytes(100))


async def too_large(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Announce a part of 2**62 bytes."""
    await _greet(reader, writer)
    await _say(writer, b"\x02" + struct.pack(">Q", 1 << 62))
    await reader.read()


async def half_a_message(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Begin a message, and stop."""
    await _greet(reader, writer)
    await _say(writer, b"\x01\x02kv\x00\x08")
    await reader.read()


async def other_parts(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send a message of one part."""
    await _greet(reader, writer)
    await _say(writer, b"\x00\x02kv")
    await reader.read()


@pytest.mark.parametrize(
    "play",
    [silent, other_protocol, endless_parts, endless_commands, too_large, half_a_message,
     other_parts],
)  # fmt: skip
async def test_a_peer_that_is_no_publisher_costs_its_connection(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmtp, "CONNECT_SECONDS", 0.2)
    monkeypatch.setattr(zmtp, "MESSAGE_SECONDS", 0.2)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await play(reader, writer)
        except OSError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, following(Publisher(server.sockets[0].getsockname()[1], None)) as rig:
        await until(lambda: len(rig.troubles) > 1, "it is left, and tried again")
        assert rig.held(ONE) in (None, 0)


# vLLM's own publisher


@pytest.mark.filterwarnings("ignore")  # vLLM's own
@pytest.mark.timeout(180)
async def test_vllms_own_publisher_is_followed(free_ports: list[int]) -> None:
    events = pytest.importorskip("vllm.distributed.kv_events")
    ports = free_ports
    settings: dict[str, Any] = {
        "endpoint": f"tcp://*:{ports[0] - 1}",  # of rank 0: this is rank 1
        "replay_endpoint": f"tcp://*:{ports[1] - 1}",
        "buffer_steps": 4, "topic": "kv",
    }  # fmt: skip

    def batch(tokens: list[int], **more: Any) -> Any:
        event = {k: v for k, v in stored(tokens, **more).items() if k != "type"}
        return events.KVEventBatch(ts=1.0, events=[events.BlockStored(**event)])

    publisher = events.ZmqEventPublisher(1, **settings)
    try:
        for number in range(6):
            publisher.publish(batch([number] * SIZE))
        async with following(Publisher(ports[0], ports[1], "kv")) as rig:
            await until(lambda: rig.held([5] * SIZE) == SIZE, "the buffer is replayed")
            assert [rig.held([number] * SIZE) for number in range(6)] == [0, 0, *[SIZE] * 4]
            publisher.publish(batch(ONE))
            await until(lambda: rig.held(ONE) == 48, "what comes is heard")
            publisher.publish(events.KVEventBatch(ts=1.0, events=[events.AllBlocksCleared()]))
            await rig.until(0, 0)
            assert not rig.troubles
    finally:
        publisher.shutdown()
