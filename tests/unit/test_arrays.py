"""Tensors over arrays of numpy, and of the double of cupy: the same memory, after their stream."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mempool import TensorMemoryPool, tensor_over
from p2p_engine.errors import LocalProtocolError
from p2p_engine.memory.layout import check_reachable
from tests.doubles import cupy_arrays as cupy
from tests.doubles.gpu import GpuDouble
from tests.support import eventually

MIB = 1 << 20
DOUBLE = GpuDouble()  # before any test looks at the threads that there are
untyped: Any = np.ma
DTYPES = "?bhilBHILefdFD"
pytestmark = pytest.mark.usefixtures("no_leaks")


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def refused(array: Any, *, is_written: bool = False) -> str:
    """The error's text."""
    with pytest.raises((TypeError, BufferError)) as error:
        tensor_over(array, is_written=is_written)
    return str(error.value)


UNFIT: dict[str, tuple[Any, str]] = {
    "reversed": (np.arange(3, dtype="i4")[::-1], "int32 has a negative stride: give a copy of it"),
    "mirrored": (np.zeros((2, 3))[:, ::-1], "float64 has a negative stride"),
    "byte order": (np.arange(3, dtype=">i4"), ">i4 cannot be a torch tensor here: .*byte order"),
    "object": (np.array([None]), "object cannot be a torch tensor"),
    "structure": (np.zeros(3, [("a", "i4"), ("b", "i1")]), r"'i1'\)\] cannot be a torch tensor"),
    "field": (np.zeros(3, [("a", "i4"), ("b", "i1")])["a"], "int32 cannot be .* multiple of item"),
    "time": (np.zeros(3, "M8[s]"), r"datetime64\[s\] cannot be a torch tensor"),
    "text": (np.array(["text"]), "<U4 cannot be a torch tensor"),
    "void": (np.zeros(3, "V2"), r"\|V2 cannot be a torch tensor"),  # bfloat16 may come as this
    "long double": (np.zeros(3, np.longdouble), "float128 cannot be a torch tensor"),
    "masked": (untyped.array([1, 2], mask=[False, True]), "a masked array has more than its bytes"),
    "list": ([1, 2, 3], "not an array of torch, cupy or numpy: list"),
    "bytes": (b"bytes", "not an array of torch, cupy or numpy: bytes"),
    "none": (None, "not an array of torch, cupy or numpy: NoneType"),
}
UNFIT_OUTS: dict[str, tuple[Any, str]] = {
    "read-only": (read_only(np.zeros(4, np.float32)), "read-only"),
    "dtype": (np.zeros(4), "out is torch.float64"),
    "shape": (np.zeros(5, np.float32), "the block holds torch.float32"),
    "byte order": (np.zeros(4, ">f4"), "byte order"),
    "reversed": (np.zeros(4, np.float32)[::-1], "negative stride"),
    "list": ([0.0] * 4, "not an array"),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 5), (3, 4)])
def test_a_tensor_has_the_memory_of_a_numpy_array(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, dtype)
    tensor = tensor_over(array)
    assert tensor.shape == shape
    assert tensor.numpy().dtype == array.dtype
    tensor.zero_()
    assert not array.any()


def test_a_tensor_keeps_its_array() -> None:
    tensor = tensor_over(np.full(MIB, 7, np.uint8))
    assert (tensor == 7).all()


def test_a_strided_array_stays_where_it_is() -> None:
    array = np.arange(24, dtype=np.int32).reshape(4, 6).T[::2]
    tensor = tensor_over(array)
    assert tensor.stride() == (2, 6)
    assert tensor.data_ptr() == array.ctypes.data


def test_a_tensor_is_returned_as_it_is() -> None:
    tensor = torch.randn(3, dtype=torch.complex64).conj()
    assert tensor_over(tensor) is tensor


def test_a_read_only_array_can_be_read_and_not_written_to() -> None:
    array = read_only(np.arange(5))
    assert tensor_over(array).tolist() == [0, 1, 2, 3, 4]
    assert refused(array, is_written=True) == "numpy.ndarray of int64 is read-only"


def test_an_array_that_cannot_say_whether_it_is_read_only_is_not_written() -> None:
    class Immutable:
        """As jax's: no flags, and a capsule that does not say it either."""

        def __init__(self) -> None:
            self._array = np.ones(4, np.float32)

        def __dlpack__(self, *, stream: Any = None) -> Any:
            return self._array.__dlpack__()

        def __dlpack_device__(self) -> tuple[Any, Any]:
            return self._array.__dlpack_device__()

    assert tensor_over(Immutable()).tolist() == [1] * 4
    says = "does not say whether it is read-only"
    assert refused(Immutable(), is_written=True).endswith(says)


