"""The model of the core's design: every state keeps the promises and has an end, and a change of
the design is found. `make model CORE=1` plays all runs."""

from __future__ import annotations

import pytest

from tests.property.core_model.explore import explore
from tests.property.core_model.mutations import FOUND, SPARED
from tests.property.core_model.runs import QUICK
from tests.property.core_model.state import Scope

pytestmark = pytest.mark.timeout(600)
LIMIT = 20_000


@pytest.mark.parametrize("setting", QUICK, ids=[setting.name for setting in QUICK])
def test_every_state_keeps_the_promises_and_has_an_end(setting: Scope) -> None:
    assert explore(setting, LIMIT) > 100


@pytest.mark.parametrize("setting", FOUND.values(), ids=list(FOUND))
def test_a_changed_design_is_found(setting: Scope) -> None:
    with pytest.raises(AssertionError, match="after "):
        explore(setting, LIMIT)


@pytest.mark.parametrize("setting", SPARED.values(), ids=list(SPARED))
def test_a_rule_that_only_saves_time_breaks_no_promise(setting: Scope) -> None:
    assert explore(setting, LIMIT) > 100
