"""The tables of docs/core.md, made from the tables that the model reads. `python -m
tests.property.core_model.page` writes them into the page."""

from __future__ import annotations

import re
from pathlib import Path

from tests.property.core_model.mutations import FOUND, SPARED
from tests.property.core_model.table import MESSAGES, TABLES, Table

PAGE = Path(__file__).parents[3] / "docs" / "core.md"
PART = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def of_states(table: Table) -> str:
    """A table of states; states that do the same on one event share a line."""
    shared: dict[tuple[str, str, str], list[str]] = {}
    for (state, event), row in table.items():
        following = "stays" if row.next == state else row.next
        shared.setdefault((event, "; ".join(row.actions), following), []).append(state)
    lines = ["| state | event | actions | next |", "|---|---|---|---|"]
    for (event, actions, following), states in shared.items():
        lines.append(f"| {', '.join(states)} | {event} | {actions or '-'} | {following} |")
    return "\n".join(lines) + "\n"


def of_messages() -> str:
    """The table of messages."""
    heads = "| message | from, to | it says | fields | answer | repeated | over |"
    lines = [heads, "|" + "---|" * 7]
    lines += [f"| `{each.name}` | " + " | ".join(each[1:]) + " |" for each in MESSAGES]
    return "\n".join(lines) + "\n"


def of_mutations() -> str:
    """The lists of what the model finds, and of what it shows to be spare."""
    lines = ["| change | |", "|---|---|"]
    lines += [f"| {name} | found |" for name in FOUND]
    lines += [f"| {name} | every promise holds |" for name in SPARED]
    return "\n".join(lines) + "\n"


def parts() -> dict[str, str]:
    """What the page has between its marks, by mark."""
    tables = {name: of_states(table) for name, table in TABLES.items()}
    return {**tables, "messages": of_messages(), "mutations": of_mutations()}


def written(text: str) -> str:
    """The page with its tables as they should be."""
    found = parts()
    return PART.sub(lambda match: match[1] + "\n" + found[match[2]] + "\n" + match[3], text)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
