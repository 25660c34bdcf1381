"""docs/core.md shows the tables that the model reads, and keeps to its own limits."""

from __future__ import annotations

import re

from tests.property.core_model.page import PAGE, written
from tests.property.core_model.table import MESSAGES, TABLES


def test_the_page_has_the_tables_that_the_model_reads() -> None:
    """`python -m tests.property.core_model.page` writes them."""
    text = PAGE.read_text()
    assert text == written(text)


def test_each_state_that_is_entered_is_left_or_is_an_end() -> None:
    ends = {"ask": {"loaded", "failed"}, "out": {"taken", "over"}}
    for kind, table in TABLES.items():
        entered = {row.next for row in table.values()} - {"none"}
        left = {state for state, _ in table}
        assert entered - left == ends.get(kind, set()), kind


def test_whatever_a_table_says_is_a_message() -> None:
    names = {message.name for message in MESSAGES}
    said = {
        action.removeprefix("say ")
        for table in TABLES.values()
        for row in table.values()
        for action in row.actions
        if action.startswith("say ")
    }
    assert said <= names
    assert len(names) <= 20


def test_there_are_at_most_28_words() -> None:
    words = PAGE.read_text().split("\n## Words\n")[1].split(":\n28.")[0]
    assert len(re.split(r",\s", words)) <= 28
