"""Data connections that break under real engines: who is told, and what goes on."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from p2p_engine import P2pNcclEngine, TransferKey
from p2p_engine.errors import TransferRejected, TransportError
from p2p_engine.memory.layout import TensorSink, TensorSource
from p2p_engine.peers.link import PeerAddress
from p2p_engine.transports.nccl.transport import NcclTransport
from p2p_engine.transports.tcp import TcpTransport
from tests.rigs.engines import MIB, assert_idle, engines
from tests.rigs.tensors import random_tensor
from tests.support import SeededRandom, eventually

KEY, BACK = TransferKey("there"), TransferKey("back")
pytestmark = pytest.mark.usefixtures("no_leaks")


def drop_connections(receiver: P2pNcclEngine) -> None:
    """Let a receiver close its end of every data connection."""
    (transport,) = receiver._parts.transports.values()
    with receiver._parts.changed:
        if isinstance(transport, NcclTransport):
            for pair in transport._senders.values():
                transport._end(pair, "the test says so")
            return
        for channel in cast("TcpTransport", transport)._senders.values():
            receiver._parts.mover.detach(channel)


@pytest.mark.parametrize("transport", ["tcp", "nccl"])
def test_connection_that_breaks_costs_nobody_anything(transport: str, rng: SeededRandom) -> None:
    """Both directions are in use: what waits to be written is written over a new connection, and
    what is awaited from that peer has nothing to do with it."""
    with engines(2, transport, peer_timeout_seconds=60) as (one, other):
        here, there = PeerAddress(one.zmq_address), PeerAddress(other.zmq_address)
        tensors, sinks = [random_tensor(rng, MIB) for _ in range(2)], [TensorSink(), TensorSink()]
        awaited = one.receive(BACK, sinks[0], peer=there)
        arriving = other.receive(KEY, sinks[1], peer=here)
        sent = one.send(KEY, there, TensorSource(tensors[1]), ready=False)
        for _ in range(2):
            eventually(lambda: other.stats()["live_bytes"] >= MIB)
            drop_connections(other)
            eventually(lambda: other.stats()["live_bytes"] == 0)
        eventually(lambda: other.stats()["live_bytes"] >= MIB)
        one.mark_ready(sent)
        sent.wait(10)
        arriving.wait(10)
        other.send(BACK, here, TensorSource(tensors[0])).wait(10)
        awaited.wait(10)
        for sink, tensor in zip(sinks, tensors, strict=True):
            assert sink.tensor is not None
            assert torch.equal(sink.tensor, tensor)
        assert_idle(one, other)


def test_connection_that_only_the_receiver_has_lost(rng: SeededRandom) -> None:
    """Something on the way has ended it towards one side, and a sender that writes nothing hears
    of no end: the receiver says so, and the next transfer goes over a new one."""
    with engines(2, "tcp", transfer_timeout_seconds=600) as (one, other):
        tensor = random_tensor(rng, MIB)
        for key in (KEY, BACK):
            sent = one.send_tensor(key, tensor, other.zmq_address)
            assert torch.equal(other.recv_tensor(key, timeout=10), tensor)
            sent.wait(10)
            with other._parts.changed:
                cast("TcpTransport", other._parts.transports["tcp"])._senders.clear()
        assert_idle(one, other)


@pytest.mark.parametrize("transport", ["tcp", "nccl"])
def test_connection_that_always_breaks_is_an_error_on_both_sides(
    transport: str, rng: SeededRandom
) -> None:
    """Long before the deadline, and the next transfer is not its concern."""
    with engines(2, transport, transfer_timeout_seconds=600, retry_seconds=0.05) as (one, other):
        there, tensor = PeerAddress(other.zmq_address), random_tensor(rng, MIB)
        arriving = other.receive(KEY, TensorSink())
        sent = one.send(KEY, there, TensorSource(tensor), ready=False)

        def is_over() -> bool:
            if other.stats()["live_bytes"]:  # it is granted
                drop_connections(other)
            return sent.done and arriving.done

        eventually(is_over)
        with pytest.raises(TransportError, match="connection"):
            sent.wait(0)
        with pytest.raises(TransferRejected, match="connection"):
            arriving.wait(0)
        one.send_tensor(BACK, tensor, other.zmq_address)
        assert torch.equal(other.recv_tensor(BACK, one.zmq_address, timeout=10), tensor)
        assert_idle(one, other)


def test_connection_that_breaks_while_bytes_move(rng: SeededRandom) -> None:
    """Whether the last byte had left or not: whole, or an error that comes long before a deadline.
    Held sources are always sent again."""
    with engines(2, "tcp", transfer_timeout_seconds=600) as (one, other):
        here, there = PeerAddress(one.zmq_address), PeerAddress(other.zmq_address)
        for number in range(20):
            key, tensor, sink = TransferKey(f"{number}"), random_tensor(rng, 4 * MIB), TensorSink()
            is_held, moved = bool(number % 2), other._parts.mover.stats()["bytes_received"]
            if is_held:
                sent = one.hold(key, TensorSource(tensor))
                arriving = other.receive(key, sink, peer=here, pull=True)
            else:
                arriving = other.receive(key, sink, peer=here)
                sent = one.send(key, there, TensorSource(tensor))
            eventually(lambda: other._parts.mover.stats()["bytes_received"] > moved)  # noqa: B023
            drop_connections(other)
            eventually(lambda: sent.done and arriving.done)  # noqa: B023
            assert arriving.error is None or (not is_held and sent.error is not None)
            if arriving.error is None:
                assert sink.tensor is not None
                assert torch.equal(sink.tensor, tensor)
        assert_idle(one, other)
