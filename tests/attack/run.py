"""Play every attack on a real proxy with stand-in instances; print and record what each cost.

`make attack`, or `make attack NAME=idle` for those whose names contain a word. Each attack has a
proxy of its own. Beside it, clients ask for little at an even rate: all of them must be answered.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Row
from tests.attack import crowds, desync, faults, loads
from tests.attack.play import Assault, has_failed, play
from tests.attack.stage import AttackStage, keep_a_core_free

ASSAULTS: tuple[Assault, ...] = (
    *crowds.ASSAULTS,
    *loads.ASSAULTS,
    *faults.ASSAULTS,
    *desync.ASSAULTS,
)


def rows(
    attacks: list[Assault], log_dir: Path, *, scale: float, rate: float, seconds: float
) -> Iterator[Row]:
    """Play attacks one after the other, each on a stage of its own."""
    for number, attack in enumerate(attacks):
        harness.progress(attack.name)
        log = log_dir / f"{number}.log"
        needs = attack.settings, attack.num_descriptors, attack.by_tls
        with AttackStage(log, scale, *needs) as stage:
            row = play(attack, stage, rate, seconds)
            harness.progress(f"  {row}")
            yield row


def main() -> int:
    """Play, print and record; 0 when no promise was broken."""
    options = argparse.ArgumentParser("python -m tests.attack.run", description=__doc__)
    options.add_argument("--name", default="", help="only attacks whose names contain this")
    options.add_argument("--scale", type=float, default=1.0, help="share of the full numbers")
    options.add_argument("--rate", type=float, default=100.0, help="healthy requests/s beside")
    options.add_argument("--seconds", type=float, default=5.0, help="at least, for each part")
    options.add_argument("--seed", type=int, default=1, help="of random choices")
    options.add_argument("--output", type=Path, default=harness.RESULTS / "attack.jsonl")
    options.add_argument("--log-dir", type=Path, default=Path(tempfile.mkdtemp(prefix="attack-")))
    chosen = options.parse_args()
    harness.progress(f"logs in {chosen.log_dir}")
    keep_a_core_free()
    attacks = [attack for attack in ASSAULTS if chosen.name in attack.name]
    played = list(
        rows(attacks, chosen.log_dir, scale=chosen.scale, rate=chosen.rate, seconds=chosen.seconds)
    )
    del chosen.log_dir
    harness.record(played, chosen)
    return int(any(map(has_failed, played)))


if __name__ == "__main__":
    sys.exit(main())
