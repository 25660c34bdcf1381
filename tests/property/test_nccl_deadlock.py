"""No order of transfers deadlocks: engines whose sends and receives occupy their devices until the
other side runs, with messages that take any time, beside models whose ranks wait for each other.
The same world without the grant, or with the streams that groups once had, does deadlock.

A device is modelled as the hardware has it: streams share a few queues, of which one blocks behind
its first command; a kernel needs multiprocessors; NCCL records and waits in a stream of its own.
"""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from p2p_engine.errors import TransportError
from p2p_engine.transports.nccl.rendezvous import (
    MAX_ASKED,
    Burst,
    ReceivingHalf,
    SendingHalf,
    SlotRequest,
    Slots,
)

NUM_SEEDS = 600
SEED = 20260101
LANES, SLABS, RECEIVES = 2, 2, 3  # as in transport.py: lanes, slabs of each, receiving slots
CONNECTIONS = 8
PROCESSORS = 16


@dataclass(frozen=True)
class Assignment:
    """Which streams there are, and which of them share hardware queues."""

    stream_of_group: bool = False  # each group has a stream, as once, of the model's priority
    own_queues: bool = True  # NCCL's own streams share no queue with the model's, or another group
    connections: int = CONNECTIONS
    is_cooperative: bool = False  # the model's kernels need every multiprocessor at once
    asks_first: bool = True
    has_models: bool = True
    has_roles: bool = False  # one instance only sends, the others only receive


@dataclass(eq=False)
class GpuCommand:
    """Something in a stream. A wait is over when `may_pass` says so."""

    stream: QueuedStream
    processors: int = 0  # a kernel needs some
    meeting: object = None  # a kernel that ends when as many are running as it needs
    num_meeting: int = 1
    may_pass: Callable[[], bool] = lambda: True
    ended: Callable[[], None] = lambda: None


@dataclass(eq=False)
class QueuedStream:
    """A stream, and the hardware queue that it is bound to."""

    queue: collections.deque[GpuCommand]
    commands: collections.deque[GpuCommand] = field(default_factory=collections.deque)


class QueuedGpu:
    """One device."""

    def __init__(self, connections: int) -> None:
        self._queues: dict[tuple[object, int], collections.deque[GpuCommand]] = {}
        self._made: collections.Counter[object] = collections.Counter()
        self._connections = connections
        self.running: list[GpuCommand] = []

    @property
    def is_idle(self) -> bool:
        return not self.running and not any(self._queues.values())

    @property
    def num_free(self) -> int:
        return PROCESSORS - sum(command.processors for command in self.running)

    def stream(self, kind: object) -> QueuedStream:
        """Make one. Streams of one kind (a priority) take the queues of that kind in turn."""
        number = self._made[kind] % self._connections
        self._made[kind] += 1
        return QueuedStream(self._queues.setdefault((kind, number), collections.deque()))

    def enqueue(self, command: GpuCommand) -> None:
        command.stream.queue.append(command)
        command.stream.commands.append(command)

    def may_start(self) -> list[GpuCommand]:
        """The first command of a queue holds up all others in it: until all before it in its stream
        have ended, and until there is room for it."""
        heads = [queue[0] for queue in self._queues.values() if queue]
        return [
            head for head in heads
            if head.stream.commands[0] is head and head.may_pass()
            and head.processors <= self.num_free
        ]  # fmt: skip

    def start(self, command: GpuCommand) -> None:
        command.stream.queue.popleft()
        if command.processors:
            self.running.append(command)
        else:
            self.end(command)

    def end(self, command: GpuCommand) -> None:
        if command in self.running:
            self.running.remove(command)
        command.stream.commands.popleft()
        command.ended()


class Comm:
    """One rank's side of a group, with NCCL's own stream."""

    def __init__(self, gpu: QueuedGpu, name: object, own: QueuedStream) -> None:
        self._gpu = gpu
        self._name = name
        self._own = own
        self._numbers = itertools.count()
        self.order: list[tuple[int, int]] = []

    def launch(
        self, stream: QueuedStream, what: tuple[int, int], ended: Callable[[], None]
    ) -> None:
        """As enqueue.cc does: the launch waits for the own stream, which then waits for it."""
        self.order.append(what)
        done: set[str] = set()
        enqueue, mark = self._gpu.enqueue, done.add
        enqueue(GpuCommand(self._own, ended=lambda: mark("before")))
        enqueue(GpuCommand(stream, may_pass=lambda: "before" in done))

        def after() -> None:
            mark("kernel")
            ended()

        meeting = self._name, next(self._numbers)
        enqueue(GpuCommand(stream, 1, meeting, 2, ended=after))
        enqueue(GpuCommand(self._own, may_pass=lambda: "kernel" in done))


