"""What a GPU has to show, as functions of how much of it; each returns its figures.

tests/gpu runs them on a real one, tests/integration the same on the double with small counts.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from mempool import Arena
from p2p_engine import EngineConfig, P2pNcclEngine, TransferKey
from p2p_engine.gpu.cuda import Cuda
from p2p_engine.gpu.device import Device
from p2p_engine.memory.layout import one_region
from p2p_engine.transports.nccl.memory import Side, estimated_bytes
from tests.doubles.slow_kernel import SlowKernel
from tests.gpu.machine import Machine
from tests.gpu.peer import GpuPeer, Processes
from tests.processes import together
from tests.support import eventually

MIB = 1 << 20
NUM_AHEAD = 3  # victims that are being started
Figures = dict[str, Any]


def exchange(
    processes: Processes,
    transport: str,
    send_type: str,
    *,
    count: int,
    max_bytes: int = 64 * MIB,
    budget_bytes: int,
    seed: int,
    **changes: Any,
) -> Figures:
    """So many transfers each way at once between two processes; every byte is compared."""
    plan = {
        "name": f"{send_type} {seed}", "send_type": send_type, "count": count, "timeout": 120.0,
        "max_bytes": max_bytes, "budget_bytes": budget_bytes,
    }  # fmt: skip
    settings, peers = processes.machine.settings(transport, **changes), processes.two()
    addresses = together(peers, "start", [(settings, max_bytes)] * 2)
    orders = [(plan, side, addresses[1 - side]) for side in (0, 1)]
    reports = together(peers, "exchange", orders)
    stats = together(peers, "at_rest", [(30.0,)] * 2)
    return _summary(reports, stats)


def exchange_inside(processes: Processes, *, count: int, max_bytes: int, seed: int) -> Figures:
    """The same between two engines of one process, whose kernels really run at the same time."""
    plan = {
        "name": f"inside {seed}", "send_type": "PUT_ASYNC", "count": count, "timeout": 60.0,
        "max_bytes": max_bytes, "budget_bytes": count * max_bytes,
    }  # fmt: skip
    settings = processes.machine.settings("nccl")
    reports = processes.two()[0].ask("exchange_inside", plan, settings)
    return _summary(reports, [])


def copy_regions(machine: Machine, *, nbytes: int, seed: int) -> Figures:
    """Scattered regions of every alignment, one after the other on the device, to host memory that
    is page-locked, and back into other places: by the kernel, and whole."""
    cuda, _ = machine.load()
    device, rng = Device(Cuda(), 0), np.random.default_rng(seed)
    assert device._pack.kernel is not None, "no pack kernel: the log says why"
    memory, arena = [cuda.allocate(nbytes) for _ in range(3)], Arena(nbytes)
    device.pins.add(arena.address, nbytes)
    shown, stream = Arena(nbytes), cuda.create_stream()
    cuda.register(shown.address, nbytes)
    shown.view(0, nbytes)[:] = rng.integers(0, 256, nbytes, np.uint8).tobytes()
    expected = bytes(shown.view(0, nbytes))
    cuda.copy(memory[0], shown.address, nbytes, stream)
    cuda.synchronize(stream)
    num_regions = 0
    for alignment in (1, 2, 4, 8, 16, 4096):
        cuts = np.unique(rng.integers(1, nbytes // alignment, 300)) * alignment
        starts, ends = np.r_[0, cuts], np.r_[cuts, nbytes]
        order = rng.permutation(len(starts))
        lengths = (ends - starts)[order]
        places = np.cumsum(lengths) - lengths
        routes = [
            (memory[0] + starts[order], memory[1] + places),
            (memory[0] + starts[order], arena.address + places),
            (arena.address + places, memory[2] + starts[order]),
        ]
        for sources, destinations in routes:
            job = device.copy(sources, destinations, lengths)
            assert job.wait(60), "a copy does not end"
            assert job.state == "done", job.error
        cuda.copy(shown.address, memory[2], nbytes, stream)
        cuda.synchronize(stream)
        assert bytes(shown.view(0, nbytes)) == expected, f"other bytes, alignment {alignment}"
        num_regions += 3 * len(starts)
    device.pins.remove(arena.address)
    cuda.unregister(shown.address)
    shown.close()
    arena.close()
    for address in memory:
        cuda.free(address)
    cuda.destroy_stream(stream)
    assert device.close(10)
    return {"regions": num_regions, "bytes": 18 * nbytes}


def send_to_itself(machine: Machine) -> Figures:
    """One rank sends to itself: the binding, its structure and streams, against the library."""
    cuda, nccl = machine.load()
    start, stream = time.monotonic(), cuda.create_stream()
    comm = nccl.init(nccl.unique_id(), 0, 2, num_ranks=1)
    eventually(lambda: not nccl.is_in_progress(comm), timeout=60)
    made = time.monotonic() - start
    source, target = cuda.allocate(MIB), cuda.allocate(MIB)
    cuda.fill(source, 7, MIB, stream)
    cuda.fill(target, 0, MIB, stream)
    nccl.start_group()
    nccl.send(comm, source, MIB, 0, stream)
    nccl.recv(comm, target, MIB, 0, stream)
    nccl.end_group()
    eventually(lambda: not nccl.is_in_progress(comm), timeout=60)
    seen = np.zeros(MIB, np.uint8)
    cuda.copy(seen.ctypes.data, target, MIB, stream)
    cuda.synchronize(stream)
    assert (seen == 7).all()
    nccl.abort(comm)
    for address in (source, target):
        cuda.free(address)
    cuda.destroy_stream(stream)
    return {"first_communicator_seconds": round(made, 2)}


def _summary(reports: list[Figures], stats: list[Figures]) -> Figures:
    errors = [error for report in reports for error in report["errors"]]
    assert not errors, errors[:5]
    assert sum(report["wrong"] for report in reports) == 0
    assert all(item["control_errors"] == 0 for item in stats)
    total = sum(report["bytes"] for report in reports)
    seconds = max(report["seconds"] for report in reports)
    return {
        "transfers": sum(report["transfers"] for report in reports),
        "wrong": 0,
        "bytes": total,
        "seconds": seconds,
        "gb_per_s": total / seconds / 1e9,
    }


def kill_peers(
    processes: Processes, transport: str, *, kills: int, size: int, **changes: Any
) -> Figures:
    """A peer dies by SIGKILL while bytes go to it, or come from it. Its transfers end, another peer
    is served, and in the end the device has as much free memory as after the first time."""
    settings = processes.machine.settings(transport, peer_timeout_seconds=3, **changes)
    survivor, other = processes.two()
    error_seconds, service_seconds, free = [], [], []
    address, third = together([survivor, other], "start", [(settings, size)] * 2)
    with contextlib.ExitStack() as stack:
        victims = _start_ahead(stack, processes.machine, kills + 1, settings, size)
        for number, victim in enumerate(victims):  # the first one brings what stays: kernels, links
            error_seconds.append(_kill(victim, survivor, address, number, size))
            plan = {
                "name": f"after {number}", "send_type": "PUT_ASYNC", "count": 1, "timeout": 60.0,
                "max_bytes": size, "budget_bytes": size,
            }  # fmt: skip
            served = together([survivor, other], "exchange", [(plan, 0, third), (plan, 1, address)])
            _summary(served, [survivor.ask("at_rest", 60.0)])
            service_seconds.append(max(report["seconds"] for report in served))
            if number == 0:
                free.append(_settled(survivor))
        free.append(_settled(survivor))
    return {
        "kills": kills,
        "error_seconds": max(error_seconds[1:]),
        "service_seconds": max(service_seconds[1:]),
        "lost_mib": (free[0] - free[1]) / MIB,
    }


def _start_ahead(
    stack: contextlib.ExitStack, machine: Machine, count: int, settings: Figures, size: int
) -> Iterator[GpuPeer]:
    """Yield so many victims; the next ones are starting meanwhile, but none with the first, after
    which the device's memory is looked at."""
    ready: collections.deque[GpuPeer] = collections.deque()
    for number in range(count):
        ahead = NUM_AHEAD if number else 1
        while len(ready) < min(ahead, count - number):
            ready.append(stack.enter_context(GpuPeer(machine, 10 + number + len(ready))))
            ready[-1].tell("start", settings, size)
        yield ready.popleft()


