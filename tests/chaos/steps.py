"""The steps of the protocol at which a fault can be laid, and how a round gets there.

A step is a role and an event in it: a message that is said or heard, or a state that is entered.
"""

from __future__ import annotations

from dataclasses import dataclass

TRANSFER, PULL, ABORT, ABANDON, FULL = "transfer", "pull", "abort", "abandon", "full"
KEEP = "keep"  # a pull, said before that it will come
GONE = "gone"  # a pull of what will not be held
LOOKUP = "lookup"  # the receiver is found by its directory
REFUSED = "refused"  # the sender is an engine that the receiver cannot have to do with
LEAVE = "leave"  # the engine of who says BYE is closed, with transfers open
FORGET = "forget"  # the receiver forgets the sender, as after a long silence
SHORT = (ABORT, ABANDON, FULL, LOOKUP, REFUSED, LEAVE, FORGET)  # of which PUT_ASYNC is enough
SENDER, RECEIVER = "sender", "receiver"


@dataclass(frozen=True)
class Step:
    """`work` is what the round does so that the step is reached."""

    role: str
    event: str
    work: str = TRANSFER

    def __str__(self) -> str:
        return f"{self.role}: {self.event}"


STEPS = [
    Step(SENDER, "say HELLO"), Step(RECEIVER, "hear HELLO"),
    Step(RECEIVER, "say WELCOME"), Step(SENDER, "hear WELCOME"),
    Step(SENDER, "connect"),
    Step(SENDER, "say OFFER"), Step(RECEIVER, "hear OFFER"),
    Step(RECEIVER, "say GRANT"), Step(SENDER, "hear GRANT"),
    Step(SENDER, "write"), Step(RECEIVER, "land"), Step(RECEIVER, "scatter"),
    Step(SENDER, "say DONE"), Step(RECEIVER, "hear DONE"),
    Step(RECEIVER, "say COMMIT"), Step(SENDER, "hear COMMIT"),
    Step(SENDER, "say PING"), Step(RECEIVER, "hear PING"), Step(SENDER, "hear PONG"),
    Step(RECEIVER, "say WANT", PULL), Step(SENDER, "hear WANT", PULL),
    Step(RECEIVER, "say RELEASE", PULL), Step(SENDER, "hear RELEASE", PULL),
    Step(RECEIVER, "say RENEW", KEEP), Step(SENDER, "hear RENEW", KEEP),
    Step(SENDER, "say GONE", GONE), Step(RECEIVER, "hear GONE", GONE),
    Step(RECEIVER, "say CANCEL", ABORT), Step(SENDER, "hear CANCEL", ABORT),
    Step(SENDER, "say CANCELLED", ABORT), Step(RECEIVER, "hear CANCELLED", ABORT),
    Step(SENDER, "say ABANDON", ABANDON), Step(RECEIVER, "hear ABANDON", ABANDON),
    Step(RECEIVER, "say ABANDONOK", ABANDON), Step(SENDER, "hear ABANDONOK", ABANDON),
    Step(RECEIVER, "say DENY", FULL), Step(SENDER, "hear DENY", FULL),
    Step(SENDER, "say LOOKUP", LOOKUP), Step(RECEIVER, "hear LOOKUP", LOOKUP),
    Step(RECEIVER, "say LOCATION", LOOKUP), Step(SENDER, "hear LOCATION", LOOKUP),
    Step(RECEIVER, "say REFUSE", REFUSED), Step(SENDER, "hear REFUSE", REFUSED),
    Step(SENDER, "say BYE", LEAVE), Step(RECEIVER, "hear BYE", LEAVE),
    Step(RECEIVER, "say BYE", LEAVE), Step(SENDER, "hear BYE", LEAVE),
    Step(RECEIVER, "say GREET", FORGET), Step(SENDER, "hear GREET", FORGET),
]  # fmt: skip
