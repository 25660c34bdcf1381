"""The part of the CUDA runtime that the engine uses, through ctypes: no build needs CUDA.

Streams, events and addresses are plain integers. Every error names the call that failed. A thread
calls `use` before anything else. The docstring of a call says if it waits for the whole device.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future
from ctypes import byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import TypeVar

from p2p_engine.errors import ConfigError, TransportError
from p2p_engine.gpu.shared_library import bind, load_library

T = TypeVar("T")
SONAMES = ("libcudart.so.13", "libcudart.so.12")
WHEELS = ("nvidia.cu13", "nvidia.cuda_runtime")
IPC_HANDLE_BYTES = 64

_NOT_READY = 600
_PEER_ACCESS_ALREADY_ENABLED = 704
_MULTIPROCESSORS = 16
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
_SHARED_BY_MPS = 133  # since CUDA 12.3
_DISABLE_TIMING = 2
_NON_BLOCKING = 1
_PORTABLE_AND_MAPPED = 3
_LAZY_PEER_ACCESS = 1
_DEFAULT_DIRECTION = 4
_CAPTURE_RELAXED = 2


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", c_char * IPC_HANDLE_BYTES)]


_FUNCTIONS: dict[str, tuple[object, ...]] = {
    "cudaGetDeviceCount": (c_void_p,),
    "cudaSetDevice": (c_int,),
    "cudaGetDevice": (c_void_p,),
    "cudaThreadExchangeStreamCaptureMode": (c_void_p,),
    "cudaRuntimeGetVersion": (c_void_p,),
    "cudaDriverGetVersion": (c_void_p,),
    "cudaDeviceGetAttribute": (c_void_p, c_int, c_int),
    "cudaDeviceCanAccessPeer": (c_void_p, c_int, c_int),
    "cudaDeviceEnablePeerAccess": (c_int, c_uint),
    "cudaMalloc": (c_void_p, c_size_t),
    "cudaFree": (c_void_p,),
    "cudaMemGetInfo": (c_void_p, c_void_p),
    "cudaMemcpyAsync": (c_void_p, c_void_p, c_size_t, c_int, c_void_p),
    "cudaMemsetAsync": (c_void_p, c_int, c_size_t, c_void_p),
    "cudaStreamCreateWithPriority": (c_void_p, c_uint, c_int),
    "cudaDeviceGetStreamPriorityRange": (c_void_p, c_void_p),
    "cudaStreamDestroy": (c_void_p,),
    "cudaStreamSynchronize": (c_void_p,),
    "cudaStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cudaEventCreateWithFlags": (c_void_p, c_uint),
    "cudaEventDestroy": (c_void_p,),
    "cudaEventRecord": (c_void_p, c_void_p),
    "cudaEventQuery": (c_void_p,),
    "cudaHostRegister": (c_void_p, c_size_t, c_uint),
    "cudaHostUnregister": (c_void_p,),
    "cudaIpcGetMemHandle": (c_void_p, c_void_p),
    "cudaIpcOpenMemHandle": (c_void_p, _IpcHandle, c_uint),
    "cudaIpcCloseMemHandle": (c_void_p,),
    "cudaGetLastError": (),
}


class Cuda:
    """One process's CUDA runtime."""

    def __init__(self, path: str = "") -> None:
        """Load the runtime from `path`, or from torch, its wheels or the system.

        Raises:
            ConfigError: there is none, or it lacks a function.
        """
        self.library = load_library(path, SONAMES, WHEELS)
        bind(self.library, c_int, _FUNCTIONS)
        bind(self.library, c_char_p, {"cudaGetErrorString": (c_int,)})
        self.host_ranges: dict[int, int] = {}  # host memory that copies may use: bytes by address

    def device_count(self) -> int:
        """Return how many devices there are.

        Raises:
            TransportError: there is none, or no driver, or one that is too old; says which.
        """
        count = c_int()
        self._call("cudaGetDeviceCount", byref(count))
        return count.value

    def use(self, device: int) -> None:
        """Make a device the current one of the calling thread, for good. The thread must be ours:
        its calls stay allowed while another thread captures a graph, and do not break the
        capture."""
        self._call("cudaSetDevice", device)
        mode = c_int(_CAPTURE_RELAXED)
        self._call("cudaThreadExchangeStreamCaptureMode", byref(mode))

    def on(self, device: int, call: Callable[[], T]) -> T:
        """Run `call` where this device is the current one, and return its result; the calling
        thread may be anybody's. Blocks for the start of a thread if it is on another device.

        That thread is not moved to our device and back: from CUDA 12 on, the way back would make a
        context on a device which it has not used, because a thread that has named none is on device
        0. A context takes half a gigabyte there.
        """
        current = c_int()
        self._call("cudaGetDevice", byref(current))
        if current.value == device:
            return call()
        outcome: Future[T] = Future()

        def run() -> None:
            try:
                self.use(device)
                outcome.set_result(call())
            except Exception as error:  # noqa: BLE001  # it is the caller's
                outcome.set_exception(error)

        threading.Thread(target=run, name="p2p-on-device", daemon=True).start()
        return outcome.result()

    def reach(self, device: int) -> None:
        """Let work of the thread's device access another device's memory, allocated in this
        process; idempotent.

        Raises:
            TransportError: the hardware does not allow it.
        """
        current, can = c_int(), c_int()
        self._call("cudaGetDevice", byref(current))
        if current.value == device:
            return
        self._call("cudaDeviceCanAccessPeer", byref(can), current.value, device)
        if not can.value:
            raise TransportError(f"GPU {current.value} cannot access the memory of GPU {device}")
        code = self.library.cudaDeviceEnablePeerAccess(device, 0)
        if code == _PEER_ACCESS_ALREADY_ENABLED:
            self.library.cudaGetLastError()  # else the next launch of any library would report it
        else:
            self._check("cudaDeviceEnablePeerAccess", code)

    def num_processors(self, device: int) -> int:
        """Return how many multiprocessors a device has."""
        return self._attribute(_MULTIPROCESSORS, device)

    def is_shared_by_mps(self, device: int) -> bool:
        """Whether this process is a client of MPS there, as far as CUDA knows."""
        with contextlib.suppress(TransportError):  # an older release
            return bool(self._attribute(_SHARED_BY_MPS, device))
        return False

    def compute_capability(self, device: int) -> int:
        """Return a device's compute capability, such as 90 for 9.0."""
        major, minor = (
            self._attribute(each, device) for each in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR)
        )
        return 10 * major + minor

    def versions(self) -> tuple[int, int]:
        """Return the versions of runtime and driver, such as 13000."""
        runtime, driver = c_int(), c_int()
        self._call("cudaRuntimeGetVersion", byref(runtime))
        self._call("cudaDriverGetVersion", byref(driver))
        return runtime.value, driver.value

    def allocate(self, nbytes: int) -> int:
        """Allocate memory of the thread's device; may wait for the whole device."""
        address = c_void_p()
        self._call("cudaMalloc", byref(address), nbytes)
        return address.value or 0

    def free(self, address: int) -> None:
        """Free device memory; waits for the whole device."""
        self._call("cudaFree", address)

    def memory(self) -> tuple[int, int]:
        """Return the free and total bytes of the thread's device."""
        free, total = c_size_t(), c_size_t()
        self._call("cudaMemGetInfo", byref(free), byref(total))
        return free.value, total.value

    def copy(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy between any two of device, registered and peer memory."""
        self._call("cudaMemcpyAsync", destination, source, nbytes, _DEFAULT_DIRECTION, stream)

    def fill(self, address: int, value: int, nbytes: int, stream: int) -> None:
        """Enqueue a fill of bytes with a value."""
        self._call("cudaMemsetAsync", address, value, nbytes, stream)

    def create_stream(self, *, is_urgent: bool = False) -> int:
        """Make a stream that does not wait for the default stream; an urgent one has the highest
        priority that the thread's device knows."""
        stream, least, most = c_void_p(), c_int(), c_int()
        self._call("cudaDeviceGetStreamPriorityRange", byref(least), byref(most))
        priority = most.value if is_urgent else 0
        self._call("cudaStreamCreateWithPriority", byref(stream), _NON_BLOCKING, priority)
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream once its work is done; returns at once."""
        self._call("cudaStreamDestroy", stream)

    def synchronize(self, stream: int) -> None:
        """Block until a stream is idle: for threads that may wait, tests and benchmarks."""
        self._call("cudaStreamSynchronize", stream)

    def create_event(self) -> int:
        """Make an event of the thread's device, without timing. It is complete until it is
        recorded."""
        event = c_void_p()
        self._call("cudaEventCreateWithFlags", byref(event), _DISABLE_TIMING)
        return event.value or 0

    def destroy_event(self, event: int) -> None:
        """Destroy an event; returns at once."""
        self._call("cudaEventDestroy", event)

    def record(self, event: int, stream: int) -> None:
        """Record an event: it completes after all that is in the stream now."""
        self._call("cudaEventRecord", event, stream)

    def is_complete(self, event: int) -> bool:
        """Whether an event is complete; never blocks."""
        code = self.library.cudaEventQuery(event)
        if code == _NOT_READY:
            self.library.cudaGetLastError()  # else the next launch of any library would report it
            return False
        self._check("cudaEventQuery", code)
        return True

    def wait_for(self, stream: int, event: int) -> None:
        """Let later work of the stream wait for an event; does not block the caller."""
        self._call("cudaStreamWaitEvent", stream, event, 0)

    def note_host(self, address: int, nbytes: int) -> None:
        """Note host memory: copies of it use the copy engines, registered or not."""
        self.host_ranges = {**self.host_ranges, address: nbytes}  # others may be reading it

    def forget_host(self, address: int) -> None:
        """Forget host memory that is gone; idempotent."""
        self.host_ranges = {key: n for key, n in self.host_ranges.items() if key != address}

    def pin(self, address: int, nbytes: int) -> None:
        """Page-lock host memory for all devices. Touches all of it, holds locks of the driver, and
        may wait for the device."""
        self._call("cudaHostRegister", address, nbytes, _PORTABLE_AND_MAPPED)

    def unpin(self, address: int) -> None:
        """Undo `pin`; waits for the whole device."""
        self._call("cudaHostUnregister", address)

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock and note little host memory at once; for more, see HostPins."""
        self.pin(address, nbytes)
        self.note_host(address, nbytes)

    def unregister(self, address: int) -> None:
        """Undo `register`; waits for the whole device."""
        self.unpin(address)
        self.forget_host(address)

    def is_host(self, address: int) -> bool:
        """Whether an address lies in host memory that was noted or registered."""
        return any(start <= address < start + n for start, n in self.host_ranges.items())

    def export(self, address: int) -> bytes:
        """Return the handle with which other processes can open an allocation."""
        handle = _IpcHandle()
        self._call("cudaIpcGetMemHandle", byref(handle), address)
        return bytes(memoryview(handle))

    def open(self, handle: bytes) -> int:
        """Map another process's allocation; returns its address here.

        Raises:
            TransportError: it is this process's own, or it does not exist (any more).
        """
        address = c_void_p()
        opaque = _IpcHandle.from_buffer_copy(handle)
        self._call("cudaIpcOpenMemHandle", byref(address), opaque, _LAZY_PEER_ACCESS)
        return address.value or 0

    def nbytes_from(self, address: int) -> int:
        """Return the bytes from an address to the end of its allocation, as the driver knows it,
        whatever the process says that made the allocation.

        Raises:
            TransportError: it knows no allocation there, or there is no driver.
        """
        start, size = c_void_p(), c_size_t()
        try:
            driver = load_library("", ("libcuda.so.1",), ())
            bind(driver, c_int, {"cuMemGetAddressRange_v2": (c_void_p, c_void_p, c_void_p)})
        except ConfigError as error:
            raise TransportError(str(error)) from error
        if code := driver.cuMemGetAddressRange_v2(byref(start), byref(size), address):
            raise TransportError(f"cuMemGetAddressRange: error {code}")
        return (start.value or 0) + size.value - address

    def close(self, address: int) -> None:
        """Unmap another process's allocation."""
        self._call("cudaIpcCloseMemHandle", address)

    def _attribute(self, number: int, device: int) -> int:
        value = c_int()
        self._call("cudaDeviceGetAttribute", byref(value), number, device)
        return value.value

    def _call(self, name: str, *arguments: object) -> None:
        self._check(name, getattr(self.library, name)(*arguments))

    def _check(self, name: str, code: int) -> None:
        if code:
            text = self.library.cudaGetErrorString(code).decode()
            self.library.cudaGetLastError()
            raise TransportError(f"{name}: {text} ({code})")
