"""Every state that a setting can reach, each checked against the promises, and for its way to the
end once nothing goes wrong any more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.property.core_model.moves import (
    FAULTS,
    Move,
    is_asked_for,
    is_given_up,
    leases_of,
    make,
    moves_of,
    orders_of,
    timers_of,
    work_of,
)
from tests.property.core_model.state import OPEN_ASKS, CoreState, Scope, State

MAX_STEPS = 400  # from any state to the end of everything
MAX_MESSAGES = 120
ROUNDS = 9  # of timers, in which everything comes to its end


class BrokenPromise(AssertionError):
    """A promise is broken."""


def check(world: CoreState) -> None:
    """Check what must hold in each state."""
    setting = world.setting
    for name, ship in world.ships.items():
        rank = world.ranks[ship.rank]
        for index, (state, _, region) in enumerate(ship.chunks):
            if state not in ("writing", "failing", "stopping") or ship.epoch != rank.epoch:
                continue
            row = rank.rows.get((name, index))
            if region is not None and region >= 0 and (row is None or row.region != region):
                raise BrokenPromise(f"chunk {name, index} is written where it owns nothing")
    for rank in world.ranks:
        regions = [row.region for row in rank.rows.values() if row.region >= 0]
        if len(regions) != len(set(regions)):
            raise BrokenPromise("two chunks have one region")
        for (name, index), row in rank.rows.items():
            ask = rank.bound.get(name, 0)
            if row.state != "landed":
                continue
            if rank.words[row.region] != (name, index):
                raise BrokenPromise(f"chunk {name, index} landed without its bytes")
            if (
                ask > 0
                and setting.ask_contents[ask - 1] != setting.try_contents[world.made[name - 1]]
            ):
                raise BrokenPromise(f"ask {ask} takes another content")
        for state, blocks in rank.asks[1:]:
            if state == "failed" and not setting.may_fail:
                raise BrokenPromise("an ask has failed for no reason")
            if state == "loaded" and blocks != (1 << setting.num_blocks) - 1:
                raise BrokenPromise("an ask is loaded and lacks a block")


class WaysToEnd:
    """Whether everything ends, from each state that is asked about, once nothing goes wrong.

    First without deadlines: what P can serve must arrive. Then D's deadline ends what is still
    open, and every lease ends. States from which the same follows are looked at once.
    """

    def __init__(self) -> None:
        self._known: set[State] = set()

    def check(self, world: CoreState) -> None:
        """Let everything end: no fault and no new order from here on; what is astray is lost.

        Raises:
            BrokenPromise: something is stuck, says messages for ever, or is remembered for ever.
        """
        world.strays.clear()
        world.left = [0, 0, 0]
        if self._is_known(world):
            return
        sent = world.num_sent
        steps = quiet(world)
        _ping(world)
        steps += quiet(world)
        if world.num_sent - sent > MAX_MESSAGES:
            raise BrokenPromise(
                f"{world.num_sent - sent} messages and {steps} steps until it is quiet"
            )
        if not self._is_known(world):
            _end_by_time(world)
            if world.num_sent - sent > 2 * MAX_MESSAGES:
                raise BrokenPromise(f"{world.num_sent - sent} messages until the end")
            _ping(world)
            quiet(world)
            _check_empty(world)

    def _is_known(self, world: CoreState) -> bool:
        name = world.frozen()
        is_known = name in self._known
        self._known.add(name)
        return is_known


def _end_by_time(world: CoreState) -> None:
    for number, rank in enumerate(world.ranks):
        for ask in range(1, len(rank.asks)):
            if rank.asks[ask][0] in OPEN_ASKS:
                if _can_be_served(world, number, ask):
                    raise BrokenPromise(f"ask {ask} of rank {number} waits for what P has")
                if _is_known_to_be_gone(world, number, ask):
                    raise BrokenPromise(f"ask {ask} of rank {number} waits for what P has ended")
                make(world, ("abort", number, ask))
    for _ in range(4):
        quiet(world)
        world.left[FAULTS] = 99
        for lease in list(leases_of(world)):
            if lease in set(leases_of(world)):
                make(world, lease)
                check(world)
                quiet(world)
        world.left[FAULTS] = 0


def quiet(world: CoreState) -> int:
    """Let what is due happen, until nothing is. A chunk is offered once in each round of timers."""
    steps, rounds = 0, 0
    offered: set[Move] = set()
    while rounds < ROUNDS:
        move = next(_due(world, offered), None)
        if move is None:
            rounds += 1
            if not _fire(world, is_late=not rounds % 3) and not offered and not rounds % 3:
                return steps
            offered.clear()
        else:
            if move[0] == "offer":
                offered.add(move)
            make(world, move)
        steps += 1
        if steps > MAX_STEPS:
            raise BrokenPromise("it does not come to an end")
    return steps


def _fire(world: CoreState, *, is_late: bool) -> bool:
    """Fire the timers; those of grace when it is late, after repetitions have been heard. Returns
    whether there were any."""
    timers = list(timers_of(world, even_busy=True))
    for timer in timers:
        is_grace = timer[0] in ("turn away", "time is over")
        if is_late >= is_grace and timer in set(timers_of(world, even_busy=True)):
            make(world, timer)
    return bool(timers)


def _due(world: CoreState, offered: set[Move]) -> Iterator[Move]:
    """Work, and the orders that must come."""
    for move in work_of(world):
        if move not in offered:
            yield move
    for move in orders_of(world):
        if move[0] == "give blocks" or (move[0] == "abort" and is_given_up(world, move[2])):
            yield move


def _can_be_served(world: CoreState, number: int, ask: int) -> bool:
    """Whether P has a try that this ask should get."""
    content = world.setting.ask_contents[ask - 1]
    for item, other in zip(world.tries, world.setting.try_contents, strict=True):
        is_idle = item.state == "paired" and not item.taken and not is_asked_for(world, item.ask)
        is_its = (item.state, item.ask) == ("paired", ask)
        if other == content and (item.state == "free" or is_its or is_idle):
            return True
    return world.heard[number][ask] == "gone"


def _is_known_to_be_gone(world: CoreState, number: int, ask: int) -> bool:
    """Whether P has ended its tries of what an ask wants, and has heard of the ask."""
    content = world.setting.ask_contents[ask - 1]
    tries = zip(world.tries, world.setting.try_contents, strict=True)
    has_ended = any(item.state == "ended" for item, other in tries if other == content)
    return has_ended and world.heard[number][ask] != "none"


def _ping(world: CoreState) -> None:
    """Let both say PING: each message has its sender's lowest open number."""
    for way in range(len(world.queues)):
        make(world, ("ping", way))


