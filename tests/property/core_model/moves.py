"""What can happen next in a state of the model, and how it happens.

A move is a tuple of its name and numbers. Faults are bounded by the setting. A timer that repeats a
message fires only when nothing is in flight between the two: an earlier repetition is the same as a
copy, which is a fault of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from tests.property.core_model.receiving import ReceiverModel
from tests.property.core_model.sending import SenderModel
from tests.property.core_model.state import OPEN_ASKS, CoreState

Move: TypeAlias = tuple[Any, ...]
ABORTS, GIVE_UPS, FAULTS = range(3)  # of what is left
ON_THE_WAY = ("granted", "writing", "written")


def moves_of(world: CoreState) -> Iterator[Move]:
    """Everything that can happen next."""
    yield from work_of(world)
    yield from orders_of(world)
    yield from timers_of(world)
    if world.left[FAULTS]:
        yield from faults_of(world)


def work_of(world: CoreState) -> Iterator[Move]:
    """What happens by itself: messages arrive, bytes move, both look."""
    for way, queue in enumerate(world.queues):
        if queue:
            yield "deliver", way
    for index in range(len(world.strays)):
        if index == 0 or world.strays[index] != world.strays[index - 1]:
            yield "deliver stray", index
    for name, ship in world.ships.items():
        for index, chunk in enumerate(ship.chunks):
            if chunk[0] == "queued":
                yield "offer", name, index
                break
        for index, chunk in enumerate(ship.chunks):
            if chunk[0] in ("granted", "writing", "stopping", "failing"):
                yield "work", name, index
    for number, rank in enumerate(world.ranks):
        for each, row in rank.rows.items():
            is_seen = row.state == "quarantined" or not world.setting.is_checked
            has_word = row.region >= 0 and rank.words[row.region] == each
            if has_word and is_seen and row.state != "landed":
                yield "look", number, *each
            if row.state == "quarantined" and row.has_died:
                yield "proof", number, *each


def orders_of(world: CoreState) -> Iterator[Move]:
    """What the two schedulers say."""
    setting = world.setting
    for index, item in enumerate(world.tries):
        if item.state == "unborn":
            yield "begin try", index
            break
    for index, item in enumerate(world.tries):
        if item.state in ("free", "paired") and world.left[GIVE_UPS]:
            yield "give up", index
    for number, rank in enumerate(world.ranks):
        for ask in range(1, len(rank.asks)):
            state = rank.asks[ask][0]
            if state == "unborn":
                ticket = world.tries[min(ask, len(world.tries)) - 1]
                if not setting.is_ticketed or ticket.state != "unborn":
                    yield "begin ask", number, ask
                break
        for ask in range(1, len(rank.asks)):
            state = rank.asks[ask][0]
            if state in ("wanted", "here"):
                yield "give blocks", number, ask
            if state in OPEN_ASKS and (world.left[ABORTS] or is_given_up(world, ask)):
                yield "abort", number, ask


def is_given_up(world: CoreState, ask: int) -> bool:
    """Whether D's scheduler gives an ask up, because a client did or another rank has failed."""
    is_failed = any(rank.asks[ask][0] == "failed" for rank in world.ranks)
    return bool(world.aborted >> ask & 1) or is_failed


def timers_of(world: CoreState, *, even_busy: bool = False) -> Iterator[Move]:
    """What is repeated, and what a second of grace ends."""
    for number, rank in enumerate(world.ranks):
        for ask in range(1, len(rank.asks)):
            if world.heard[number][ask] == "waiting" and _has_ended_try(world, ask):
                yield "turn away", number, ask
        if not even_busy and (world.queues[2 * number] or world.queues[2 * number + 1]):
            continue
        if not even_busy and world.known_epochs[number] != rank.epoch:
            yield "ping", 2 * number + 1
        if not even_busy and rank.sender_epoch != world.epoch:
            yield "ping", 2 * number
        for ask in range(1, len(rank.asks)):
            if rank.asks[ask][0] in ("wanted", "loading"):
                yield "ask again", number, ask
        for each, row in rank.rows.items():
            if row.state == "quarantined" and not row.has_died:
                yield "stop again", number, *each
        for name, ship in world.ships.items():
            for index, chunk in enumerate(ship.chunks):
                if ship.rank == number and chunk[0] in ("offered", "written"):
                    yield "say again", name, index
    for index, item in enumerate(world.tries):
        has_shipment = any(ship.of == index for ship in world.ships.values())
        if item.state == "free" and world.setting.pushes[index] and not has_shipment:
            yield "time is over", index


