"""Every state that transfers between two engines can reach, within bounds, explored one by one.

The real sender and the real store, in tests/doubles/world.py. In each state every move is
tried: any message on its way may be delivered next, be lost or be doubled, bytes may move, the data
connection may break, time may pass, the receiver may cancel, the sender may be restarted. How often
the bad things happen is bounded. Each state that is new is checked for all promises, and for a way
to the end of everything from there. Breadth first, so that the first failure has the shortest
story; a state is reached by playing its moves again.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeAlias

from p2p_engine.errors import TransferError, TransportError
from p2p_engine.wire.messages import Grant, decode
from tests.doubles.world import MAX_BLOCKS, Receiving, Sending, World
from tests.property.transfer_machine import (
    KEYS,
    TransferMachine,
    WhenReceiverWrites,
    WhenSenderWrites,
)

Move: TypeAlias = tuple[str, int]
CHUNK = (2, MAX_BLOCKS - 2)  # small enough for several to have room
FAULTS = ("lose", "double", "break", "cancel", "restart")
SAID_ONCE = ("renew", "want")  # by the receiver, for the first key
BOUNDED = (*FAULTS, *SAID_ONCE, "advance")  # each at most once


@dataclasses.dataclass(frozen=True)
class Bounds:
    """How many contents are sent, and how many bad things happen on one path, each at most once."""

    num_keys: int = 1
    num_faults: int = 1
    num_renewals: int = 0  # 1: the receiver may renew, and ask for, what is pushed


def begin(machine: TransferMachine, bounds: Bounds) -> None:
    """Both callers have said what they want."""
    world = machine.world
    for key in KEYS[: bounds.num_keys]:
        world.send(key, b"", *CHUNK, ready=True)
        world.receive(key, b"", CHUNK[0])


def moves_of(world: World, path: tuple[Move, ...], bounds: Bounds) -> list[Move]:
    """What can happen next."""
    used = Counter(name for name, _ in path)
    link = world.links.link
    moves: list[Move] = []
    if link is not None and (link.channel is None or not link.ready):
        moves.append(("connect", 0))
    if world.jobs or world.ended or any(channel.stream for channel in world.channels.values()):
        moves.append(("work", 0))
    seen = {frame: index for index, (_, frame) in reversed(list(enumerate(world.network)))}
    moves += [("deliver", index) for index in seen.values()]
    if sum(used[name] for name in FAULTS) < bounds.num_faults:
        for name in FAULTS:
            if used[name]:
                continue
            if name in ("lose", "double"):
                moves += [(name, index) for index in seen.values()]
            elif name == "cancel":
                moves += [(name, index) for index in range(bounds.num_keys)]
            else:
                moves.append((name, 0))
    moves += [(name, 0) for name in SAID_ONCE if bounds.num_renewals and not used[name]]
    if not used["advance"]:
        moves.append(("advance", 0))
    return moves


def make(machine: TransferMachine, move: Move, bounds: Bounds) -> None:
    """Let it happen."""
    world, (name, index) = machine.world, move
    if name == "connect":
        world.connect()
    elif name == "work":
        work(world)
    elif name == "deliver":
        world.deliver(index)
    elif name == "double":
        world.deliver(index, keep=True)
    elif name == "lose":
        world.network.pop(index)
    elif name == "renew":
        world.keep((KEYS[0], b""))
        world.renew()
    elif name == "want":
        world.want((KEYS[0], b""))
    elif name == "advance":
        world.advance(0.6)
    elif name == "break":
        world.break_channel(TransportError("the data connection broke"))
    elif name == "cancel":
        world.receivings[index].transfer.cancel("not wanted any more")
    elif name == "restart":
        world.restart_sender()
        for key in KEYS[: bounds.num_keys]:
            world.send(key, b"", *CHUNK, ready=True)
            try:
                world.receive(key, b"", CHUNK[0])
            except TransferError:
                continue  # it waits for the first one still, or was refused


def work(world: World) -> None:
    """Everything that moves comes to its end, and its owners hear of it."""
    for job in list(world.jobs):
        world.move(job, 1 << 20)
    for epoch in list(world.channels):
        world.move_stream(epoch)
    world.drain()
    world.store.poll()


def name_of(world: World) -> str:
    """What tells one state from another; two that differ only in which key is which are one.

    The keys are sent in their order at each start of the sender: the first has the first number.
    """
    parts = parts_of(world)
    return min(repr(sorted(parts)), repr(sorted(map(_mirrored, parts))))


def parts_of(world: World) -> list[str]:
    """Everything in a state, with sequence numbers as "#1" and "#2"."""
    chunks = [
        ("chunk", f"#{c.seq}", c.state.name, c.attempt, repr(c.shipment.ready_layers),
         round(c.resend_at - world.now, 3), repr(c.ending))
        for c in world.sender._chunks.values()
    ]  # fmt: skip
    landings = [
        ("landing", i.id[0], f"#{i.id[1]}", i.state.name, i.attempt, i.receive is not None,
         i.done_heard, i.place)
        for i in world.landings()
    ]  # fmt: skip
    jobs = [
        ("job", place, j.kind, j.epoch, f"#{j.seq}", j.state, j.moved, j.cancel_asked)
        for place, j in enumerate(world.jobs)
    ]
    streams = [
        ("stream", epoch, place, f"#{seq}", end)
        for epoch, channel in world.channels.items()
        for place, (seq, _, end) in enumerate(channel.stream)
    ]
    callers: list[Sending | Receiving] = [*world.sendings, *world.receivings]
    ends = [
        ("end", type(item).__name__, str(item.key), item.transfer.released, item.transfer.done,
         repr(item.transfer.error))
        for item in callers
    ]  # fmt: skip
    link = world.links.link
    rest = (
        "rest", world.now, world.epoch, sorted(world.sessions),
        link is not None and (link.state.name, link.channel is not None),
        len(world.breaking), sorted(world.transport.connected),
    )  # fmt: skip
    kept = [("kept", str(key), world.store.is_left((key, b))) for key, b in world.kept()]
    abandoned = [("abandoned", str(key)) for key in world.sender._abandoned]
    network = [("message", _message(to, frame)) for to, frame in world.network]
    everything = [*chunks, *landings, *jobs, *streams, *ends, *kept, *abandoned, *network, rest]
    return [repr(part) for part in everything]


_KEYS_AND_NUMBERS = re.compile(r"(request-|#|\bseq=)([12])\b")


def _mirrored(part: str) -> str:
    """The same with the two keys in each other's place."""
    return _KEYS_AND_NUMBERS.sub(lambda found: found[1] + "21"[int(found[2]) - 1], part)


