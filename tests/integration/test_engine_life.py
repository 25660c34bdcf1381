"""An engine's beginning, its end at any moment, its directory, and noise on its sockets."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
import torch
import zmq

from mempool import Mover
from p2p_engine import P2pNcclEngine, TransferKey
from p2p_engine.bounded import BUDGET_BYTES, OFFERED_BYTES
from p2p_engine.errors import (
    ConfigError,
    EngineClosed,
    P2pError,
    PeerLost,
    PeerRefused,
    PeerUnreachable,
    TransferRejected,
)
from p2p_engine.memory.arena import LandingArena
from p2p_engine.memory.jobs import Job
from p2p_engine.memory.layout import TensorSink, TensorSource
from p2p_engine.peers.directory import Directory, RankAddress
from p2p_engine.peers.link import PeerAddress
from p2p_engine.transports.base import ArenaChannel, Order
from p2p_engine.transports.handshake import ACCEPTED, PREAMBLE
from p2p_engine.transports.shm import ShmChannel, ShmTransport
from p2p_engine.wire.addresses import split_address
from p2p_engine.wire.messages import (
    PROTOCOL_VERSION,
    AnyMessage,
    Fail,
    Greet,
    Hello,
    Manifest,
    Offer,
    Ping,
    Refuse,
    Want,
    Welcome,
    decode,
    encode,
)
from tests import marks
from tests.rigs.engines import MIB, assert_idle, engines, settings, start
from tests.rigs.tensors import pattern, random_tensor
from tests.support import SeededRandom, eventually

KEY = TransferKey("request-1")
pytestmark = pytest.mark.usefixtures("no_leaks")


class TalkingStranger:
    """A DEALER that says whatever the test likes."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(f"tcp://{address}")

    def say(self, *frames: bytes) -> None:
        """Send frames as they are."""
        self._socket.send_multipart(frames)

    def ask(self, frame: bytes) -> AnyMessage:
        """Say a frame until an answer comes: what is said while a connection is cut is lost.

        Raises:
            AssertionError: none comes.
        """

        def is_heard() -> bool:
            self.say(frame)
            return bool(self._socket.poll(100))

        eventually(is_heard)
        return decode(self._socket.recv())

    def hear(self) -> AnyMessage:
        """Return the next answer.

        Raises:
            AssertionError: none comes.
        """
        assert self._socket.poll(10_000), "no answer"
        return decode(self._socket.recv())

    def close(self) -> None:
        """Hang up."""
        self._socket.close()
        self._context.term()


@pytest.fixture
def engine() -> Iterator[P2pNcclEngine]:
    with P2pNcclEngine(settings("shm,tcp")) as made:
        yield made


@pytest.fixture
def stranger(engine: P2pNcclEngine) -> Iterator[TalkingStranger]:
    made = TalkingStranger(engine.zmq_address)
    yield made
    made.close()


def hello(epoch: int = 5, version: int = PROTOCOL_VERSION, address: str = "127.0.0.1:1") -> bytes:
    return encode(Hello(epoch, 0, version, address, None, {}))


# The beginning


def test_port_that_is_taken_is_named() -> None:
    with P2pNcclEngine(settings()) as first:
        _, port = split_address(first.zmq_address)
        with pytest.raises(ConfigError, match=str(port)):
            P2pNcclEngine(settings(port=port))


def test_port_range_takes_the_first_free_port() -> None:
    with P2pNcclEngine(settings()) as first:
        _, port = split_address(first.zmq_address)
        span = (port, min(port + 50, 65535))
        with P2pNcclEngine(settings(kv_port_range=span)) as second:
            assert port < split_address(second.zmq_address)[1] <= port + 50


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_host_that_is_not_ours_leaves_nothing_behind(transport: str) -> None:
    with pytest.raises(ConfigError, match=r"203\.0\.113\.7"):
        P2pNcclEngine(settings(transport, host="203.0.113.7"))


