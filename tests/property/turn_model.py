"""Every state that a turn of a session can reach, within bounds: prefill keeps the beginning of a
prompt back, or decode has stashed an earlier turn's KV, and the other side claims it.

The parts of tests/doubles/turns_world.py are the real ones. Not played: the connector, which is the
test's moves here; several ranks, and the LOOKUP that finds them; HELLO and PING, in place of which
a side connects, or notices that the other one was restarted, at any moment; and vLLM's own cache,
which is the number of blocks that a claim does not want. Between two processes, each connection
keeps the order of its messages, as ZMQ's does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

from hypothesis.stateful import RuleBasedStateMachine

from p2p_engine.bounded import Notes
from p2p_engine.errors import TransferError, TransportError
from p2p_engine.memory.arena import POOL
from p2p_engine.send.holds import PROMISED_SECONDS
from tests.doubles.turns_world import HOLDER, LANES, TurnsWorld
from tests.doubles.world import MAX_BLOCKS, NUM_TOKENS, PEER, SETTINGS
from tests.property.explore import Move, Path
from tests.property.state_names import parts_of
from tests.property.transfer_machine import KEYS, TransferMachine, reads

KEY = KEYS[0]
NUM_HELD = 2  # of MAX_BLOCKS
ALL, HALF, OTHER = b"all", b"half", b"other"  # bindings: of a stash, of its beginning, of another
FAULTS = (
    "lose", "double", "break", "withdraw", "give up", "lapse", "kill promiser", "kill claimer",
    "kill both",
)  # fmt: skip
DEATHS = ("lapse", "kill promiser", "kill claimer", "kill both")
LONG_SECONDS = PROMISED_SECONDS + 0.1
LAPSE_SECONDS = SETTINGS.lease_seconds + 0.1


class TurnMachine(TransferMachine):
    """The promises of transfers, and those of holds."""

    def __init__(self, *, receiver_writes: bool) -> None:
        RuleBasedStateMachine.__init__(self)
        config = dataclasses.replace(SETTINGS, mem_pool_size_gb=16384 / (1 << 30))
        self.world: TurnsWorld = TurnsWorld(receiver_writes=receiver_writes, config=config)
        self.receiver_writes = receiver_writes

    def check_promises(self) -> None:
        """Check every invariant."""
        super().check_promises()
        self.no_copy_after_release()
        self.stashed_is_accounted()
        self.nobody_waits_long_for_a_promise()
        self.what_nobody_disturbs_ends_well()

    def no_copy_after_release(self) -> None:
        """What is stashed is not read when its caller has its memory again."""
        for job in self.world.jobs:
            if job.kind == "stash" and not job.done:
                for sending in self.world.sendings:
                    assert not (sending.transfer.released and reads(job, sending.memory))

    def _writable(self) -> list[tuple[int, int, int, int]]:
        """Who does not know yet that the receiver has ended writes into memory of nobody."""
        link = self.world.links.link
        return super()._writable() if link and link.epoch == self.world.store_epoch else []

    def _in_flight(self) -> list[Any]:
        epoch = self.world.store_epoch
        return [message for message in super()._in_flight() if message.source_epoch == epoch]

    def stashed_is_accounted(self) -> None:
        """A stash has memory of the pool while it is held, copied or still being read."""
        holds = self.world.holds
        self.world.pool.check()
        spaces = [space for hold in (*holds._by_transfer.values(), *holds._ending)
                  for space in hold.spaces]  # fmt: skip
        known, live = sum(space.nbytes for space in spaces), self.world.pool.live_bytes[POOL]
        assert known == live or (known < live and self.world.sender.num_open())

    def nobody_waits_long_for_a_promise(self) -> None:
        """Who asks a new process for what the one before has promised is refused soon."""
        world = self.world
        if not world.holds._is_young():
            return
        for (content, _), want in world.holds._unheld._unheld.items():
            is_soon = want.deadline <= world.now + PROMISED_SECONDS
            assert is_soon or content in world.withdrawn, f"{content} waits"

    def what_nobody_disturbs_ends_well(self) -> None:
        """The first claim of what is held, or pushed after all, brings it."""
        world = self.world
        if not (world.is_disturbed or world.expected):
            assert not any(receiving.transfer.error for receiving in world.receivings[:1])


@dataclasses.dataclass(frozen=True)
class TurnModel:
    """What both plays have in common. Moves of a connector are made once, also after a fault."""

    receiver_writes: bool
    num_faults: int = 1
    is_kept: bool = False  # what is claimed is renewed
    is_slow: bool = False  # time passes once
    faults: tuple[str, ...] = FAULTS
    own: ClassVar[tuple[str, ...]] = ()  # moves of its own, that are made once

    @property
    def bounded(self) -> tuple[str, ...]:
        """Each at most once."""
        return (*FAULTS, *self.own, "claim", "claim again", "advance")

    def machine(self) -> TurnMachine:
        """Make its world."""
        return TurnMachine(receiver_writes=self.receiver_writes)

    def moves(self, world: TurnsWorld, path: Path) -> list[Move]:
        """What can happen next."""
        used = Counter(name for name, _ in path)
        lanes = [lane for lane in range(len(LANES)) if world.first_of(lane) is not None]
        moves = [(name, 0) for name in _of_the_world(world)]
        moves += [("deliver", index) for index in lanes]
        if sum(used[name] for name in FAULTS) < self.num_faults:
            for name in (name for name in self.faults if not used[name]):
                indices = lanes if name in ("lose", "double") else [0]
                moves += [(name, index) for index in indices]
        once = [name for name in self._next(world, used) if not used[name]]
        moves += [(name, 0) for name in once]
        return moves + [("advance", 0)] * (self.is_slow and not used["advance"])

    def begin(self, world: TurnsWorld) -> None:
        """Let one side promise something."""
        raise NotImplementedError

    def _next(self, world: TurnsWorld, used: Counter[str]) -> Iterator[str]:
        """What callers can do next."""
        if used["claim"] and not any(not item.transfer.done for item in world.receivings):
            yield "claim again"

    def make(self, world: TurnsWorld, move: Move) -> None:
        """Let it happen, and both control threads hear of it."""
        name, lane = move
        world.is_disturbed |= name in (*FAULTS, "needless")
        index = world.first_of(lane)
        if name in ("deliver", "double") and index is not None:
            world.deliver(index, keep=name == "double")
        elif name == "lose" and index is not None:
            world.network.pop(index)
        elif name == "break":
            world.break_channel(TransportError("the data connection broke"))
        elif name in ("advance", "lapse"):
            world.advance(LONG_SECONDS if name == "advance" else LAPSE_SECONDS)
        elif name == "withdraw":
            for receiving in world.receivings:
                receiving.transfer.cancel("not wanted any more")
        elif name.startswith("kill"):
            self._kill(world, name)
        elif name.startswith("claim"):
            with contextlib.suppress(TransferError):  # refused at once
                self.claim(world)
        elif name in ("connect", "greet", "notice", "work"):
            getattr(world, name)()
        else:
            self.act(world, name)
        world.advance(0.0)

    def _kill(self, world: TurnsWorld, name: str) -> None:
        if name != "kill claimer":
            world.restart_sender()
        if name != "kill promiser":
            world.restart_receiver()

    def claim(self, world: TurnsWorld) -> None:
        """Ask for what was promised."""
        raise NotImplementedError

    def act(self, world: TurnsWorld, name: str) -> None:
        """Make a move of the play's own, or let the promiser `give up`."""
        raise NotImplementedError

    def name(self, world: TurnsWorld) -> str:
        """What tells a state from another one."""
        return repr(sorted([*parts_of(world), *_parts_of_turns(world)]))


