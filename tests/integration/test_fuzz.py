"""A slice of the socket fuzzer: noise, wrong and replayed messages harm nobody."""

from __future__ import annotations

import pytest

from tests.fuzz import campaign
from tests.support import SeededRandom


@pytest.mark.timeout(300)
@pytest.mark.parametrize("keys", [False, True], ids=["open", "keys"])
def test_a_slice_of_the_fuzzer(keys: bool, rng: SeededRandom) -> None:
    with campaign.FuzzCampaign(rng.initial_seed, keys=keys) as fired:
        for _ in range(2):
            assert fired.fire(5_000).frames.total() == 5_000
