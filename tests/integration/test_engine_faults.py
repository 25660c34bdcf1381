"""A fault in any callback, or in any part of the tick: it ends the transfers that it concerns, the
others go on, and `healthy` tells what lasts.

What there is to be broken is looked up, so that a new part or callback is tried by itself.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from p2p_engine import P2pNcclEngine, TransferKey
from p2p_engine.control import tick_parts
from p2p_engine.control.plane import PlaneListener
from p2p_engine.errors import P2pError
from p2p_engine.memory.layout import Regions, Sink, Source, TensorSink, TensorSource
from p2p_engine.peers.link import PeerAddress
from p2p_engine.peers.listeners import LinkListener, SessionListener
from p2p_engine.receive import pulls, renewals, replies, store
from p2p_engine.transfer import Transfer
from p2p_engine.transports.base import Channel
from tests.rigs.engines import engines, settings, start
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("no_leaks")
BAD = TransferKey("bad")
SHORT = {"transfer_timeout_seconds": 1.0, "lease_seconds": 1.0, "connect_timeout_seconds": 2.0}
TENSOR = torch.arange(3000)


class InjectedError(Exception):
    """What no code expects."""


def is_callback(value: object) -> bool:
    return callable(value) and not isinstance(value, type)


def methods_of(protocol: type) -> list[str]:
    return [name for name, _ in inspect.getmembers(protocol, inspect.isfunction) if name[0] != "_"]


def calls_on(part: str, *modules: ModuleType) -> set[str]:
    """The methods of a part that other parts call."""
    sources = "".join(map(inspect.getsource, modules))
    return set(re.findall(rf"self\._{part}\.(\w+)\(", sources))


LISTENERS = (LinkListener, SessionListener, PlaneListener)
NEWS = {name for listener in LISTENERS for name in methods_of(listener)}
NEWS |= calls_on("store", pulls, renewals) | calls_on("expectations", replies, store)
NEWS -= {"offered_until"}  # the caller's own `receive` asks that, and raises what it raises


def takes_a_job(method: object) -> bool:
    return inspect.isfunction(method) and "Job" in {
        getattr(item.annotation, "__name__", item.annotation)
        for item in inspect.signature(method).parameters.values()
    }


def parts_of(engine: P2pNcclEngine) -> Iterator[tuple[str, object]]:
    """The objects that the engine is made of, and theirs."""
    for name, part in vars(engine._parts).items():
        if type(part).__module__.startswith("p2p_engine."):
            yield name, part
            for inner, below in vars(part).items():
                if type(below).__module__ in (
                    "p2p_engine.receive.replies",
                    "p2p_engine.receive.placement",
                ):
                    yield f"{name}.{inner}", below


def breakable() -> tuple[list[str], list[str]]:
    """Look up what can be broken in an engine: parts of its tick; callbacks and takers of news."""
    with start(settings()) as engine:
        found = []
        for name, part in parts_of(engine):
            held = [key for key, value in vars(part).items() if is_callback(value)]
            held += [method for method, _ in inspect.getmembers(type(part), takes_a_job)]
            held += [method for method in sorted(NEWS) if method in vars(type(part))]
            found += [f"{name}.{key}" for key in held]
        return list(engine._parts.ticks), [item for item in found if not item.endswith("_clock")]


TICK_PARTS, CALLBACKS = breakable()


def test_what_can_be_broken_was_found() -> None:
    assert {"arrivals", "store", "sender", "links", "sessions", "watchdog"} <= set(TICK_PARTS)
    assert {"pulls.link_ready", "store.session_lost", "store.fail_content"} <= set(CALLBACKS)
    assert {"store._scattered", "store._received", "sender._job_ended"} <= set(CALLBACKS)
    assert "store._replies._reply" in CALLBACKS


class Traffic:
    """One transfer of each kind between an engine and its peer; `good` are to succeed."""

    def __init__(self, engine: P2pNcclEngine, peer: P2pNcclEngine, name: str) -> None:
        self.good: list[Transfer] = []
        self.late: list[Transfer] = []  # that nobody answers: they end by their deadlines
        there, here = PeerAddress(peer.zmq_address), PeerAddress(engine.zmq_address)
        source = TensorSource(TENSOR)

        def key(kind: str) -> TransferKey:
            return TransferKey(name, kind)

        self.sinks = [TensorSink() for _ in range(5)]
        received = iter(self.sinks)
        self.good += [engine.receive(key("first"), next(received), peer=there)]
        self.good += [peer.send(key("first"), here, source), engine.send(key("out"), there, source)]
        self.good += [peer.receive(key("out"), next(received), peer=here)]
        self.good += [engine.hold(key("held"), source), peer.hold(key("held there"), source)]
        self.good += [peer.receive(key("held"), next(received), peer=here, pull=True)]
        self.good += [engine.receive(key("held there"), next(received), peer=there, pull=True)]
        self.good += [peer.send(key("then"), here, source)]
        self.late += [engine.receive(key("never"), TensorSink(), timeout=0.2)]
        self.late += [engine.receive(key("none"), TensorSink(), peer=there, pull=True, timeout=0.2)]
        self.late += [engine.send(key("unready"), there, source, ready=False, timeout=0.2)]
        self.late += [engine.hold(key("unwanted"), source, lease=0.2)]
        with contextlib.suppress(P2pError):  # it may have failed already
            self.good += [engine.receive(key("then"), next(received), peer=there)]

    @property
    def all(self) -> list[Transfer]:
        return [*self.good, *self.late]

    def end(self, *pollers: P2pNcclEngine) -> None:
        """Wait until everything has ended, as vLLM's workers do; `poll` never raises."""
        for transfer in self.all:

            def is_done(transfer: Transfer = transfer) -> bool:
                for engine in pollers:
                    engine.poll()
                return transfer.done

            eventually(is_done, 20, what=f"{transfer}")

    def is_right(self) -> bool:
        return all(transfer.error is None for transfer in self.good) and all(
            sink.tensor is not None and torch.equal(sink.tensor, TENSOR) for sink in self.sinks
        )