def _has_ended_try(world: CoreState, ask: int) -> bool:
    content = world.setting.ask_contents[ask - 1]
    tries = zip(world.tries, world.setting.try_contents, strict=True)
    return any(item.state == "ended" and other == content for item, other in tries)


def faults_of(world: CoreState) -> Iterator[Move]:
    """What goes wrong."""
    for fault in world.setting.faults:
        if fault == "stray":
            for way, queue in enumerate(world.queues):
                for index in range(len(queue)):
                    yield "stray", way, index
                    yield "copy", way, index
        elif fault == "restart P":
            yield ("restart P",)
        elif fault == "restart D":
            yield ("restart D",)
        elif fault == "break":
            for number in range(len(world.ranks)):
                chunks = [c for s in world.ships.values() if s.rank == number for c in s.chunks]
                if any(chunk[0] in ON_THE_WAY for chunk in chunks):
                    yield "break", number, 0
                    yield "break", number, 1
        elif fault == "silence":
            for number, heard in enumerate(world.heard):
                for ask in range(1, len(heard)):
                    if heard[ask] != "none":
                        yield "expire", number, ask
        elif fault == "lapse":
            yield from leases_of(world)


def leases_of(world: CoreState) -> Iterator[Move]:
    """The leases that may end."""
    for index, item in enumerate(world.tries):
        is_held = item.state == "free" and not world.setting.pushes[index]
        if is_held or (item.state == "paired" and not is_asked_for(world, item.ask)):
            yield "time is over", index
        elif item.state == "ended":
            yield "forget", index
    for number, rank in enumerate(world.ranks):
        for name, ask in rank.bound.items():
            if ask == 0:
                yield "lapse", number, name


def is_asked_for(world: CoreState, ask: int) -> bool:
    """Whether a rank asks still: another one may have got its part, or have never asked."""
    return any(heard[ask] == "paired" for heard in world.heard)


def make(world: CoreState, move: Move) -> None:
    """Let a move happen."""
    name, *rest = move
    _MOVES[name](world, *rest)


def spend(world: CoreState, kind: int) -> None:
    """Take one of what is left of a kind."""
    world.left[kind] = max(0, world.left[kind] - 1)