class Rank:
    """An engine, its device, and its part of a model."""

    def __init__(self, world: GroupWorld, instance: int, how: Assignment) -> None:
        self.gpu = QueuedGpu(how.connections)
        self.instance = instance
        self._how = how
        self._world = world
        self._compute = self.gpu.stream("normal")
        self.steps_left = world.rng.randint(1, 8) if how.has_models else 0
        world.num_steps[instance] = self.steps_left = world.num_steps.get(instance, self.steps_left)
        self.send_slots, self.recv_slots = Slots(LANES), Slots(RECEIVES)
        kind = "normal" if how.stream_of_group else "urgent"
        self.lanes = [[self.gpu.stream(kind) for _ in range(SLABS)] for _ in range(LANES)]
        self.receives = [self.gpu.stream(kind) for _ in range(RECEIVES)]
        self.recv_slabs = Slots(world.rng.randint(1, 2))

    def comm(self, name: object) -> tuple[Comm, QueuedStream]:
        """Make one, and the stream that it once had."""
        own = self.gpu.stream(("own", name) if self._how.own_queues else "normal")
        self.gpu.stream("normal")  # NCCL's second one, without work
        once = self.gpu.stream("normal") if self._how.stream_of_group else own
        return Comm(self.gpu, name, own), once

    def step(self) -> None:
        """The model's thread launches a layer: its kernels, and one that waits for other ranks."""
        self.steps_left -= 1
        number = self._world.num_steps[self.instance] - self.steps_left
        count = sum(rank.instance == self.instance for rank in self._world.ranks)
        needs = PROCESSORS if self._how.is_cooperative else 1
        self.gpu.enqueue(GpuCommand(self._compute, 1))
        self.gpu.enqueue(GpuCommand(self._compute, needs, ("model", self.instance, number), count))
        self.gpu.enqueue(GpuCommand(self._compute, 1))


