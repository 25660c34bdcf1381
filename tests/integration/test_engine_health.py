"""Health: a thread that died, and a wait that outlived its deadline, are seen at once and said."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace

import pytest
import torch

from p2p_engine import P2pNcclEngine, TransferKey, health
from p2p_engine.assembly import PATIENCE_SECONDS
from p2p_engine.control.timers import ListeningClock
from p2p_engine.errors import EngineClosed, TransferTimeout
from p2p_engine.health import OVERDUE_SECONDS, Watchdog
from p2p_engine.memory.layout import TensorSink, TensorSource
from p2p_engine.peers.link import PeerAddress
from tests import marks
from tests.hostile.shortage import no_descriptor_left
from tests.rigs.engines import assert_idle, engines, settings
from tests.rigs.tensors import random_tensor
from tests.support import SeededRandom, eventually, records_of

KEY = TransferKey("request-1")
pytestmark = pytest.mark.usefixtures("no_leaks")


def kill_control_thread(engine: P2pNcclEngine) -> None:
    """Make its loop meet what no loop survives."""

    def die() -> None:
        raise SystemExit

    engine._parts.control.call_soon(die)
    eventually(lambda: not engine._parts.control.alive)


def test_an_engine_that_can_let_nobody_in_is_not_healthy_until_it_can(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with engines(1) as (engine,):
        assert engine.healthy
        with no_descriptor_left():
            eventually(lambda: not engine.healthy)
        assert "a peer waits for a descriptor of this process" in caplog.text
        eventually(lambda: engine.healthy)


def test_memory_that_nobody_waits_for_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    with engines(1) as (engine,), engine._parts.changed:
        arena = SimpleNamespace(refusal="Cannot allocate memory")
        monkeypatch.setattr(engine._parts, "arena", SimpleNamespace(arena=arena))
        assert not list(engine._parts._lacks())
        engine._parts.placement._credit.wait((1, 0), 10)
        assert list(engine._parts._lacks()) == [
            "a sender waits for landing memory: Cannot allocate memory"
        ]
        monkeypatch.undo()


@marks.every_transport
def test_dead_control_thread_is_told_and_nobody_waits_for_ever(
    transport: str, caplog: pytest.LogCaptureFixture, rng: SeededRandom
) -> None:
    with engines(2, transport) as (engine, other):
        target, source = PeerAddress(other.zmq_address), TensorSource(torch.zeros(9))
        engine.send(TransferKey("first"), target, TensorSource(random_tensor(rng, 9))).wait(10)
        unready = engine.send(KEY, target, source, ready=False, timeout=1.0)
        waiting = engine.receive(KEY, TensorSink(), peer=target, timeout=1.0)
        assert engine.healthy
        kill_control_thread(engine)
        assert not engine.healthy
        assert not engine.stats()["healthy"]
        assert "p2p-control has died" in caplog.text
        with pytest.raises(EngineClosed, match="control thread has died"):
            engine.receive(TransferKey("b"), TensorSink())
        for transfer in (unready, waiting):
            eventually(lambda t=transfer: engine.poll() or t.done)
            assert isinstance(transfer.error, TransferTimeout)
        engine.close()
        eventually(lambda: other.stats()["sessions"] == 0, what="the peer heard BYE")
        other.drop_landed()
        assert_idle(other)


def test_dead_mover_makes_the_engine_unhealthy() -> None:
    with P2pNcclEngine(settings()) as engine:
        assert engine.healthy
        assert engine._parts.mover.close(10)
        assert not engine.healthy


def test_copy_that_does_not_end_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The one wait that we cannot end: its memory is kept, and everybody can see it."""
    with engines(2, "shm", transfer_timeout_seconds=1.0) as (sender, receiver):
        target = PeerAddress(receiver.zmq_address)
        with sender._parts.changed:  # its own thread looks before or after, and finds nothing late
            transfer = sender.send(KEY, target, TensorSource(torch.zeros(9)), ready=False)
            monkeypatch.setattr(sender._parts.sender, "stop", lambda chunk, error: None)
            now = time.monotonic()
            for late in (1.1, 1.2, 1.2 + OVERDUE_SECONDS):
                sender._parts.sender.tick(now + late)
                sender._parts.watchdog.look(now + late, sender._parts.sender.overdue(now + late))
            assert sender.stats()["overdue_waits"] == 1
            assert not sender.healthy
            monkeypatch.undo()
        assert "a wait has outlived its deadline: send request-1" in caplog.text
        eventually(lambda: transfer.done)
        eventually(lambda: sender.healthy)
        assert sender.stats()["overdue_waits_reported"] == 1


def test_watchdog_reports_once_and_takes_it_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    dog = Watchdog()
    for now in (0.0, 1.9, 2.0, 2.1):
        dog.look(now, ["a", "b"] if now < 1.95 else ["a"])
    assert dog.overdue == ["a"]
    assert dog.num_reported == 1
    dog.look(3.0, [])
    assert dog.overdue == []
    said = records_of(health.logger, caplog)
    assert [record.levelname for record in said] == ["ERROR", "WARNING"]


def test_time_in_which_nothing_ran_does_not_count() -> None:
    now, dog = 0.0, Watchdog()
    running = ListeningClock(PATIENCE_SECONDS, lambda: now)
    dog.look(running(), ["a"])
    now += 100.0
    dog.look(running(), ["a"])
    assert dog.overdue == []
    for _ in range(6):  # a wait that is overdue at each of them is reported all the same
        now += 100.0
        dog.look(running(), ["a"])
    assert dog.overdue == ["a"]
