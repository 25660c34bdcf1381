"""Play: one attack on a stage beside a healthy load, and the row that is recorded of it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness import Row
from tests.attack.neighbours import Neighbours
from tests.attack.stage import AttackStage, Cost, longest_turn_ms
from tests.processes import Child

MIB = 1 << 20


@dataclass(frozen=True)
class Assault:
    """Something that an enemy does.

    `play` does it, returns what came of it, and raises AssertionError where a promise is broken.
    It blocks until the attack is over, and leaves nothing behind. `settings` are options of the
    proxy, which may have `num_descriptors` (0: as many as the machine gives). `spares_others`: the
    healthy load beside it must be answered, every request. `spares_instances`: no instance may be
    taken for not ready.
    """

    name: str
    play: Callable[[AttackStage], str]
    settings: dict[str, Any] = field(default_factory=dict)
    spares_others: bool = True
    spares_instances: bool = True
    num_descriptors: int = 0
    by_tls: bool = False  # the proxy has a certificate


def play(attack: Assault, stage: AttackStage, rate: float, seconds: float) -> Row:
    """Play an attack; the healthy load runs for `seconds` before it, and for at least as long
    beside it."""
    with Child(Neighbours, stage.url, rate, through=()) as neighbours:
        calm_from = len(stage.log())
        calm = _load(neighbours, lambda: time.sleep(seconds))
        cost, before = Cost(), Cost()
        before.look(stage)
        began, marked = time.monotonic(), len(stage.log())
        with cost.of(stage):
            outcome, beside = "", {}

            def attack_them() -> None:
                nonlocal outcome
                outcome = _outcome(attack, stage)
                time.sleep(max(0.0, began + seconds - time.monotonic()))

            beside = _load(neighbours, attack_them)
        took = time.monotonic() - began
        outcome = outcome + _aftermath(attack, stage, beside["failures"], stage.log()[marked:])
    return {
        "attempt": attack.name,
        "outcome": outcome,
        "others": beside["num_ok"],
        "others_failed": sum(beside["failures"].values()),
        "p99_ms_calm": calm["p99_ms"],
        "p99_ms": beside["p99_ms"],
        "turn_ms_calm": longest_turn_ms(stage.log()[calm_from:marked]),
        "turn_ms": longest_turn_ms(stage.log()[marked:]),
        "rss_mib_calm": before.rss_bytes // MIB,
        "rss_mib": cost.rss_bytes // MIB,
        "descriptors": cost.descriptors,
        "cpu_seconds": round(max(0.0, cost.cpu_seconds - before.cpu_seconds), 2),
        "seconds": round(took, 1),
    }


def has_failed(row: Row) -> bool:
    """Tell whether a promise was broken."""
    return "BROKEN" in row["outcome"]


def _load(neighbours: Child, meanwhile: Callable[[], None]) -> dict[str, Any]:
    neighbours.ask("start")
    meanwhile()
    said: dict[str, Any] = neighbours.ask("stop")
    return said


def _outcome(attack: Assault, stage: AttackStage) -> str:
    try:
        return attack.play(stage)
    except Exception as error:  # noqa: BLE001  # the next attack is played all the same
        traceback.print_exc()
        return f"BROKEN: {str(error) or type(error).__name__}"
    finally:
        stage.dismiss()
        for role in ("prefill", "decode"):
            stage.instances.ask("behave", role, {})


def _aftermath(attack: Assault, stage: AttackStage, failures: dict[str, int], log: str) -> str:
    """Say which promise that holds after every attack is broken; empty if none is."""
    broken = []
    if failures and attack.spares_others:
        broken.append(f"others failed: {failures}")
    if "instance not ready" in log and attack.spares_instances:
        broken.append("an instance was taken for not ready")
    if "Traceback" in log:
        broken.append("the log has a traceback")
    try:
        stage.wait_until_ready()
        stage.wait_until_idle()
    except (AssertionError, OSError) as error:
        broken.append(str(error))
    return f" BROKEN: {', '.join(broken)}" if broken else ""
