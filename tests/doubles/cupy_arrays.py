"""cupy over the double of a GPU: the few of its names that tests and the kit use.

The double's memory is the host's, so a capsule says that, and so does the tensor over it.
`__dlpack_device__` says CUDA, as cupy's does, and the consumer's stream waits for the producer's.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from p2p_engine.gpu.cuda import Cuda
from tests.doubles.gpu import GpuDouble
from tests.doubles.slow_kernel import SlowKernel

__version__ = "none: a double"
NOT_WAITED_FOR = -1  # DLPack's number of no stream
LEGACY_STREAM = 1
uint8 = np.uint8


@functools.cache
def _driver() -> Cuda:
    GpuDouble()  # beneath the bindings
    return Cuda()


def _cuda() -> Cuda:
    _driver().use(0)
    return _driver()


class CupyStream:
    """cupy.cuda.Stream: a stream that arrays are made in while it is entered."""

    entered: ClassVar[list[CupyStream]] = []  # the last one is current

    def __init__(self, *, non_blocking: bool = False) -> None:
        assert non_blocking, "others wait for the default stream, which the double's do not"
        self.ptr = _cuda().create_stream()
        self._functions: list[SlowKernel] = []

    def __enter__(self) -> CupyStream:
        self.entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.entered.remove(self)

    def __del__(self) -> None:
        _cuda().destroy_stream(self.ptr)

    def launch_host_func(self, callback: Callable[[Any], object], argument: object) -> None:
        """Call back when all before it in the stream is done; what comes after it waits."""
        self._functions.append(SlowKernel(_cuda(), self.ptr, lambda _: callback(argument)))

    def synchronize(self) -> None:
        """Block until all that is in the stream is done."""
        _cuda().synchronize(self.ptr)


class UnownedMemory:
    """cupy.cuda.UnownedMemory."""

    def __init__(self, ptr: int, size: int, owner: object) -> None:
        self.ptr, self.size, self.owner = ptr, size, owner


class MemoryPointer:
    """cupy.cuda.MemoryPointer."""

    def __init__(self, memory: UnownedMemory, offset: int) -> None:
        self.memory, self.ptr = memory, memory.ptr + offset


class CupyArray:
    """cupy.ndarray."""

    def __init__(
        self, shape: Any, dtype: Any = np.float64, memptr: MemoryPointer | None = None
    ) -> None:
        self._memptr = memptr
        self.host: np.ndarray
        if memptr is None:
            self.host = np.zeros(shape, dtype)
        else:
            nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            memory = (ctypes.c_uint8 * nbytes).from_address(memptr.ptr)
            self.host = np.frombuffer(memory, dtype).reshape(shape)
        self.dtype, self.shape, self.strides = self.host.dtype, shape, self.host.strides
        self.flags = SimpleNamespace(c_contiguous=True)  # cupy's do not say whether it is writeable
        self.consumers: list[int] = []  # the streams that wait, or were to

    def fill(self, value: int) -> None:
        """Fill with bytes of this value, in the current stream."""
        address = self.host.ctypes.data
        _cuda().fill(address, value, self.host.nbytes, _current_stream())

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        if stream == 0:
            raise ValueError("0 is not a stream of DLPack's")
        consumer = LEGACY_STREAM if stream is None else stream
        if consumer != NOT_WAITED_FOR:
            cuda = _cuda()
            event = cuda.create_event()
            cuda.record(event, _current_stream())
            cuda.wait_for(0 if consumer == LEGACY_STREAM else consumer, event)
            cuda.destroy_event(event)
        self.consumers.append(consumer)
        return self.host.__dlpack__()


def _current_stream() -> int:
    return CupyStream.entered[-1].ptr if CupyStream.entered else 0


def asnumpy(array: CupyArray) -> np.ndarray:
    """Return a copy on the host, after the current stream."""
    _cuda().synchronize(_current_stream())
    return np.array(array.host)


cuda = SimpleNamespace(Stream=CupyStream, UnownedMemory=UnownedMemory, MemoryPointer=MemoryPointer)
empty = ndarray = CupyArray
