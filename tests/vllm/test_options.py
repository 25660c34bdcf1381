"""A few of the changes of `make test-options`: one of each outcome, and the control."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests import marks
from tests.options.campaign import try_all
from tests.options.record import control
from tests.options.table import changes
from tests.options.trial import MOVED, REFUSED, SIDES, WRONG

pytestmark = [marks.vllm_core, pytest.mark.timeout(900)]
SECONDS = 600.0
SEED = 31
EXPECTED = {control().name: WRONG, "--block-size=64": MOVED, "--load-format=dummy": REFUSED}


def test_a_difference_moves_or_is_named_and_the_control_is_wrong(tmp_path: Path) -> None:
    wanted = [change for change in changes() if change.name in EXPECTED]
    seen: dict[str, Any] = {}
    for line in try_all("llama", wanted, tmp_path, time.monotonic() + SECONDS, SEED):
        seen[line["change"]] = [line[side] for side in SIDES]
    outcomes = {name: [side["outcome"] for side in sides] for name, sides in seen.items()}
    assert outcomes == {name: [outcome] * 2 for name, outcome in EXPECTED.items()}, seen
    assert all("dummy" in side["why"] for side in seen["--load-format=dummy"])
