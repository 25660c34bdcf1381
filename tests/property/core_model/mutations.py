"""Changes of the design that its model must find, each with the run that finds it."""

from __future__ import annotations

import dataclasses

from tests.property.core_model.state import Scope
from tests.property.core_model.table import TableRow

ALL = ("stray", "restart P", "restart D", "silence", "lapse", "break")
ONE = Scope("pull", pushes=(False,), num_blocks=1, faults=ALL, num_faults=1, aborts=1)
PUSHED = Scope("push", num_blocks=1, faults=ALL, num_faults=1, aborts=1)
CHECKED = Scope("push, checked", num_blocks=1, faults=("stray",), num_faults=1, is_checked=True)
KIND = Scope("kind", pushes=(False,), num_blocks=1, faults=("stray", "break"), num_faults=1,
               may_fail=False)  # fmt: skip
GIVEN_UP = Scope("given up", num_blocks=1, aborts=1, give_ups=1)
BIG = Scope("two chunks", pushes=(False,), faults=("break",), num_faults=1)
DENIED = Scope("denied", faults=("lapse", "stray"), num_faults=2)
ASTRAY = Scope("astray", pushes=(False,), num_blocks=1, faults=("stray",), num_faults=2,
                 aborts=1)  # fmt: skip
AGAIN = Scope("again", pushes=(False, False), try_contents=(0, 0), ask_contents=(0, 0),
                num_blocks=1, aborts=1)  # fmt: skip
BESIDE = Scope("beside", pushes=(False, False), try_contents=(0, 0), ask_contents=(0, 0),
                 num_blocks=1, aborts=1, faults=("stray",), num_faults=1)  # fmt: skip


def changed(setting: Scope, kind: str, state: str, event: str, row: str) -> Scope:
    """Return a setting with one row changed to `actions | next`."""
    actions, following = (part.strip() for part in row.split("|"))
    doings = tuple(filter(None, (part.strip() for part in actions.split(";"))))
    tables = {name: dict(table) for name, table in setting.tables.items()}
    assert (state, event) in tables[kind], "there is no such row to change"
    tables[kind][state, event] = TableRow(state, event, doings, following)
    return dataclasses.replace(setting, tables=tables)


def without(setting: Scope, rule: str) -> Scope:
    """Return a setting in which a rule is dropped."""
    return dataclasses.replace(setting, without=frozenset({rule}))


FOUND = {
    "memory is free as soon as D gives a chunk up": changed(
        ONE, "in", "granted", "stop", "free; say STOP | none"
    ),
    "memory of a dead writer is never free": changed(
        ONE, "in", "quarantined", "proof of death", "| quarantined"
    ),
    "STOPPED frees nothing": changed(ONE, "in", "quarantined", "writer is gone", "| quarantined"),
    "DONE is not repeated": changed(CHECKED, "out", "written", "unanswered", "| written"),
    "OFFER is not repeated": changed(ONE, "out", "offered", "unanswered", "| offered"),
    "ASK is not repeated": changed(ONE, "ask", "loading", "unanswered", "| loading"),
    "COMMIT is said once": changed(
        changed(PUSHED, "in", "landed", "DONE", "| landed"), "in", "committed", "DONE",
        "| committed",
    ),
    "GRANT is said once": changed(ONE, "in", "granted", "OFFER", "| granted"),
    "an offer for what is over is ignored": changed(
        DENIED, "in", "none", "OFFER, it is over", "| none"
    ),
    "a chunk whose connection broke is not sent again": changed(
        KIND, "out", "failing", "job ended", "| over"
    ),
    "lost bytes are not sent again": changed(KIND, "out", "written", "LOST", "| over"),
    "bytes that were lost count": changed(
        ONE, "in", "granted", "DONE, word was lost", "say COMMIT | landed"
    ),
    "GONE ends an ask that has all": changed(KIND, "ask", "here", "GONE", "stop all | failed"),
    "an ask whose try was given up is forgotten": changed(
        GIVEN_UP, "heard", "paired", "is turned away", "| paired"
    ),
    "GONE is said once": changed(
        dataclasses.replace(GIVEN_UP, faults=("stray",), num_faults=1), "heard", "gone", "ASK",
        "| gone",
    ),
    "a try that has lost its ask serves no other": changed(
        AGAIN, "try", "paired", "ask is over", "stop | paired"
    ),
    "an ended try is remembered": changed(ONE, "try", "ended", "lease is over", "| ended"),
    "what D has given up it still takes": changed(
        PUSHED, "ask", "wanted", "fails", "say RELEASE | failed"
    ),
    "the lowest open shipment says nothing": without(ONE, "lowest shipment"),
    "the lowest open ask says nothing": without(ASTRAY, "lowest ask"),
    "the lowest open chunk says nothing": without(BIG, "lowest chunk"),
    "STOP is not repeated": changed(BESIDE, "in", "quarantined", "unanswered", "| quarantined"),
    "STOP of what is over has no answer": without(BESIDE, "answer"),
    "an acknowledgement is answered": without(GIVEN_UP, "silence"),
}  # fmt: skip
# Rules that only save time or memory: without them every promise still holds.
SPARED = {
    "RELEASE is not said": changed(ONE, "ask", "wanted", "fails", "stop all | failed"),
    "a push goes on after its ask has ended, until D stops it": changed(
        PUSHED, "try", "paired", "ask is over", "turn the ask away | free"
    ),
    "a late GRANT of what was denied meanwhile counts": changed(
        ONE, "out", "queued", "GRANT", "| granted"
    ),
}  # fmt: skip