class RaisingCall:
    """Raises in place of a callable: `count` times, or until it is mended."""

    def __init__(self, owner: Any, name: str, count: float = float("inf")) -> None:
        self.owner, self.name, self.left, self.num_raised = owner, name, count, 0
        self.original: Callable[..., Any] = getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.left <= 0:
            return self.original(*args, **kwargs)
        self.left -= 1
        self.num_raised += 1
        raise InjectedError(self.name)

    def mend(self) -> None:
        self.left = 0


def is_empty(engine: P2pNcclEngine) -> bool:
    engine.drop_landed()
    stats = engine.stats()
    return (stats["open_transfers"], stats["live_bytes"], stats["quarantined_bytes"]) == (0, 0, 0)


@pytest.mark.parametrize("name", TICK_PARTS)
def test_part_of_the_tick_that_fails_stops_no_other(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it fails: what does not need it goes on, and the engine says that it is not healthy.
    Afterwards all has ended, and the engine is healthy again."""
    monkeypatch.setattr(tick_parts, "FAILING_SECONDS", 0.2)
    with engines(2, "shm", **SHORT) as (peer, engine):
        Traffic(engine, peer, "before").end(peer, engine)
        calls = engine._parts.ticks._calls
        called, original = [0.0], calls[name]

        def fail(now: float) -> None:
            called.append(now)
            raise InjectedError(name)

        calls[name] = fail
        traffic = Traffic(engine, peer, "meanwhile")
        eventually(lambda: engine.stats()["broken_parts"] == [name])
        assert not engine.healthy
        if name != "jobs":  # whose news everything that moves needs
            for transfer in traffic.good:
                eventually(lambda t=transfer: t.done)  # type: ignore[misc]
            assert traffic.is_right()
        calls[name] = original
        traffic.end(peer, engine)
        Traffic(engine, peer, "after").end(peer, engine)
        eventually(lambda: engine.healthy)
        assert engine.stats()["control_errors"] >= len(called) - 1
        eventually(lambda: is_empty(engine))


@pytest.mark.parametrize("transport", ["shm", "nixl", "tcp"])
@pytest.mark.parametrize("path", CALLBACKS)
def test_callback_that_fails_once_costs_its_own_transfers(path: str, transport: str) -> None:
    with engines(3, transport, **SHORT) as (peer, other, engine):
        owner: Any = engine._parts
        *way, name = path.split(".")
        for step in way:
            owner = getattr(owner, step)
        fault = RaisingCall(owner, name, count=1)
        Traffic(engine, peer, "concerned").end(peer, engine)
        fault.mend()
        traffic = Traffic(engine, other, "not concerned")
        traffic.end(other, engine)
        assert traffic.is_right(), [transfer.error for transfer in traffic.good]
        if fault.num_raised:
            assert engine.stats()["control_errors"] == 1
        eventually(lambda: engine.healthy)
        eventually(lambda: is_empty(engine))


KINDS = [MemoryError, TypeError, ValueError, InjectedError]


@pytest.mark.parametrize(
    ("kind", "transport"), [*zip(KINDS, ["shm", "tcp", "shm", "tcp"], strict=True)]
)
@pytest.mark.parametrize("name", methods_of(Sink))
def test_sink_that_raises_anything_ends_its_own_receive(
    name: str, kind: type[Exception], transport: str
) -> None:
    with engines(2, transport, **SHORT) as (peer, engine):
        sink = TensorSink()

        def fail(*_: Any) -> None:
            raise kind("the sink's")

        setattr(sink, name, fail)
        waiting = engine.receive(BAD, sink)
        peer.send(BAD, PeerAddress(engine.zmq_address), TensorSource(TENSOR))
        eventually(lambda: waiting.done)
        assert "the sink's" in str(waiting.error)
        traffic = Traffic(engine, peer, "others")
        traffic.end(peer, engine)
        assert traffic.is_right()
        assert engine.healthy
        assert engine.stats()["control_errors"] == 0
        eventually(lambda: is_empty(engine))


NONSENSE = {
    "null": Regions(np.array([0]), np.array([TENSOR.nbytes])),
    "unsigned": Regions(np.array([1 << 20], np.uint64), np.array([TENSOR.nbytes])),
    "negative": Regions(np.array([-1 << 40]), np.array([TENSOR.nbytes])),
    "no array": Regions([1 << 20], np.array([TENSOR.nbytes])),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("transport", ["shm", "nixl", "tcp"])
@pytest.mark.parametrize("first", ["receiver", "sender"])
@pytest.mark.parametrize("regions", NONSENSE.values(), ids=NONSENSE)
def test_sink_whose_regions_are_nonsense_ends_its_own_receive(
    regions: Regions, first: str, transport: str
) -> None:
    """What the mover refuses, whatever it raises."""

    class Nonsense(TensorSink):
        def regions(self, *_: Any) -> Regions:
            return regions

    with engines(2, transport, **SHORT) as (peer, engine):
        if first == "sender":
            peer.send(BAD, PeerAddress(engine.zmq_address), TensorSource(TENSOR)).wait(10)
        waiting = engine.receive(BAD, Nonsense())
        if first == "receiver":
            peer.send(BAD, PeerAddress(engine.zmq_address), TensorSource(TENSOR))
        eventually(lambda: waiting.done)
        assert waiting.error is not None
        traffic = Traffic(engine, peer, "others")
        traffic.end(peer, engine)
        assert traffic.is_right()
        assert engine.stats()["control_errors"] == 0
        eventually(lambda: is_empty(engine))


@pytest.mark.parametrize("transport", ["shm", "nixl", "tcp"])
@pytest.mark.parametrize("name", [*methods_of(Source), *NONSENSE])
@pytest.mark.parametrize("is_held", [False, True], ids=["sent", "held"])
def test_source_that_fails_ends_its_own_transfer(name: str, is_held: bool, transport: str) -> None:
    """And whoever waits for it is told, instead of waiting to its deadline."""

    class Faulty(TensorSource):
        def __getattribute__(self, attribute: str) -> Any:
            if attribute == name:
                raise InjectedError("the source's")
            if attribute == "regions" and name in NONSENSE:
                return lambda *_: NONSENSE[name]
            return super().__getattribute__(attribute)

    with engines(2, transport, **{**SHORT, "transfer_timeout_seconds": 20.0}) as (peer, engine):
        home, there = PeerAddress(engine.zmq_address), PeerAddress(peer.zmq_address)
        waiting = peer.receive(BAD, TensorSink(), peer=home, pull=is_held)
        source = Faulty(TENSOR)
        sent = engine.hold(BAD, source) if is_held else engine.send(BAD, there, source)
        if name != "packed":  # which only a spill asks for
            eventually(lambda: waiting.done)
            assert waiting.error is not None
        eventually(lambda: sent.done)
        traffic = Traffic(engine, peer, "others")
        traffic.end(peer, engine)
        assert traffic.is_right()
        assert engine.stats()["control_errors"] == 0
        eventually(lambda: is_empty(engine))


@pytest.mark.parametrize("transport", ["shm", "nixl", "tcp"])
@pytest.mark.parametrize("name", [name for name in methods_of(Channel) if name != "close"])
def test_channel_that_fails_costs_what_went_over_it(name: str, transport: str) -> None:
    with engines(3, transport, **SHORT) as (peer, other, engine):
        Traffic(engine, peer, "before").end(peer, engine)
        (link,) = engine._parts.links._links.values()
        fault = RaisingCall(link.channel, name, count=1)
        Traffic(engine, peer, "concerned").end(peer, engine)
        fault.mend()
        traffic = Traffic(engine, other, "not concerned")
        traffic.end(other, engine)
        assert traffic.is_right()
        eventually(lambda: is_empty(engine))


def test_time_of_a_part_that_fails_now_and_then_is_not_held_against_it() -> None:
    now, outcomes = [0.0], iter([True, False] * 50)

    def call(_: float) -> None:
        if next(outcomes):
            raise InjectedError

    several = tick_parts.TickParts({"a": call})
    for _ in range(100):
        now[0] += tick_parts.FAILING_SECONDS
        several.run(now[0])
    assert (several.broken, several.num_failures) == ([], 50)


def test_for_each_takes_every_step_and_raises_the_first() -> None:
    taken: list[int] = []

    def step(number: int) -> None:
        taken.append(number)
        if number % 2:
            raise InjectedError(number)

    with pytest.raises(InjectedError, match="1"):
        tick_parts.for_each(range(5), step)
    assert taken == [0, 1, 2, 3, 4]
    tick_parts.for_each([0, 2], step)
