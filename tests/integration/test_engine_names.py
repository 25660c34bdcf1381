"""Names that no server resolves cost those who use them, and nobody else."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.unresolvable import Unresolving
from tests.processes import Child

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process saw, in which a look-up of such a name never returns."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    library = tmp_path_factory.mktemp("resolver") / "resolver.so"
    source = ROOT / "tests" / "hostile" / "unresolvable.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    with Child(Unresolving, environment={**os.environ, "LD_PRELOAD": str(library)}) as child:
        child.PATIENCE = 150
        return {**child.ask("try_engines"), **child.ask("try_directory")}


def test_a_healthy_pair_goes_on_beside_a_name_that_nobody_resolves(seen: dict[str, Any]) -> None:
    assert seen["healthy pair"] == {"ok"}
    assert seen["beside a crowd"] == "ok"


@pytest.mark.parametrize("name", ["bad peer", "bad rank", "bad instance"])
def test_the_name_is_blamed(seen: dict[str, Any], name: str) -> None:
    assert seen[name].startswith("PeerUnreachable ")
    assert "name 'prefill-7.nodns' was not resolved within" in seen[name]


def test_a_crowd_of_such_names_ends_and_known_names_are_resolved_beside_it(
    seen: dict[str, Any],
) -> None:
    """More names than there are threads, all of which hang."""
    assert seen["good name"] == "ok"
    assert seen["crowd"] == {"PeerUnreachable"}
    assert seen["known name beside a crowd"] == "ok"


def test_a_proxy_by_such_a_name_costs_the_other_no_heartbeat(seen: dict[str, Any]) -> None:
    assert seen["heartbeats"] == 3
    assert seen["rank"] == "ok"
