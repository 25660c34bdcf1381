"""A slice of `make scale`: instances come and go while requests go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import marks
from tests.scale import run as scale
from tests.support import SeededRandom

pytestmark = [marks.slow, pytest.mark.timeout(300)]


async def test_coming_and_going_costs_no_request_and_leaves_no_count(
    tmp_path: Path, rng: SeededRandom
) -> None:
    with scale.new_fleet(tmp_path) as fleet:
        scale.start(fleet, 2)
        seed = rng.randrange(1000)
        load, events = await scale.run(fleet, 2, rate=30.0, seconds=20.0, seed=seed, at_least=3)
        try:
            scale.settle(fleet)
        except TimeoutError:
            pytest.fail(f"not zero: {scale.leftovers(fleet)} after {events.done}")
    assert scale.unexplained(load.outcomes, events) == [], events.done
    assert load.outcomes.num_ok > 250
