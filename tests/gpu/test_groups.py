"""On a real GPU: what groups of two ranks in two processes take, and give back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import marks
from tests.gpu import checks
from tests.gpu.peer import Processes

pytestmark = [marks.gpu, marks.slow, pytest.mark.timeout(470)]


@pytest.mark.parametrize("channels", [1, 2, 4, 8, 16])
def test_groups_take_what_is_estimated(
    processes: Processes, channels: int, record_property: Callable[[str, object], None]
) -> None:
    figures = checks.group_memory(processes, channels)
    record_property("figures", figures)
    assert abs(figures["made_mib"] - figures["expected_mib"]) <= 2


def test_groups_64_at_once(
    processes: Processes, record_property: Callable[[str, object], None]
) -> None:
    figures = checks.group_memory(processes, 2, 64)
    record_property("figures", figures)
    assert figures["used_mib"] <= 1.4 * 1024
    assert abs(figures["lost_mib"]) <= 16


def test_groups_beyond_64_are_evicted(
    processes: Processes, record_property: Callable[[str, object], None]
) -> None:
    figures = checks.evict_groups(processes, max_groups=64, more=4)
    record_property("figures", figures)
    assert figures["mib_of_one_side"] <= 1.4 * 1024