def test_engine_that_gets_no_thread_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left open would make libzmq wait for ever when its context is collected."""

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="new thread"):
            start(settings())


def test_ipv6(rng: SeededRandom) -> None:
    tensor = random_tensor(rng, 1000)
    with engines(2, "tcp", host="::1") as (sender, receiver):
        assert receiver.zmq_address.startswith("[::1]:")
        sender.send_tensor(KEY, tensor, receiver.zmq_address)
        assert torch.equal(receiver.recv_tensor(KEY, sender.zmq_address, timeout=10), tensor)


# The end


@marks.every_transport
def test_close_ends_what_is_open_on_both_sides(transport: str) -> None:
    """Nobody waits for the peer to be declared silent."""
    with engines(2, transport, peer_timeout_seconds=60) as (one, other):
        target = PeerAddress(other.zmq_address)
        sent = one.send(KEY, target, TensorSource(torch.zeros(9)), ready=False)
        received = one.receive(TransferKey("b"), TensorSink(), peer=target)
        held = one.hold(TransferKey("c"), TensorSource(torch.zeros(9)))
        awaited = other.receive(KEY, TensorSink(), peer=PeerAddress(one.zmq_address))
        eventually(lambda: other.stats()["open_transfers"] == 2)
        eventually(lambda: other.stats()["links"] == {"ready": 1})
        one.close()
        for transfer in (sent, received, held):
            assert transfer.released
            with pytest.raises(EngineClosed):
                transfer.wait(0)
        with pytest.raises(PeerLost, match="closing"):
            awaited.wait(10)
        assert_idle(other)


@marks.every_transport
def test_close_in_the_middle_of_a_transfer(transport: str, rng: SeededRandom) -> None:
    """Whichever side closes first, whenever: each transfer ends once, and by name."""
    for closer in (0, 1):
        with engines(2, transport, kv_buffer_size=64 * MIB) as parties:
            sender, receiver = parties
            tensors = [random_tensor(rng, 4 * MIB) for _ in range(4)]
            sinks = [TensorSink() for _ in tensors]
            open_transfers = [receiver.receive(TransferKey(f"{i}"), sinks[i]) for i in range(4)]
            for number, tensor in enumerate(tensors):
                key, target = TransferKey(f"{number}"), PeerAddress(receiver.zmq_address)
                open_transfers.append(sender.send(key, target, TensorSource(tensor)))
            eventually(lambda: sender.stats()["sent_bytes"] > 0)  # noqa: B023
            parties[closer].close()
            for transfer in open_transfers[4:] if closer == 0 else open_transfers:
                try:
                    transfer.wait(10)
                except P2pError as error:
                    assert isinstance(error, EngineClosed | PeerLost)  # noqa: PT017
            for number, sink in enumerate(sinks):
                if open_transfers[number].done and open_transfers[number].error is None:
                    assert sink.tensor is not None
                    assert torch.equal(sink.tensor, tensors[number])


def test_close_twice_and_from_many_threads() -> None:
    engine = P2pNcclEngine(settings())
    threads = [threading.Thread(target=engine.close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    engine.close()


class StuckMover:
    """The engine's mover, whose thread hangs in a copy while the test says so."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self.is_stuck = True

    def close(self, timeout: float) -> bool:
        return not self.is_stuck and self._mover.close(timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mover, name)


def test_close_keeps_what_a_copy_may_still_touch() -> None:
    engine = P2pNcclEngine(settings())
    engine._parts.mover = stuck = StuckMover(engine._parts.mover)  # type: ignore[assignment]
    waiting = engine.receive(KEY, TensorSink())
    engine.close()
    assert not waiting.released
    assert engine._parts.arena is not None
    assert len(engine._parts.arena.arena.view(0, 8)) == 8  # it is mapped
    stuck.is_stuck = False
    engine.close()
    assert isinstance(waiting.error, EngineClosed)
    with pytest.raises(ValueError, match="closed"):
        engine._parts.arena.arena.view(0, 8)


def test_close_that_gave_up_on_a_thread_is_finished_by_the_next_one() -> None:
    with start(settings()) as engine:
        goes_on = threading.Event()

        def stand_still() -> None:
            goes_on.wait(60)

        engine._parts.control.call_soon(stand_still)
        engine.close(0.1)
        is_given_up = engine._parts.control.alive
        arena = engine._parts.arena
        assert arena is not None
        is_mapped = len(arena.arena.view(0, 8)) == 8  # for frames that are still to be handled
        goes_on.set()
        assert is_given_up
        assert is_mapped
        engine.close()
        with pytest.raises(ValueError, match="closed"):
            arena.arena.view(0, 8)
        assert not engine._parts.control.alive


def test_closed_engine_says_so() -> None:
    engine = P2pNcclEngine(settings())
    engine.close()
    source, target = TensorSource(torch.zeros(1)), PeerAddress("127.0.0.1:1")
    for call in (
        lambda: engine.send(KEY, target, source),
        lambda: engine.receive(KEY, TensorSink()),
        lambda: engine.hold(KEY, source),
        lambda: engine.abandon(KEY, target, ""),
        lambda: engine.discard(KEY),
        lambda: engine.drop_landed(),
    ):
        with pytest.raises(EngineClosed):
            call()
    assert engine.stats()["healthy"] is False


