"""Which modules an OFFER and a GRANT enter, traced in real engines, as ARCHITECTURE.md says."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path
from types import FrameType

import pytest
import torch

from p2p_engine import TransferKey
from p2p_engine.control.sockets import Route
from p2p_engine.dispatch import Dispatch
from p2p_engine.memory.layout import TensorSink
from p2p_engine.wire.messages import decode
from tests.rigs.engines import engines

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "p2p_engine"
MAX_PARTS = 9


class Trace:
    """The modules of ours that are entered while each message of a kind is handled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.modules: dict[str, list[set[str]]] = defaultdict(list)
        on_frame = Dispatch.on_frame

        def traced(dispatch: Dispatch, route: Route, frame: bytes) -> None:
            entered: set[str] = set()
            self.modules[type(decode(frame)).__name__.upper()].append(entered)

            def note(called: FrameType, event: str, _: object) -> None:
                path = Path(called.f_code.co_filename)
                if event == "call" and path.is_relative_to(PACKAGE):
                    entered.add(str(path.relative_to(PACKAGE).with_suffix("")))

            sys.setprofile(note)
            try:
                on_frame(dispatch, route, frame)
            finally:
                sys.setprofile(None)

        monkeypatch.setattr(Dispatch, "on_frame", traced)


def told(message: str) -> tuple[list[str], list[str]]:
    """The parts and the modules without state in a message's row of ARCHITECTURE.md."""
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    row = re.search(rf"^\| {message} \|(.*)\|(.*)\|$", text, re.MULTILINE)
    assert row is not None
    parts, others = (re.findall(r"`([^`]+)`", cell) for cell in row.groups())
    return parts, others


def test_the_way_of_offer_and_grant_is_what_architecture_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = Trace(monkeypatch)
    with engines(2, "shm") as (sender, receiver):
        for number in range(5):
            key = TransferKey(f"request-{number}", "layer")
            waiting = receiver.receive(key, TensorSink())
            sender.send_tensor(key, torch.arange(4096), receiver.zmq_address).wait(10)
            waiting.wait(10)
    for message in ("OFFER", "GRANT"):
        parts, others = told(message)
        shortest = min(trace.modules[message], key=len)  # one may have to wake the control thread
        assert shortest == {*parts, *others}, message
        assert len(parts) <= MAX_PARTS
