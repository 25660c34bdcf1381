"""What docs/gpu.md promises of rates, by the model: nine tenths of every network and of PCIe."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from benchmarks.bench_rates import CHUNK_MIB, INTERPRETERS, LINKS, Rig
from benchmarks.rates_world import MIB, Costs

PAGE = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text("utf-8")
NETWORKS = ("100 Gb/s", "200 Gb/s", "400 Gb/s", "PCIe 5 x16")


@pytest.mark.parametrize("kind", ["idle", "busy"])
@pytest.mark.parametrize("link", NETWORKS)
def test_nine_tenths_of_a_link_are_used(link: str, kind: str) -> None:
    costs = dataclasses.replace(
        Costs(), link_rate=LINKS[link] * 1e9, interpreter=INTERPRETERS[kind]
    )
    rate = Rig(costs, CHUNK_MIB * MIB).rate(4096 // CHUNK_MIB)
    assert rate >= 0.9 * LINKS[link]
    row = re.search(rf"^\| {link} \|.*\| ([\d., ]+) \| [\d.]+ \|$", PAGE, re.MULTILINE)
    assert row is not None
    told = dict(zip(INTERPRETERS, map(float, row[1].split(",")), strict=True))
    assert told[kind] == pytest.approx(rate, rel=0.03)
