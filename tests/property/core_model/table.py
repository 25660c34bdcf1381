"""The design of docs/core.md as data: the messages, and both sides' tables of states and events.

Each side is one machine over the records of its one table of contents. The sender (P) has a *try*
of each content that its scheduler lets leave, what it has *heard* of each ask, and the chunks that
go *out*. The receiver (D) has its *asks*, and the chunks that come *in*. Every change of state is a
row here; an event for which a state has no row is an error by name (`NoSuchRow`).

Why so: a message that does not say which try it belongs to forces each side to guess, and every
guess needs a memory of its own. Here each ask, each shipment and each chunk has a number that is
counted up and never used again, and each message says the sender's lowest open number. A number
below that is over, and no table need remember it. A number at or above it that is not in the table
is new. That may be wrong for one late copy of a message, whose record then lives until the next
message about it: the other side answers that it is over. So a wrong guess costs one round trip, and
no other try.

Two more rules carry the rest. A try of P's serves one ask, and an ask is served by one try: so an
end never touches another try. And memory is given back by proof only: STOPPED, a lowest open number
that has passed, DONE, the completion word, or the end of the process that wrote.
"""

from __future__ import annotations

from typing import NamedTuple


class NoSuchRow(AssertionError):
    """A record met an event for which its state has no row."""


class TableRow(NamedTuple):
    """What a record does in one state when one event happens."""

    state: str
    event: str
    actions: tuple[str, ...]
    next: str


class MessageRow(NamedTuple):
    """One message with its one meaning."""

    name: str
    way: str
    meaning: str
    fields: str
    answer: str
    repeated: str
    over: str


Table = dict[tuple[str, str], TableRow]


def _table(text: str) -> Table:
    rows: Table = {}
    for line in text.strip().splitlines():
        state, event, actions, following = (part.strip() for part in line.split("|"))
        for one in state.split(", "):
            to = one if following == "same" else following
            doings = tuple(filter(None, (part.strip() for part in actions.split(";"))))
            assert (one, event) not in rows, f"two rows for {one} and {event}"
            rows[one, event] = TableRow(one, event, doings, to)
    return rows


TRY = _table(
    """
    none   | begins                | open shipments          | free
    free   | ask is matched        | bind                    | paired
    free   | all is taken          |                         | ended
    free   | ask is over           | stop                    | free
    free   | ask is over, ticketed | stop                    | ended
    free   | time is over          | stop                    | ended
    free   | given up              | stop                    | ended
    free   | peer is over          | stop; open shipments    | free
    paired | all is taken          |                         | ended
    paired | ask is over           | stop; turn the ask away | free
    paired | ask is over, ticketed | stop; turn the ask away | ended
    paired | time is over          | stop; turn the ask away | ended
    paired | given up              | stop; turn the ask away | ended
    paired | peer is over          | stop; turn the ask away | free
    ended  | given up              |                         | ended
    ended  | lease is over         |                         | none
    """
)

HEARD = _table(
    """
    none    | ASK                    |             | waiting
    none    | ASK, ticket is over    | say GONE    | none
    none    | is over                | end by name | none
    waiting | ASK                    |             | waiting
    waiting | is matched             |             | paired
    waiting | every try has ended    | say GONE    | gone
    waiting | is over                |             | none
    paired  | ASK                    |             | paired
    paired  | all is taken           |             | none
    paired  | is turned away         |             | waiting
    paired  | is turned away, ticket | say GONE    | gone
    paired  | is over                | end the try | none
    gone    | ASK                    | say GONE    | gone
    gone    | is over                |             | none
    """
)

OUT = _table(
    """
    queued                              | may leave  | say OFFER  | offered
    offered                             | unanswered | say OFFER  | offered
    offered                             | GRANT      |            | granted
    offered, queued                     | DENY       |            | queued
    granted                             | is ready   | write      | writing
    writing                             | is written | say DONE   | written
    written                             | unanswered | say DONE   | written
    written                             | COMMIT     |            | taken
    written                             | LOST       | ship again | over
    granted                             | break      | ship again | over
    writing                             | break      | cancel job | failing
    written                             | break      | say DONE   | written
    failing                             | job ended  | ship again | over
    stopping                            | job ended  |            | over
    queued, offered, granted, written   | stop       |            | over
    writing, failing                    | stop       | cancel job | stopping
    queued, granted, writing, written   | GRANT      |            | same
    failing, stopping                   | GRANT      |            | same
    granted, writing, written           | DENY       |            | same
    failing, stopping                   | DENY       |            | same
    queued, offered, stopping           | break      |            | same
    stopping                            | stop       |            | stopping
    """
)

