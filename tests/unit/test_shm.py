"""What a peer hands over beside its endpoint is mapped, or given back whole."""

from __future__ import annotations

import fcntl
import os

import pytest

from p2p_engine.errors import TransportError
from p2p_engine.transports.shm import _map

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
