"""What an engine does in one step with few and with many transfers open: the same.

Counted are the instructions that the interpreter runs, which a busy machine does not change.
`make bench NAME=open` measures the time.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch

from p2p_engine import P2pNcclEngine, TransferKey
from p2p_engine.memory.layout import TensorSink, TensorSource
from p2p_engine.peers.link import PeerAddress
from tests.rigs.engines import engines
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("no_leaks")
FEW, MANY = 10, 1_000
SOURCE = TensorSource(torch.arange(16))
QUIET = {
    "retry_seconds": 1e4, "peer_timeout_seconds": 1e4, "lease_seconds": 1e4,
    "transfer_timeout_seconds": 1e4,
}  # fmt: skip


def instructions(call: Callable[[], Any]) -> int:
    """Count what this thread runs of the engine's code during a call."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if frame.f_globals.get("__name__", "").startswith("p2p_engine"):
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            count += event == "opcode"
            return trace
        return None

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(previous)
    return count


def key(kind: str, number: int) -> TransferKey:
    return TransferKey(f"{kind}-{number}")


@contextmanager
def pair(num_open: int) -> Iterator[tuple[P2pNcclEngine, P2pNcclEngine]]:
    """A sender and a receiver with so many transfers of each kind open."""
    with engines(2, "shm", kv_buffer_size=2**25, **QUIET) as (sender, receiver):
        there, here = PeerAddress(receiver.zmq_address), PeerAddress(sender.zmq_address)
        for number in range(num_open):
            sender.send(key("granted", number), there, SOURCE, ready=False)
            sender.hold(key("held", number), SOURCE)
            receiver.receive(key("waited", number), TensorSink())
            receiver.receive(key("awaited", number), TensorSink(), peer=here)
            receiver.receive(key("wanted", number), TensorSink(), peer=here, pull=True)
            sender.abandon(key("abandoned", number), there, "the test says so")
        eventually(lambda: receiver.stats()["open_transfers"] >= 4 * num_open, 60)
        eventually(lambda: len(sender._parts.holds._unheld) >= num_open, 60)
        eventually(lambda: not len(sender._parts.sender._abandoned), 60)
        yield sender, receiver


def least(call: Callable[[], Any], lock: threading.Condition) -> int:
    """The instructions of a call in which nothing else was to be done."""
    counts = []
    for _ in range(5):
        with lock:
            counts.append(instructions(call))
    return min(counts)


def costs(num_open: int) -> dict[str, int]:
    with pair(num_open) as (sender, receiver):
        there, here = PeerAddress(receiver.zmq_address), PeerAddress(sender.zmq_address)
        calls: dict[str, tuple[P2pNcclEngine, Callable[[], Any]]] = {
            "tick of the sender": (
                sender,
                lambda: sender._parts.dispatch.on_tick(time.monotonic()),
            ),
            "tick of the receiver": (
                receiver,
                lambda: receiver._parts.dispatch.on_tick(time.monotonic()),
            ),
            "poll": (receiver, receiver._parts.collect),
            "receive": (
                receiver,
                lambda: receiver.receive(key("new", 0), TensorSink()).cancel(),
            ),
            "receive of a peer": (
                receiver,
                lambda: receiver.receive(
                    key("new", 1), TensorSink(), peer=here, pull=True
                ).cancel(),
            ),
            "send": (
                sender,
                lambda: sender.send(key("new", 2), there, SOURCE, ready=False).cancel(),
            ),
            "hold": (sender, lambda: sender.hold(key("new", 3), SOURCE).cancel()),
            "abandon": (sender, lambda: sender.abandon(key("new", 4), there, "again")),
            "want": (
                sender,
                lambda: sender._parts.holds.on_want(
                    (key("held", 0), b"other"), there, None, lambda _: None
                ),
            ),
            "release": (
                sender,
                lambda: sender._parts.holds.on_release((key("wanted", 0), b""), there, None),
            ),
            "renewal": (
                sender,
                lambda: sender._parts.sender.on_renew(receiver.epoch, [(key("granted", 0), b"")]),
            ),
        }
        return {name: least(call, engine._parts.changed) for name, (engine, call) in calls.items()}


def test_nothing_costs_more_because_much_is_open() -> None:
    few, many = costs(FEW), costs(MANY)
    assert all(few.values())
    ratios = {name: many[name] / few[name] for name in few}
    assert max(ratios.values()) < 2, {name: (few[name], many[name]) for name in few}
