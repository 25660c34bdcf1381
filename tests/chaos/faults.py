"""The faults: what each does to the process that stands at its step, or to the network."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.chaos.parent import ChaosChild, settings
from tests.rigs.relay import FaultyRelay


@dataclass
class FaultScene:
    """Who a fault can be laid on: the victim stands at its step, and the survivor is its peer."""

    victim: ChaosChild
    survivor: ChaosChild
    random: random.Random
    relays: list[FaultyRelay] = field(default_factory=list)

    def each_relay(self, mode: str) -> None:
        """Let the network be so from now on."""
        for relay in self.relays:
            relay.mode = mode


@dataclass(frozen=True)
class Fault:
    """`lay` is called while the victim stands at its step; `lift` when the others have ended."""

    name: str
    lay: Callable[[FaultScene], None]
    lift: Callable[[FaultScene], None] = lambda scene: None
    needs_relays: bool = False
    kills: bool = False
    restarts: bool = False
    transports: tuple[str, ...] = ("shm", "tcp")
    lasts: float = 0.0  # seconds before it is lifted; 0: after the round's transfers have ended
    is_of_turns: bool = False  # it is laid in turns of a session only
    kills_both: bool = False
    replaces: bool = False  # the victim, at once


def _kill(scene: FaultScene) -> None:
    scene.victim.kill()


def _replace(scene: FaultScene) -> None:
    """The survivor has not noticed yet when somebody else is there."""
    scene.victim.kill()
    scene.victim = scene.victim.successor()


def _kill_both(scene: FaultScene) -> None:
    scene.victim.kill()
    scene.survivor.kill()


def _stop(scene: FaultScene) -> None:
    scene.victim.signal(signal.SIGSTOP)


def _continue(scene: FaultScene) -> None:
    scene.victim.signal(signal.SIGCONT)
    scene.victim.let_go()


def _relays(mode: str) -> Callable[[FaultScene], None]:
    def lay(scene: FaultScene) -> None:
        scene.each_relay(mode)
        scene.victim.let_go()

    return lay


def _pass(scene: FaultScene) -> None:
    scene.each_relay("pass")


def _cut(scene: FaultScene) -> None:
    for relay in scene.relays:
        relay.cut()
    scene.victim.let_go()


def _cut_data(scene: FaultScene) -> None:
    for relay in scene.relays[1::2]:
        relay.cut()
    scene.victim.let_go()


def _jump(scene: FaultScene) -> None:
    """The trap holds the victim's engine, not its command thread."""
    scene.victim.tell("jump", scene.random.choice([0.5, 3.0, 3600.0]))
    scene.victim.let_go()
    scene.victim.answer()


def _limit(command: str) -> Callable[[FaultScene], None]:
    def lay(scene: FaultScene) -> None:
        scene.victim.tell(command, True)
        scene.victim.let_go()
        scene.victim.answer()

    return lay


def _unlimit(command: str) -> Callable[[FaultScene], None]:
    return lambda scene: scene.victim.ask(command, False)


def _pause(scene: FaultScene) -> None:
    time.sleep(scene.random.uniform(0.05, 0.3))
    scene.victim.let_go()


def _outlast(scene: FaultScene) -> None:
    time.sleep(settings("shm").lease_seconds + 0.2)
    scene.victim.let_go()


FAULTS = [
    Fault("kill", _kill, kills=True),
    Fault("restart", _kill, kills=True, restarts=True),
    Fault("replace", _replace, replaces=True),
    Fault("kill both", _kill_both, kills=True, restarts=True, is_of_turns=True, kills_both=True),
    Fault("stop", _stop, _continue, lasts=0.2),
    Fault("long stop", _stop, _continue, lasts=1.2),
    Fault("slow thread", _pause),
    Fault("lease ends", _outlast, is_of_turns=True),
    Fault("trickle", _relays("trickle"), _pass, needs_relays=True),
    Fault("partition", _relays("hold"), _pass, needs_relays=True),
    Fault("short partition", _relays("hold"), _pass, needs_relays=True, lasts=0.3),
    Fault("cut", _cut, needs_relays=True),
    Fault("cut data", _cut_data, needs_relays=True, transports=("tcp",)),
    Fault("clock jump", _jump),
    Fault("no descriptors", _limit("limit_descriptors"), _unlimit("limit_descriptors")),
    Fault("no memory", _limit("limit_memory"), _unlimit("limit_memory"), transports=("shm",)),
]