@dataclasses.dataclass(frozen=True)
class KeptBack(TurnModel):
    """Prefill has pushed blocks from NUM_HELD on, and holds those before; decode has so many."""

    num_known: int = 0
    own = ("press",)

    def begin(self, world: TurnsWorld) -> None:
        """Prefill has computed the prompt."""
        world.send(KEY, ALL, NUM_HELD, MAX_BLOCKS - NUM_HELD, ready=True, generation=1)
        world.hold((KEY, ALL), 0, NUM_HELD, generation=1)
        world.meet()

    def _next(self, world: TurnsWorld, used: Counter[str]) -> Iterator[str]:
        yield from super()._next(world, used)
        yield "claim"
        if world.holds.num_open():
            yield "press"

    def claim(self, world: TurnsWorld) -> None:
        """Load what decode lacks."""
        if self.is_kept:
            world.keep_there((KEY, ALL))
        blocks = (self.num_known, MAX_BLOCKS)
        world.claim((KEY, ALL), blocks, pull=self.num_known < NUM_HELD, has_held=True)

    def act(self, world: TurnsWorld, name: str) -> None:
        """Push what is held, because vLLM needs its blocks; or give all of it up."""
        for sending in world.sendings:
            if sending.is_held or name == "give up":
                sending.transfer.cancel(name)
        if name == "press":
            world.withdrawn.add((KEY, ALL))
            world.send(KEY, ALL, 0, NUM_HELD, ready=True, generation=1)
        else:
            world.holds.let_go((KEY, ALL), name, 1)
            world.sender.abandon((KEY, ALL), PEER, name, 1)