def _check_empty(world: CoreState) -> None:
    if any(world.queues) or world.ships:
        raise BrokenPromise("something is still open")
    if any(item.state not in ("none", "unborn") for item in world.tries):
        raise BrokenPromise(f"P remembers a try for ever: {[item.state for item in world.tries]}")
    if any(state != "none" for heard in world.heard for state in heard):
        raise BrokenPromise(f"P remembers an ask for ever: {world.heard}")
    for rank in world.ranks:
        if rank.rows or rank.bound:
            raise BrokenPromise(f"D remembers a shipment for ever: {rank.rows} {rank.bound}")


def explore(
    setting: Scope, limit: int = 1_000_000, report: Callable[[str], None] = lambda _: None
) -> int:
    """Visit every state, breadth first; returns how many there are.

    Raises:
        AssertionError: a promise is broken, with the moves that lead there; or there are more
            states than `limit`.
    """
    start = CoreState(setting)
    parents: dict[State, tuple[State, Move] | None] = {start.frozen(): None}
    frontier, ends = [start], WaysToEnd()
    while frontier:
        following: list[CoreState] = []
        for world in frontier:
            name = world.frozen()
            for move in moves_of(world):
                child = world.copy()
                try:
                    make(child, move)
                    check(child)
                    key = child.frozen()
                    if key in parents:
                        continue
                    parents[key] = name, move
                    following.append(child)
                    ends.check(child.copy())
                except AssertionError as error:
                    raise AssertionError(f"{error}, after {story(parents, name, move)}") from error
        assert len(parents) <= limit, f"more than {limit} states"
        frontier = following
        report(f"{setting.name}: {len(parents)} states, {len(frontier)} to try next")
    return len(parents)


def story(parents: dict[State, Any], name: State, last: Move) -> list[Move]:
    """The moves that lead to a state, and one more."""
    moves = [last]
    while (found := parents[name]) is not None:
        name, move = found
        moves.append(move)
    return moves[::-1]
