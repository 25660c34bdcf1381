"""Streams that share hardware queues, on the double: a command waits behind what another stream put
into its queue before it. The streams that groups once had close a circle there, and ours do not."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from p2p_engine.gpu.cuda import Cuda
from p2p_engine.memory.jobs import Job
from p2p_engine.memory.layout import one_region
from p2p_engine.transports.nccl.library import Nccl
from tests.doubles.gpu import GpuDouble
from tests.doubles.slow_kernel import SlowKernel
from tests.rigs.tensors import random_memory
from tests.rigs.transports import TransportEnd, TransportPair, write
from tests.support import SeededRandom, all_given_back, eventually

DEFAULT_QUEUES = 8
MANY_QUEUES = 32


@pytest.fixture
def double() -> Iterator[GpuDouble]:
    made = GpuDouble()
    with all_given_back(made):
        yield made


@pytest.fixture
def cuda(double: GpuDouble) -> Cuda:
    made = Cuda()
    made.use(0)
    return made


def is_done(cuda: Cuda, stream: int, event: int) -> Callable[[], bool]:
    cuda.record(event, stream)
    return lambda: cuda.is_complete(event)


def test_what_waits_holds_up_the_other_streams_of_its_queue(double: GpuDouble, cuda: Cuda) -> None:
    """Two queues, so the first and the third stream share one. What runs does not hold it."""
    slow, held = cuda.create_stream(), double["held_streams"]
    events = [cuda.create_event() for _ in range(5)]
    with double.fault(hardware_queues=2):
        streams = [cuda.create_stream(is_urgent=i == 3) for i in range(4)]
    first, second, third, urgent = streams
    running = SlowKernel(cuda, first)
    eventually(is_done(cuda, third, events[0]))
    running.end()
    kernel = SlowKernel(cuda, slow)
    cuda.record(events[1], slow)
    cuda.wait_for(first, events[1])
    is_third_done = is_done(cuda, third, events[2])
    eventually(is_done(cuda, second, events[3]))
    eventually(is_done(cuda, urgent, events[4]))
    eventually(lambda: double["held_streams"] == held + 1)
    assert not is_third_done()
    kernel.end()
    eventually(is_third_done)
    for stream in (slow, *streams):
        cuda.destroy_stream(stream)
    for event in events:
        cuda.destroy_event(event)


@dataclass
class HandmadeSide:
    """One rank of a group, and the stream in which it launches."""

    device: int
    stream: int
    comm: int
    move: Callable[..., None]
    peer: int


class HandmadeGroups:
    """Two groups between two devices, one for each direction; both devices made their receiving one
    first. Between them, `num_others` streams of normal priority were made for other groups."""

    def __init__(self, cuda: Cuda, nccl: Nccl, num_others: int, *, is_urgent: bool) -> None:
        self._cuda, self._nccl = cuda, nccl
        self._memory = np.zeros(4, np.uint8)
        ids = [nccl.unique_id() for _ in range(2)]  # the group that ends on device 0, on device 1
        self._others: list[int] = []
        self.receiving: list[HandmadeSide] = []
        self.sending: list[HandmadeSide] = []
        for device in range(2):
            cuda.use(device)
            self.receiving.append(self._side(device, ids[device], rank=1, is_urgent=is_urgent))
            self._others += [cuda.create_stream() for _ in range(num_others)]
            self.sending.append(self._side(device, ids[1 - device], rank=0, is_urgent=is_urgent))
        for side in (*self.receiving, *self.sending):
            eventually(lambda s=side: not nccl.is_in_progress(s.comm))  # type: ignore[misc]

    def launch(self, sides: list[HandmadeSide]) -> None:
        """Launch a kernel for each; all are in their streams then."""
        for number, side in enumerate(sides):
            address = self._memory.ctypes.data + number
            side.move(side.comm, address, 1, side.peer, side.stream)
        for side in sides:
            eventually(lambda s=side: not self._nccl.is_in_progress(s.comm))  # type: ignore[misc]

    def connect(self) -> None:
        """Move a first byte in each, one group after the other."""
        for device in range(2):
            self.launch([self.receiving[device], self.sending[1 - device]])
            self._cuda.synchronize(self.receiving[device].stream)
            self._cuda.synchronize(self.sending[1 - device].stream)

    def abort(self, device: int) -> None:
        """End the group that receives on a device, as a deadline does; each rank's abort waits for
        the other one's."""
        sides = self.receiving[device], self.sending[1 - device]
        threads = [threading.Thread(target=self._nccl.abort, args=(s.comm,)) for s in sides]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)

    def close(self) -> None:
        """Give the streams back."""
        for stream in (*self._others, *(s.stream for s in (*self.receiving, *self.sending))):
            self._cuda.destroy_stream(stream)

    def _side(self, device: int, unique_id: bytes, rank: int, *, is_urgent: bool) -> HandmadeSide:
        stream = self._cuda.create_stream(is_urgent=is_urgent)
        comm = self._nccl.init(unique_id, rank, 2)
        move = self._nccl.recv if rank else self._nccl.send
        return HandmadeSide(device, stream, comm, move, 1 - rank)


