"""What a GPU engine's parts reach beside the machine's own limits, on one GPU.

push     CUDA IPC, process to process            beside a device-to-device copy of the same size
pack     scattered regions into one and back     beside the same
pool     device memory to the pinned pool, back  beside torch's pinned copy
groups   bytes of device memory of a group       beside 4 + 6c MiB

Rates are GB/s of bytes moved (each is read once and written once). `--part` runs one alone.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Row, arguments, progress, record, spread
from mempool import Arena
from p2p_engine.cuda import Cuda
from p2p_engine.device import Device
from p2p_engine.layout import Int64s
from p2p_engine.transports.nccl.library import Nccl, show_version
from p2p_engine.transports.nccl.memory import MIB, estimated_bytes

gpu: Any = torch.cuda
TOTAL = 256 * MIB


def rate(move: Callable[[], None], repetitions: int, nbytes: int = TOTAL) -> list[float]:
    """GB/s of each repetition, after one to warm up."""
    move()
    rates = []
    for _ in range(repetitions):
        start = time.perf_counter()
        move()
        rates.append(nbytes / (time.perf_counter() - start) / 1e9)
    return rates


def by_device(device: Device, sources: Int64s, destinations: Int64s, lengths: Int64s) -> None:
    """Copy by our own means, and wait."""
    job = device.copy(sources, destinations, lengths)
    if not job.wait(60) or job.state != "done":
        raise RuntimeError(f"copy: {job.state} {job.error}")


def beside(name: str, ours: list[float], limit: list[float]) -> Row:
    """One row: ours, the limit, their ratio at the median."""
    part = float(np.median(ours) / np.median(limit))
    return {"what": name, **spread(ours, "ours_"), **spread(limit, "limit_"), "ratio": part}


def pack(device: Device, repetitions: int, seed: int) -> list[Row]:
    """Regions of a cache, in random order, into one piece and back."""
    cache = torch.empty(2 * TOTAL, dtype=torch.uint8, device="cuda")
    slab = torch.empty(TOTAL, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(slab)

    def copy_now() -> None:
        other.copy_(slab)
        gpu.synchronize()

    limit, rows = rate(copy_now, repetitions), []
    for nbytes in (4096, 65536):
        order = np.random.default_rng(seed).permutation(2 * TOTAL // nbytes)[: TOTAL // nbytes]
        scattered = cache.data_ptr() + order * nbytes
        packed = slab.data_ptr() + np.arange(len(order)) * nbytes
        lengths = np.full(len(order), nbytes)
        for name, sides in (("pack", (scattered, packed)), ("unpack", (packed, scattered))):
            move = functools.partial(by_device, device, sides[0], sides[1], lengths)
            ours = rate(move, repetitions)
            rows.append(beside(f"{name} {nbytes} B", ours, limit))
    return rows


def pool(device: Device, repetitions: int) -> list[Row]:
    """Device memory and registered host memory, beside torch's pinned copy."""
    arena = Arena(TOTAL)
    device.run(lambda: device.cuda.register(arena.address, TOTAL), 60)
    memory = torch.empty(TOTAL, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(TOTAL, dtype=torch.uint8, pin_memory=True)
    here, there = np.array([memory.data_ptr()]), np.array([arena.address])
    length = np.array([TOTAL])

    def torch_copy(to: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        def copy_now() -> None:
            to.copy_(source, non_blocking=True)
            gpu.synchronize()

        return copy_now

    store = rate(lambda: by_device(device, here, there, length), repetitions)
    load = rate(lambda: by_device(device, there, here, length), repetitions)
    rows = [
        beside("pool store", store, rate(torch_copy(pinned, memory), repetitions)),
        beside("pool load", load, rate(torch_copy(memory, pinned), repetitions)),
    ]
    device.run(lambda: device.cuda.unregister(arena.address), 60)
    arena.close()
    return rows


def push(repetitions: int) -> list[Row]:
    """Tensors from a process to another one on this GPU, by our transport."""
    from tests.gpu.peer import GpuPeer  # processes of its own

    settings = {"device": "cuda:0", "transports": "cuda_ipc", "kv_buffer_size": 4 << 30,
                "mem_pool_size_gb": 1}  # fmt: skip
    rows: list[Row] = []
    with GpuPeer(1, settings) as one, GpuPeer(2, settings) as two:
        for nbytes in (4 * MIB, 64 * MIB, 256 * MIB):
            seeds = list(range(nbytes, nbytes + repetitions))
            one.ask("send", seeds, [nbytes] * repetitions, two.address)
            wrong = two.ask("receive", seeds, [nbytes] * repetitions, one.address)
            told = one.ask("stats")
            moved = told["sent_bytes"] / max(told["writing_seconds"], 1e-9) / 1e9
            rows.append({"what": f"push {nbytes >> 20} MiB", "wrong": wrong, "gb_per_s": moved})
    return rows


def groups(path: str) -> list[Row]:
    """Device memory of a communicator of one rank: what a rank of a group takes when it is made."""
    cuda, nccl, rows = Cuda(), Nccl(path), []
    cuda.use(0)
    for channels in (1, 2, 4, 8, 16):
        before = cuda.memory()[0]
        comm = nccl.init(nccl.unique_id(), 0, channels, num_ranks=1)
        start = time.perf_counter()
        while nccl.is_in_progress(comm):
            if time.perf_counter() - start > 120:
                raise TimeoutError("ncclCommInitRankConfig")
        rows.append({
            "what": f"group of {channels}", "seconds": time.perf_counter() - start,
            "mib": (before - cuda.memory()[0]) / MIB,
            "expected_mib": estimated_bytes(channels) / MIB,
        })  # fmt: skip
        nccl.abort(comm)
    return rows


def main() -> None:
    """Run the parts and keep the figures."""
    parser = arguments("gpu", __doc__ or "", repetitions=10)
    parser.add_argument("--part", choices=["pack", "pool", "push", "groups"])
    parser.add_argument("--nccl", default="", help="the path of another libnccl.so.2")
    options = parser.parse_args()
    if not gpu.is_available():
        raise SystemExit("no GPU: nothing is measured")
    gpu.init()
    device, rows = Device(Cuda(), 0), []
    parts: dict[str, Callable[[], list[Row]]] = {
        "pack": lambda: pack(device, options.repetitions, options.seed),
        "pool": lambda: pool(device, options.repetitions),
        "push": lambda: push(options.repetitions),
        "groups": lambda: groups(options.nccl),
    }
    for name, run in parts.items():
        if options.part in (None, name):
            progress(name)
            rows += run()
    device.close(10)
    details = {
        "gpu": gpu.get_device_name(0),
        "cuda": {"runtime_and_driver": Cuda().versions(), "torch": torch.__version__},
        "nccl": show_version(Nccl(options.nccl).version),
    }
    record(rows, options, details)


if __name__ == "__main__":
    main()