class GroupWorld:
    """Ranks, and what is on its way between them."""

    def __init__(self, rng: random.Random, instances: list[int], how: Assignment) -> None:
        self.rng = rng
        self.num_steps: dict[int, int] = {}
        self.ranks: list[Rank] = []
        for instance in instances:
            self.ranks.append(Rank(self, instance, how))
        self.how = how
        self.room_of: dict[Burst, tuple[Slots, SlotRequest]] = {}  # for what goes to the host
        self.copies: list[Burst] = []  # from such a slab to the host
        self.wires: dict[tuple[int, int], collections.deque[Callable[[], None]]] = {}
        self.senders: dict[tuple[int, int], SendingHalf] = {}
        self.receivers: dict[tuple[int, int], ReceivingHalf] = {}
        self.comms: dict[tuple[tuple[int, int], bool], tuple[Comm, QueuedStream]] = {}
        self.num_open = 0

    def say(self, source: int, destination: int, message: Callable[[], None]) -> None:
        """Deliver later, in order."""
        self.wires.setdefault((source, destination), collections.deque()).append(message)

    def launch(
        self,
        pair: tuple[int, int],
        is_send: bool,
        burst: Burst,
        streams: list[QueuedStream],
        ended: Callable[[], None],
    ) -> None:
        """All pieces of a burst at once. A sender packs each one in the same stream before it."""
        comm, stream_of_group = self.comms[pair, is_send]
        gpu = self.ranks[pair[0 if is_send else 1]].gpu
        for offset in range(burst.nbytes):
            stream = streams[offset % len(streams)]
            if self.how.stream_of_group:
                stream = stream_of_group
            if is_send:
                gpu.enqueue(GpuCommand(stream, 1))
            is_last = offset == burst.nbytes - 1
            comm.launch(stream, (burst.seq, offset), ended if is_last else lambda: None)

    def pair(self, source: int, destination: int) -> None:
        """Make the group that moves from one rank to another."""
        pair, there, here = (source, destination), self.ranks[destination], self.ranks[source]
        self.comms[pair, True] = here.comm(pair)
        self.comms[pair, False] = there.comm(pair)

        def sent(burst: Burst) -> None:
            self.senders[pair].sent(burst)
            self.num_open -= 1

        def find_room(burst: Burst, found: Callable[[], None]) -> None:
            if burst.nbytes > 1:
                found()
                return
            request = SlotRequest(found)
            self.room_of[burst] = there.recv_slabs, request
            there.recv_slabs.take(request)

        def received(burst: Burst) -> None:
            self.receivers[pair].received(burst)
            if burst in self.room_of:
                self.copies.append(burst)

        self.receivers[pair] = ReceivingHalf(
            there.recv_slots,
            find_room,
            lambda burst: True,
            lambda burst, slot: self.launch(
                pair, False, burst, [there.receives[slot]], partial(received, burst)
            ),
            lambda order, _: self.say(destination, source, lambda: self.senders[pair].on_go(order)),
        )
        self.senders[pair] = SendingHalf(
            here.send_slots,
            lambda order, burst: self.say(
                source, destination, lambda: self.receivers[pair].on_ask(order, burst)
            ),
            lambda burst, slot: self.launch(
                pair, True, burst, here.lanes[slot], partial(sent, burst)
            ),
            lambda burst: None,
        )

    def put(self, source: int, destination: int, burst: Burst) -> None:
        """Send, or as the old connector did: each side launches at once."""
        self.num_open += 1
        if self.how.asks_first:
            self.senders[source, destination].add(burst)
            return

        def sent() -> None:
            self.num_open -= 1

        pair, there = (source, destination), self.ranks[destination]
        self.launch(pair, True, burst, self.ranks[source].lanes[0], sent)
        receive = partial(self.launch, pair, False, burst, there.receives[:1], lambda: None)
        self.say(source, destination, receive)

    def get(self, source: int, destination: int, burst: Burst) -> None:
        """Ask the other side to send."""
        self.num_open += 1

        def wanted() -> None:
            self.num_open -= 1
            self.put(source, destination, burst)

        self.say(destination, source, wanted)

    def step(self) -> bool:
        """Let one thing happen, chosen at random; False: nothing can."""
        done: list[Callable[[], object]] = [
            partial(self.deliver, wire) for wire in self.wires.values() if wire
        ]
        done += [rank.step for rank in self.ranks if rank.steps_left]
        for rank in self.ranks:
            done += [partial(rank.gpu.start, command) for command in rank.gpu.may_start()]
        done += [partial(self.copied, burst) for burst in self.copies]
        done += [partial(self.end, kernels) for kernels in self.meetings()]
        if not done:
            return False
        self.rng.choice(done)()
        return True

    def deliver(self, wire: collections.deque[Callable[[], None]]) -> None:
        wire.popleft()()

    def meetings(self) -> list[list[tuple[QueuedGpu, GpuCommand]]]:
        """Kernels that can end: by themselves, or because all that they wait for run too."""
        met: dict[object, list[tuple[QueuedGpu, GpuCommand]]] = {}
        for rank in self.ranks:
            for command in rank.gpu.running:
                met.setdefault(command.meeting or command, []).append((rank.gpu, command))
        return [found for found in met.values() if len(found) == found[0][1].num_meeting]

    def end(self, kernels: list[tuple[QueuedGpu, GpuCommand]]) -> None:
        for gpu, kernel in kernels:
            gpu.end(kernel)

    def copied(self, burst: Burst) -> None:
        self.copies.remove(burst)
        slabs, request = self.room_of.pop(burst)
        slabs.give_back(request)

    def is_stuck(self) -> bool:
        """Run until nothing can happen; whether something was left open."""
        while self.step():
            pass
        return bool(self.num_open) or not all(rank.gpu.is_idle for rank in self.ranks)


def play(how: Assignment, seed: int) -> GroupWorld:
    """Any transfers between the ranks of two or three instances, in circles for certain."""
    rng = random.Random(seed)
    instances = [i for i in range(rng.randint(2, 3)) for _ in range(rng.randint(1, 2))]
    made = GroupWorld(rng, instances, how)
    count = len(instances)
    pairs = [
        pair for pair in itertools.permutations(range(count), 2)
        if instances[pair[0]] != instances[pair[1]]
        and (not how.has_roles or instances[pair[0]] == 0)
    ]  # fmt: skip
    rng.shuffle(pairs)
    for pair in pairs:
        made.pair(*pair)
    chosen = pairs * rng.randint(1, 2) + rng.choices(pairs, k=rng.randint(0, 10))
    rng.shuffle(chosen)
    for seq, (source, destination) in enumerate(chosen):
        rng.choice([made.put, made.get])(source, destination, Burst(seq, 0, rng.randint(1, 3)))
    return made


def gets_stuck(how: Assignment) -> bool:
    return any(play(how, seed).is_stuck() for seed in range(SEED, SEED + NUM_SEEDS))


