"""Whatever a stream says, nothing outside of the expected regions is written, and its job ends."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from mempool import Mover

HEADER = struct.Struct("<IIQQQ")
MAGIC, LAST, ABORTED = 0x31763270, 1, 2
PAYLOAD, GUARD, SEQ = 300, 100, 5
numbers = st.sampled_from([0, 1, 2, PAYLOAD - 1, PAYLOAD, PAYLOAD + 1, 1 << 32, 1 << 62, 1 << 63])


@st.composite
def segments(draw: st.DrawFn) -> bytes:
    """One header, right or almost right, and payload, as long as it says or not."""
    fields = draw(
        st.tuples(
            st.sampled_from([MAGIC] * 5 + [0]),
            st.sampled_from([0, LAST, ABORTED, LAST | ABORTED, 4]),
            st.sampled_from([SEQ] * 5 + [0, SEQ + 1, (1 << 64) - 1]),
            numbers,
            numbers,
        )
    )
    length = draw(st.sampled_from([min(fields[4], PAYLOAD), PAYLOAD, 1, 0]))
    return HEADER.pack(*fields) + b"\xaa" * length


streams = st.lists(segments() | st.binary(max_size=80), max_size=6).map(b"".join)


@pytest.fixture(scope="module")
def mover() -> Iterator[Mover]:
    with contextlib.closing(Mover()) as made:
        yield made


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(stream=streams, cuts=st.lists(st.integers(0, 500), max_size=3))
def test_any_stream_stays_within_its_regions(mover: Mover, stream: bytes, cuts: list[int]) -> None:
    memory = np.full(PAYLOAD + 3 * GUARD, 0x55, np.uint8)
    half = PAYLOAD // 2
    starts = memory.ctypes.data + np.array([GUARD, 2 * GUARD + half])
    ours, theirs = socket.socketpair()
    with ours, theirs:
        mover.attach(ours.fileno(), 1)
        job = mover.expect(1, SEQ, starts, np.array([half, half]), keep=memory)
        for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(stream)], strict=True):
            with contextlib.suppress(ConnectionError):  # it was cut off at the first wrong word
                theirs.sendall(stream[start:end])
        theirs.close()
        assert job.wait(10)
        mover.detach(1)
    outside = np.delete(memory, np.r_[GUARD : GUARD + half, 2 * GUARD + half : 2 * (GUARD + half)])
    assert (outside == 0x55).all()


def test_after_all_of_it_a_right_stream_arrives(mover: Mover) -> None:
    memory = np.zeros(PAYLOAD, np.uint8)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        mover.attach(ours.fileno(), 1)
        job = mover.expect(1, SEQ, np.array([memory.ctypes.data]), np.array([PAYLOAD]), keep=memory)
        theirs.sendall(HEADER.pack(MAGIC, LAST, SEQ, 0, PAYLOAD) + b"\xaa" * PAYLOAD)
        assert job.wait(10)
        mover.detach(1)
    assert (job.state, bool((memory == 0xAA).all())) == ("done", True)
