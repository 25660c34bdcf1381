"""Loads: whole requests that are large, odd, or many."""

from __future__ import annotations

from collections import Counter

from tests.attack.clients import KINDS
from tests.attack.play import MIB, Assault
from tests.attack.stage import AttackStage

SECONDS = 5.0


def long_prompts(stage: AttackStage) -> str:
    """Prompts of 1 to 10 MB, some at a time."""
    clients, seen = stage.clients(), Counter[str]()
    for size in (1, 4, 10):
        kinds = ["text", "token ids", "messages"]
        seen += clients.ask("post", kinds, stage.count(size * MIB), stage.count(10), 4)
    assert set(seen) == {"200"}, seen
    return f"answered: {_said(seen)}"


def odd_bodies(stage: AttackStage) -> str:
    """Bodies that are hard to read."""
    kinds = [*KINDS, "keys"]
    seen = stage.clients().ask("post", kinds, stage.count(4 * MIB), 2, 4)
    # The instances are of Python, and may fail with a number of a million digits.
    assert set(seen) <= {"200", "400", "502"}, seen
    return f"answered: {_said(seen)}"


def largest_bodies(stage: AttackStage) -> str:
    """Bodies as large as they may be, from many clients at once."""
    num_bytes = stage.count(64 * MIB) - 4096
    seen = stage.clients().ask("post", ["text"], num_bytes, stage.count(48), 24)
    # Who sends on after a 503 may see the connection end before the answer.
    assert set(seen) <= {"200", "503", "ClientOSError"}, seen
    return f"answered: {_said(seen)}"


def many_models(stage: AttackStage) -> str:
    """Requests run or wait, and each names another model."""
    stage.instances.ask("behave", "decode", {"pace": 0.1})
    clients = stage.clients()
    seen = clients.ask("ask_for_models", stage.count(1000))
    assert set(seen) == {"200"}, seen
    return f"answered: {_said(seen)}"


def readers(stage: AttackStage) -> str:
    """Clients read the page, its events, the status and the metrics, as quickly as they can."""
    paths = ["/", "/status/events", "/status", "/metrics"]
    seen = stage.clients().ask("read", paths, stage.count(500), SECONDS)
    assert set(seen) <= set(paths), seen
    return f"{sum(seen.values())} readers of {len(paths)} pages"


def _said(seen: Counter[str]) -> str:
    return ", ".join(f"{status}: {count}" for status, count in sorted(seen.items()))


ASSAULTS = (
    Assault("prompts of 1 to 10 MB", long_prompts),
    Assault("odd bodies of 4 MB", odd_bodies),
    Assault("48 bodies of 64 MiB, 24 at once", largest_bodies),
    Assault("1,000 requests for as many models", many_models),
    Assault("500 readers of the status", readers),
)
