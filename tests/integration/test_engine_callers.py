"""Sources, sinks and callbacks that fail: each ends its own transfer, by name, and no other."""

from __future__ import annotations

from collections.abc import Callable
from threading import Timer
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from p2p_engine import P2pNcclEngine, SendMode, TransferKey
from p2p_engine import engine as engine_module
from p2p_engine.errors import (
    EngineClosed,
    LocalProtocolError,
    P2pError,
    TransferRejected,
    TransferTimeout,
)
from p2p_engine.memory.layout import ALL_LAYERS, Int64s, Regions, TensorSink, TensorSource
from p2p_engine.peers.link import PeerAddress
from p2p_engine.wire.messages import CacheSpec, Manifest
from tests import marks
from tests.rigs.engines import assert_idle, engines
from tests.rigs.tensors import random_tensor
from tests.support import SeededRandom, eventually

BAD, GOOD = TransferKey("bad"), TransferKey("good")
NOBODY = PeerAddress("127.0.0.1:1")
pytestmark = pytest.mark.usefixtures("no_leaks")


class BadSink(TensorSink):
    """Fails in one of its methods."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self._method = method

    def _step(self, method: str) -> None:
        if method == self._method:
            raise KeyError("the caller's mistake")

    def wanted(self, manifest: Manifest) -> tuple[int, int]:
        self._step("wanted")
        return super().wanted(manifest)

    def regions(self, manifest: Manifest, first_block: int, num_blocks: int) -> Regions:
        self._step("regions")
        regions = super().regions(manifest, first_block, num_blocks)
        if self._method == "too few":
            return Regions(regions.addresses, regions.lengths - 1)
        return regions

    def landed(self, manifest: Manifest, first_block: int, num_blocks: int) -> bool:
        self._step("landed")
        return super().landed(manifest, first_block, num_blocks)


class BadSource:
    """Fails, or gives more than its manifest says, when it is to be read."""

    def __init__(self, tensor: torch.Tensor, fault: str) -> None:
        self._inner = TensorSource(tensor)
        self._fault = fault

    @property
    def manifest(self) -> Manifest:
        return self._inner.manifest

    @property
    def first_layer(self) -> int:
        return 0

    def regions(self, first_block: int, num_blocks: int, layers: slice = ALL_LAYERS) -> Regions:
        if self._fault == "fails":
            raise KeyError("the caller's mistake")
        regions = self._inner.regions(first_block, num_blocks)
        return Regions(regions.addresses, regions.lengths * 2)

    def towards(self, peer: CacheSpec | None) -> BadSource:
        return self

    def packed(self, starts: Int64s) -> BadSource:
        return self


def exchange_good(sender: P2pNcclEngine, receiver: P2pNcclEngine, tensor: torch.Tensor) -> None:
    sender.send_tensor(GOOD, tensor, receiver.zmq_address)
    assert torch.equal(receiver.recv_tensor(GOOD, timeout=10), tensor)


@marks.every_transport
@pytest.mark.parametrize("receiver_first", [True, False])
@pytest.mark.parametrize("method", ["wanted", "regions", "too few", "landed"])
def test_sink_that_fails(
    transport: str, receiver_first: bool, method: str, rng: SeededRandom
) -> None:
    tensor = random_tensor(rng, 100_000)
    with engines(2, transport) as (sender, receiver):
        if receiver_first:
            waiting = receiver.receive(BAD, BadSink(method))
            sent = sender.send_tensor(BAD, tensor, receiver.zmq_address)
        else:
            sent = sender.send_tensor(BAD, tensor, receiver.zmq_address)
            sent.wait(10)
            waiting = receiver.receive(BAD, BadSink(method))
        with pytest.raises((LocalProtocolError, TransferRejected), match=r"mistake|bytes"):
            waiting.wait(10)
        eventually(lambda: sent.done)
        exchange_good(sender, receiver, tensor)
        assert_idle(sender, receiver)


@marks.every_transport
@pytest.mark.parametrize("fault", ["fails", "too many"])
def test_source_that_fails(transport: str, fault: str, rng: SeededRandom) -> None:
    """The receiver hears of it at once."""
    tensor = random_tensor(rng, 100_000)
    with engines(2, transport, transfer_timeout_seconds=600) as (sender, receiver):
        waiting = receiver.receive(BAD, TensorSink())
        sent = sender.send(BAD, PeerAddress(receiver.zmq_address), BadSource(tensor, fault))
        with pytest.raises(LocalProtocolError, match=r"mistake|bytes"):
            sent.wait(10)
        with pytest.raises(TransferRejected, match=r"mistake|bytes"):
            waiting.wait(10)
        exchange_good(sender, receiver, tensor)
        assert_idle(sender, receiver)


def test_callback_that_fails_is_counted_and_the_others_run() -> None:
    with engines(1) as (engine,):
        called: list[str] = []
        nothing = np.zeros(0, np.int64)

        def fail(job: Any) -> None:
            called.append("bad")
            raise KeyError("a bug")

        with engine._parts.changed:  # so that one poll meets them all
            jobs = [
                engine._parts.mover.copy(nothing, nothing, nothing, tag=tag)
                for tag in (fail, fail, lambda job: called.append("good"))
            ]
            assert all(job.wait(10) for job in jobs)
            engine.poll()
        assert called == ["bad", "bad", "good"]
        assert engine.stats()["control_errors"] == 2


def test_errors_of_a_sink_that_are_named_stay_as_they_are(rng: SeededRandom) -> None:
    class NamedSink(TensorSink):
        def landed(self, manifest: Manifest, first_block: int, num_blocks: int) -> bool:
            raise P2pError("my own name for it")

    with engines(2) as (sender, receiver):
        waiting = receiver.receive(BAD, NamedSink())
        sender.send_tensor(BAD, random_tensor(rng, 10), receiver.zmq_address)
        with pytest.raises(P2pError, match="my own name"):
            waiting.wait(10)


class SlowCopy:
    """A copy that goes on for a while after it was told to stop."""

    state, error, nbytes, checksum = "running", None, 0, None

    def __init__(self, tag: Any, changed: Any, seconds: float) -> None:
        self.tag, self._changed, self._seconds, self.done = tag, changed, seconds, False

    def wait(self, timeout: float) -> bool:
        return self.done

    def cancel(self) -> None:
        Timer(self._seconds, self._end).start()

    def _end(self) -> None:
        with self._changed:
            self.state, self.done = "cancelled", True
            self.tag(self)


@pytest.mark.parametrize("is_sent", [False, True], ids=["recv_tensor", "send_tensor"])
def test_who_waits_no_longer_has_its_memory_back_first(
    is_sent: bool, monkeypatch: pytest.MonkeyPatch, rng: SeededRandom
) -> None:
    copies: list[SlowCopy] = []

    def copy(*_: Any, tag: Any, **__: Any) -> SlowCopy:
        copies.append(SlowCopy(tag, engine._parts.changed, 0.3))
        return copies[-1]

    changes = {"send_type": SendMode.PUT, "transfer_timeout_seconds": 0.5}
    with engines(2, "shm", **changes) as (sender, receiver):
        tensor, out = random_tensor(rng, 5000), torch.empty(5000, dtype=torch.uint8)
        engine = sender if is_sent else receiver
        sender.send_tensor(GOOD, tensor, receiver.zmq_address)
        if is_sent:
            (link,) = sender._parts.links._links.values()
            monkeypatch.setattr(
                link.channel, "write", lambda order: copy(tag=order.tag), raising=False
            )
            with pytest.raises(TransferTimeout):
                sender.send_tensor(BAD, tensor, receiver.zmq_address)
        else:
            monkeypatch.setattr(receiver._parts.store, "_copier", SimpleNamespace(copy=copy))
            with pytest.raises(TransferTimeout):
                receiver.recv_tensor(GOOD, timeout=0.2, out=out)
        assert [item.done for item in copies] == [True]
        receiver.drop_landed()
        monkeypatch.undo()


def test_memory_that_cannot_be_given_back_is_named(
    monkeypatch: pytest.MonkeyPatch, rng: SeededRandom
) -> None:
    monkeypatch.setattr(engine_module, "WITHDRAW_SECONDS", 0.1)
    copies: list[SlowCopy] = []
    with engines(2, "shm") as (sender, receiver):

        def copy(*_: Any, tag: Any, **__: Any) -> SlowCopy:
            copies.append(SlowCopy(tag, receiver._parts.changed, 0.5))
            return copies[-1]

        sender.send_tensor(GOOD, random_tensor(rng, 5000), receiver.zmq_address)
        monkeypatch.setattr(receiver._parts.store, "_copier", SimpleNamespace(copy=copy))
        with pytest.raises(TransferTimeout, match="still in use"):
            receiver.recv_tensor(GOOD, timeout=0.1)
        eventually(lambda: copies[0].done)
        monkeypatch.undo()


ORDERS: dict[str, Callable[[P2pNcclEngine], object]] = {
    "send": lambda engine: engine.send(GOOD, NOBODY, TensorSource(torch.zeros(1))),
    "hold": lambda engine: engine.hold(GOOD, TensorSource(torch.zeros(1))),
    "receive": lambda engine: engine.receive(GOOD, TensorSink()),
    "discard": lambda engine: engine.discard(GOOD),
    "abandon": lambda engine: engine.abandon(GOOD, NOBODY, "no"),
    "drop_landed": lambda engine: engine.drop_landed(),
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_order_that_waited_for_the_lock_while_the_engine_closed(
    order: Callable[[P2pNcclEngine], object],
) -> None:
    """Nobody is left who would end it."""
    with engines(1) as (engine,):
        lock = engine._parts.changed

        class LockThatCloseHasFirst:
            def __enter__(self) -> None:
                engine._closed = True
                lock.acquire()

            def __exit__(self, *_: object) -> None:
                lock.release()

        engine._parts.changed = LockThatCloseHasFirst()  # type: ignore[assignment]
        with pytest.raises(EngineClosed):
            order(engine)
        engine._parts.changed, engine._closed = lock, False
        assert engine.stats()["open_transfers"] == 0
