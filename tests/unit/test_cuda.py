"""The driver by NVIDIA's bindings, on its double: order, events, memory, handles, contexts."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from p2p_engine.errors import ConfigError, TransportError
from p2p_engine.gpu.cuda import BINDINGS, Cuda
from tests.doubles.gpu import GpuDouble
from tests.doubles.slow_kernel import SlowKernel
from tests.support import eventually


@pytest.fixture
def double() -> Iterator[GpuDouble]:
    made = GpuDouble()
    before = made.held()
    yield made
    eventually(lambda: made.held() == before, what=f"{made.held()} {before}")


@pytest.fixture
def cuda(double: GpuDouble) -> Cuda:
    made = Cuda()
    made.use(0)
    return made


def test_a_stream_is_in_order_and_events_tell_of_it(cuda: Cuda) -> None:
    stream, event, memory = cuda.create_stream(), cuda.create_event(), cuda.allocate(4096)
    kernel = SlowKernel(cuda, stream)
    cuda.fill(memory, 7, 4096, stream)
    cuda.record(event, stream)
    assert not cuda.is_complete(event)
    assert ctypes.string_at(memory, 4) == bytes(4)
    kernel.end()
    eventually(lambda: cuda.is_complete(event))
    assert ctypes.string_at(memory, 4096) == b"\x07" * 4096
    cuda.destroy_stream(stream)
    cuda.destroy_event(event)
    cuda.free(memory)


def test_a_stream_waits_for_another_ones_event(cuda: Cuda) -> None:
    producer, consumer = cuda.create_stream(), cuda.create_stream()
    produced, consumed = cuda.create_event(), cuda.create_event()
    memory = cuda.allocate(8192)
    kernel = SlowKernel(cuda, producer)
    cuda.fill(memory, 9, 4096, producer)
    cuda.record(produced, producer)
    cuda.wait_for(consumer, produced)
    cuda.copy(memory + 4096, memory, 4096, consumer)
    cuda.record(consumed, consumer)
    assert not cuda.is_complete(consumed)
    kernel.end()
    eventually(lambda: cuda.is_complete(consumed))
    assert ctypes.string_at(memory + 4096, 4096) == b"\x09" * 4096
    for stream in (producer, consumer):
        cuda.destroy_stream(stream)
    for event in (produced, consumed):
        cuda.destroy_event(event)
    cuda.free(memory)


def test_an_event_stands_for_what_it_was_recorded_behind_last(cuda: Cuda) -> None:
    slow, quick, event = cuda.create_stream(), cuda.create_stream(), cuda.create_event()
    kernel = SlowKernel(cuda, slow)
    cuda.record(event, slow)
    cuda.record(event, quick)
    eventually(lambda: cuda.is_complete(event))
    kernel.end()
    cuda.synchronize(slow)
    assert cuda.is_complete(event)
    for stream in (slow, quick):
        cuda.destroy_stream(stream)
    cuda.destroy_event(event)


OPEN_IN_CHILD = """
import ctypes, sys
from p2p_engine.gpu.cuda import Cuda
from tests.doubles.gpu import GpuDouble
double, cuda = GpuDouble(), Cuda()
cuda.use(0)
address = cuda.open(bytes.fromhex(sys.argv[1]))
print(ctypes.string_at(address, 5).decode())
ctypes.memmove(address, b"there", 5)
cuda.close(address)
"""


def test_another_process_opens_an_allocation(cuda: Cuda) -> None:
    memory = cuda.allocate(4096)
    ctypes.memmove(memory, b"hello", 5)
    handle = cuda.export(memory)
    command = [sys.executable, "-c", OPEN_IN_CHILD, handle.hex()]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert answer.stdout == "hello\n"
    assert ctypes.string_at(memory, 5) == b"there"
    with pytest.raises(TransportError, match="cuIpcOpenMemHandle"):
        cuda.open(handle)  # not in the process that exported it
    with pytest.raises(TransportError, match="63 bytes are no handle"):
        cuda.open(handle[1:])
    cuda.free(memory)
    stale = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "cuIpcOpenMemHandle" in stale.stderr


def test_errors_name_the_call(cuda: Cuda, double: GpuDouble) -> None:
    with pytest.raises(TransportError, match=r"cuDeviceGet: .* \(101\)"):
        cuda.use(99)
    with double.fault(malloc_fails=1), pytest.raises(TransportError, match="cuMemAlloc: out of"):
        cuda.allocate(4096)
    with pytest.raises(TransportError, match="cuMemFree"):
        cuda.free(12345)


def test_a_code_that_the_bindings_do_not_know_is_an_error_of_the_call(
    cuda: Cuda, double: GpuDouble
) -> None:
    event = cuda.create_event()
    with double.fault(sticky_error=1234):
        with pytest.raises(TransportError, match="cuMemcpyAsync: a code that cuda-bindings"):
            cuda.copy(4096, 8192, 1, 0)
        with pytest.raises(TransportError, match="cuEventQuery: a code that cuda-bindings"):
            cuda.is_complete(event)
    cuda.destroy_event(event)


def test_memory_is_accounted(cuda: Cuda) -> None:
    free, total = cuda.memory()
    memory = cuda.allocate(1 << 20)
    assert cuda.memory() == (free - (1 << 20), total)
    assert cuda.nbytes_from(memory) == 1 << 20
    cuda.free(memory)
    assert cuda.memory() == (free, total)
    with pytest.raises(TransportError, match="cuMemGetAddressRange"):
        cuda.nbytes_from(memory)


def test_a_thread_is_lent_a_device_and_keeps_its_own(cuda: Cuda, double: GpuDouble) -> None:
    """Also a thread that has none: it gets none on the way back."""
    with double.fault(num_devices=2, contexts=0):
        cuda.destroy_event(cuda.on(1, cuda.create_event))
        with pytest.raises(TransportError, match="cuMemAlloc: out of memory"):
            cuda.on(1, lambda: cuda.allocate(1 << 60))
        assert int(cuda.call(cuda.driver.cuCtxGetDevice)) == 0
        with ThreadPoolExecutor(1) as pool:
            event = pool.submit(cuda.on, 1, cuda.create_event).result()
            with pytest.raises(TransportError, match="cuCtxGetDevice: invalid device context"):
                pool.submit(cuda.call, cuda.driver.cuCtxGetDevice).result()
        assert double["contexts"] == 0b10
        cuda.destroy_event(event)


def test_what_is_missing_on_a_machine_with_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(ConfigError, match=re.escape(f"pip install '{BINDINGS}'")):
        Cuda()


def test_a_driver_that_is_missing_or_does_not_work_is_named(double: GpuDouble) -> None:
    with (
        double.fault(driver_fails=100),
        pytest.raises(ConfigError, match=r"CUDA cannot be used: cuInit: .* \(100\)"),
    ):
        Cuda()
    program = "from p2p_engine.gpu.cuda import Cuda; Cuda()"  # a process without the double
    alone = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "ConfigError: NVIDIA's driver cannot be loaded: " in alone.stderr
