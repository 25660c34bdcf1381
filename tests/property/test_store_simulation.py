"""Sender and store over a network that loses, doubles and reorders: a state machine of everything
that callers, peers and time can do, with the promises of the store checked after every step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.property.transfer_machine import (
    CHUNKS,
    DISASTERS,
    KEYS,
    CheckedReceiverWrites,
    CheckedSenderWrites,
    CutReceiverWrites,
    CutSenderWrites,
    TransferMachine,
    WhenReceiverWrites,
    WhenSenderWrites,
    WindowedReceiverWrites,
    WindowedSenderWrites,
)
from tests.support import SeededRandom

pytestmark = pytest.mark.timeout(400)  # to shrink a failure takes up to five minutes

_steps = settings(
    max_examples=50, stateful_step_count=50, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip
TestSenderWrites = WhenSenderWrites.TestCase
TestSenderWrites.settings = _steps
TestReceiverWrites = WhenReceiverWrites.TestCase
TestReceiverWrites.settings = _steps

# How often a walk does what: what makes progress more often than what destroys it.
WEIGHTS = {
    "send": 12, "receive": 10, "mark_ready": 5, "cancel": 4, "let_go": 2, "keep": 3, "advance": 9,
    "move": 16, "move_stream": 8, "drain": 8, "converse": 14, "one_message": 9,
    "meet_with_disaster": 3,
}  # fmt: skip
NEEDS = {
    "mark_ready": lambda world: world.sendings,
    "cancel": lambda world: world.sendings or world.receivings,
    "move": lambda world: world.jobs,
    "move_stream": lambda world: world.channels,
    "one_message": lambda world: world.network,
}


def _arguments(name: str, rng: SeededRandom) -> list[Any]:
    key, binding = rng.choice(KEYS), rng.choice([b"", b"", b"", b"", b"other"])
    which = rng.randrange(1 << 16)
    arguments: dict[str, list[Any]] = {
        "send": [key, binding, rng.choice(CHUNKS), rng.random() < 0.7, rng.random() < 0.3],
        "receive": [key, binding, rng.choice([0, 0, 0, 1, 2, 3]), rng.random() < 0.4],
        "let_go": [key, b"", rng.choice(["discard", "leave", "abandon", "drop landed"])],
        "keep": [key, binding, rng.choice(["keep", "keep", "drop", "renew", "want"])],
        "advance": [rng.choice([0.3, 0.3, 1.0, 7.0])],
        "move": [which, rng.choice([512, 1 << 20])],
        "converse": [rng.choice([1, 2, 3])],
        "one_message": [which, rng.choice(["overtakes", "is doubled", "is lost"])],
        "meet_with_disaster": [rng.choice(DISASTERS)],
        "drain": [],
    }
    return arguments.get(name, [which])


def _walk(machine: TransferMachine, rng: SeededRandom, log: list[Any]) -> None:
    for name in rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=60):
        if NEEDS.get(name, bool)(machine.world):
            log.append((name, _arguments(name, rng)))
            getattr(machine, name)(*log[-1][1])
            machine.check_promises()


@pytest.mark.parametrize(
    "kind",
    [
        WhenSenderWrites,
        WhenReceiverWrites,
        CheckedSenderWrites,
        CheckedReceiverWrites,
        CutSenderWrites,
        CutReceiverWrites,
        WindowedSenderWrites,
        WindowedReceiverWrites,
    ],
)
def test_random_walks_keep_the_promises(kind: type[TransferMachine], rng: SeededRandom) -> None:
    """Many long walks at little cost: they meet what a small number of examples does not."""
    for _ in range(kind.num_walks):
        machine, log = kind(), []  # type: ignore[var-annotated]
        try:
            _walk(machine, rng, log)
            machine.teardown()
        except Exception:
            machine.world.close()
            print(*log, sep="\n")  # noqa: T201  # how to get there
            raise
