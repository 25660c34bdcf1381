"""Compiling and launching kernels, on the doubles of NVRTC and the driver: what they get, and what
they refuse. The real NVRTC compiles ours where it is installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from p2p_engine.errors import TransportError
from p2p_engine.gpu.cuda import Cuda
from p2p_engine.gpu.kernels import Compiler, Kernels
from p2p_engine.gpu.pack_kernel import KERNEL
from tests.doubles.gpu import GpuDouble
from tests.doubles.slow_kernel import SlowKernel
from tests.support import eventually

DOUBLE = GpuDouble()
ADD = """
extern "C" __global__ void add(long long* out, long long first, long long step) {
    for (long long i = threadIdx.x + blockIdx.x * blockDim.x; i < 8; i += gridDim.x * blockDim.x)
        out[i] = first + i * step;
}
"""


@pytest.fixture
def cuda() -> Cuda:
    made = Cuda()
    made.use(0)
    return made


@pytest.fixture
def stream(cuda: Cuda) -> Iterator[int]:
    before = DOUBLE["live_streams"]
    made = cuda.create_stream()
    yield made
    cuda.destroy_stream(made)
    eventually(lambda: DOUBLE["live_streams"] == before)


def test_arguments_arrive_in_order_and_may_change_after_the_launch(cuda: Cuda, stream: int) -> None:
    kernels, out = Kernels(cuda, 0, ADD), np.zeros(8, np.int64)
    kernels.launch("add", 1, 1, stream, out.ctypes.data, 0, 0)  # loads it
    before = SlowKernel(cuda, stream)
    kernels.launch("add", 2, 3, stream, out.ctypes.data, -5, 1 << 40)
    assert not out.any()
    before.end()
    cuda.synchronize(stream)
    assert out.tolist() == [-5 + (i << 40) for i in range(8)]
    kernels.close()
    kernels.close()
    assert DOUBLE["live_modules"] == 0


def test_a_device_newer_than_the_compiler_gets_assembly(cuda: Cuda) -> None:
    with DOUBLE.fault(capability=999):
        Kernels(cuda, 0, ADD).close()
    compiler = Compiler()
    assert compiler.compile(ADD, 90).startswith(b"double of sm_90 ")
    assert compiler.compile(ADD, 101).startswith(b"// double of compute_100 ")


def test_what_does_not_compile_is_an_error_with_the_first_line_of_the_log(cuda: Cuda) -> None:
    with DOUBLE.fault(compiler_fails=1), pytest.raises(TransportError) as caught:
        Kernels(cuda, 0, ADD)
    text = "NVRTC: NVRTC_ERROR_COMPILATION: p2p_engine.cu(1): error: the double cannot compile it"
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("name", "threads", "problem"),
    [
        ("other", 1, r"cuModuleGetFunction: named symbol not found \(500\)"),
        ("add", 2048, r"cuLaunchKernel: invalid argument \(1\)"),
    ],
)
def test_what_the_driver_refuses_is_an_error(
    cuda: Cuda, stream: int, name: str, threads: int, problem: str
) -> None:
    kernels = Kernels(cuda, 0, ADD)
    with pytest.raises(TransportError, match=problem):
        kernels.launch(name, 1, threads, stream, 0, 0, 0)
    with DOUBLE.fault(kernel_fails=700), pytest.raises(TransportError, match=r"\(700\)"):
        kernels.launch("add", 1, 1, stream, 0, 0, 0)
    kernels.close()


def test_a_thread_without_a_context_can_launch_nothing(cuda: Cuda, stream: int) -> None:
    kernels, caught = Kernels(cuda, 0, ADD), list[str]()

    def launch() -> None:
        try:
            kernels.launch("add", 1, 1, stream, 0, 0, 0)
        except TransportError as error:
            caught.append(str(error))

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert caught == ["cuLaunchKernel: invalid device context (201)"]
    kernels.close()


WITH_REAL_NVRTC = """
from p2p_engine.gpu.kernels import Compiler
from p2p_engine.gpu.pack_kernel import KERNEL
for capability in (75, 80, 90, 100, 120):
    image = Compiler().compile(KERNEL, capability)
    assert image[:4] == bytes([127]) + b"ELF", image[:20]
"""


def test_the_real_nvrtc_compiles_the_pack_kernel() -> None:
    """It needs no GPU. In a process that does not have the double."""
    if not importlib.util.find_spec("nvidia") or not importlib.util.find_spec("nvidia.cu13"):
        pytest.skip("the wheel nvidia-cuda-nvrtc is not installed")
    subprocess.run([sys.executable, "-c", WITH_REAL_NVRTC], check=True)


def test_the_pack_kernel_is_plain_cuda_c() -> None:
    """NVRTC has no headers where there is no toolkit."""
    assert "#include" not in KERNEL
