"""Two engines that claim one address: behind one NAT, or on 127.0.0.1 in two network namespaces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import zmq

from p2p_engine import P2pNcclEngine, TransferKey
from p2p_engine.errors import PeerRefused, PeerUnreachable
from p2p_engine.memory.layout import TensorSource
from p2p_engine.peers.link import PeerAddress
from p2p_engine.wire.messages import (
    PROTOCOL_VERSION,
    AnyMessage,
    Bye,
    Greet,
    Hello,
    Refuse,
    decode,
    encode,
)
from tests.rigs.engines import MIB, Peer, engines, settings, start
from tests.rigs.relay import FaultyRelay
from tests.rigs.tensors import pattern

pytestmark = pytest.mark.usefixtures("fork_server", "no_leaks")


@contextlib.contextmanager
def claiming(address: str) -> Iterator[P2pNcclEngine]:
    """An engine that claims another one's address."""
    with start(settings("tcp")) as rival:
        rival._parts.control.sockets.address = address
        yield rival


def send(sender: P2pNcclEngine, receiver: P2pNcclEngine, name: str) -> None:
    """Send a tensor and wait for its end."""
    target = PeerAddress(receiver.zmq_address)
    sender.send(TransferKey(name), target, TensorSource(torch.arange(9))).wait(20)


def test_the_second_is_refused_by_name_while_the_first_lives() -> None:
    with engines(2, "tcp") as (first, receiver), claiming(first.zmq_address) as second:
        for number in range(5):
            send(first, receiver, f"first {number}")
            with pytest.raises(PeerRefused, match="of another engine, which is alive"):
                send(second, receiver, f"second {number}")
        assert receiver.stats()["sessions"] == 1
        first.close()
        send(second, receiver, "second at last")


def test_who_greets_under_a_living_session_s_epoch_is_refused_and_the_session_goes_on() -> None:
    """Its epoch and its address are on the wire for whoever reads it."""
    with engines(2, "tcp") as (session, receiver):
        send(session, receiver, "before")
        unready = session.send(
            TransferKey("open"), PeerAddress(receiver.zmq_address), TensorSource(torch.arange(9)),
            ready=False,
        )  # fmt: skip
        hello = Hello(session.epoch, 0, PROTOCOL_VERSION, session.zmq_address, None, {})
        context = zmq.Context()
        with context.socket(zmq.DEALER) as stranger:
            stranger.connect(f"tcp://{receiver.zmq_address}")
            for frame in (encode(hello), encode(Bye(session.epoch, receiver.epoch))):
                stranger.send(frame)
            heard: list[type[AnyMessage]] = []
            while Refuse not in heard:
                assert stranger.poll(20_000), heard
                heard.append(type(decode(stranger.recv())))
            assert heard == [Greet, Refuse] or heard == [Refuse]
        context.term()
        session.mark_ready(unready)
        unready.wait(20)
        send(session, receiver, "after")
        assert receiver.stats()["sessions"] == 1


def test_one_engine_by_two_addresses_of_the_same_peer() -> None:
    """As with one that is dialled directly and through a forwarded port: the sender greets over two
    connections, and says that both are its own."""
    with (
        engines(2, "tcp") as (sender, receiver),
        contextlib.closing(FaultyRelay(receiver.zmq_address)) as relay,
    ):
        for number in range(4):
            target = PeerAddress([receiver.zmq_address, relay.address][number % 2])
            source = TensorSource(torch.arange(9))
            sender.send(TransferKey(f"{number}"), target, source).wait(20)
        assert receiver.stats()["sessions"] == 1


def test_a_killed_engine_makes_room_at_once() -> None:
    """Long before it counts as silent: its connection has ended."""
    config = settings("tcp", peer_timeout_seconds=600.0)
    with start(config) as receiver, Peer(config) as first, claiming(first.address) as second:
        first.ask("send", "first", MIB, receiver.zmq_address)
        received = receiver.recv_tensor(TransferKey("first"), timeout=20)
        assert torch.equal(received, pattern("first", MIB))
        first.kill()
        send(second, receiver, "second")
        assert receiver.stats()["sessions"] == 1


def test_who_neither_answers_nor_ends_keeps_its_address_until_it_counts_as_silent() -> None:
    config = settings("tcp", peer_timeout_seconds=4.0, connect_timeout_seconds=1.5)
    with start(config) as receiver, Peer(config) as first, claiming(first.address) as second:
        first.ask("send", "first", MIB, receiver.zmq_address)
        receiver.recv_tensor(TransferKey("first"), timeout=20)
        first.stop()
        refusals = 0
        while receiver.stats()["sessions"] and refusals < 50:
            try:
                send(second, receiver, f"second {refusals}")
                break
            except PeerUnreachable:
                refusals += 1
        assert refusals < 50
        send(second, receiver, "second at last")
        first.wake()