@pytest.mark.parametrize(
    ("is_urgent", "num_others", "queues", "is_circle"),
    [
        (False, 6, DEFAULT_QUEUES, True),  # three streams for each group, of one priority
        (False, 6, 0, False),
        (True, 0, DEFAULT_QUEUES, False),
        (True, 6, DEFAULT_QUEUES, True),  # NCCL's own streams share one, and both ranks send
        (True, 6, MANY_QUEUES, False),
    ],
)
def test_two_groups_that_share_a_queue_wait_for_each_other(
    double: GpuDouble, cuda: Cuda, queues: int, num_others: int, *, is_urgent: bool, is_circle: bool
) -> None:
    """Each device receives first, and its send is behind that, whose peer is behind the other's:
    nothing moves until one of them is aborted."""
    nccl, held = Nccl(double.path), double["held_streams"]
    with double.fault(num_devices=2, hardware_queues=queues):
        groups = HandmadeGroups(cuda, nccl, num_others, is_urgent=is_urgent)
        groups.connect()
        sent, event = double["sent_operations"], cuda.create_event()  # on device 1
        groups.launch(groups.receiving)
        has_received = is_done(cuda, groups.receiving[1].stream, event)
        eventually(lambda: double["resident_kernels"] == 2)
        groups.launch(groups.sending)
        if is_circle:
            eventually(lambda: double["held_streams"] == held + 2)
            assert (double["resident_kernels"], double["sent_operations"]) == (2, sent)
            assert not has_received()
        else:
            eventually(lambda: double["sent_operations"] == sent + 2)
        groups.abort(0)
        eventually(has_received)
        groups.abort(1)
        groups.close()
        cuda.destroy_event(event)
        cuda.use(0)


class TwoRankModel:
    """A model on two devices. Each layer has a kernel that waits for the other rank's, and another
    one behind it."""

    def __init__(self, cuda: Cuda, devices: tuple[int, int]) -> None:
        self._cuda, self._devices = cuda, devices
        self._streams = []
        for device in devices:
            cuda.use(device)
            self._streams.append(cuda.create_stream())
        self._memory = np.zeros(2, np.uint8)
        self._barriers: list[threading.Barrier] = []
        self._layers: list[list[object]] = [[], []]

    def launch(self, rank: int) -> None:
        """Launch the next layer of a rank."""
        number, stream = len(self._layers[rank]), self._streams[rank]
        if number == len(self._barriers):
            self._barriers.append(threading.Barrier(2))
        wait = self._barriers[number].wait
        self._layers[rank].append(SlowKernel(self._cuda, stream, wait))
        self._cuda.fill(self._memory.ctypes.data + rank, 1, 1, stream)

    def close(self) -> None:
        """Wait for its last layer."""
        for stream in self._streams:
            self._cuda.synchronize(stream)
            self._cuda.destroy_stream(stream)


class LinkedInstances:
    """A part of NCCL's transport on each of some devices, as instances have it, and a model on the
    first two."""

    def __init__(self, cuda: Cuda, routes: list[tuple[int, int]], **options: Any) -> None:
        count = 1 + max(itertools.chain(*routes))
        self._ends = [
            TransportEnd("nccl", device=device, slab_bytes=64 << 10, **options)
            for device in range(count)
        ]
        self._model = TwoRankModel(cuda, (0, 1))
        self._pairs = [TransportPair("nccl", self._ends[a], self._ends[b]) for a, b in routes]
        self._channels = [pair.channel() for pair in self._pairs]

    def exchange(self, rng: SeededRandom) -> list[str]:
        """Send along every route at once, while the model computes; return what went wrong."""
        memory = random_memory(rng, 300_000)
        source, jobs = one_region(memory.ctypes.data, memory.nbytes), list[Job]()
        order = rng.sample(self._pairs, len(self._pairs))
        self._model.launch(0)
        landings = [pair.grant(None, memory.nbytes) for pair in order]
        for pair, landing in zip(order, landings, strict=True):
            assert landing.job is not None
            channel = self._channels[self._pairs.index(pair)]
            jobs += [landing.job, write(channel, source, landing, memory)]
        self._model.launch(1)
        eventually(lambda: all(job.done for job in jobs), 20)
        errors = [str(job.error) for job in jobs if job.state != "done"]
        for pair, landing in zip(order, landings, strict=True):
            assert errors or pair.bytes_of(landing, memory.nbytes) == memory.tobytes()
            pair.receiver.arena.release(landing.space)
        return errors

    def close(self) -> None:
        """End all."""
        self._model.close()
        for pair, channel in zip(self._pairs, self._channels, strict=True):
            pair.sender.in_control(channel.close)
        for end in self._ends:
            end.close()


ROLES = list(itertools.product((0, 1), (2, 3, 4)))
ALL_DIRECTIONS = list(itertools.permutations(range(4), 2))


@pytest.mark.parametrize(
    ("queues", "routes"), [(DEFAULT_QUEUES, ROLES), (MANY_QUEUES, ALL_DIRECTIONS)]
)
def test_our_streams_close_no_circle(
    double: GpuDouble, cuda: Cuda, rng: SeededRandom, queues: int, routes: list[tuple[int, int]]
) -> None:
    """Two ranks of a prefill instance, whose model computes, with three decode instances; and
    instances that send and receive, with the queues that the documents ask for."""
    with double.fault(num_devices=5, hardware_queues=queues):
        instances = LinkedInstances(cuda, routes)
        for _ in range(10):
            assert not instances.exchange(rng)
        instances.close()
    cuda.use(0)


def test_without_priority_our_streams_close_circles_that_only_a_deadline_ends(
    double: GpuDouble, cuda: Cuda, rng: SeededRandom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share the queues of NCCL's own streams then, and of the model."""
    create = Cuda.create_stream
    monkeypatch.setattr(Cuda, "create_stream", lambda cuda, *, is_urgent=False: create(cuda))
    with double.fault(num_devices=4, hardware_queues=DEFAULT_QUEUES):
        instances = LinkedInstances(cuda, ALL_DIRECTIONS, patience_seconds=2.0)
        errors = next(filter(None, (instances.exchange(rng) for _ in range(20))), [])
        assert any("a kernel of a group has not ended within 2 s" in error for error in errors)
        instances.close()
    cuda.use(0)