def _message(to: str, frame: bytes) -> str:
    message = decode(frame)
    if isinstance(message, Grant):  # its trailer is random
        return f"{to} {message.destination_epoch} #{message.seq} {message.attempt} {message.offset}"
    return f"{to} {message!r}"


class Seen:
    """The states that are known, and what had been spent of the bounds when they were reached."""

    def __init__(self) -> None:
        self._spent: dict[str, list[frozenset[str]]] = {}
        self.num_states = 0

    def add(self, name: str, spent: frozenset[str]) -> bool:
        """Note a state; False: from one like it at least as much can happen, and that is known."""
        known = self._spent.setdefault(name, [])
        if any(other <= spent for other in known):
            return False
        known.append(spent)
        self.num_states += 1
        return True


def explore(
    kind: type[TransferMachine],
    bounds: Bounds,
    limit: int,
    report: Callable[[str], None] = lambda _: None,
) -> int:
    """Visit every state; returns how many there are. `report` hears how far it has come.

    Raises:
        AssertionError: a promise is broken, a state has no way to the end, or there are more states
            than `limit`.
    """
    seen = Seen()
    frontier: list[tuple[Move, ...]] = [()]
    while frontier:
        following: list[tuple[Move, ...]] = []
        for path in frontier:
            moves = visit(kind, path, bounds, seen)
            following += [(*path, move) for move in moves]
            assert seen.num_states <= limit, f"more than {limit} states"
        frontier = following
        report(f"{kind.__name__}: {seen.num_states} states, {len(frontier)} to try next")
    return seen.num_states


def visit(
    kind: type[TransferMachine], path: tuple[Move, ...], bounds: Bounds, seen: Seen
) -> list[Move]:
    """Play a path; returns what can follow, nothing when its state is known."""
    machine: Any = kind()
    try:
        begin(machine, bounds)
        for move in path:
            make(machine, move, bounds)
        spent = frozenset(name for name, _ in path if name in BOUNDED)
        if not seen.add(name_of(machine.world), spent):
            return []
        machine.check_promises()
        moves = moves_of(machine.world, path, bounds)
        machine.world.settle()
        machine.check_promises()
        assert sum(machine.world.store.live_bytes().values()) == 0
        return moves
    except AssertionError as error:
        raise AssertionError(f"after {path}: {error}") from error
    finally:
        machine.world.close()


def main() -> None:
    """Explore as far as is asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=2)
    parser.add_argument("--faults", type=int, default=1)
    parser.add_argument("--renewals", type=int, default=0)
    parser.add_argument("--limit", type=int, default=1_000_000)
    options = parser.parse_args()
    bounds, kinds = (
        Bounds(options.keys, options.faults, options.renewals),
        (WhenSenderWrites, WhenReceiverWrites),
    )
    with ProcessPoolExecutor(len(kinds)) as pool:
        runs = [pool.submit(explore, kind, bounds, options.limit, say) for kind in kinds]
        for kind, run in zip(kinds, runs, strict=True):
            states = run.result()
            say(f"{kind.__name__}: {states} states, all promises hold in each")


def say(text: str) -> None:
    """Print at once: it takes long."""
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
