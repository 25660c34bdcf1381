"""Engines and directories with keys: members work together; all others get nothing, and know."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import zmq

from p2p_engine import EngineConfig, P2pNcclEngine, TransferKey
from p2p_engine.control.auth import MAX_YOUNG, Curve
from p2p_engine.control.fleet_key import read_key_file, write_key_file
from p2p_engine.errors import AuthenticationFailed, ConfigError
from p2p_engine.memory.layout import TensorSink
from p2p_engine.peers import sessions
from p2p_engine.peers.directory import Directory, RankAddress
from p2p_engine.peers.link import InstanceAddress, PeerAddress
from p2p_engine.wire.addresses import split_address
from p2p_engine.wire.messages import (
    PROTOCOL_VERSION,
    Hello,
    Lookup,
    Ping,
    Refuse,
    Welcome,
    decode,
    encode,
)
from tests import marks
from tests.rigs.engines import MIB, assert_idle, settings, start
from tests.rigs.tensors import random_tensor
from tests.support import SeededRandom, eventually

KEY, RANK = TransferKey("request"), RankAddress(0, "127.0.0.1:1", 1)
pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """Return the key files of two fleets."""
    paths = tmp_path / "fleet.key", tmp_path / "other.key"
    for path in paths:
        write_key_file(path)
    return paths


def joined(target: Path, *parts: Path) -> str:
    """Write the secrets of several files into one, in this order."""
    target.write_text("".join(part.read_text() for part in parts))
    target.chmod(0o600)
    return str(target)


@contextlib.contextmanager
def pair(
    one: str | Path, other: str | Path, transport: str = "shm"
) -> Iterator[list[P2pNcclEngine]]:
    """Start two engines with these key files ("": none)."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(start(settings(transport, key_file=str(path))))
            for path in (one, other)
        ]


def assert_moves(one: P2pNcclEngine, other: P2pNcclEngine, rng: SeededRandom) -> None:
    tensor = random_tensor(rng, MIB)
    one.send_tensor(KEY, tensor, other.zmq_address)
    assert torch.equal(other.recv_tensor(KEY, one.zmq_address, timeout=10), tensor)
    assert_idle(one, other)


@marks.every_transport
def test_members_of_a_fleet_move_bytes(
    keys: tuple[Path, Path], transport: str, rng: SeededRandom
) -> None:
    with pair(keys[0], keys[0], transport) as (one, other):
        assert_moves(one, other, rng)
        assert one.stats()["authenticated"]
        assert other.stats()["refused_connections"] == 0


CASES = {
    "another key": (0, 1, "another key"),
    "no key here": (None, 0, "ask(s)? for a key"),
    "no key there": (0, None, "takes no(ne| keys)"),
}


@pytest.mark.parametrize("case", CASES)
def test_strangers_are_named_before_any_deadline(keys: tuple[Path, Path], case: str) -> None:
    """Both ways of dialling: for a push, and for a receive whose sender is known."""
    here, there, told = CASES[case]
    one_key, other_key = ("" if number is None else keys[number] for number in (here, there))
    with pair(one_key, other_key) as (one, other):
        sent = one.send_tensor(KEY, torch.ones(1000), other.zmq_address)
        with pytest.raises(AuthenticationFailed, match=told):
            sent.wait(5)  # the deadline of a first answer is 10 s here
        expected = one.receive(KEY, TensorSink(), peer=PeerAddress(other.zmq_address))
        with pytest.raises(AuthenticationFailed, match=other.zmq_address):
            expected.wait(5)
        assert other.stats()["sessions"] == 0
        assert other.stats()["messages_received"] == 0
        assert_idle(one, other)


def test_a_directory_of_strangers_is_named(keys: tuple[Path, Path]) -> None:
    config = settings(key_file=str(keys[1]))
    with (
        P2pNcclEngine(settings(key_file=str(keys[0]))) as engine,
        Directory(config, [RANK], kv_port=0, role="D") as directory,
    ):
        for peer in (PeerAddress(directory.address, 0), InstanceAddress(directory.address)):
            expected = engine.receive(KEY, TensorSink(), peer=peer)
            with pytest.raises(AuthenticationFailed, match=directory.address):
                expected.wait(5)


def test_secrets_are_replaced_while_the_fleet_works(
    keys: tuple[Path, Path], tmp_path: Path, rng: SeededRandom
) -> None:
    """Member after member, at each step: a pair of before and after works in both directions."""
    old, new = keys
    steps = [
        str(old),
        joined(tmp_path / "1.key", old, new),
        joined(tmp_path / "2.key", new, old),
        str(new),
    ]
    for before, after in itertools.pairwise(steps):
        with pair(before, after) as (one, other):
            assert_moves(one, other, rng)
            assert_moves(other, one, rng)
    with pair(old, new) as (one, other), pytest.raises(AuthenticationFailed):
        one.send_tensor(KEY, torch.ones(10), other.zmq_address).wait(5)


def test_peer_that_comes_back_with_another_key_is_named(
    keys: tuple[Path, Path], rng: SeededRandom
) -> None:
    with P2pNcclEngine(settings(key_file=str(keys[0]))) as one:
        with P2pNcclEngine(settings(key_file=str(keys[0]))) as other:
            assert_moves(one, other, rng)
            port = int(other.zmq_address.rpartition(":")[2])
        with (
            P2pNcclEngine(settings(key_file=str(keys[1]), port=port)) as stranger,
            pytest.raises(AuthenticationFailed),
        ):
            one.send_tensor(KEY, torch.ones(10), stranger.zmq_address).wait(5)
        with P2pNcclEngine(settings(key_file=str(keys[0]), port=port)) as friend:
            assert_moves(one, friend, rng)