def _kill(victim: GpuPeer, survivor: GpuPeer, address: str, number: int, size: int) -> float:
    """Kill a peer in mid-transfer; the seconds until all that was open with it had ended."""
    names, theirs = [f"doomed {number} {i}" for i in range(4)], victim.answer()
    ours, its = ("receive", "send") if number % 2 else ("send", "receive")
    victim.tell("begin", names, size, address, its)
    survivor.ask("begin", names, size, theirs, ours)
    moment = victim.kill()
    return float(survivor.ask("outcomes", 60.0)["ended_at"] - moment)


def _settled(peer: GpuPeer) -> int:
    """Free bytes when they have not grown for half a second: drivers reclaim what the dead had."""
    free = int(peer.ask("free_bytes"))

    def grown() -> int:
        now = int(peer.ask("free_bytes"))
        return now if now > free else 0

    with contextlib.suppress(AssertionError):
        while True:
            free = eventually(grown, timeout=0.5)
    return free


def group_memory(processes: Processes, channels: int, count: int = 1) -> Figures:
    """Device memory of one rank's side of `count` groups between two processes: half of what both
    take. When made, and after the first byte; what is missing when they have ended."""
    peers = processes.two()
    # the first group of a process brings what stays: kernels, the context's growth
    _make_groups(peers, 1, 1)
    together(peers, "end_groups", [(), ()])
    before = _settled(peers[0])
    seconds = _make_groups(peers, count, channels)
    made = before - int(peers[0].ask("free_bytes"))
    together(peers, "first_bytes", [(0,), (1,)])
    used = before - int(peers[0].ask("free_bytes"))
    together(peers, "end_groups", [(), ()])
    lost = before - _settled(peers[0])
    return {
        "channels": channels,
        "groups": count,
        "made_mib": made / 2 / MIB,
        "expected_mib": count * estimated_bytes(channels) / MIB,
        "used_mib": used / 2 / MIB,
        "expected_used_mib": count * estimated_bytes(channels, Side.NETWORK) / MIB,
        "lost_mib": lost / MIB,
        "seconds_each": seconds / count,
    }