@pytest.mark.parametrize(
    "how",
    [
        Assignment(),
        Assignment(own_queues=False, has_roles=True),
        Assignment(own_queues=False, connections=32),
    ],
)
def test_no_seed_gets_stuck(how: Assignment) -> None:
    for seed in range(SEED, SEED + NUM_SEEDS // 2):
        world = play(how, seed)
        assert not world.is_stuck(), f"seed {seed}"
        for (pair, is_send), (comm, _) in world.comms.items():
            assert comm.order == world.comms[pair, not is_send][0].order, f"seed {seed}: {pair}"
        for rank in world.ranks:
            for slots in (rank.send_slots, rank.recv_slots, rank.recv_slabs):
                assert not slots.num_held, f"seed {seed}: a slot was not given back"


@pytest.mark.parametrize(
    "how",
    [
        Assignment(asks_first=False, has_models=False),
        Assignment(stream_of_group=True),
        Assignment(stream_of_group=True, has_models=False),
        Assignment(stream_of_group=True, own_queues=False, has_roles=True),
        Assignment(own_queues=False),
        Assignment(own_queues=False, has_models=False),
        Assignment(is_cooperative=True),
    ],
)
def test_what_deadlocks(how: Assignment) -> None:
    assert gets_stuck(how)


def receiving_half(slots: Slots, launched: list[Burst]) -> ReceivingHalf:
    return ReceivingHalf(
        slots,
        lambda _, found: found(),
        lambda _: True,
        lambda burst, _: launched.append(burst),
        lambda *_: None,
    )


def test_what_waits_in_a_group_that_ends_is_not_launched_by_what_that_frees() -> None:
    slots, launched = Slots(1), list[Burst]()
    other, half = receiving_half(slots, launched), receiving_half(slots, launched)
    other.on_ask(0, Burst(9, 0, 1))
    for order in range(2):
        half.on_ask(order, Burst(order, 0, 1))
    half.end()
    other.received(Burst(9, 0, 1))
    assert launched == [Burst(9, 0, 1)]
    assert slots.num_free == 1


def test_a_slot_is_held_until_the_kernels_of_a_group_that_failed_have_ended() -> None:
    slots, launched = Slots(1), list[Burst]()
    half, other = receiving_half(slots, launched), receiving_half(slots, launched)
    half.on_ask(0, Burst(0, 0, 1))
    half.end()
    other.on_ask(0, Burst(9, 0, 1))
    assert launched == [Burst(0, 0, 1)]
    half.received(Burst(0, 0, 1))
    assert launched == [Burst(0, 0, 1), Burst(9, 0, 1)]


def test_bursts_of_a_group_share_a_slot_while_nobody_waits_for_one() -> None:
    slots, launched = Slots(1), list[Burst]()
    half, other = receiving_half(slots, launched), receiving_half(slots, launched)
    for order in range(2):
        half.on_ask(order, Burst(order, 0, 1))
    other.on_ask(0, Burst(9, 0, 1))
    half.on_ask(2, Burst(2, 0, 1))
    assert launched == [Burst(0, 0, 1), Burst(1, 0, 1)]
    for order in range(2):
        half.received(Burst(order, 0, 1))
    assert launched[2:] == [Burst(9, 0, 1)]
    other.received(Burst(9, 0, 1))
    assert launched[3:] == [Burst(2, 0, 1)]


def test_a_sender_that_asks_for_too_much_is_refused() -> None:
    slots, launched = Slots(1), list[Burst]()
    half = receiving_half(slots, launched)
    for order in range(3 * MAX_ASKED):
        half.on_ask(order, Burst(order, 0, 1))
    with pytest.raises(TransportError, match="more than"):
        half.on_ask(3 * MAX_ASKED, Burst(99, 0, 1))
    assert len(launched) <= 3 * MAX_ASKED


def test_a_burst_that_breaks_the_rules_ends_only_its_own_group() -> None:
    """What gives a slot back may be another pair, which has more to do then."""
    slots, launched = Slots(1), list[Burst]()
    other = receiving_half(slots, launched)

    def is_wanted(_: Burst) -> bool:
        half.end()  # as the pair does when it fails
        return False

    half = ReceivingHalf(
        slots, lambda _, found: found(), is_wanted, lambda *_: None, lambda *_: None
    )
    other.on_ask(0, Burst(9, 0, 1))
    half.on_ask(0, Burst(0, 7, 1))
    other.received(Burst(9, 0, 1))
    assert slots.num_free == 1


def test_there_are_never_more_kernels_than_slots() -> None:
    """Those of one group run one after the other."""
    world = play(Assignment(has_models=False), SEED + 1)
    most = 0
    while world.step():
        for rank in world.ranks:
            running = [kernel for kernel in rank.gpu.running if kernel.meeting is not None]
            most = max(most, len(running))
    assert 1 < most <= LANES + RECEIVES
    assert not world.num_open
