"""The reaper ends a communicator, whatever else fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from p2p_engine.errors import TransportError
from p2p_engine.transports.nccl.reaper import Reaper


class BrokenNccl:
    """Gives no registration back."""

    def __init__(self) -> None:
        self.aborted: list[int] = []

    def deregister(self, comm: int, registration: int) -> None:
        raise TransportError("ncclCommDeregister: unhandled error")

    def abort(self, comm: int) -> None:
        self.aborted.append(comm)


def test_a_registration_that_cannot_be_undone_keeps_no_communicator_alive() -> None:
    nccl, posted = BrokenNccl(), list[Any]()
    cuda = SimpleNamespace(use=lambda index: None)
    device = SimpleNamespace(cuda=cuda, index=0, post=posted.append)
    reaper = Reaper(cast("Any", nccl), cast("Any", device))
    reaper.abort(7, [1, 2], lambda: None)
    assert reaper.wait(10)
    assert nccl.aborted == [7]
    assert len(posted) == 1
