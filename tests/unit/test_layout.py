"""Tensors as sources and sinks; the paged layouts are held against a model elsewhere."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from p2p_engine.errors import LocalProtocolError, RemoteProtocolError
from p2p_engine.memory.layout import Regions, TensorSink, TensorSource
from p2p_engine.wire.messages import Manifest

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip
TENSORS = {
    "vector": torch.arange(5.0),
    "empty": torch.zeros(3, 0, 2),
    "zero-dim": torch.tensor(4.0),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "every other": torch.arange(10.0)[::2],
    "expanded": torch.tensor([7.0]).expand(4),
    "negated": torch.randn(3, dtype=torch.complex64).conj().imag,
    "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
    "needs a gradient": torch.ones(2, requires_grad=True),
}


def carry(source: TensorSource, sink: TensorSink) -> torch.Tensor:
    """Copy as a mover does."""
    first, num = sink.wanted(source.manifest)
    here, there = source.regions(first, num), sink.regions(source.manifest, first, num)
    for start, end, length in zip(here.addresses, there.addresses, here.lengths, strict=True):
        ctypes.memmove(int(end), int(start), int(length))
    assert sink.landed(source.manifest, first, num)
    assert sink.tensor is not None
    return sink.tensor


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    nbytes = 24 * dtype.itemsize
    values = torch.arange(nbytes).to(torch.uint8)
    tensor = (values % 2).view(torch.bool) if dtype is torch.bool else values.view(dtype)
    received = carry(TensorSource(tensor), TensorSink())
    assert received.dtype == dtype
    assert torch.equal(received.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("name", TENSORS)
def test_every_shape_and_view(name: str) -> None:
    tensor = TENSORS[name]
    received = carry(TensorSource(tensor), TensorSink())
    assert received.shape == tensor.shape
    assert torch.equal(received, tensor.detach())


def test_contiguous_tensor_is_not_copied() -> None:
    tensor = torch.zeros(4)
    assert TensorSource(tensor).regions(0, 1).addresses[0] == tensor.data_ptr()


@pytest.mark.parametrize(
    "tensor", [torch.zeros(2, device="meta"), torch.eye(2).to_sparse()], ids=["meta", "sparse"]
)
def test_memory_that_cannot_be_reached_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(LocalProtocolError):
        TensorSource(tensor)


@pytest.mark.parametrize(
    "manifest",
    [
        Manifest(0, 1, [8], dtype="float32", shape=[3]),
        Manifest(0, 1, [12], dtype="float64", shape=[3]),
        Manifest(0, 2, [12], dtype="float32", shape=[3]),
        Manifest(1, 1, [12], dtype="float32", shape=[3]),
        Manifest(0, 1, [12], dtype="Tensor", shape=[3]),
        Manifest(0, 1, [12], dtype="", shape=[3]),
        Manifest(0, 1, [12]),
    ],
)
@pytest.mark.parametrize("tensor", [None, torch.zeros(3)], ids=["new", "given"])
def test_manifest_of_something_else_is_refused(
    manifest: Manifest, tensor: torch.Tensor | None
) -> None:
    with pytest.raises(RemoteProtocolError):
        TensorSink(tensor).wanted(manifest)


def test_tensor_that_cannot_be_made_is_named() -> None:
    def allocate(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("not enough memory")

    manifest = Manifest(0, 1, [4], dtype="float32", shape=[1])
    with pytest.raises(LocalProtocolError, match=r"float32.*not enough memory"):
        TensorSink(allocate=allocate).wanted(manifest)


def test_regions_count_their_bytes() -> None:
    assert Regions(np.array([1, 2]), np.array([10, 20])).nbytes == 30