def _make_groups(peers: list[GpuPeer], count: int, channels: int) -> float:
    unique_ids = peers[0].ask("unique_ids", count)
    orders = [(unique_ids, rank, channels) for rank in (0, 1)]
    return float(max(together(peers, "make_groups", orders)))


def evict_groups(processes: Processes, *, max_groups: int, more: int) -> Figures:
    """One rank and so many peers, of which it may keep max_groups: the rest goes, on both sides."""
    one, two = processes.two()
    endpoints = two.ask("listen", max_groups + more, max_groups + more)
    warm = one.ask("dial", endpoints[:1], max_groups)
    assert warm["groups"] == 1
    before = int(one.ask("free_bytes"))
    full = one.ask("dial", endpoints[1:max_groups], max_groups)
    used = before - int(one.ask("free_bytes"))
    stats = one.ask("dial", endpoints[max_groups:], max_groups)
    assert (full["groups"], full["evicted"]) == (max_groups, 0)
    assert (stats["groups"], stats["evicted"]) == (max_groups, more)
    assert stats["quarantined"] == 0
    one.ask("hang_up")
    eventually(lambda: int(one.ask("free_bytes")) > before - 16 * MIB, timeout=60)
    return {
        "groups": max_groups,
        "evicted": stats["evicted"],
        "mib_of_one_side": used / (max_groups - 1) * max_groups / 2 / MIB,
        "estimated_mib": full["estimated_bytes"] / MIB,
    }


def race_slow_producers(machine: Machine, *, rounds: int, nbytes: int) -> Figures:
    """A copy is ordered behind work that a stream has not done: no byte of the round before."""
    cuda, _ = machine.load()
    device, stale = Device(Cuda(), 0), 0
    stream = cuda.create_stream()
    source, target = cuda.allocate(nbytes), cuda.allocate(nbytes)
    sides = [one_region(address, nbytes) for address in (source, target)]
    seen = np.zeros(nbytes, np.uint8)
    for number in range(rounds):
        kernel = SlowKernel(cuda, stream)
        cuda.fill(source, number % 256, nbytes, stream)
        moment = device.record(stream)
        job = device.copy(sides[0].addresses, sides[1].addresses, sides[0].lengths, after=[moment])
        for _ in range(3):  # its thread has looked, and looked again
            device.run(lambda: None, 5.0)
        assert not job.done
        kernel.end()
        assert job.wait(20)
        cuda.copy(seen.ctypes.data, target, nbytes, stream)
        cuda.synchronize(stream)
        stale += int(np.count_nonzero(seen != number % 256))
        del moment
    cuda.free(source)
    cuda.free(target)
    cuda.destroy_stream(stream)
    assert device.close(10)
    return {"rounds": rounds, "stale_bytes": stale}


def send_arrays(machine: Machine, *, rounds: int, nbytes: int) -> Figures:
    """cupy's arrays, sent and given as `out` before what fills them has run; cupy compares."""
    cupy, release = machine.find_cupy()
    if cupy is None:
        return {"rounds": 0, "cupy": release}
    stream, wrong = cupy.cuda.Stream(non_blocking=True), 0
    with contextlib.ExitStack() as stack:
        sender, receiver = (stack.enter_context(_tensor_engine(machine, nbytes)) for _ in range(2))
        array, out = (cupy.empty(nbytes, cupy.uint8) for _ in range(2))
        for number in range(rounds):
            opened, key, value = threading.Event(), TransferKey(f"array {number}"), number % 256
            with stream:
                stream.launch_host_func(opened.wait, 20)
                array.fill(value)
                out.fill(255 - value)
                sent = sender.send_tensor(key, array, receiver.zmq_address)
                opened.set()
                receiver.recv_tensor(key, sender.zmq_address, timeout=60.0, out=out)
                sent.wait(60.0)
                wrong += int(np.count_nonzero(cupy.asnumpy(out) != value))
    return {"rounds": rounds, "wrong_bytes": wrong, "cupy": release}


def _tensor_engine(machine: Machine, nbytes: int) -> P2pNcclEngine:
    settings = machine.settings("cuda_ipc", kv_buffer_size=4 * nbytes, mem_pool_size_gb=0.01)
    engine = P2pNcclEngine(EngineConfig(**settings))
    if not torch.cuda.is_available():  # the double's memory is the host's, and so are its tensors
        engine._tensor_device = "cpu"
    return engine