def deliver(world: CoreState, way: int, message: tuple[Any, ...]) -> None:
    """Let a message arrive."""
    if way % 2:
        ReceiverModel(world, way // 2).hear(message)
    else:
        SenderModel(world).hear(way // 2, message)


def _stray(world: CoreState, way: int, index: int) -> None:
    spend(world, FAULTS)
    world.strays.append((way, world.queues[way].pop(index)))
    world.strays.sort()


def _copy(world: CoreState, way: int, index: int) -> None:
    spend(world, FAULTS)
    world.strays.append((way, world.queues[way][index]))
    world.strays.sort()


def _work(world: CoreState, name: int, index: int) -> None:
    ship = world.ships[name]
    state, _, region = ship.chunks[index]
    rank = world.ranks[ship.rank]
    if state == "granted":
        SenderModel(world).on_out(name, index, "is ready")
    elif state == "writing":
        if region >= 0 and ship.epoch == rank.epoch:
            rank.words[region] = (name, index)
        SenderModel(world).on_out(name, index, "is written")
    else:
        SenderModel(world).on_out(name, index, "job ended")


def _break(world: CoreState, number: int, loses_word: int) -> None:
    spend(world, FAULTS)
    rank = world.ranks[number]
    for name, ship in list(world.ships.items()):
        for index in range(len(ship.chunks)):
            state, _, region = ship.chunks[index]
            if ship.rank != number or name not in world.ships:
                continue
            row = rank.rows.get((name, index))
            is_awaited = row is not None and row.state == "granted" and ship.epoch == rank.epoch
            if loses_word and state == "written" and is_awaited and region >= 0:
                rank.words[region] = ("lost", (name, index))
            if state in ("queued", "offered", *ON_THE_WAY, "stopping"):
                SenderModel(world).on_out(name, index, "break")


def _restart_sender(world: CoreState) -> None:
    spend(world, FAULTS)
    world.epoch += 1
    for item in world.tries:
        if item.state != "unborn":
            item.state, item.ask, item.taken = "none", 0, 0
    world.ships.clear()
    for number, rank in enumerate(world.ranks):
        world.heard[number] = ["none"] * len(world.heard[number])
        world.heard_lowest[number], world.known_epochs[number] = 1, rank.epoch


def _restart_receiver(world: CoreState) -> None:
    spend(world, FAULTS)
    for rank in world.ranks:
        rank.epoch += 1
        rank.sender_epoch, rank.lowest = world.epoch, 1
        rank.asks = [["unborn" if ask[0] == "unborn" else "failed", 0] for ask in rank.asks]
        rank.words = [None] * len(rank.words)
        for memory in (rank.bound, rank.rows, rank.lowest_chunks):
            memory.clear()


def _give_up(world: CoreState, index: int) -> None:
    spend(world, GIVE_UPS)
    _on_try(world, index, "given up")


def _on_try(world: CoreState, index: int, event: str) -> None:
    sending = SenderModel(world)
    sending.on_try(index, event)
    sending.match()


def _begin_try(world: CoreState, index: int) -> None:
    world.tries[index].state = "none"
    _on_try(world, index, "begins")


def _time_is_over(world: CoreState, index: int) -> None:
    if not world.setting.pushes[index] or world.tries[index].state == "paired":
        spend(world, FAULTS)
    _on_try(world, index, "time is over")


def _forget(world: CoreState, index: int) -> None:
    spend(world, FAULTS)
    _on_try(world, index, "lease is over")


def _lapse(world: CoreState, number: int, name: int) -> None:
    spend(world, FAULTS)
    ReceiverModel(world, number).lapse(name)


def _expire(world: CoreState, number: int, ask: int) -> None:
    spend(world, FAULTS)
    sending = SenderModel(world)
    sending.on_heard(number, ask, "is over")
    sending.match()


def _turn_away(world: CoreState, number: int, ask: int) -> None:
    SenderModel(world).on_heard(number, ask, "every try has ended")


def _abort(world: CoreState, number: int, ask: int) -> None:
    if not is_given_up(world, ask):
        spend(world, ABORTS)
    world.aborted |= 1 << ask
    ReceiverModel(world, number).on_ask(ask, "fails")


_MOVES: dict[str, Callable[..., None]] = {
    "deliver": lambda w, way: deliver(w, way, w.queues[way].pop(0)),
    "deliver stray": lambda w, index: deliver(w, *w.strays.pop(index)),
    "stray": _stray,
    "copy": _copy,
    "offer": lambda w, name, index: SenderModel(w).on_out(name, index, "may leave"),
    "say again": lambda w, name, index: SenderModel(w).on_out(name, index, "unanswered"),
    "work": _work,
    "look": lambda w, number, *each: _look(w, number, each),
    "proof": lambda w, number, *each: ReceiverModel(w, number).prove(each),
    "stop again": lambda w, number, *each: ReceiverModel(w, number).on_row(each, "unanswered"),
    "begin try": _begin_try,
    "give up": _give_up,
    "time is over": _time_is_over,
    "forget": _forget,
    "begin ask": lambda w, number, ask: ReceiverModel(w, number).begin(ask),
    "give blocks": lambda w, number, ask: ReceiverModel(w, number).on_ask(ask, "blocks given"),
    "ask again": lambda w, number, ask: ReceiverModel(w, number).on_ask(ask, "unanswered"),
    "abort": _abort,
    "turn away": _turn_away,
    "ping": lambda w, way: w.send(bool(way % 2), way // 2, "PING"),
    "lapse": _lapse,
    "expire": _expire,
    "break": _break,
    "restart P": _restart_sender,
    "restart D": _restart_receiver,
}


def _look(world: CoreState, number: int, each: Any) -> None:
    receiving = ReceiverModel(world, number)
    receiving.on_row(each, "word")
    receiving.look_at_all()
