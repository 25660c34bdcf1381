"""The CUDA runtime by ctypes, on the double: order, events, memory, other processes' handles."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from p2p_engine.errors import ConfigError, TransportError
from p2p_engine.gpu.cuda import IPC_HANDLE_BYTES, Cuda
from tests.doubles.gpu import GpuDouble, build
from tests.support import eventually

HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@pytest.fixture
def double() -> Iterator[GpuDouble]:
    made = GpuDouble()
    before = made.held()
    yield made
    eventually(lambda: made.held() == before, what=f"{made.held()} {before}")


@pytest.fixture
def cuda(double: GpuDouble) -> Cuda:
    made = Cuda(double.path)
    made.use(0)
    return made


class Gate:
    """Keeps a stream busy until it is opened, as a slow kernel does."""

    def __init__(self, cuda: Cuda, stream: int) -> None:
        self._opened = threading.Event()
        self._function = HOST_FUNCTION(lambda _: self._opened.wait(20) and None)
        cuda.library.cudaLaunchHostFunc(ctypes.c_void_p(stream), self._function, None)

    def open(self) -> None:
        self._opened.set()


def test_a_stream_is_in_order_and_events_tell_of_it(cuda: Cuda) -> None:
    stream, event, memory = cuda.create_stream(), cuda.create_event(), cuda.allocate(4096)
    gate = Gate(cuda, stream)
    cuda.fill(memory, 7, 4096, stream)
    cuda.record(event, stream)
    assert not cuda.is_complete(event)
    assert ctypes.string_at(memory, 4) == bytes(4)
    gate.open()
    eventually(lambda: cuda.is_complete(event))
    assert ctypes.string_at(memory, 4096) == b"\x07" * 4096
    cuda.destroy_stream(stream)
    cuda.destroy_event(event)
    cuda.free(memory)


def test_a_stream_waits_for_another_ones_event(cuda: Cuda) -> None:
    producer, consumer = cuda.create_stream(), cuda.create_stream()
    produced, consumed = cuda.create_event(), cuda.create_event()
    memory = cuda.allocate(8192)
    gate = Gate(cuda, producer)
    cuda.fill(memory, 9, 4096, producer)
    cuda.record(produced, producer)
    cuda.wait_for(consumer, produced)
    cuda.copy(memory + 4096, memory, 4096, consumer)
    cuda.record(consumed, consumer)
    assert not cuda.is_complete(consumed)
    gate.open()
    eventually(lambda: cuda.is_complete(consumed))
    assert ctypes.string_at(memory + 4096, 4096) == b"\x09" * 4096
    for stream in (producer, consumer):
        cuda.destroy_stream(stream)
    for event in (produced, consumed):
        cuda.destroy_event(event)
    cuda.free(memory)


def test_an_event_stands_for_what_it_was_recorded_behind_last(cuda: Cuda) -> None:
    slow, quick, event = cuda.create_stream(), cuda.create_stream(), cuda.create_event()
    gate = Gate(cuda, slow)
    cuda.record(event, slow)
    cuda.record(event, quick)
    eventually(lambda: cuda.is_complete(event))
    gate.open()
    cuda.synchronize(slow)
    assert cuda.is_complete(event)
    for stream in (slow, quick):
        cuda.destroy_stream(stream)
    cuda.destroy_event(event)


OPEN_IN_CHILD = """
import ctypes, sys
from p2p_engine.gpu.cuda import Cuda
cuda = Cuda(sys.argv[1])
cuda.use(0)
address = cuda.open(bytes.fromhex(sys.argv[2]))
print(ctypes.string_at(address, 5).decode())
ctypes.memmove(address, b"there", 5)
cuda.close(address)
"""


def test_another_process_opens_an_allocation(cuda: Cuda) -> None:
    memory = cuda.allocate(4096)
    ctypes.memmove(memory, b"hello", 5)
    handle = cuda.export(memory)
    assert len(handle) == IPC_HANDLE_BYTES
    command = [sys.executable, "-c", OPEN_IN_CHILD, build(), handle.hex()]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert answer.stdout == "hello\n"
    assert ctypes.string_at(memory, 5) == b"there"
    with pytest.raises(TransportError, match="cudaIpcOpenMemHandle"):
        cuda.open(handle)  # not in the process that exported it
    cuda.free(memory)
    stale = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "cudaIpcOpenMemHandle" in stale.stderr


def test_errors_name_the_call(cuda: Cuda, double: GpuDouble) -> None:
    with pytest.raises(TransportError, match=r"cudaSetDevice: .* \(101\)"):
        cuda.use(99)
    with double.fault(malloc_fails=1), pytest.raises(TransportError, match="cudaMalloc: out of"):
        cuda.allocate(4096)
    with pytest.raises(TransportError, match="cudaFree"):
        cuda.free(12345)


def test_memory_is_accounted(cuda: Cuda) -> None:
    free, total = cuda.memory()
    memory = cuda.allocate(1 << 20)
    assert cuda.memory() == (free - (1 << 20), total)
    assert cuda.nbytes_from(memory) == 1 << 20
    cuda.free(memory)
    assert cuda.memory() == (free, total)
    with pytest.raises(TransportError, match="cuMemGetAddressRange"):
        cuda.nbytes_from(memory)


def test_without_the_driver_no_size_is_believed(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> None:
        raise ConfigError("libcuda.so.1: not found")

    monkeypatch.setattr("p2p_engine.gpu.cuda.load_library", load)
    with pytest.raises(TransportError, match="libcuda"):
        cuda.nbytes_from(4096)


def test_a_library_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        Cuda("/nowhere/libcudart.so")