class Raw:
    """A DEALER of nobody's, with or without keys."""

    def __init__(self, address: str, curve: Curve | None = None, server: bytes = b"") -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if curve is not None:
            curve.dial(self.socket)
        if server:
            public, secret = zmq.curve_keypair()
            for option, value in (
                (zmq.CURVE_SERVERKEY, server),
                (zmq.CURVE_PUBLICKEY, public),
                (zmq.CURVE_SECRETKEY, secret),
            ):
                self.socket.setsockopt(option, value)
        self.socket.connect(f"tcp://{address}")

    def __enter__(self) -> zmq.Socket[bytes]:
        return self.socket

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self._context.term()


def test_who_has_no_key_is_never_heard(keys: tuple[Path, Path]) -> None:
    """Nor is who knows the server's public key; a member beside them is."""
    curve = Curve(read_key_file(str(keys[0])))
    server = curve._servers[0][0]
    config = settings(key_file=str(keys[0]))
    frames = [
        encode(Hello(7, 0, 2, "127.0.0.1:5", None, {})),
        encode(Ping(7, 0)),
        encode(Lookup(7, 0, 0)),
    ]
    with (
        P2pNcclEngine(config) as engine,
        Directory(config, [RANK], kv_port=0, role="D") as directory,
    ):
        for address in (engine.zmq_address, directory.address):
            with Raw(address) as bare, Raw(address, server=server) as knowing:
                for frame in frames:
                    bare.send(frame)
                    knowing.send(frame)
                with Raw(address, curve) as member:
                    member.send(frames[2] if address == directory.address else frames[1])
                    assert member.poll(10_000)
                assert not bare.poll(0)
                assert not knowing.poll(0)
        stats = engine.stats()
        assert (stats["messages_received"], stats["sessions"]) == (1, 0)
        eventually(lambda: engine.stats()["refused_connections"] >= 2)


def test_a_key_file_that_is_none_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="key_file"):
        P2pNcclEngine(EngineConfig(key_file=str(tmp_path / "none.key")))


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_connections_that_say_nothing_are_few_and_end(
    keys: tuple[Path, Path], rng: SeededRandom
) -> None:
    """Members at other addresses are not kept out meanwhile, and transfers go on."""
    with pair(keys[0], keys[0]) as (one, other):
        assert_moves(one, other, rng)
        before = num_descriptors()
        address = split_address(other.zmq_address)
        flood = [
            socket.create_connection(address, source_address=("127.0.0.2", 0)) for _ in range(600)
        ]
        try:
            eventually(lambda: num_descriptors() - before <= len(flood) + MAX_YOUNG)
            assert_moves(one, other, rng)
            with P2pNcclEngine(settings(key_file=str(keys[0]))) as newcomer:
                assert_moves(newcomer, other, rng)
            eventually(lambda: other.stats()["refused_connections"] >= len(flood) - MAX_YOUNG)
            eventually(lambda: num_descriptors() - before <= len(flood))
        finally:
            for connection in flood:
                connection.close()


def greet(member: zmq.Socket[bytes], epoch: int) -> type:
    """Say HELLO in the name of an engine; what kind of answer comes."""
    member.send(encode(Hello(epoch, 0, PROTOCOL_VERSION, f"127.0.0.1:{epoch}", None, {})))
    assert member.poll(10_000)
    return type(decode(member.recv()))


def test_peers_that_greet_are_bounded(
    keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 3)
    curve = Curve(read_key_file(str(keys[0])))
    with P2pNcclEngine(settings(key_file=str(keys[0]))) as engine:
        with contextlib.ExitStack() as stack:
            members = [stack.enter_context(Raw(engine.zmq_address, curve)) for _ in range(4)]
            answers = [greet(members[epoch - 1], epoch) for epoch in (1, 2, 3, 4, 1)]
        assert answers == [Welcome, Welcome, Welcome, Refuse, Welcome]
        assert engine.stats()["sessions"] == 3


def test_one_connection_is_one_session(keys: tuple[Path, Path]) -> None:
    """Who greets under ever new names takes nobody's place."""
    curve = Curve(read_key_file(str(keys[0])))
    with P2pNcclEngine(settings(key_file=str(keys[0]))) as engine:
        with Raw(engine.zmq_address, curve) as member:
            assert [greet(member, epoch) for epoch in (1, 2, 3)] == [Welcome] * 3
        assert engine.stats()["sessions"] == 1


def test_a_flood_of_strangers_keeps_no_member_from_the_directory(keys: tuple[Path, Path]) -> None:
    """Many who ask without a key, as fast as they can; none of it reaches the directory."""
    config, question = settings(key_file=str(keys[0])), encode(Lookup(7, 0, 0))
    curve = Curve(read_key_file(str(keys[0])))
    with (
        Directory(config, [RANK], kv_port=0, role="D") as directory,
        contextlib.ExitStack() as strangers,
    ):
        for _ in range(40):
            bare = strangers.enter_context(Raw(directory.address))
            with contextlib.suppress(zmq.Again):  # it has been refused by now
                for _ in range(200):
                    bare.send(question, zmq.NOBLOCK)
        for _ in range(20):
            with Raw(directory.address, curve) as member:
                member.send(question)
                assert member.poll(10_000)
        assert directory._control.sockets.frames_received == 20
        assert directory.wrong_messages == 0
