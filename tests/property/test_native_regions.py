"""Scattered regions arrive byte for byte: copied at once, copied by slices, streamed."""

from __future__ import annotations

import socket

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from mempool import Mover, copy_now

NUM_BYTES = 20_000
LONG = 30.0

Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]


def offsets_of(lengths: list[int], order: list[int], gaps: list[int]) -> Int64s:
    """Lay spans of these lengths out in this order with gaps between them; where each begins."""
    offsets = np.zeros(len(lengths), dtype=np.int64)
    at = 0
    for index, gap in zip(order, gaps, strict=True):
        offsets[index] = at + gap
        at += gap + lengths[index]
    return offsets


@st.composite
def scatters(draw: st.DrawFn) -> tuple[Int64s, Int64s, Int64s]:
    """Source offsets, destination offsets and lengths; no two destinations overlap."""
    lengths = draw(st.lists(st.integers(0, 900), min_size=0, max_size=15))
    gaps = st.lists(st.integers(0, 64), min_size=len(lengths), max_size=len(lengths))
    order = st.permutations(range(len(lengths)))
    return (
        offsets_of(lengths, draw(order), draw(gaps)),
        offsets_of(lengths, draw(order), draw(gaps)),
        np.array(lengths, dtype=np.int64),
    )


def buffers() -> tuple[Bytes, Bytes]:
    source = np.random.default_rng(1).integers(1, 256, NUM_BYTES, dtype=np.uint8)
    return source, np.zeros(NUM_BYTES, dtype=np.uint8)


def expected(source: Bytes, scatter: tuple[Int64s, Int64s, Int64s]) -> Bytes:
    target = np.zeros(NUM_BYTES, dtype=np.uint8)
    for start, at, length in zip(*scatter, strict=True):
        target[at : at + length] = source[start : start + length]
    return target


@given(scatters())
def test_copied_at_once(scatter: tuple[Int64s, Int64s, Int64s]) -> None:
    source, target = buffers()
    sources, destinations, lengths = scatter
    copied = copy_now(sources + source.ctypes.data, destinations + target.ctypes.data, lengths)
    assert copied == lengths.sum()
    assert np.array_equal(target, expected(source, scatter))


@settings(deadline=None)
@given(scatters(), st.integers(1, 3000))
def test_copied_by_slices(scatter: tuple[Int64s, Int64s, Int64s], slice_bytes: int) -> None:
    source, target = buffers()
    sources, destinations, lengths = scatter
    mover = Mover(slice_bytes=slice_bytes)
    job = mover.copy(sources + source.ctypes.data, destinations + target.ctypes.data, lengths)
    assert job.wait(LONG)
    assert mover.close(LONG)
    assert (job.state, job.nbytes) == ("done", lengths.sum())
    assert np.array_equal(target, expected(source, scatter))


@settings(deadline=None)
@given(scatters(), st.integers(1, 3000), st.integers(1, 3000))
def test_streamed(
    scatter: tuple[Int64s, Int64s, Int64s], sender_slice: int, receiver_slice: int
) -> None:
    source, target = buffers()
    sources, destinations, lengths = scatter
    sender, receiver = Mover(slice_bytes=sender_slice), Mover(slice_bytes=receiver_slice)
    left, right = socket.socketpair()
    with left, right:
        sender.attach(left.fileno(), 1)
        receiver.attach(right.fileno(), 2)
    job = receiver.expect(2, 3, destinations + target.ctypes.data, lengths)
    sender.send(1, 3, sources + source.ctypes.data, lengths)
    assert job.wait(LONG)
    assert sender.close(LONG)
    assert receiver.close(LONG)
    assert (job.state, job.error) == ("done", None)
    assert np.array_equal(target, expected(source, scatter))
