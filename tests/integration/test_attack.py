"""A slice of `make attack`: each attack with small numbers; times are not judged here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import marks
from tests.attack.play import Assault, has_failed, play
from tests.attack.run import ASSAULTS
from tests.attack.stage import AttackStage

pytestmark = [marks.slow, pytest.mark.timeout(300)]


def by_stage() -> list[list[Assault]]:
    """Group the attacks that one proxy can bear, one after the other."""
    stages: dict[str, list[Assault]] = {}
    for attack in ASSAULTS:
        key = f"{sorted(attack.settings.items())} {attack.num_descriptors} {attack.by_tls}"
        stages.setdefault(key, []).append(attack)
    return list(stages.values())


@pytest.mark.parametrize("attacks", by_stage(), ids=lambda attacks: attacks[0].name)
def test_attacks_cost_others_nothing(attacks: list[Assault], tmp_path: Path) -> None:
    first = attacks[0]
    needs = first.settings, first.num_descriptors, first.by_tls
    with AttackStage(tmp_path / "log", 0.02, *needs) as stage:
        rows = [play(attack, stage, rate=20.0, seconds=0.5) for attack in attacks]
    assert [row for row in rows if has_failed(row)] == []