@pytest.mark.parametrize("name", UNFIT)
def test_what_cannot_be_a_tensor_is_named(name: str) -> None:
    array, text = UNFIT[name]
    with pytest.raises((TypeError, BufferError), match=text):
        tensor_over(array)


def test_an_array_of_another_kind_of_device_is_named() -> None:
    class OnMetal(cupy.CupyArray):
        def __dlpack_device__(self) -> tuple[int, int]:
            return 8, 0

    text = refused(OnMetal(4, np.uint8))
    assert text.endswith("here: its device is of DLPack's kind 8, not 1 (host) or 2 (CUDA)")


def test_a_tensor_of_another_gpu_is_refused() -> None:
    tensor: Any = SimpleNamespace(device=torch.device("cuda:1"), layout=torch.strided)
    check_reachable(tensor, "cuda:1")
    for device in ("cuda", "cuda:0", "cpu"):
        with pytest.raises(LocalProtocolError, match=f"not a dense tensor on {device}: cuda:1"):
            check_reachable(tensor, device)


# On a GPU


def test_the_default_stream_waits_for_the_array_and_the_caller_does_not() -> None:
    opened, stream = threading.Event(), cupy.cuda.Stream(non_blocking=True)
    array = cupy.empty(1000, cupy.uint8)
    stream.launch_host_func(opened.wait, 20)
    with stream:
        array.fill(7)
        tensor = tensor_over(array)
    cuda = cupy._cuda()
    after = cuda.create_event()
    cuda.record(after, 0)
    assert not cuda.is_complete(after)
    assert not tensor.any()
    opened.set()
    eventually(lambda: cuda.is_complete(after))
    assert (tensor == 7).all()
    cuda.destroy_event(after)


@pytest.mark.parametrize(("current", "given"), [(0, 1), (1234, 1234)])
def test_torchs_current_stream_is_the_one_that_waits(
    current: int, given: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's number of the default stream is not DLPack's."""

    class Stillborn(cupy.CupyArray):
        def __dlpack__(self, *, stream: int | None = None) -> Any:
            self.consumers.append(stream or 0)
            return self.host.__dlpack__()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda number: contextlib.nullcontext(number))
    streams = {0: SimpleNamespace(cuda_stream=current)}
    monkeypatch.setattr(torch.cuda, "current_stream", streams.__getitem__)
    array = Stillborn(8, np.uint8)
    tensor_over(array)
    assert array.consumers == [given]


# In the pool


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_pool_takes_and_gives_numpy_arrays(dtype: str) -> None:
    array = np.arange(24).reshape(4, 6).astype(dtype).T
    out = np.zeros((6, 4), dtype)
    with TensorMemoryPool(MIB) as pool:
        block = pool.store_tensor(array)
        assert pool.load_tensor(block, out=out) is out
        loaded = pool.load_tensor(block)
    assert (out == array).all()
    assert isinstance(loaded, torch.Tensor)
    assert (np.from_dlpack(loaded) == array).all()


def test_the_pool_takes_and_gives_cupys_arrays() -> None:
    array, out = cupy.empty((8, 16), cupy.uint8), cupy.empty((8, 16), cupy.uint8)
    array.fill(9)
    cupy.asnumpy(array)  # waits: the double's memory is the host's, whose copies follow no stream
    with TensorMemoryPool(MIB) as pool:
        assert pool.load_tensor(pool.store_tensor(array), out=out) is out
    assert (cupy.asnumpy(out) == 9).all()
    assert (array.consumers, out.consumers) == ([1], [1])


def test_the_pool_loads_into_strides_and_touches_nothing_between_them() -> None:
    frame = np.zeros((6, 8), np.float32)
    with TensorMemoryPool(MIB) as pool:
        pool.load_tensor(pool.store_tensor(np.ones((6, 4), np.float32)), out=frame[:, ::2])
    assert (frame == [1, 0] * 4).all()


@pytest.mark.parametrize("name", UNFIT_OUTS)
def test_the_pool_loads_into_no_array_that_does_not_match(name: str) -> None:
    out, text = UNFIT_OUTS[name]
    with TensorMemoryPool(MIB) as pool:
        block = pool.store_tensor(np.zeros(4, np.float32))
        with pytest.raises((TypeError, ValueError, BufferError), match=text):
            pool.load_tensor(block, out=out)
        assert pool.load_tensor(block).tolist() == [0, 0, 0, 0]


def test_an_array_that_cannot_be_stored_takes_no_memory() -> None:
    with TensorMemoryPool(MIB) as pool:
        with pytest.raises(BufferError, match="object"):
            pool.store_tensor(np.array([None]))
        assert pool.stats().num_blocks == 0