def test_exception_in_the_body_closes_the_engine() -> None:
    with pytest.raises(KeyError), P2pNcclEngine(settings()):
        raise KeyError


def test_engine_that_got_no_core_takes_nobody_for_dead(rng: SeededRandom) -> None:
    """What its own thread did not hear, for whatever reason, is not its peers' silence."""
    with engines(2, peer_timeout_seconds=5) as (sender, receiver):
        tensor = random_tensor(rng, MIB)
        unready = sender.send(
            KEY, PeerAddress(receiver.zmq_address), TensorSource(tensor), ready=False
        )
        eventually(lambda: receiver.stats()["sessions"] == 1)
        for engine in (sender, receiver):
            engine._parts.dispatch.on_tick(time.monotonic() + 6)
        sender.mark_ready(unready)
        assert torch.equal(receiver.recv_tensor(KEY, sender.zmq_address, timeout=10), tensor)
        assert_idle(sender, receiver)


@marks.every_transport
def test_restarted_peer_at_the_same_address(transport: str, rng: SeededRandom) -> None:
    tensor = random_tensor(rng, 10_000)
    with start(settings(transport)) as sender:
        old = start(settings(transport))
        _, port = split_address(old.zmq_address)
        for number in range(3):
            with old:
                key = TransferKey(f"{number}")
                sender.send_tensor(key, tensor, old.zmq_address)
                assert torch.equal(old.recv_tensor(key, sender.zmq_address, timeout=10), tensor)
                lost = sender.send(
                    KEY, PeerAddress(old.zmq_address), TensorSource(tensor), ready=False
                )
            with pytest.raises(PeerLost):
                lost.wait(10)
            old = start(settings(transport, port=port))
        old.close()
        assert_idle(sender)


@marks.every_transport
@pytest.mark.parametrize("pull", [False, True])
def test_who_was_not_heard_for_long_greets_again(
    transport: str, pull: bool, rng: SeededRandom
) -> None:
    """What it has begun in the meantime arrives: neither of the two is over."""
    with engines(2, transport) as (here, there):
        sender, receiver = (there, here) if pull else (here, there)
        for number in range(2):
            with there._parts.changed:
                for epoch in list(there._parts.sessions._sessions):
                    there._parts.sessions._lose(epoch, PeerLost("it is silent"))
            key, tensor, sink = TransferKey(f"{number}"), random_tensor(rng, MIB), TensorSink()
            if pull:
                sent = sender.hold(key, TensorSource(tensor))
            else:
                sent = sender.send(key, PeerAddress(receiver.zmq_address), TensorSource(tensor))
            receiver.receive(key, sink, peer=PeerAddress(sender.zmq_address), pull=pull).wait(10)
            sent.wait(10)
            assert sink.tensor is not None
            assert torch.equal(sink.tensor, tensor)
        assert_idle(sender, receiver)


# The directory


def test_rank_is_found_through_the_directory(rng: SeededRandom) -> None:
    tensor = random_tensor(rng, 100)
    with engines(3) as (sender, *ranks):
        places = [RankAddress(i, rank.zmq_address, rank.epoch) for i, rank in enumerate(ranks)]
        with Directory(settings(), places, kv_port=0, role="D") as directory:
            for number, rank in enumerate(ranks):
                target = PeerAddress(directory.address, number)
                sender.send(KEY, target, TensorSource(tensor)).wait(10)
                assert torch.equal(rank.recv_tensor(KEY, timeout=10), tensor)
            nobody = sender.send(KEY, PeerAddress(directory.address, 7), TensorSource(tensor))
            with pytest.raises(PeerRefused, match="no rank 7"):
                nobody.wait(10)


@marks.every_transport
def test_one_engine_by_two_names(transport: str, rng: SeededRandom) -> None:
    """Its own address, by which it pulls, and its rank in an instance, by which it is sent to."""
    with engines(2, transport) as (sender, receiver):
        ranks = [RankAddress(0, receiver.zmq_address, receiver.epoch)]
        with Directory(settings(), ranks, kv_port=0, role="D") as directory:
            names = [PeerAddress(directory.address, 0), PeerAddress(receiver.zmq_address)]
            tensor = random_tensor(rng, MIB)
            for number, name in enumerate([*names, *names]):
                key = TransferKey(f"{number}")
                sent = sender.send(key, name, TensorSource(tensor))
                assert torch.equal(receiver.recv_tensor(key, timeout=10), tensor)
                sent.wait(10)
            both = [
                sender.send(TransferKey(f"{name}"), name, TensorSource(tensor), ready=False)
                for name in names
            ]
            for transfer in reversed(both):
                sender.mark_ready(transfer)
                assert torch.equal(receiver.recv_tensor(transfer.key, timeout=10), tensor)
        assert_idle(sender, receiver)


