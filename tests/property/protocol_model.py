"""Every state that transfers between two engines can reach, within bounds.

The real sender and the real store, in tests/doubles/world.py: any message on its way may be
delivered next, be lost or be doubled, bytes may move, the data connection may break, time may pass,
the receiver may cancel, the sender may be restarted. How often the bad things happen is bounded.
`turn_model.py` has the turns of a session.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from p2p_engine.errors import TransferError, TransportError
from tests.doubles.world import MAX_BLOCKS, World
from tests.property.explore import Move, Path, Playable, explore
from tests.property.state_names import parts_of
from tests.property.transfer_machine import (
    KEYS,
    TransferMachine,
    WhenReceiverWrites,
    WhenSenderWrites,
)
from tests.property.turn_model import all_turns

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


@dataclasses.dataclass(frozen=True)
class TransferModel:
    """The play of these transfers."""

    kind: type[TransferMachine]
    bounds: Bounds
    bounded = BOUNDED

    def __str__(self) -> str:
        return self.kind.__name__

    def machine(self) -> TransferMachine:
        """Make its world."""
        return self.kind()

    def begin(self, world: World) -> None:
        """Both callers have said what they want."""
        begin(world, self.bounds)

    def moves(self, world: World, path: Path) -> list[Move]:
        """What can happen next."""
        return moves_of(world, path, self.bounds)

    def make(self, world: World, move: Move) -> None:
        """Let it happen."""
        make(world, move, self.bounds)

    def name(self, world: World) -> str:
        """What tells one state from another."""
        return name_of(world)


def begin(world: World, bounds: Bounds) -> None:
    """Both callers say what they want."""
    for key in KEYS[: bounds.num_keys]:
        world.send(key, b"", *CHUNK, ready=True)
        world.receive(key, b"", CHUNK[0])


def moves_of(world: World, path: Path, bounds: Bounds) -> list[Move]:
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


def make(world: World, move: Move, bounds: Bounds) -> None:
    """Let it happen."""
    name, index = move
    if name == "connect":
        world.connect()
    elif name == "work":
        world.work()
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


def name_of(world: World) -> str:
    """What tells one state from another; two that differ only in which key is which are one.

    The keys are sent in their order at each start of the sender: the first has the first number.
    """
    parts = parts_of(world)
    return min(repr(sorted(parts)), repr(sorted(map(_mirrored, parts))))


_KEYS_AND_NUMBERS = re.compile(r"(request-|#|\bseq=)([12])\b")


def _mirrored(part: str) -> str:
    """The same with the two keys in each other's place."""
    return _KEYS_AND_NUMBERS.sub(lambda found: found[1] + "21"[int(found[2]) - 1], part)


def main() -> None:
    """Explore as far as is asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=2)
    parser.add_argument("--faults", type=int, default=1)
    parser.add_argument("--renewals", type=int, default=0)
    parser.add_argument("--limit", type=int, default=1_000_000)
    parser.add_argument("--turns", action="store_true", help="turns of a session, not transfers")
    options = parser.parse_args()
    bounds = Bounds(options.keys, options.faults, options.renewals)
    kinds = (WhenSenderWrites, WhenReceiverWrites)
    plays: list[Playable] = [TransferModel(kind, bounds) for kind in kinds]
    if options.turns:
        plays = [*all_turns(options.faults)]
    with ProcessPoolExecutor(len(kinds)) as pool:
        runs = [pool.submit(explore, play, options.limit, say) for play in plays]
        for play, run in zip(plays, runs, strict=True):
            say(f"{play}: {run.result()} states, all promises hold in each")


def say(text: str) -> None:
    """Print at once: it takes long."""
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
