"""Transfers of no bytes: they end like any other, take no memory and write nowhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from p2p_engine import P2pNcclEngine, SendMode, TransferKey
from p2p_engine.memory.layout import Sink, Source, TensorSink, TensorSource
from p2p_engine.memory.paged import PagedSink
from p2p_engine.peers.link import PeerAddress
from p2p_engine.transfer import Transfer
from tests import marks
from tests.rigs.engines import PagedMemory, assert_idle, engines, settings, start
from tests.rigs.tensors import random_tensor
from tests.support import SeededRandom, eventually

KEY = TransferKey("request-1", "layers.0")
pytestmark = pytest.mark.usefixtures("no_leaks")


def empty_tensor() -> tuple[Source, Sink]:
    return TensorSource(torch.zeros(0, 5)), TensorSink()


def no_blocks() -> tuple[Source, Sink]:
    memory = PagedMemory(4)
    return memory.source([]), memory.sink([])


def pages_of_no_bytes() -> tuple[Source, Sink]:
    memory = PagedMemory(4, page_bytes=0)
    return memory.source([1, 2]), memory.sink([3, 0])


def blocks_that_are_there() -> tuple[Source, Sink]:
    """The sink wants a block behind all that comes: the sender is granted none, and told so."""
    memory = PagedMemory(4)
    return memory.source([1, 2]), PagedSink(memory.cache, np.array([3], np.int64), 2, 64)


def send_nothing(
    sender: P2pNcclEngine, receiver: P2pNcclEngine, source: Source, sink: Sink, first: str
) -> None:
    """Both sides of one transfer, in either order, pushed or pulled."""
    is_pulled = sender.config.send_type is SendMode.GET
    target, home = PeerAddress(receiver.zmq_address), PeerAddress(sender.zmq_address)

    def send() -> Transfer:
        return sender.hold(KEY, source) if is_pulled else sender.send(KEY, target, source)

    def receive() -> Transfer:
        return receiver.receive(KEY, sink, peer=home, pull=is_pulled)

    if first == "receiver":
        received, sent = receive(), send()
    else:
        sent = send()
        eventually(lambda: is_pulled or sent.done)
        received = receive()
    sent.wait(10)
    assert sent.released
    if source.manifest.num_blocks and not source.manifest.nbytes:
        received.wait(10)
    else:  # nothing came of what is wanted, and nobody says that it is all
        received.cancel()


@marks.every_transport
@pytest.mark.parametrize("mode", [SendMode.PUT_ASYNC, SendMode.GET])
@pytest.mark.parametrize("first", ["receiver", "sender"])
@pytest.mark.parametrize("make", [empty_tensor, no_blocks, pages_of_no_bytes])
def test_nothing_arrives_and_leaves_the_memory_to_the_next_sender(
    transport: str, mode: SendMode, first: str, make: object, rng: SeededRandom
) -> None:
    with engines(3, transport, send_type=mode) as (sender, receiver, next_sender):
        source, sink = make()  # type: ignore[operator]
        send_nothing(sender, receiver, source, sink, first)
        assert receiver._parts.arena is not None
        receiver._parts.arena.check()
        tensor = random_tensor(rng, 5000)
        next_sender.send_tensor(TransferKey("next"), tensor, receiver.zmq_address)
        came = receiver.recv_tensor(TransferKey("next"), next_sender.zmq_address, timeout=10)
        assert torch.equal(came, tensor)
        assert_idle(sender, receiver, next_sender)


@marks.every_transport
def test_chunk_of_which_nothing_is_wanted_takes_no_memory(transport: str) -> None:
    with engines(2, transport) as (sender, receiver):
        source, sink = blocks_that_are_there()
        send_nothing(sender, receiver, source, sink, "receiver")
        assert receiver._parts.arena is not None
        receiver._parts.arena.check()
        assert sender.stats()["sent_bytes"] == 0
        assert_idle(sender, receiver)


def test_nothing_needs_no_landing_memory() -> None:
    with start(settings("tcp")) as sender, start(settings("tcp"), receives=False) as receiver:
        sent = sender.send_tensor(KEY, torch.zeros(0), receiver.zmq_address)
        sent.wait(10)
        assert receiver.recv_tensor(KEY, timeout=10).numel() == 0
