"""ArenaChannel: memory is given back only when no copy can touch it any more."""

from __future__ import annotations

import socket
from typing import Any, cast
from unittest.mock import MagicMock

import numpy as np
import pytest

from mempool import Arena, Mover
from p2p_engine.control.plane import ControlPlane
from p2p_engine.errors import TransportError
from p2p_engine.memory.layout import one_region
from p2p_engine.transports.base import Order
from p2p_engine.transports.shm import ShmChannel
from p2p_engine.wire.messages import Grant


class StuckJob:
    """A copy that does not stop before the test says so: the thread hangs in a page fault."""

    done = False

    def cancel(self) -> None:
        """Ask in vain."""

    def wait(self, timeout: float) -> bool:
        return self.done


class StuckCopier:
    def __init__(self) -> None:
        self.job = StuckJob()

    def copy(self, *_: Any, **__: Any) -> StuckJob:
        return self.job


def test_copy_that_does_not_stop_keeps_the_mapping() -> None:
    theirs = Arena(8192)
    ours = Arena.attach(theirs.fileno(), 8192)
    mover, memory = StuckCopier(), np.zeros(8, np.uint8)
    line, other = socket.socketpair()
    control = cast("ControlPlane", MagicMock())
    channel = ShmChannel(cast("Mover", mover), ours, line, control)
    grant = Grant(1, 2, 1, 0, 0, 1, 4096, 5, 4096)
    order = Order(one_region(memory.ctypes.data, 8), grant, keep=memory)
    channel.write(order)
    assert not channel.close(0.0)
    assert len(ours.view(0, 8)) == 8  # it is mapped
    with pytest.raises(TransportError, match="closed"):
        channel.write(order)
    mover.job.done = True
    assert channel.close(0.0)
    with pytest.raises(ValueError, match="closed"):
        ours.view(0, 8)
    theirs.close()
    other.close()
