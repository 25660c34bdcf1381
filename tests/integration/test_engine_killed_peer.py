"""Peers in processes of their own that are killed, or stopped and woken, in mid-transfer."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from time import monotonic

import pytest
import torch

from p2p_engine import P2pNcclEngine, TransferKey
from p2p_engine.errors import P2pError, PeerLost
from p2p_engine.memory.layout import TensorSink, TensorSource
from p2p_engine.peers.link import PeerAddress
from tests import marks
from tests.rigs.engines import MIB, Peer, assert_idle, settings, start
from tests.rigs.tensors import pattern
from tests.support import eventually

KEY = TransferKey("request-1")
SIZE = 32 * MIB
# Of who is killed or stopped the silence is waited for; who only gets no core keeps his transfers.
ROOM = {"kv_buffer_size": 40 * MIB, "mem_pool_size_gb": 0, "peer_timeout_seconds": 3.0}
pytestmark = [pytest.mark.usefixtures("fork_server", "no_leaks"), pytest.mark.timeout(120)]


@contextlib.contextmanager
def here_and_there(transport: str) -> Iterator[tuple[P2pNcclEngine, Peer]]:
    """An engine of this process and one of another."""
    config = settings(transport, **ROOM)
    with start(config) as engine, Peer(config) as peer:
        yield engine, peer


def exchange(engine: P2pNcclEngine, peer: Peer, name: str) -> None:
    """Send a tensor each way and compare."""
    peer.ask("send", f"{name} to us", MIB, engine.zmq_address)
    received = engine.recv_tensor(TransferKey(f"{name} to us"), timeout=20)
    assert torch.equal(received, pattern(f"{name} to us", MIB))
    engine.send_tensor(TransferKey(name), pattern(name, MIB), peer.address)
    assert peer.ask("receive", name, MIB, engine.zmq_address, 20.0)


@marks.between_processes
def test_two_processes_exchange(transport: str) -> None:
    with here_and_there(transport) as (engine, peer):
        for number in range(3):
            exchange(engine, peer, f"{number}")
        assert_idle(engine)


@marks.between_processes
def test_killed_sender_costs_its_own_transfers_only(transport: str) -> None:
    with here_and_there(transport) as (engine, peer), Peer(engine.config) as other:
        sink = TensorSink()
        waiting = engine.receive(KEY, sink, peer=PeerAddress(peer.address))
        exchange(engine, peer, "before")
        peer.tell("send", "request-1", SIZE, engine.zmq_address)
        eventually(lambda: is_writing(engine) or waiting.done, what="bytes come")
        peer.kill()
        with contextlib.suppress(PeerLost):
            waiting.wait(20)
            assert sink.tensor is not None
            assert torch.equal(sink.tensor, pattern("request-1", SIZE))
        exchange(engine, other, "after")
        assert_idle(engine)  # the kernel's proof of its end has freed what it wrote into


@pytest.mark.parametrize("pull", [False, True])
def test_restarted_sender_ends_what_is_awaited_from_it(pull: bool, free_port: int) -> None:
    """At once, long before its silence would tell."""
    config = settings("shm", peer_timeout_seconds=600)
    at_port = settings("shm", peer_timeout_seconds=600, port=free_port)
    with P2pNcclEngine(config) as engine:
        with Peer(at_port) as peer:
            exchange(engine, peer, "before")
            waiting = engine.receive(
                KEY, TensorSink(), peer=PeerAddress(peer.address), pull=pull, timeout=600
            )
            links = engine._parts.links._links
            eventually(lambda: all(link.resend_at > monotonic() + 60 for link in [*links.values()]))
            peer.kill()
        with Peer(at_port) as peer:
            peer.ask("send", "after", MIB, engine.zmq_address)
            with pytest.raises(PeerLost, match="restarted"):
                waiting.wait(10)


@marks.between_processes
def test_killed_receiver_costs_its_own_transfers_only(transport: str) -> None:
    with here_and_there(transport) as (engine, peer), Peer(engine.config) as other:
        source = pattern("request-1", SIZE)
        transfer = engine.send(KEY, PeerAddress(peer.address), TensorSource(source), ready=False)
        eventually(lambda: engine.stats()["links"] == {"ready": 1})
        engine.mark_ready(transfer)
        peer.kill()
        with contextlib.suppress(P2pError):
            transfer.wait(20)
        assert transfer.released
        exchange(engine, other, "after")
        assert_idle(engine)


def test_killed_peer_is_noticed_while_the_interpreter_is_held_again_and_again() -> None:
    """By code that does not give it back for 0.3 s at a time: no thread of ours runs meanwhile."""
    interpreter = ctypes.PyDLL(None)  # keeps it while a call lasts
    with here_and_there("tcp") as (engine, peer):
        waiting = engine.receive(KEY, TensorSink(), peer=PeerAddress(peer.address), timeout=100)
        eventually(lambda: engine.stats()["links"] == {"ready": 1})
        peer.kill()
        deadline = monotonic() + 30
        while not waiting.done and monotonic() < deadline:
            interpreter.usleep(300_000)
        with pytest.raises(PeerLost, match="silent"):
            waiting.wait(0)


def is_writing(engine: P2pNcclEngine) -> bool:
    """Whether a sender was granted a region here."""
    return bool(engine.stats()["live_bytes"])


def resting(engine: P2pNcclEngine) -> bool:
    """Whether all its links rest."""
    return all(link.is_resting for link in engine._parts.links._links.values())


def test_killed_peer_of_a_resting_link_is_noticed_before_its_rest_is_over() -> None:
    with here_and_there("tcp") as (engine, peer):
        exchange(engine, peer, "before")
        eventually(lambda: resting(engine), what="nothing is open")
        assert (engine.stats()["links"], engine.stats()["sessions"]) == ({"ready": 1}, 1)
        peer.kill()
        eventually(lambda: engine.stats()["links"] == {}, timeout=20)
        eventually(lambda: engine.stats()["sessions"] == 0, timeout=20)


def test_stopped_peer_of_a_resting_link_is_noticed_from_its_next_use_on() -> None:
    with here_and_there("tcp") as (engine, peer):
        exchange(engine, peer, "before")
        eventually(lambda: resting(engine), what="nothing is open")
        peer.stop()
        sent = engine.send(KEY, PeerAddress(peer.address), TensorSource(torch.ones(9)))
        with pytest.raises(PeerLost, match="is silent for"):
            sent.wait(20)
        peer.wake()
        exchange(engine, peer, "after")


@marks.between_processes
def test_stopped_sender_that_wakes_up_harms_nobody(transport: str) -> None:
    """It may write into its region whenever it wakes up: until then the region is nobody else's."""
    with here_and_there(transport) as (engine, peer), Peer(engine.config) as other:
        exchange(engine, peer, "before")
        waiting = engine.receive(KEY, TensorSink(), peer=PeerAddress(peer.address))
        peer.tell("send", "request-1", SIZE, engine.zmq_address)
        eventually(lambda: is_writing(engine) or waiting.done, what="bytes come")
        peer.stop()
        with contextlib.suppress(PeerLost):
            waiting.wait(20)
        lost = waiting.error is not None
        exchange(engine, other, "meanwhile")
        if lost and transport in ("shm", "cuda_ipc"):  # the sender writes
            stats = engine.stats()
            assert stats["quarantined_bytes"] >= SIZE
            assert stats["live_bytes"] >= SIZE
        canary = TransferKey("canary")
        other.ask("send", "canary", MIB, engine.zmq_address)
        eventually(lambda: engine.stats()["landed_bytes_by_place"]["buffer"] > 0)
        peer.wake()
        peer.answer()
        assert torch.equal(engine.recv_tensor(canary, timeout=20), pattern("canary", MIB))
        exchange(engine, peer, "awake")
        assert_idle(engine)


@marks.between_processes
def test_stopped_receiver_that_wakes_up_is_served_again(transport: str) -> None:
    with here_and_there(transport) as (engine, peer):
        exchange(engine, peer, "before")
        peer.stop()
        transfer = engine.send_tensor(KEY, pattern("request-1", MIB), peer.address)
        with pytest.raises(PeerLost, match="silent"):
            transfer.wait(20)
        peer.wake()
        eventually(lambda: can_exchange(engine, peer), what="it answers again")
        assert_idle(engine)


def can_exchange(engine: P2pNcclEngine, peer: Peer) -> bool:
    """Whether a transfer to the peer succeeds; its old link may need to end first."""
    name = f"try {engine.stats()['messages_sent']}"
    transfer = engine.send_tensor(TransferKey(name), pattern(name, 1000), peer.address)
    try:
        transfer.wait(20)
    except P2pError:
        return False
    return bool(peer.ask("receive", name, 1000, engine.zmq_address, 20.0))
