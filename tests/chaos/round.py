"""One round: two processes, transfers, a fault at a step, and what must hold afterwards."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from p2p_engine import SendMode
from tests.chaos.faults import Fault, FaultScene
from tests.chaos.parent import ChaosChild
from tests.chaos.steps import (
    ABANDON,
    ABORT,
    FORGET,
    FULL,
    GONE,
    KEEP,
    LEAVE,
    LOOKUP,
    PULL,
    REFUSED,
    SENDER,
    SHORT,
    Step,
)
from tests.processes import ChildError
from tests.rigs.relay import FaultyRelay

SIZES = [100, 200_000, 2_000_000]
REACH_SECONDS = 1.0
END_SECONDS = 6.0  # four times the deadline of a transfer
REST_SECONDS = 8.0
PROBE_SECONDS = 10.0


@dataclass
class RoundResult:
    """One line of the campaign's record; `violations` are broken promises."""

    number: int
    transport: str
    mode: str
    fault: str
    step: str
    work: str
    nbytes: int
    hit: bool = False
    outcomes: dict[str, int] = field(default_factory=dict)
    others: int = 0  # transfers of bystanders that had to go on, and did
    moved_bytes: int = 0
    detect_seconds: float | None = None
    recover_seconds: float | None = None
    wall_seconds: float = 0.0
    violations: list[str] = field(default_factory=list)

    def line(self) -> dict[str, Any]:
        """As JSON."""
        return {
            key: round(value, 4) if isinstance(value, float) else value
            for key, value in asdict(self).items()
        }


