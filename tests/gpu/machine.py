"""What the checks of this folder run on: a real GPU, or the double of one, with other counts."""

from __future__ import annotations

import os
import platform
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from p2p_engine.gpu.cuda import Cuda
from p2p_engine.gpu.kernels import Compiler
from p2p_engine.gpu.pack_kernel import KERNEL
from p2p_engine.transports.nccl.library import Nccl, show_version
from tests.gpu.oracle import find_cupy

# Two ranks on one GPU: NCCL takes them for two hosts, and they meet over the loopback ...
TWO_HOSTS = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
}
# ... or, from 2.30 on, they say what they are, and reach each other's memory.
ONE_HOST = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}


@dataclass(frozen=True)
class Machine:
    """Where NCCL is (empty: where the engine finds it), whether the two ranks of a group are two
    hosts to NCCL, the module that is cupy, and the folder of another driver than the system's."""

    nccl: str = ""
    are_hosts: bool = True
    cupy: str = "cupy"
    driver: str = ""

    def environment(self, number: int) -> dict[str, str]:
        """Return the variables with which process `number` is started."""
        place = {"LD_LIBRARY_PATH": self.driver} if self.driver else {}
        if self.are_hosts:
            return {**os.environ, **place, **TWO_HOSTS, "NCCL_HOSTID": f"host-{number}"}
        return {**os.environ, **place, **ONE_HOST}

    def settings(self, transport: str, **changes: Any) -> dict[str, Any]:
        """Return the settings of an engine on its GPU."""
        return {
            "device": "cuda:0",
            "transports": transport,
            "nccl_library": self.nccl,
            "connect_timeout_seconds": 60,
            "transfer_timeout_seconds": 120,
            **changes,
        }

    def describe(self) -> dict[str, Any]:
        """Name the GPU, the driver, the libraries, and what of the kernel the engine can use."""
        gpu: Any = torch.cuda
        cuda, nccl = self.load()
        driver = Path("/proc/driver/nvidia/version")
        capability = cuda.compute_capability(0)
        compiler = Compiler()
        return {
            "gpu": gpu.get_device_name(0) if gpu.is_available() else None,
            "capability": capability,
            "free_and_total_bytes": cuda.memory(),
            "driver": driver.read_text().splitlines()[0] if driver.exists() else None,
            "cuda_driver": cuda.driver_version(),
            "nccl": show_version(nccl.version),
            "nvrtc": compiler.version,
            "image_bytes": len(compiler.compile(KERNEL, capability)),
            "torch": torch.__version__,
            "cupy": self.find_cupy()[1],
            "python": platform.python_version(),
            "kernel": platform.release(),
            "cores": len(os.sched_getaffinity(0)),
            "locked_memory_limit": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
            "has_pidfd": _has_pidfd(),
        }

    def find_cupy(self) -> tuple[Any, str]:
        """Return cupy, or None, and its release or why it is not there."""
        return find_cupy(self.cupy)

    def load(self) -> tuple[Cuda, Nccl]:
        """Load both libraries, for the calling thread."""
        cuda = Cuda()
        cuda.use(0)
        return cuda, Nccl(self.nccl)


def _has_pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True