def test_directory_that_is_not_there(free_port: int) -> None:
    with engines(1, connect_timeout_seconds=0.3) as (engine,):
        target = PeerAddress(f"127.0.0.1:{free_port}", 1)
        transfer = engine.send(KEY, target, TensorSource(torch.zeros(1)))
        with pytest.raises(PeerUnreachable, match="LOCATING"):
            transfer.wait(10)


# Noise


def test_garbage_on_the_control_port_is_counted_and_survived(
    engine: P2pNcclEngine, stranger: TalkingStranger, rng: SeededRandom
) -> None:
    frames: list[bytes] = [rng.randbytes(rng.randrange(300)) for _ in range(300)]
    frames += [msgpack.packb(value) for value in ({}, [], ["OFFER"], ["NO", 1, 2], {"cmd": "NEW"})]
    frames += [hello()[:n] for n in range(1, len(hello()))]
    for frame in frames:
        stranger.say(frame)
    stranger.say(b"two", b"frames")
    eventually(lambda: engine.stats()["wrong_messages"] == len(frames) + 1)
    assert isinstance(stranger.ask(hello()), Welcome)
    assert engine.stats()["control_errors"] == 0


def test_messages_before_hello_are_answered_with_greet(
    engine: P2pNcclEngine, stranger: TalkingStranger
) -> None:
    offer = Offer(5, engine.epoch, 1, 0, KEY, Manifest(0, 1, [8]), b"", "shm")
    stranger.say(encode(offer))
    assert isinstance(stranger.hear(), Greet)
    assert_idle(engine)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_who_has_no_data_connection_gets_no_memory(
    engine: P2pNcclEngine, stranger: TalkingStranger, transport: str
) -> None:
    """It could not write there; so words alone fill nothing up."""
    stranger.say(hello())
    stranger.hear()
    stranger.say(encode(Offer(5, engine.epoch, 1, 0, KEY, Manifest(0, 1, [MIB]), b"", transport)))
    refusal = stranger.hear()
    assert isinstance(refusal, Fail)
    assert refusal.code == "TransportError"
    assert "no data connection" in refusal.reason
    assert_idle(engine)


def test_messages_for_an_older_engine_are_dropped(
    engine: P2pNcclEngine, stranger: TalkingStranger
) -> None:
    stranger.say(hello())
    stranger.hear()
    stranger.say(encode(Offer(5, engine.epoch - 1, 1, 0, KEY, Manifest(0, 1, [8]), b"", "shm")))
    stranger.say(encode(Ping(5, engine.epoch)))
    assert type(stranger.hear()).__name__ == "Pong"
    assert_idle(engine)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [(hello(version=99), "version"), (hello(address="nowhere"), "nowhere")],
    ids=["version", "address"],
)
def test_hello_that_cannot_be_accepted_is_refused(
    stranger: TalkingStranger, frame: bytes, reason: str
) -> None:
    stranger.say(frame)
    answer = stranger.hear()
    assert isinstance(answer, Refuse)
    assert reason in answer.reason


@pytest.mark.parametrize(
    "manifest",
    [
        Manifest(0, 1, [1 << 48], dtype="float32", shape=[1 << 46]),
        Manifest(0, 1 << 31, [1 << 48] * 1000, dtype="float32", shape=[1 << 46]),
        Manifest(0, 1, [8], dtype="float32", shape=[1000]),
        Manifest(5, 1, [8], dtype="float32", shape=[2]),
        Manifest(0, 1, [8], dtype="Tensor", shape=[2]),
        Manifest(0, 1, [0], dtype="float32", shape=[0, 1 << 48, 1 << 48]),
    ],
)
def test_manifest_that_lies_ends_one_transfer_by_name(
    engine: P2pNcclEngine, stranger: TalkingStranger, manifest: Manifest
) -> None:
    stranger.say(hello())
    stranger.hear()
    waiting = engine.receive(KEY, TensorSink())
    stranger.say(encode(Offer(5, engine.epoch, 1, 0, KEY, manifest, b"", "shm")))
    assert isinstance(stranger.hear(), Fail)
    with pytest.raises(TransferRejected):
        waiting.wait(10)
    assert_idle(engine)


