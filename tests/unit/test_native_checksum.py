"""Checksums by the mover, held against another library's."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import google_crc32c
import numpy as np
import numpy.typing as npt
import pytest

from mempool import Job, Mover
from tests.support import SeededRandom

LONG = 30.0


@pytest.fixture
def mover() -> Iterator[Mover]:
    mover = Mover(slice_bytes=4096)
    yield mover
    assert mover.close(LONG)


def pieces(
    memory: npt.NDArray[np.uint8], rng: SeededRandom, count: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Cut memory into `count` pieces, in order: what lies where, and how much."""
    cuts = np.sort(rng.numpy.integers(0, memory.nbytes + 1, count - 1))
    starts = np.r_[0, cuts]
    return memory.ctypes.data + starts, np.diff(np.r_[starts, memory.nbytes])


def checksum_of(job: Job) -> int | None:
    assert job.wait(LONG)
    assert job.state == "done"
    return job.checksum


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 3071, 3072, 3073, 100_003, 1_000_003])
@pytest.mark.parametrize("num_pieces", [1, 2, 300])
def test_every_kind_of_job_says_the_same(
    mover: Mover, rng: SeededRandom, nbytes: int, num_pieces: int
) -> None:
    source = rng.numpy.integers(0, 256, nbytes + 1, np.uint8)[:nbytes]
    target = np.zeros(nbytes + 1, np.uint8)[:nbytes]
    expected = google_crc32c.value(source.tobytes())
    addresses, lengths = pieces(source, rng, num_pieces)
    copy = mover.copy(
        addresses, target.ctypes.data + addresses - source.ctypes.data, lengths, checked=True
    )
    assert checksum_of(copy) == expected
    assert checksum_of(mover.check(addresses, lengths)) == expected
    left, right = socket.socketpair()
    with left, right:
        mover.attach(left.fileno(), 1)
        mover.attach(right.fileno(), 2)
        target[:] = 0
        expect = mover.expect(2, 5, *pieces(target, rng, num_pieces), checked=True)
        send = mover.send(1, 5, addresses, lengths, checked=True)
        assert checksum_of(send) == checksum_of(expect) == expected
        mover.detach(1)
        mover.detach(2)
    assert target.tobytes() == source.tobytes()


def test_job_without_a_checksum_has_none(mover: Mover) -> None:
    page = np.zeros(100, np.uint8)
    place, length = np.array([page.ctypes.data]), np.array([100])
    assert checksum_of(mover.copy(place, place, length)) is None


def test_check_moves_nothing(mover: Mover) -> None:
    page = np.zeros(100, np.uint8)
    assert checksum_of(mover.check(np.array([page.ctypes.data]), np.array([100]))) is not None
    assert mover.stats()["bytes_copied"] == 0