class Round:
    """The survivor is used again; the victim is this round's."""

    def __init__(
        self, number: int, transport: str, fault: Fault, step: Step, survivor: ChaosChild, seed: int
    ) -> None:
        self._random = random.Random(f"{seed}/{number}")
        mode = (
            SendMode.GET if step.work in (PULL, KEEP, GONE) else self._random.choice(list(SendMode))
        )
        if step.work in SHORT:
            mode = SendMode.PUT_ASYNC
        size = self._random.choice(SIZES)
        self.result = RoundResult(
            number, transport, mode.value, fault.name, str(step), step.work, size
        )
        self._fault, self._step, self._survivor, self._seed = fault, step, survivor, seed
        self._mode = mode.value
        self._names = [f"{seed}-{number}-{i}" for i in range(3)]

    def run(self) -> RoundResult:
        """Play it; every broken promise is in the result."""
        start = time.monotonic()
        scene = FaultScene(ChaosChild(self.result.transport), self._survivor, self._random)
        try:
            self._play(scene)
        except ChildError as error:
            self.result.violations.append(str(error))
        finally:
            self._end_all(scene)
        self.result.wall_seconds = time.monotonic() - start
        return self.result

    def _end_all(self, scene: FaultScene) -> None:
        scene.victim.close()
        for relay in scene.relays:
            relay.close()

    # Who is who

    def _roles(self, scene: FaultScene) -> tuple[ChaosChild, ChaosChild]:
        pair = (scene.victim, scene.survivor)
        return pair if self._step.role == SENDER else pair[::-1]

    def _divert(self, scene: FaultScene) -> None:
        for process in (scene.victim, scene.survivor):
            control = FaultyRelay(process.control)
            scene.relays.append(control)
            data = FaultyRelay(process.data) if process.data else FaultyRelay(process.control)
            scene.relays.append(data)
            process.ask("divert", control.address, data.address if process.data else "")

    def _address(self, scene: FaultScene, process: ChaosChild) -> str:
        if not scene.relays:
            return process.control
        return scene.relays[0 if process is scene.victim else 2].address

    # The play

    def _play(self, scene: FaultScene) -> None:
        if self._fault.needs_relays:
            self._divert(scene)
        self._owed: Counter[ChaosChild] = Counter()
        self._begin(scene)
        self.result.hit = scene.victim.trap.poll(REACH_SECONDS)
        laid_at = time.monotonic()
        self._fault.lay(scene)
        self._go_on_after(scene)
        self._live_through(scene, laid_at)
        self._recover(scene, laid_at)
        self._rest(scene)

    def _begin(self, scene: FaultScene) -> None:
        scene.victim.ask("trap", self._step.event)
        sender, receiver = self._roles(scene)
        work, nbytes = self._step.work, self.result.nbytes
        if work == FULL:
            receiver.ask("fill")
        here, there = self._meeting(scene)
        is_ready = work not in (ABORT, ABANDON, LEAVE, FORGET)
        calls = [
            (sender, "send", (self._names, nbytes, there, self._mode, is_ready)),
            (receiver, "receive", (self._names, nbytes, here, self._mode)),
        ]
        if work == KEEP:
            calls.insert(0, (receiver, "keep", (self._names, here)))
        if work == GONE:
            calls[0] = (sender, "let_go", (self._names,))
        if work not in SHORT and self._random.random() < 0.5:
            calls.reverse()
        for process, command, arguments in calls[:1] if work in (FULL, REFUSED) else calls:
            self._tell(process, command, *arguments)
        self._go_on(scene)

    def _go_on(self, scene: FaultScene) -> None:
        """What the step needs beside the transfers, once these have begun."""
        sender, receiver = self._roles(scene)
        work = self._step.work
        if work in (ABORT, ABANDON, LEAVE, FORGET):
            time.sleep(0.05)
        if work == ABORT or self._step.event.endswith("RELEASE"):
            self._tell(receiver, "cancel")
        elif work == ABANDON:
            self._tell(sender, "abandon", self._address(scene, receiver))
        elif work == LEAVE:
            self._tell(sender if self._is_senders() else receiver, "leave")
        elif work == FORGET:
            self._tell(receiver, "forget")

    def _go_on_after(self, scene: FaultScene) -> None:
        """What others do when the fault is laid."""

    def _tell(self, process: ChaosChild, command: str, *arguments: Any) -> None:
        """Start a command, whose answer is taken when everybody sees the end."""
        process.tell(command, *arguments)
        self._owed[process] += 1

    def _is_senders(self) -> bool:
        """Whether the message of this step is the sender's to say."""
        return (self._step.role == SENDER) == self._step.event.startswith("say")

    def _meeting(self, scene: FaultScene) -> tuple[str, str]:
        """Where sender and receiver find each other: by another engine, or by a directory."""
        sender, receiver = self._roles(scene)
        here, there = self._address(scene, sender), self._address(scene, receiver)
        work = self._step.work
        if work == REFUSED:
            sender.ask("visit", "another model")
        elif work == LEAVE and self._is_senders():
            here = sender.ask("visit", "")
        elif work == LEAVE:
            there = self._relayed(scene, receiver.ask("visit", ""))
        elif work == LOOKUP:
            there = self._relayed(scene, receiver.ask("directory_address")) + "/0"
        return here, there

    def _relayed(self, scene: FaultScene, address: str) -> str:
        if not scene.relays:
            return address
        scene.relays.append(FaultyRelay(address))
        return scene.relays[-1].address

    def _live_through(self, scene: FaultScene, laid_at: float) -> None:
        """Everybody who lives must see the end of everything."""
        if self._fault.lasts:
            time.sleep(self._fault.lasts)
            self._fault.lift(scene)
        sender, receiver = self._roles(scene)
        for process in (scene.survivor, scene.victim):
            if process.is_killed:
                continue
            self._take_answers(process)
            if process is receiver and self._step.work == FULL:
                process.ask("drain")
            if process is sender and self._step.work in (ABORT, FORGET):
                process.ask("mark_ready")
        for process in (scene.survivor, scene.victim):
            if not process.is_killed:
                process.tell("finish", END_SECONDS)
        for process in (scene.survivor, scene.victim):
            if not process.is_killed:
                self._judge(process, process is receiver, process.answer(), laid_at)
        if not self._fault.lasts:
            self._fault.lift(scene)

    def _take_answers(self, process: ChaosChild) -> list[Any]:
        """Wait for the answers to all that a process was told."""
        return [process.answer() for _ in range(self._owed.pop(process, 0))]

    def _judge(
        self, process: ChaosChild, receives: bool, outcomes: list[Any], laid_at: float
    ) -> None:
        who = "receiver" if receives else "sender"
        for name, word, is_right, ended_at in outcomes:
            self.result.outcomes[word] = self.result.outcomes.get(word, 0) + 1
            if word == "stuck":
                self.result.violations.append(f"{who}: {name} is stuck")
            if not is_right:
                self.result.violations.append(f"{who}: {name} has wrong bytes")
            if word == "ok" and receives:
                self.result.moved_bytes += self.result.nbytes
            if word not in ("ok", "stuck", "TransferCancelled") and ended_at > laid_at:
                seconds = ended_at - laid_at
                self.result.detect_seconds = max(self.result.detect_seconds or 0.0, seconds)

    def _recover(self, scene: FaultScene, laid_at: float) -> None:
        """A new transfer between the two succeeds; a killed victim has a successor."""
        if self._fault.kills:
            scene.victim = scene.victim.successor(is_elsewhere=not self._fault.restarts)
        sender, receiver = self._roles(scene)
        words: tuple[Any, ...] = ()
        for attempt in range(100):
            names = [f"{self._seed}-{self.result.number}-probe-{attempt}"]
            mode = SendMode.PUT_ASYNC.value
            there, here = self._address(scene, receiver), self._address(scene, sender)
            sender.ask("send", names, 1000, there, mode, True)
            receiver.ask("receive", names, 1000, here, mode)
            words = sender.ask("finish", END_SECONDS), receiver.ask("finish", END_SECONDS)
            if all(item[1] == "ok" and item[2] for outcomes in words for item in outcomes):
                self.result.recover_seconds = time.monotonic() - laid_at
                return
            if time.monotonic() - laid_at > PROBE_SECONDS:
                break
        self.result.violations.append(f"no transfer succeeds afterwards: {words}")

    def _rest(self, scene: FaultScene) -> None:
        """Nothing of the round is left: on the victim when it has let go, and on the survivor."""
        if scene.relays:
            scene.survivor.ask("divert", scene.survivor.control, "")
        scene.victim.ask("close")
        left = self._survivor.ask("leftovers", REST_SECONDS)
        self.result.violations += [f"left on the survivor: {item}" for item in left]
        scene.victim.kill()
        with contextlib.suppress(ChildError):
            scene.victim.answer(0)
