"""docs/stories.md: its numbers run on, its marks are true, and its first table names its lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.insides import is_inside, looks_inside

PAGE = (Path(__file__).parents[2] / "docs" / "stories.md").read_text()
FIRST, *GROUPS = re.split(r"^## [A-Z]: .+$", PAGE, flags=re.MULTILINE)
TITLES = re.findall(r"^## ([A-Z]): ", PAGE, re.MULTILINE)
STORY = re.compile(r"^\| ([A-Z]\d+)( †)? \| (.+) \| (.+) \|$", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py):(test_\w+)`( †)?")


@pytest.mark.parametrize(("title", "group"), [*zip(TITLES, GROUPS, strict=True)], ids=TITLES)
def test_numbers_run_on_and_marks_are_true(title: str, group: str) -> None:
    stories = STORY.findall(group)
    assert [number for number, *_ in stories] == [f"{title}{n + 1}" for n in range(len(stories))]
    assert len(stories) == group.count("\n| ") - 1  # each line is a story but for the head
    for number, mark, _, tests in stories:
        named = TEST.findall(tests)
        assert named
        wrong = [test for path, test, has in named if bool(has) != looks_inside(path, test)]
        assert (number, wrong) == (number, [])
        assert (number, bool(mark)) == (number, all(has for *_, has in named))


def test_the_page_counts_its_stories() -> None:
    stories = STORY.findall("".join(GROUPS))
    held_inside = sum(bool(mark) for _, mark, *_ in stories)
    assert f"{len(stories)} stories, each in one line" in PAGE
    assert f"{held_inside} stories have to be held from outside" in PAGE


def test_the_twenty_that_break_most_easily_are_stories_of_the_page() -> None:
    stories = {number: story for number, _, story, _ in STORY.findall("".join(GROUPS))}
    rows = re.findall(r"^\| ([A-Z]\d+) \| (.+?) \| (.+) \|$", FIRST, re.MULTILINE)
    assert len({number for number, *_ in rows}) == len(rows) == 20
    assert [number for number, story, _ in rows if stories[number] != story] == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("p2p_engine.receive.store.Store", True),
        ("p2p_engine.wire.messages.Offer", True),
        ("p2p_engine.wire.messages.TransferKey", False),
        ("p2p_engine.P2pNcclEngine", False),
        ("p2p_engine.connector.pressure.SPILL_SECONDS", False),
        ("proxy.fleet.registry.Registry", True),
        ("proxy.app.make_app", False),
        ("tests.doubles.world.World", True),
        ("tests.rigs.engines.engines", False),
        ("wait", False),
    ],
)
def test_what_a_redesign_may_take_away_is_inside(name: str, expected: bool) -> None:
    assert is_inside(name) == expected