def test_flood_of_wants_is_bounded(engine: P2pNcclEngine, stranger: TalkingStranger) -> None:
    stranger.say(hello())
    stranger.hear()
    for number in range(6000):
        stranger.say(encode(Want(5, engine.epoch, TransferKey(f"{number}"), b"")))
    stranger.say(encode(Ping(5, engine.epoch)))
    assert type(stranger.hear()).__name__ == "Pong"
    assert engine.stats()["remembered_bytes"] <= BUDGET_BYTES + OFFERED_BYTES


@marks.every_transport
def test_transfers_go_on_amid_noise(transport: str, rng: SeededRandom) -> None:
    with engines(2, transport) as (sender, receiver):
        noise, endpoints = TalkingStranger(receiver.zmq_address), []
        try:
            noise.say(hello())
            welcome = noise.hear()
            assert isinstance(welcome, Welcome)
            endpoints = [_connect(welcome.endpoints) for _ in range(3)]
            for number in range(20):
                noise.say(rng.randbytes(50))
                for connection in endpoints:
                    _spill(connection, rng.randbytes(7))
                tensor, key = random_tensor(rng, 50_000), TransferKey(f"{number}")
                sender.send_tensor(key, tensor, receiver.zmq_address)
                received = receiver.recv_tensor(key, sender.zmq_address, timeout=10)
                assert torch.equal(received, tensor)
            assert_idle(sender, receiver)
        finally:
            noise.close()
            for connection in endpoints:
                connection.close()


def _connect(endpoints: dict[str, dict[str, str]]) -> socket.socket:
    """Dial a data port without knowing a token."""
    (endpoint,) = endpoints.values()
    if "socket" in endpoint:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect("\0" + endpoint["socket"])
        return connection
    address = endpoint.get("address") or endpoint["proven_address"]
    return socket.create_connection(split_address(address), 10)


def _spill(connection: socket.socket, noise: bytes) -> None:
    try:
        connection.send(noise)
    except OSError:
        return  # shown the door


def test_data_connections_end_with_the_sessions_that_they_were_for(
    engine: P2pNcclEngine, stranger: TalkingStranger
) -> None:
    """A member says HELLO under one epoch after another, and opens a connection under each."""
    transport, opened = engine._parts.transports["shm"], []
    assert isinstance(transport, ShmTransport)
    for epoch in range(100, 120):
        welcome = stranger.ask(hello(epoch))
        assert isinstance(welcome, Welcome)
        assert welcome.destination_epoch == epoch
        endpoint = welcome.endpoints["shm"]
        opened.append(socket.socket(socket.AF_UNIX))
        opened[-1].settimeout(10)
        opened[-1].connect("\0" + endpoint["socket"])
        opened[-1].sendall(PREAMBLE.pack(epoch, bytes.fromhex(endpoint["token"])))
        assert opened[-1].recv(1) == ACCEPTED
        eventually(lambda: list(transport._senders) == [epoch])  # noqa: B023
    for connection in opened:
        connection.close()


def test_what_is_granted_in_a_burst_was_touched_by_its_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever first touches a page pays for it. As right after a start, the receiver's thread has
    touched nothing when the first offers come; the file's holes tell what it has not touched."""
    holes: list[int] = []

    def write(channel: ShmChannel, order: Order) -> Job:
        start, end = order.grant.offset, order.grant.offset + order.source.nbytes
        assert receiver._parts.arena is not None
        if os.lseek(receiver._parts.arena.arena.fileno(), start, os.SEEK_HOLE) < end:
            holes.append(start)
        return ArenaChannel.write(channel, order)

    monkeypatch.setattr(ShmChannel, "write", write)
    with monkeypatch.context() as stopped:
        stopped.setattr(LandingArena, "_prefault", lambda arena: None)
        sender, receiver = (start(settings()) for _ in range(2))
        tensors = {f"request-{number}": pattern(f"{number}", MIB) for number in range(12)}
        sent = [
            sender.send_tensor(TransferKey(name), tensor, receiver.zmq_address)
            for name, tensor in tensors.items()
        ]
        eventually(lambda: sender.stats()["denied_offers"] >= len(sent))
    assert receiver._parts.arena is not None
    with receiver._parts.changed:
        receiver._parts.arena._prefault()
    for name, tensor in tensors.items():
        got = receiver.recv_tensor(TransferKey(name), sender.zmq_address, timeout=10)
        assert torch.equal(got, tensor)
    for transfer in sent:
        transfer.wait(10)
    assert not holes
    assert_idle(sender, receiver)
    sender.close()
    receiver.close()
