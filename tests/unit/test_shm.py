"""What a peer hands over beside its endpoint is mapped, or given back whole; its pages are the
peer's."""

from __future__ import annotations

import fcntl
import os

import numpy as np
import pytest

from p2p_engine.errors import TransportError
from p2p_engine.memory.arena import LandingArena
from p2p_engine.memory.layout import one_region
from p2p_engine.transports.shm import ShmChannel, _map
from tests.rigs.transports import MIB, TransportPair, write
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("no_leaks")


def memory_file(nbytes: int) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return descriptor


@pytest.mark.parametrize("count", [0, 2])
def test_more_or_less_than_one_descriptor_is_refused_and_closed(count: int) -> None:
    """Two fit the room that the kernel aligns for one."""
    descriptors = [memory_file(4096) for _ in range(count)]
    with pytest.raises(TransportError, match=f"{count} descriptors came, not 1"):
        _map(descriptors, 4096, 0, 0)


@pytest.mark.parametrize("nbytes", [-1, 0, 1 << 62, 1 << 80])
def test_a_size_that_cannot_be_is_refused(nbytes: int) -> None:
    with pytest.raises(TransportError):
        _map([memory_file(4096)], nbytes, 0, 0)


@pytest.mark.parametrize("offset", [-8, 4096 - 7, 1 << 80])
def test_a_nonce_that_lies_outside_is_refused(offset: int) -> None:
    with pytest.raises(TransportError, match="nonce"):
        _map([memory_file(4096)], 4096, offset, 0)


def test_a_sender_touches_no_page_but_those_that_it_is_granted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The receiver lies: it grants what it has never touched, far up in its memory file."""
    monkeypatch.setattr(LandingArena, "_prefault", lambda arena: None)
    pair, memory = TransportPair("shm"), np.ones(32, np.uint8)
    arena = pair.receiver.arena
    assert arena.reserve(6 * MIB) is not None
    channel, landing = pair.channel(), pair.grant(None, 32)
    assert isinstance(channel, ShmChannel)
    before = os.fstat(arena.arena.fileno()).st_blocks
    write(channel, one_region(memory.ctypes.data, 32), landing, memory)
    eventually(lambda: pair.has_landed(landing, 32))
    assert channel._arena.report()["prefault"] == "0 of 0 bytes"  # nothing is done behind
    assert (os.fstat(arena.arena.fileno()).st_blocks - before) * 512 == 4096
    pair.close()
