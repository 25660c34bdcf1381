"""Every state that a play can reach, within its bounds, explored one by one.

In each state every move of the play is tried. Each state that is new is checked for all promises,
and for a way to the end of everything from there. Breadth first, so that the first failure has the
shortest story; a state is reached by playing its moves again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from tests.doubles.world import World
from tests.property.transfer_machine import TransferMachine

Move: TypeAlias = tuple[str, int]
Path: TypeAlias = tuple[Move, ...]


class Playable(Protocol):
    """What begins, what can follow, and what tells one state from another. Moves that are `bounded`
    are made once at most."""

    @property
    def bounded(self) -> tuple[str, ...]:
        """The names of these moves."""

    def machine(self) -> TransferMachine:
        """Make a world that has not begun, with its promises."""

    def begin(self, world: Any) -> None:
        """Make the first move, which is always the same."""

    def moves(self, world: Any, path: Path) -> list[Move]:
        """What can happen next."""

    def make(self, world: Any, move: Move) -> None:
        """Let it happen."""

    def name(self, world: Any) -> str:
        """What tells a state from another one."""


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


def explore(play: Playable, limit: int, report: Callable[[str], None] = lambda _: None) -> int:
    """Visit every state; returns how many there are. `report` hears how far it has come.

    Raises:
        AssertionError: a promise is broken, a state has no way to the end, or there are more states
            than `limit`.
    """
    seen = Seen()
    frontier: list[Path] = [()]
    while frontier:
        following: list[Path] = []
        for path in frontier:
            following += [(*path, move) for move in visit(play, path, seen)]
            assert seen.num_states <= limit, f"more than {limit} states"
        frontier = following
        report(f"{play}: {seen.num_states} states, {len(frontier)} to try next")
    return seen.num_states


def visit(play: Playable, path: Path, seen: Seen) -> list[Move]:
    """Play a path; returns what can follow, nothing when its state is known."""
    machine = play.machine()
    world: World = machine.world
    try:
        play.begin(world)
        for move in path:
            play.make(world, move)
        spent = frozenset(name for name, _ in path if name in play.bounded)
        if not seen.add(play.name(world), spent):
            return []
        machine.check_promises()
        moves = play.moves(world, path)
        world.settle()
        machine.check_promises()
        assert sum(world.store.live_bytes().values()) == 0
        return moves
    except AssertionError as error:
        raise AssertionError(f"after {path}: {error}") from error
    finally:
        world.close()
