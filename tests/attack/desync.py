"""Desync: requests that try to be two, on the proxy itself and behind the servers of `fronts`."""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from p2p_engine.simulate.answers import tokens
from tests.attack.play import Assault
from tests.attack.stage import AttackStage
from tests.hostile.requests import ATTACKS, SMUGGLED, Attack
from tests.rigs.desync import ask, play_behind, wrong_outcomes
from tests.rigs.fronts import FRONTS, ID_PREFIX, Front, program, running_front
from tests.rigs.proxies import COMPLETIONS

NUM_VICTIMS = 3


def direct(stage: AttackStage) -> str:
    """Each gets exactly the answers that the corpus says, on a connection of its own."""
    attacks = _share(stage)
    wrong = asyncio.run(wrong_outcomes(stage.port, attacks))
    assert not wrong, wrong
    _assert_nothing_smuggled(stage)
    return f"{len(attacks)} played, each answered as it must be"


def behind(front: str) -> Callable[[AttackStage], str]:
    """Return the play of the same behind a front, which keeps connections for all its clients."""

    def play(stage: AttackStage) -> str:
        if program(front) is None:
            return f"skipped: {front.partition(',')[0]} is not installed"
        attacks = _share(stage)
        with (
            tempfile.TemporaryDirectory(prefix="front-") as folder,
            running_front(front, stage.port, Path(folder)) as running,
        ):
            num_victims = asyncio.run(_play_beside_victims(running.port, attacks))
            num_seen = _wait_until_both_saw_the_same(stage, running)
        _assert_nothing_smuggled(stage)
        return (
            f"{len(attacks)} played, {num_victims} clients behind the same front got their own, "
            f"both saw the same {num_seen} requests"
        )

    return play


async def _play_beside_victims(port: int, attacks: Mapping[str, Attack]) -> int:
    count = 0
    for name, attack in attacks.items():
        await play_behind(port, attack)
        for number in range(NUM_VICTIMS):
            prompt = f"victim {number} of {name}"
            expected = "".join(tokens({"prompt": prompt, "max_tokens": 4}))
            answer = await ask(port, prompt)
            text = "" if answer is None else answer.body.decode("unicode-escape", "replace")
            status = answer.status if answer is not None else 0
            assert (status, expected in text) == (200, True), f"{prompt}: {status} {text}"
            count += 1
    return count


def _wait_until_both_saw_the_same(stage: AttackStage, front: Front) -> int:
    """Wait until each request that the front had answered is one in the proxy's log, and no other
    is there; return their number."""
    served, known = set[str](), list[str]()

    def are_equal() -> bool:
        nonlocal served, known
        seen = front.seen()
        served = {name for name, status, path in seen if (status, path) == (200, COMPLETIONS)}
        known = re.findall(rf'"client_id":"({ID_PREFIX}[^"]*)"', stage.log())
        return served <= set(known) <= {name for name, *_ in seen}

    stage.wait_until(are_equal, "both saw the same requests")
    assert len(known) == len(set(known)), "the proxy saw a request twice"
    return len(served)


def _share(stage: AttackStage) -> dict[str, Attack]:
    """Return the share of the corpus that is played, evenly chosen."""
    step = max(1, len(ATTACKS) // stage.count(len(ATTACKS)))
    return dict(list(ATTACKS.items())[::step])


def _assert_nothing_smuggled(stage: AttackStage) -> None:
    assert f'"client_id":"{SMUGGLED}"' not in stage.log(), "a hidden request was served"


ASSAULTS = (
    Assault(f"{len(ATTACKS)} unclear requests", direct),
    *(Assault(f"{len(ATTACKS)} unclear requests behind {name}", behind(name)) for name in FRONTS),
)
