"""Two releases of the protocol side by side: an engine beside one of the version before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from p2p_engine import P2pNcclEngine, TransferKey
from p2p_engine.errors import TransferRejected
from p2p_engine.memory.layout import TensorSink, TensorSource
from p2p_engine.peers.link import PeerAddress
from p2p_engine.transfer import Transfer
from tests import marks
from tests.doubles.older_peer import OlderPeer
from tests.rigs.engines import assert_idle, settings, start
from tests.rigs.tensors import pattern
from tests.support import eventually

NBYTES = 100_000
pytestmark = marks.slow


@pytest.fixture(scope="module", params=["shm", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[P2pNcclEngine, OlderPeer]]:
    config = settings(request.param)
    with OlderPeer(config) as older, start(config) as engine:
        yield engine, older


def expect(engine: P2pNcclEngine, name: str, peer: str | None) -> tuple[Transfer, TensorSink]:
    """Wait for a tensor; with a peer, pull it there."""
    sink, source = TensorSink(), None if peer is None else PeerAddress(peer)
    key = TransferKey(name)
    return engine.receive(key, sink, peer=source, pull=source is not None), sink


def check(transfer: Transfer, sink: TensorSink, name: str) -> None:
    transfer.wait(20)
    assert sink.tensor is not None
    assert torch.equal(sink.tensor, pattern(name, NBYTES))


def test_each_pushes_to_the_other(pair: tuple[P2pNcclEngine, OlderPeer]) -> None:
    engine, older = pair
    engine.send_tensor(TransferKey("to it"), pattern("to it", NBYTES), older.address)
    assert older.ask("receive", "to it", NBYTES, engine.zmq_address, 20.0)
    waiting = expect(engine, "from it", None)
    older.ask("send", "from it", NBYTES, engine.zmq_address)
    check(*waiting, "from it")
    assert_idle(engine)


def test_each_pulls_from_the_other(pair: tuple[P2pNcclEngine, OlderPeer]) -> None:
    engine, older = pair
    older.ask("hold", "there", NBYTES)
    check(*expect(engine, "there", older.address), "there")
    engine.hold(TransferKey("here"), TensorSource(pattern("here", NBYTES)))
    assert older.ask("receive", "here", NBYTES, engine.zmq_address, 20.0)
    assert_idle(engine)


def test_its_gone_is_understood(pair: tuple[P2pNcclEngine, OlderPeer]) -> None:
    engine, older = pair
    older.ask("hold", "once", NBYTES)
    check(*expect(engine, "once", older.address), "once")
    eventually(lambda: older.ask("stats")["open_transfers"] == 0)
    with start(engine.config) as third:
        again, _ = expect(third, "once", older.address)
        with pytest.raises(TransferRejected, match="pulled already"):
            again.wait(20)
