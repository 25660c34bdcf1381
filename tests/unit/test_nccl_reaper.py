"""The reaper ends a communicator, whatever else fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2p_engine.errors import TransportError
from p2p_engine.transports.nccl.reaper import Reaper


def make_reaper(nccl: object, posted: list[Any]) -> Reaper:
    cuda = SimpleNamespace(use=lambda index: None)
    device = SimpleNamespace(cuda=cuda, index=0, post=posted.append)
    return Reaper(cast("Any", nccl), cast("Any", device))


class BusyNccl:
    """A call of its communicator is in progress for a while."""

    def __init__(self, num_looks: int) -> None:
        self.calls: list[str] = []
        self._num_looks = num_looks

    def is_in_progress(self, comm: int) -> bool:
        self._num_looks -= 1
        return self._num_looks >= 0

    def deregister(self, comm: int, registration: int) -> None:
        self.calls.append("deregister" if self._num_looks < 0 else "races")

    def abort(self, comm: int) -> None:
        self.calls.append("abort")


class BrokenNccl:
    """Gives no registration back."""

    def __init__(self) -> None:
        self.aborted: list[int] = []

    def is_in_progress(self, comm: int) -> bool:
        return False

    def deregister(self, comm: int, registration: int) -> None:
        raise TransportError("ncclCommDeregister: unhandled error")

    def abort(self, comm: int) -> None:
        self.aborted.append(comm)


def test_a_registration_that_cannot_be_undone_keeps_no_communicator_alive() -> None:
    nccl, posted = BrokenNccl(), list[Any]()
    reaper = make_reaper(nccl, posted)
    reaper.abort(7, [1, 2], lambda: None)
    assert reaper.wait(10)
    assert nccl.aborted == [7]
    assert len(posted) == 1


@pytest.mark.parametrize(
    ("num_looks", "was_connected", "calls"),
    [
        (0, True, ["deregister", "abort"]),
        (3, True, ["deregister", "abort"]),  # its last launch ends
        (1 << 30, False, ["abort"]),  # its first one waits for a peer that is dead
    ],
)
def test_registrations_are_undone_before_the_abort_and_race_with_no_other_call(
    num_looks: int, was_connected: bool, calls: list[str]
) -> None:
    nccl, posted = BusyNccl(num_looks), list[Any]()
    reaper = make_reaper(nccl, posted)
    reaper.abort(7, [1], lambda: None, was_connected=was_connected)
    assert reaper.wait(10)
    assert nccl.calls == calls
