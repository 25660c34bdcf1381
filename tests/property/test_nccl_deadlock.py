"""No order of transfers deadlocks: engines whose sends and receives occupy their devices until the
other side runs, with messages that take any time. The same model without the grant step does."""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from p2p_engine.transports.nccl.rendezvous import (
    Piece,
    ReceivingHalf,
    SendingHalf,
    SlotRequest,
    Slots,
)

NUM_SEEDS = 3000
SEED = 20260101


@dataclass(eq=False)
class Kernel:
    """One side of one piece, in its communicator's order."""

    comm: tuple[int, int]
    number: int
    is_send: bool
    ended: Callable[[], None]


@dataclass
class KernelQueue:
    """Kernels start in the order of their launch, when there is room; each runs until its other
    side runs too."""

    room: int
    queue: collections.deque[Kernel] = field(default_factory=collections.deque)
    resident: list[Kernel] = field(default_factory=list)

    def start_next(self) -> bool:
        if not self.queue or len(self.resident) >= self.room:
            return False
        self.resident.append(self.queue.popleft())
        return True


class GroupWorld:
    """Engines, their devices, and what is on its way between them."""

    def __init__(self, rng: random.Random, num_engines: int, room: int, slots: int) -> None:
        self.rng = rng
        self.devices = [KernelQueue(room) for _ in range(num_engines)]
        self.send_slots = [Slots(slots) for _ in range(num_engines)]
        self.recv_slots = [Slots(slots) for _ in range(num_engines)]
        self.slabs = [Slots(2) for _ in range(num_engines)]
        self.slab_of: dict[Piece, SlotRequest] = {}
        self.recv_slabs = [Slots(rng.randint(1, 2)) for _ in range(num_engines)]
        self.room_of: dict[Piece, tuple[Slots, SlotRequest]] = {}  # for what goes to the host
        self.copies: list[Piece] = []  # from such a slab to the host
        self.wires: dict[tuple[int, int], collections.deque[Callable[[], None]]] = {}
        self.launches: dict[tuple[tuple[int, int], bool], itertools.count[int]] = {}
        self.senders: dict[tuple[int, int], SendingHalf] = {}
        self.receivers: dict[tuple[int, int], ReceivingHalf] = {}
        self.num_open = 0
        self.order: dict[tuple[tuple[int, int], bool], list[Piece]] = collections.defaultdict(list)

    def say(self, source: int, destination: int, message: Callable[[], None]) -> None:
        """Deliver later, in order."""
        self.wires.setdefault((source, destination), collections.deque()).append(message)

    def launch(self, engine: int, comm: tuple[int, int], is_send: bool, piece: Piece,
               ended: Callable[[], None]) -> None:  # fmt: skip
        number = next(self.launches.setdefault((comm, is_send), itertools.count()))
        self.order[comm, is_send].append(piece)
        self.devices[engine].queue.append(Kernel(comm, number, is_send, ended))

    def pair(self, source: int, destination: int) -> None:
        """Make the group that moves from one engine to another."""
        comm = (source, destination)

        def sent(piece: Piece) -> None:
            self.senders[comm].sent(piece)
            self.slabs[source].give_back(self.slab_of.pop(piece))
            self.num_open -= 1

        def find_room(piece: Piece, found: Callable[[], None]) -> None:
            if piece.seq % 3:
                found()
                return
            request, slabs = SlotRequest(found), self.recv_slabs[destination]
            self.room_of[piece] = slabs, request
            slabs.take(request)

        def received(piece: Piece) -> None:
            self.receivers[comm].received(piece)
            if piece in self.room_of:
                self.copies.append(piece)

        self.receivers[comm] = ReceivingHalf(
            self.recv_slots[destination],
            find_room,
            lambda piece: True,
            lambda piece: self.launch(destination, comm, False, piece, lambda: received(piece)),
            lambda order, _: self.say(destination, source, lambda: self.senders[comm].on_go(order)),
        )
        self.senders[comm] = SendingHalf(
            self.send_slots[source],
            lambda order, piece: self.say(
                source, destination, lambda: self.receivers[comm].on_ask(order, piece)
            ),
            lambda piece: self.launch(source, comm, True, piece, lambda: sent(piece)),
            lambda piece: None,
        )

    def put(self, source: int, destination: int, piece: Piece) -> None:
        """Send a piece once its bytes are packed, which takes a slab until it has left."""
        self.num_open += 1
        self.slab_of[piece] = slab = SlotRequest(
            lambda: self.senders[source, destination].add(piece)
        )
        self.slabs[source].take(slab)

    def get(self, source: int, destination: int, piece: Piece) -> None:
        """Ask the other side to send."""
        self.num_open += 1

        def wanted() -> None:
            self.num_open -= 1
            self.put(source, destination, piece)

        self.say(destination, source, wanted)

    def step(self) -> bool:
        """Let one thing happen, chosen at random; False: nothing can."""
        steps = [wire.popleft for wire in self.wires.values() if wire]
        if steps:
            steps = [self.rng.choice(steps)]
        done: list[Callable[[], object]] = [lambda step=step: step()() for step in steps]  # type: ignore[misc]
        done += [device.start_next for device in self.devices
                 if device.queue and len(device.resident) < device.room]  # fmt: skip
        done += [lambda piece=piece: self.copied(piece) for piece in self.copies]  # type: ignore[misc]
        done += [lambda pair=pair: self.complete(*pair) for pair in self.meetings()]  # type: ignore[misc]
        if not done:
            return False
        self.rng.choice(done)()
        return True

    def meetings(self) -> list[tuple[Kernel, Kernel]]:
        """Both sides of a piece are on their devices."""
        running = {
            (kernel.comm, kernel.number, kernel.is_send): kernel
            for device in self.devices
            for kernel in device.resident
        }
        return [
            (kernel, running[comm, number, False])
            for (comm, number, is_send), kernel in running.items()
            if is_send and (comm, number, False) in running
        ]

    def complete(self, send: Kernel, recv: Kernel) -> None:
        for kernel, engine in ((send, send.comm[0]), (recv, recv.comm[1])):
            self.devices[engine].resident.remove(kernel)
            kernel.ended()

    def copied(self, piece: Piece) -> None:
        self.copies.remove(piece)
        slabs, request = self.room_of.pop(piece)
        slabs.give_back(request)

    def is_stuck(self) -> bool:
        """Run until nothing can happen; whether something was left open."""
        while self.step():
            pass
        left = self.num_open or any(d.queue or d.resident for d in self.devices)
        return bool(left)


