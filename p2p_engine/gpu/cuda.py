"""The part of CUDA's driver that the engine uses, by NVIDIA's cuda-bindings.

Streams, events and addresses are plain integers. Every error names the call that failed. A thread
calls `use` before anything else. The docstring of a call says if it waits for the whole device.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from p2p_engine.errors import ConfigError, TransportError

T = TypeVar("T")
BINDINGS = "cuda-bindings>=13.0.3,<14"


def load_bindings(name: str) -> Any:
    """Return a module of cuda-bindings: `driver` or `nvrtc`. Nothing of CUDA's is loaded yet.

    Raises:
        ConfigError: the package is not installed; names it.
    """
    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        raise ConfigError(
            f"a GPU needs NVIDIA's bindings, which torch for CUDA brings: pip install '{BINDINGS}' "
            f"({error})"
        ) from error


def run_bound(function: Callable[..., tuple[Any, ...]], *arguments: Any) -> tuple[Any, ...]:
    """Call a function of cuda-bindings; returns its code and results. The bindings make a member
    of an enumeration of each code.

    Raises:
        TransportError: they have no such member: the library is newer than the bindings.
    """
    try:
        return function(*arguments)
    except (KeyError, ValueError) as error:
        text = f"{function.__name__}: a code that cuda-bindings do not know: {error}"
        raise TransportError(text) from error


class Cuda:
    """The driver in this process, and the primary context of each device, which torch uses too."""

    def __init__(self) -> None:
        """Load the driver.

        Raises:
            ConfigError: the bindings or the driver are missing, or the driver does not work; with
                CUDA's own words, such as those for a machine without a GPU.
        """
        self.driver = load_bindings("driver")
        try:
            self.call(self.driver.cuInit, 0)
        except TransportError as error:
            raise ConfigError(f"CUDA cannot be used: {error}") from error
        except RuntimeError as error:  # the bindings find no library, or no function in it
            raise ConfigError(f"NVIDIA's driver cannot be loaded: {error}") from error
        results = self.driver.CUresult
        self._not_ready = results.CUDA_ERROR_NOT_READY
        self._access_is_enabled = results.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
        self._contexts: dict[int, Any] = {}  # by device; each lives as long as the process
        self.host_ranges: dict[int, int] = {}  # host memory that copies may use: bytes by address

    def call(self, function: Callable[..., tuple[Any, ...]], *arguments: Any) -> Any:
        """Call a function of the driver and return its one result, a tuple of several, or None.

        Raises:
            TransportError: the driver refuses; names the function, and says why in CUDA's words.
        """
        code, *results = run_bound(function, *arguments)
        if code:
            raise self._error(function, code)
        return (results[0] if len(results) == 1 else tuple(results)) if results else None

    def device_count(self) -> int:
        """Return how many devices there are."""
        return int(self.call(self.driver.cuDeviceGetCount))

    def driver_version(self) -> int:
        """Return the newest release of CUDA that the driver knows, such as 13000 for 13.0."""
        return int(self.call(self.driver.cuDriverGetVersion))

    def use(self, device: int) -> None:
        """Make a device the current one of the calling thread, for good. The thread must be ours:
        its calls stay allowed while another thread captures a graph, and do not break the
        capture."""
        self.call(self.driver.cuCtxSetCurrent, self._context(device))
        relaxed = self.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self.call(self.driver.cuThreadExchangeStreamCaptureMode, relaxed)

    def on(self, device: int, call: Callable[[], T]) -> T:
        """Run `call` where this device is the current one, and return its result. The calling
        thread may be anybody's: it is on its own device again afterwards, or on none."""
        self.call(self.driver.cuCtxPushCurrent, self._context(device))
        try:
            return call()
        finally:
            self.call(self.driver.cuCtxPopCurrent)

    def reach(self, device: int) -> None:
        """Let work of the thread's device access another device's memory, allocated in this
        process; idempotent.

        Raises:
            TransportError: the hardware does not allow it.
        """
        current = int(self.call(self.driver.cuCtxGetDevice))
        if current == device:
            return
        if not self.call(self.driver.cuDeviceCanAccessPeer, current, device):
            raise TransportError(f"GPU {current} cannot access the memory of GPU {device}")
        enable = self.driver.cuCtxEnablePeerAccess
        (code,) = run_bound(enable, self._context(device), 0)
        if code and code != self._access_is_enabled:
            raise self._error(enable, code)

    def num_processors(self, device: int) -> int:
        """Return how many multiprocessors a device has."""
        return self._attribute("MULTIPROCESSOR_COUNT", device)

    def is_shared_by_mps(self, device: int) -> bool:
        """Whether this process is a client of MPS there, as far as CUDA knows."""
        with contextlib.suppress(TransportError):  # a driver older than CUDA 12.3
            return bool(self._attribute("MPS_ENABLED", device))
        return False

    def compute_capability(self, device: int) -> int:
        """Return a device's compute capability, such as 90 for 9.0."""
        major = self._attribute("COMPUTE_CAPABILITY_MAJOR", device)
        return 10 * major + self._attribute("COMPUTE_CAPABILITY_MINOR", device)

    def allocate(self, nbytes: int) -> int:
        """Allocate memory of the thread's device; may wait for the whole device."""
        return int(self.call(self.driver.cuMemAlloc, nbytes))

    def free(self, address: int) -> None:
        """Free device memory; waits for the whole device."""
        self.call(self.driver.cuMemFree, address)

    def memory(self) -> tuple[int, int]:
        """Return the free and total bytes of the thread's device."""
        free, total = self.call(self.driver.cuMemGetInfo)
        return free, total

    def copy(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy between any two of device, registered and peer memory."""
        self.call(self.driver.cuMemcpyAsync, destination, source, nbytes, stream)

    def fill(self, address: int, value: int, nbytes: int, stream: int) -> None:
        """Enqueue a fill of bytes with a value."""
        self.call(self.driver.cuMemsetD8Async, address, value, nbytes, stream)

    def create_stream(self, *, is_urgent: bool = False) -> int:
        """Make a stream that does not wait for the default stream; an urgent one has the highest
        priority that the thread's device knows."""
        _, most = self.call(self.driver.cuCtxGetStreamPriorityRange)
        flags = self.driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        priority = most if is_urgent else 0
        return int(self.call(self.driver.cuStreamCreateWithPriority, flags, priority))

    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream once its work is done; returns at once."""
        self.call(self.driver.cuStreamDestroy, stream)

    def synchronize(self, stream: int) -> None:
        """Block until a stream is idle: for threads that may wait, tests and benchmarks."""
        self.call(self.driver.cuStreamSynchronize, stream)

    def create_event(self) -> int:
        """Make an event of the thread's device, without timing. It is complete until it is
        recorded."""
        flags = self.driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        return int(self.call(self.driver.cuEventCreate, flags))

    def destroy_event(self, event: int) -> None:
        """Destroy an event; returns at once."""
        self.call(self.driver.cuEventDestroy, event)

    def record(self, event: int, stream: int) -> None:
        """Record an event: it completes after all that is in the stream now."""
        self.call(self.driver.cuEventRecord, event, stream)

    def is_complete(self, event: int) -> bool:
        """Whether an event is complete; never blocks."""
        (code,) = run_bound(self.driver.cuEventQuery, event)
        if code and code != self._not_ready:
            raise self._error(self.driver.cuEventQuery, code)
        return not code

    def wait_for(self, stream: int, event: int) -> None:
        """Let later work of the stream wait for an event; does not block the caller."""
        self.call(self.driver.cuStreamWaitEvent, stream, event, 0)

    def note_host(self, address: int, nbytes: int) -> None:
        """Note host memory: copies of it use the copy engines, registered or not."""
        self.host_ranges = {**self.host_ranges, address: nbytes}  # others may be reading it

    def forget_host(self, address: int) -> None:
        """Forget host memory that is gone; idempotent."""
        self.host_ranges = {key: n for key, n in self.host_ranges.items() if key != address}

    def pin(self, address: int, nbytes: int) -> None:
        """Page-lock host memory for all devices. Touches all of it, holds locks of the driver, and
        may wait for the device."""
        flags = self.driver.CU_MEMHOSTREGISTER_PORTABLE | self.driver.CU_MEMHOSTREGISTER_DEVICEMAP
        self.call(self.driver.cuMemHostRegister, address, nbytes, flags)

    def unpin(self, address: int) -> None:
        """Undo `pin`; waits for the whole device."""
        self.call(self.driver.cuMemHostUnregister, address)

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
        handle = self.call(self.driver.cuIpcGetMemHandle, address)
        return ctypes.string_at(handle.getPtr(), self.driver.CU_IPC_HANDLE_SIZE)

    def open(self, handle: bytes) -> int:
        """Map another process's allocation; returns its address here.

        Raises:
            TransportError: the handle is not a handle, the allocation is this process's own, or it
                does not exist (any more).
        """
        if len(handle) != self.driver.CU_IPC_HANDLE_SIZE:
            raise TransportError(f"{len(handle)} bytes are no handle of CUDA's")
        opaque = self.driver.CUipcMemHandle()
        ctypes.memmove(opaque.getPtr(), handle, len(handle))
        flags = self.driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(self.call(self.driver.cuIpcOpenMemHandle, opaque, flags))

    def nbytes_from(self, address: int) -> int:
        """Return the bytes from an address to the end of its allocation, as the driver knows it,
        whatever the process says that made the allocation.

        Raises:
            TransportError: it knows no allocation there.
        """
        start, nbytes = self.call(self.driver.cuMemGetAddressRange, address)
        return int(start) + int(nbytes) - address

    def close(self, address: int) -> None:
        """Unmap another process's allocation."""
        self.call(self.driver.cuIpcCloseMemHandle, address)

    def _context(self, device: int) -> Any:
        """Return a device's primary context, which is made if nothing has used the device yet."""
        if device not in self._contexts:
            handle = self.call(self.driver.cuDeviceGet, device)
            self._contexts[device] = self.call(self.driver.cuDevicePrimaryCtxRetain, handle)
        return self._contexts[device]

    def _attribute(self, name: str, device: int) -> int:
        attribute = getattr(self.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.call(self.driver.cuDeviceGetAttribute, attribute, device))

    def _error(self, function: Callable[..., Any], code: Any) -> TransportError:
        _, text = self.driver.cuGetErrorString(code)
        words = text.decode() if text else "unknown"
        return TransportError(f"{function.__name__}: {words} ({int(code)})")
