"""A short slice of the fault campaign: `make chaos` plays as much of it as there is time for."""

from __future__ import annotations

import pytest

from tests.chaos.campaign import run
from tests.support import SeededRandom


@pytest.mark.timeout(300)
def test_promises_hold_through_faults(rng: SeededRandom) -> None:
    results = run(20.0, rng.initial_seed, jobs=3, at_least=12)
    assert [result.line() for result in results if result.violations] == []
    assert sum(result.hit for result in results) > len(results) / 2
    assert sum(result.moved_bytes for result in results) > 0