ASK = _table(
    """
    none            | request comes   | say ASK                     | wanted
    wanted, loading | unanswered      | say ASK                     | same
    wanted          | blocks given    | place                       | loading
    wanted          | all has landed  | stop the rest               | here
    loading         | all is in place | stop the rest               | loaded
    here            | blocks given    | place                       | loaded
    wanted, loading | GONE            | stop all                    | failed
    here            | GONE            |                             | here
    wanted, loading | fails           | stop all; say RELEASE       | failed
    here            | fails           | stop all; say RELEASE       | failed
    wanted, loading | peer is over    | stop all                    | failed
    here            | peer is over    |                             | here
    """
)

IN = _table(
    """
    none        | OFFER, there is room     | reserve; say GRANT | granted
    none        | OFFER, no room           | say DENY           | none
    none        | OFFER, nothing is lacked | say GRANT          | committed
    none        | OFFER, it is over        | say STOP           | none
    none        | DONE                     | say STOP           | none
    granted     | OFFER                    | say GRANT          | granted
    granted     | word                     | say COMMIT         | landed
    granted     | DONE                     |                    | granted
    granted     | DONE, word was lost      | free; say LOST     | lost
    granted     | stop                     | say STOP           | quarantined
    granted     | writer is gone           | free               | none
    granted     | writer died              |                    | quarantined
    landed      | DONE                     | say COMMIT         | landed
    landed      | is in place              | free               | committed
    landed      | stop                     | free               | committed
    quarantined | OFFER                    | say STOP           | quarantined
    quarantined | unanswered               | say STOP           | quarantined
    quarantined | DONE                     | free; say STOP     | none
    quarantined | word                     | free               | none
    quarantined | writer is gone           | free               | none
    quarantined | proof of death           | free               | none
    committed   | OFFER                    | say GRANT          | committed
    committed   | DONE                     | say COMMIT         | committed
    committed   | writer is gone           |                    | none
    lost        | DONE                     | say LOST           | lost
    lost        | writer is gone           |                    | none
    landed      | OFFER                    |                    | landed
    landed      | writer is gone           |                    | landed
    lost        | OFFER                    |                    | lost
    quarantined | stop                     |                    | quarantined
    committed   | stop                     |                    | committed
    lost        | stop                     |                    | lost
    quarantined | writer died              |                    | quarantined
    landed      | writer died              |                    | landed
    committed   | writer died              |                    | none
    lost        | writer died              |                    | none
    """
)

TABLES = {"try": TRY, "heard": HEARD, "out": OUT, "ask": ASK, "in": IN}

_MESSAGES = """
LOOKUP | engine → directory | where does this rank listen? | rank | LOCATION | until answered | `connect_timeout_seconds`
LOCATION | directory → engine | there; and the identity's fields | rank, address, ranks, spec, identity | - | no | -
HELLO | either, first | this is who I am | version, epoch, address, spec, endpoints, number | WELCOME or REFUSE | until answered | `connect_timeout_seconds`
WELCOME | to HELLO | I take you for a peer | version, spec, endpoints, checksum, largest landing, lease | - | no | -
REFUSE | to HELLO | I do not, and this differs | version, reason | - | no | -
PING | either | are you there? | number | PONG | four times in `peer_timeout_seconds` | silence
PONG | to PING | I am | number | - | no | -
BYE | either | my engine ends: everything of it is over | - | - | no | -
ASK | D → P | I want these until their leases end | for each: ask, content, ticket, lease | OFFER or GONE, or nothing yet | four times in a lease | all is here, GONE, or RELEASE
GONE | P → D | what this ask wants does not come | ask, why | - | as answer to each ASK | -
RELEASE | D → P | this ask is over here | ask, content, ticket | - | no: the lease covers the loss | -
OFFER | P → D | reserve memory for this chunk | chunk, lowest chunk, ask or 0, content, manifest, transport, checksum | GRANT, DENY or STOP | until answered | the shipment's deadline
GRANT | D → P | here it is | chunk, range, offset, word | - | as answer to each OFFER | -
DENY | D → P | not now; number and turn are kept | chunk, retry after | - | as answer to each OFFER | -
DONE | P → D | every byte of this chunk is written | chunk, lowest chunk, checksum | COMMIT, LOST or STOP | until answered | the shipment's deadline
COMMIT | D → P | every byte of it is here | chunk | - | as answer to each DONE | -
LOST | D → P | its bytes are not here: send them under a new number | chunk | - | as answer to each DONE | -
STOP | D → P | I take no more of this shipment | shipment, why | STOPPED | while memory is quarantined; and as answer to OFFER and DONE | STOPPED, or the lowest number passes
STOPPED | P → D | I write nothing more for it | shipment | - | as answer to STOP and GRANT of what is over | -
"""  # noqa: E501
MESSAGES = [
    MessageRow(*(part.strip() for part in line.split("|")))
    for line in _MESSAGES.strip().splitlines()
]
