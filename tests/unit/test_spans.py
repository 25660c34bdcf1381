"""Chunks found by where they lie: the same as by a look at each, at the same cost among many."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_engine.receive.ledger import Landing, LandingState, Receive
from p2p_engine.receive.spans import Cover, Spans
from p2p_engine.wire.messages import Manifest, PageShape, Part, Plane, TransferKey
from tests.support import SeededRandom

SHAPE = PageShape(1, 0, (Plane(0, 8, 8),))


@dataclass(eq=False)
class Owner:
    manifest: Manifest


def any_part(rng: SeededRandom) -> Part | None:
    layers, heads = rng.choice([(0, 4), (0, 8), (4, 4)]), rng.choice([(0, 2), (2, 2), (0, 4)])
    return rng.choice([None, Part(*layers, *heads, rng.choice([1, 2, 16]), SHAPE)])


def any_chunk(rng: SeededRandom, parts: list[Part | None]) -> Manifest:
    return Manifest(rng.randrange(60), rng.randrange(1, 9), [8], part=rng.choice(parts))


@pytest.mark.parametrize("num_parts", [1, 3])
def test_spans_that_overlap_are_those_of_a_look_at_each(rng: SeededRandom, num_parts: int) -> None:
    for _ in range(30):
        parts = [any_part(rng) for _ in range(num_parts)]
        spans: Spans[Owner] = Spans()
        owners: list[Owner] = []
        for _ in range(80):
            if owners and rng.random() < 0.4:
                owner = owners.pop(rng.randrange(len(owners)))
                spans.discard(owner.manifest, owner)
                spans.discard(owner.manifest, owner)
            else:
                owner = Owner(any_chunk(rng, parts))
                owners.append(owner)
                spans.add(owner.manifest, owner)
            chunk = any_chunk(rng, parts)
            found = list(spans.overlapping(chunk))
            assert len(found) == len(set(found))
            assert set(found) == {item for item in owners if item.manifest.overlaps(chunk)}
            assert len(spans) == len(owners)


@pytest.mark.parametrize("num_parts", [1, 3])
def test_what_is_covered_is_what_came(rng: SeededRandom, num_parts: int) -> None:
    for _ in range(30):
        parts = [any_part(rng) for _ in range(num_parts)]
        cover = Cover()
        came: list[Manifest] = []
        for _ in range(40):
            chunk = any_chunk(rng, parts)
            assert cover.overlaps(chunk) == any(chunk.overlaps(other) for other in came)
            cover.add(chunk)
            came.append(chunk)


def test_nothing_covers_nothing() -> None:
    cover = Cover()
    cover.add(Manifest(3, 0, [8]))
    assert not cover.overlaps(Manifest(0, 9, [8]))


class ManyChunks:
    """A receive to which so many chunks are being copied."""

    def __init__(self, num: int) -> None:
        content = (TransferKey("long prompt"), b"")
        unused: Any = None
        shm: Any = SimpleNamespace(name="shm")
        self.receive = Receive(content, unused, unused, 0.0)
        self.landings = [
            Landing((1, index), 0, content, Manifest(2 * index, 1, [8]), shm, 1, 0.0)
            for index in range(num)
        ]
        for landing in self.landings:
            self.receive.attach(landing)
            self.receive.delivered.add(landing.manifest)

    def seconds_for_each(self) -> float:
        start = time.thread_time()
        for landing in self.landings:
            self.receive.has_delivered(landing.manifest)
            self.receive.writers_of(landing.manifest)
            self.receive.detach(landing)
            assert not self.receive.over
            assert self.receive.hopeless is None
        return (time.thread_time() - start) / len(self.landings)


def test_chunk_of_a_long_prompt_costs_what_one_of_a_short_prompt_does() -> None:
    few = min(ManyChunks(100).seconds_for_each() for _ in range(5))
    many = min(ManyChunks(5_000).seconds_for_each() for _ in range(3))
    assert many < 8 * few


def test_receive_is_over_when_nobody_writes_to_it_any_more() -> None:
    scene = ManyChunks(2)
    scene.receive.complete = True
    assert not scene.receive.over
    first, second = scene.landings
    scene.receive.detach(first)
    assert not scene.receive.over
    scene.receive.detach(second)
    assert scene.receive.over
    first.state = LandingState.LANDED
    scene.receive.scatters(first)
    assert first.state is LandingState.SCATTERING
    assert not scene.receive.over