@dataclasses.dataclass(frozen=True)
class Recalled(TurnModel):
    """Decode has noted a stash in its directory, and makes it in its next step; prefill asks the
    directory, and then for what both prompts share. `is_second`: a request was sent again under its
    name, and the two have given different answers."""

    shared: bytes = ALL
    is_second: bool = False
    own = ("stash", "recall", "needless")

    def begin(self, world: TurnsWorld) -> None:
        """A request of decode's has finished."""
        tokens = NUM_TOKENS // MAX_BLOCKS
        marks = [(tokens * NUM_HELD, HALF), (tokens * MAX_BLOCKS, ALL)]
        world.expected.add(KEY)
        world.is_disturbed = self.is_second and self.shared == ALL
        world.notes.note(KEY, marks, SETTINGS.lease_seconds)
        world.meet()

    def _next(self, world: TurnsWorld, used: Counter[str]) -> Iterator[str]:
        yield from super()._next(world, used)
        if KEY in world.expected:
            yield "stash"
        yield "recall"
        if any(binding == self.shared for item in world.recallings
               for _, binding in item.marks or ()):  # fmt: skip
            yield from ("claim", "needless")

    def claim(self, world: TurnsWorld) -> None:
        """Load what both prompts share."""
        content = (KEY, self.shared)
        if self.is_kept:
            world.keep_there(content)
        end = NUM_HELD if self.shared == HALF else MAX_BLOCKS
        world.claim(content, (0, end), pull=True, source=ALL)

    def act(self, world: TurnsWorld, name: str) -> None:
        """Stash, recall, say that nothing of it is needed, or give all up."""
        if name == "stash":
            world.expected.clear()
            for binding in [OTHER] * self.is_second + [ALL]:
                with contextlib.suppress(TransferError):  # the connector reports it
                    world.stash((KEY, binding), {HALF: NUM_HELD}, ALL)
        elif name == "recall":
            world.recall(KEY)
        elif name == "needless":
            if not world.store.leave((KEY, self.shared), is_pulled=True):
                world.store.discard((KEY, self.shared), name)
            world.pulls.release((KEY, self.shared), HOLDER)
        else:
            for sending in world.sendings:
                sending.transfer.cancel(name)


def all_turns(num_faults: int) -> Iterator[TurnModel]:
    """Every play, over both kinds of transport."""
    for receiver_writes, is_kept in itertools.product((False, True), repeat=2):
        common = receiver_writes, num_faults, is_kept
        yield from (KeptBack(*common, num_known=number) for number in range(MAX_BLOCKS))
        for shared, is_second in itertools.product((ALL, HALF), (False, True)):
            yield Recalled(*common, shared=shared, is_second=is_second)
    for receiver_writes in (False, True):
        yield KeptBack(receiver_writes, num_faults, is_slow=True)
        yield Recalled(receiver_writes, num_faults, is_slow=True, shared=HALF)


def _of_the_world(world: TurnsWorld) -> Iterator[str]:
    """What can happen by itself, apart from messages."""
    link, asks = world.links.link, world.asks.link
    is_met = link is None or link.epoch != world.store_epoch
    if not is_met and (link.channel is None or not link.ready):  # type: ignore[union-attr]
        yield "connect"
    if asks is not None and not asks.ready:
        yield "greet"
    if world.is_stale():
        yield "notice"
    if world.jobs or world.ended or any(item.stream for item in world.channels.values()):
        yield "work"


def _parts_of_turns(world: TurnsWorld) -> list[str]:
    """What parts_of does not see, with times as seconds from now."""

    def left(moment: float) -> float:
        return round(moment - world.now, 3)

    holds, asks, link = world.holds, world.asks.link, world.links.link
    held = [
        ("hold", str(h.content), left(h.lease_ends_at), left(h.latest_end), sorted(h.served),
         len(h.shipments), h.copying is not None, len(h.spaces),
         [left(want.deadline) for want in h.wants.values()])
        for h in (*holds._by_transfer.values(), *holds._ending)
    ]  # fmt: skip
    parked = [("parked", str(content), left(want.deadline), want.reason)
              for (content, _), want in holds._unheld._unheld.items()]  # fmt: skip
    endings = world.endings
    memories: tuple[Notes[Any, Any], ...] = (endings._endings, endings._over, endings._final)
    ended = [
        ("ending", repr(sorted((name, repr(note.value)) for name, note in notes._notes.items())))
        for notes in memories
    ]
    awaited = [
        ("awaited", str(item.content), item.pull, item.transfer.done,
         [(a.link.epoch, a.link.ready, left(a.resend_at), a.num_wants) for a in item.asked])
        for item in world.expectations._awaited.values()
    ]  # fmt: skip
    duties = [
        ("duty", left(duty.due_at), sorted(map(str, duty.contents)), sorted(map(str, duty.fresh)),
         duty.epoch)
        for duty in world.renewals._duties.values()
    ]  # fmt: skip
    tombstones = [
        ("tombstone", name, left(stone.until), stone.cause, stone.is_refused, stone.epoch)
        for name, note in world.store._replies._tombstones._notes.items()
        for stone in (note.value,)
    ]  # fmt: skip
    rest = (
        "turn", world.store_epoch, sorted(map(str, world.expected)),
        asks is not None and (asks.epoch, asks.ready), link is not None and link.epoch,
        [len(names) for names in world.pulls._to_release._values.values()],
        sorted(map(str, world.expectations.let_go)), sorted(map(str, world.store._left)),
        [(left(item.deadline), item.marks) for item in world.recallings], world.notes.find(KEY),
    )  # fmt: skip
    everything = [*held, *parked, *ended, *awaited, *duties, *tombstones, rest]
    return [repr(part) for part in everything]
