"""The runs of the model. Its full product is too large, so each run has a few dimensions at full
size and the others at one; docs/core.md says which and why."""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any

from tests.property.core_model.explore import explore
from tests.property.core_model.state import Scope

DEATHS = ("restart P", "restart D")
LAPSES = ("silence", "lapse")
STRAY = ("stray",)
ALL = (*STRAY, *DEATHS, *LAPSES, "break")
PULL = Scope("", pushes=(False,))
PUSH = Scope("", pushes=(True,))
TWICE = Scope("", pushes=(False, False), try_contents=(0, 0), ask_contents=(0, 0), num_blocks=1)
PUSHED_TWICE = dataclasses.replace(TWICE, pushes=(True, True))
APART = Scope("", pushes=(False, False), try_contents=(0, 1), ask_contents=(0, 1), num_blocks=1)


def _of(base: Scope, name: str, **more: Any) -> Scope:
    return dataclasses.replace(base, name=name, **more)


# All together are less than half a minute of one core.
QUICK = [
    _of(PULL, "pull", aborts=1, give_ups=1),
    _of(PUSH, "push"),
    _of(PULL, "pull, a message astray", num_blocks=1, faults=STRAY, num_faults=1, aborts=1),
    _of(PUSH, "push, a message astray", num_blocks=1, faults=STRAY, num_faults=1),
    _of(PULL, "pull, a death or a lapse", num_blocks=1, faults=(*DEATHS, *LAPSES, "break"),
            num_faults=1, aborts=1),
    _of(PUSH, "push, a death or a lapse", num_blocks=1, faults=(*DEATHS, *LAPSES, "break"),
            num_faults=1),
    _of(PULL, "pull, nothing but loss", num_blocks=1, faults=(*STRAY, "break"),
            num_faults=1, may_fail=False),
    _of(PUSH, "push, nothing but loss, checked", num_blocks=1, faults=STRAY, num_faults=1,
            is_checked=True, may_fail=False),
    _of(PULL, "pull to two ranks", num_ranks=2, num_blocks=1),
]  # fmt: skip
FULL = [
    *QUICK,
    _of(TWICE, "pull again, ticketed", is_ticketed=True, aborts=1),
    _of(PUSH, "push, both give up", aborts=1, give_ups=1),
    _of(PULL, "pull, everything once", faults=ALL,
            num_faults=1, aborts=1, give_ups=1),
    _of(PUSH, "push, everything once", faults=ALL,
            num_faults=1, aborts=1, give_ups=1),
    _of(PULL, "pull, two astray", num_blocks=1, faults=STRAY, num_faults=2, aborts=1),
    _of(PUSH, "push, two astray", num_blocks=1, faults=STRAY, num_faults=2, aborts=1),
    _of(PULL, "pull, two of all faults", num_blocks=1,
            faults=ALL, num_faults=2),
    _of(TWICE, "pull again", aborts=1, give_ups=1),
    _of(PUSHED_TWICE, "push again", aborts=1, give_ups=1),
    _of(TWICE, "pull again, astray", faults=STRAY, num_faults=1, aborts=1),
    _of(TWICE, "pull again, ticketed, astray", is_ticketed=True, faults=STRAY,
            num_faults=1, aborts=1, give_ups=1),
    _of(APART, "two prompts, two chunks each", num_blocks=2),
    _of(APART, "two prompts, astray", faults=STRAY, num_faults=1),
    _of(APART, "a push and a pull, a death", pushes=(True, False), faults=DEATHS,
            num_regions=2,
            num_faults=1),
    _of(PUSH, "push to two ranks", num_ranks=2, num_blocks=1, aborts=1),
    _of(PULL, "pull to two ranks, a death", num_ranks=2, num_blocks=1, faults=DEATHS,
            num_faults=1, aborts=1),
]  # fmt: skip


def play(setting: Scope, limit: int) -> str:
    """Play one run; returns a line about it."""
    began = time.process_time()
    states = explore(setting, limit)
    return f"{setting.name}: {states} states, {time.process_time() - began:.0f} s of one core"


def main() -> None:
    """Play all runs, or those whose names have a text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="")
    parser.add_argument("--limit", type=int, default=2_000_000)
    parser.add_argument("--blocks", type=int, default=0, help="of each shipment")
    options = parser.parse_args()
    for setting in FULL:
        if options.blocks:
            setting = dataclasses.replace(setting, num_blocks=options.blocks)
        if options.name in setting.name:
            print(play(setting, options.limit), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