class WithoutGrants(GroupWorld):
    """The same, but each side launches at once: what the old connector did."""

    def put(self, source: int, destination: int, piece: Piece) -> None:
        comm = (source, destination)
        self.num_open += 1

        def sent() -> None:
            self.num_open -= 1

        self.launch(source, comm, True, piece, sent)
        receive = lambda: self.launch(destination, comm, False, piece, lambda: None)  # noqa: E731
        self.say(source, destination, receive)


def play(world: type[GroupWorld], seed: int) -> GroupWorld:
    """Any transfers between any engines, cycles among them for certain."""
    rng = random.Random(seed)
    num_engines = rng.randint(2, 6)
    slots = rng.randint(1, 3)
    made = world(rng, num_engines, room=2 * slots, slots=slots)
    pairs = list(itertools.permutations(range(num_engines), 2))
    for source, destination in pairs:
        made.pair(source, destination)
    ring = [(i, (i + 1) % num_engines) for i in range(num_engines)]
    chosen = ring * rng.randint(1, 3) + rng.choices(pairs, k=rng.randint(0, 20))
    rng.shuffle(chosen)
    for seq, (source, destination) in enumerate(chosen):
        rng.choice([made.put, made.get])(source, destination, Piece(seq, 0, 1))
    return made


def test_no_seed_gets_stuck() -> None:
    for seed in range(SEED, SEED + NUM_SEEDS):
        world = play(GroupWorld, seed)
        assert not world.is_stuck(), f"seed {seed}"
        for (comm, is_send), pieces in world.order.items():
            assert pieces == world.order[comm, not is_send], f"seed {seed}: {comm}"
        for slots in (*world.send_slots, *world.recv_slots, *world.recv_slabs):
            assert slots.num_free > 0, f"seed {seed}: a slot was not given back"


def test_without_the_grant_step_it_deadlocks() -> None:
    stuck = sum(play(WithoutGrants, seed).is_stuck() for seed in range(SEED, SEED + 300))
    assert stuck > 0, "the model cannot see a deadlock"


def test_what_waits_in_a_group_that_ends_is_not_launched_by_what_that_frees() -> None:
    slots, launched = Slots(1), list[Piece]()
    half = ReceivingHalf(
        slots, lambda piece, found: found(), lambda piece: True, launched.append, lambda *_: None
    )
    for order in range(2):
        half.on_ask(order, Piece(order, 0, 1))
    half.end()
    assert launched == [Piece(0, 0, 1)]
    assert slots.num_free == 1


@pytest.mark.parametrize("slots", [1, 3])
def test_there_are_never_more_kernels_than_slots(slots: int) -> None:
    rng = random.Random(SEED)
    world = GroupWorld(rng, 3, room=100, slots=slots)
    for pair in itertools.permutations(range(3), 2):
        world.pair(*pair)
    for seq in range(60):
        source, destination = rng.sample(range(3), 2)
        world.put(source, destination, Piece(seq, 0, 1))
    while world.step():
        for device in world.devices:
            assert len(device.queue) + len(device.resident) <= 2 * slots
    assert not world.num_open
