"""Engines on a GPU in two processes, on the stand-in for one: handles of other processes, peers
that are killed in the middle of a transfer."""

from __future__ import annotations

import pytest

from p2p_engine import EngineConfig, P2pNcclEngine, TransferKey
from p2p_engine.config import GPU_TRANSPORTS
from p2p_engine.errors import P2pError
from p2p_engine.peers import PeerAddress
from tests.engines import (
    BLOCKS,
    PAGE_BYTES,
    PagedMemory,
    Peer,
    patterned,
    settings,
    start_fork_server,
)
from tests.gpu_double import GpuDouble
from tests.support import eventually

DOUBLE = GpuDouble()
IDS = list(range(BLOCKS))


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    start_fork_server()


def gpu_settings(transport: str, **changes: object) -> EngineConfig:
    paths = {"nccl_library": DOUBLE.path, "cudart_library": DOUBLE.path}
    return settings(transport, device="cuda", **paths, **changes)


@pytest.mark.parametrize("transport", GPU_TRANSPORTS)
def test_both_directions_between_two_processes(transport: str) -> None:
    config = gpu_settings(transport)
    with P2pNcclEngine(config) as engine, Peer(config) as peer:
        ours = patterned("there")
        sent = engine.send(TransferKey("there"), PeerAddress(peer.address), ours.source(IDS))
        assert peer.ask("receive_blocks", "there", 20.0)
        sent.wait(10)
        peer.ask("send_blocks", "back", engine.zmq_address)
        theirs = PagedMemory(BLOCKS, page_bytes=PAGE_BYTES)
        engine.receive(TransferKey("back"), theirs.sink(IDS)).wait(20)
        assert (theirs.data == patterned("back").data).all()
        links = peer.ask("stats")
        assert links["control_errors"] == 0
        if transport == "cuda_ipc":
            assert DOUBLE["live_imports"] == 1
    eventually(lambda: DOUBLE["live_imports"] == 0)


@pytest.mark.parametrize("transport", GPU_TRANSPORTS)
def test_a_peer_that_is_killed_costs_its_own_transfers_only(transport: str) -> None:
    """It dies while a kernel waits for it; the next peer is served, and nothing is left over."""
    config = gpu_settings(transport, peer_timeout_seconds=1.0, connect_timeout_seconds=3.0)
    ours = patterned("there")
    with P2pNcclEngine(config) as engine:
        for _ in range(3):
            with Peer(config) as peer:
                address = PeerAddress(peer.address)
                warm = patterned("warm")
                engine.send(TransferKey("warm"), address, warm.source(IDS))
                assert peer.ask("receive_blocks", "warm", 20.0)
                with DOUBLE.fault(send_hangs=1):
                    key = TransferKey("doomed")
                    sent = engine.send(key, address, ours.source(IDS), ready=transport == "nccl")
                    is_writing = lambda: "WRITING" in states(engine)  # noqa: E731
                    eventually(is_writing if transport == "nccl" else lambda: True)
                    peer.kill()
                    with pytest.raises(P2pError):
                        sent.wait(10)
            with Peer(config) as peer:
                after = patterned("after")
                engine.send(TransferKey("after"), PeerAddress(peer.address), after.source(IDS))
                assert peer.ask("receive_blocks", "after", 20.0)
        eventually(lambda: engine.stats()["open_transfers"] == 0)
    eventually(lambda: DOUBLE["live_comms"] == 0)
    eventually(lambda: DOUBLE["live_imports"] == 0)
    eventually(lambda: DOUBLE["live_allocations"] == 0)


def states(engine: P2pNcclEngine) -> list[str]:
    return [chunk.state.name for chunk in engine._sender._chunks.values()]
