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
# Turns of a session. The sender promises KV, and the receiver claims it. Prefill has pushed a
# prompt and has kept its beginning back:
CLAIM = "claim"  # decode lacks some of that
SPARE = "spare"  # decode has all of it, or more
PRESS = "press"  # decode lacks some, and prefill needs its blocks: it pushes all after all
# Decode has stashed a request's KV and noted it in its directory, which prefill asks:
RECALL = "recall"  # prefill loads all of it, or a beginning
NEEDLESS = "needless"  # prefill needs nothing of it
EVICT = "evict"  # it is gone when prefill comes for it, and the directory does not know
TWICE = "twice"  # two requests claim it, and another instance
STASHED = (RECALL, NEEDLESS, EVICT, TWICE)
TURNS = (CLAIM, SPARE, PRESS, *STASHED)


@dataclass(frozen=True)
class Step:
    """`work` is what the round does so that the step is reached. In a turn, the step comes after
    the promise, when it is claimed, unless it `is_promise`."""

    role: str
    event: str
    work: str = TRANSFER
    is_promise: bool = False

    def __str__(self) -> str:
        turn = f" ({self.work}{', promise' if self.is_promise else ''})"
        return f"{self.role}: {self.event}{turn if self.work in TURNS else ''}"


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
    Step(SENDER, "say OFFER", CLAIM, True), Step(RECEIVER, "land", CLAIM, True),
    Step(SENDER, "hold", CLAIM, True),
    Step(RECEIVER, "say WANT", CLAIM), Step(SENDER, "hear WANT", CLAIM),
    Step(RECEIVER, "say RENEW", CLAIM), Step(SENDER, "hear RENEW", CLAIM),
    Step(SENDER, "say OFFER", CLAIM), Step(RECEIVER, "hear OFFER", CLAIM),
    Step(RECEIVER, "say GRANT", CLAIM), Step(SENDER, "hear GRANT", CLAIM),
    Step(SENDER, "write", CLAIM), Step(RECEIVER, "land", CLAIM), Step(RECEIVER, "scatter", CLAIM),
    Step(SENDER, "say DONE", CLAIM), Step(RECEIVER, "hear DONE", CLAIM),
    Step(RECEIVER, "say COMMIT", CLAIM), Step(SENDER, "hear COMMIT", CLAIM),
    Step(RECEIVER, "say RELEASE", SPARE), Step(SENDER, "hear RELEASE", SPARE),
    Step(SENDER, "withdraw", PRESS), Step(SENDER, "say OFFER", PRESS),
    Step(RECEIVER, "hear OFFER", PRESS), Step(SENDER, "write", PRESS),
    Step(SENDER, "stash", RECALL, True), Step(SENDER, "copied", RECALL, True),
    Step(RECEIVER, "say RECALL", RECALL), Step(SENDER, "hear RECALL", RECALL),
    Step(SENDER, "say STASHED", RECALL), Step(RECEIVER, "hear STASHED", RECALL),
    Step(RECEIVER, "say RENEW", RECALL), Step(SENDER, "hear RENEW", RECALL),
    Step(RECEIVER, "say WANT", RECALL), Step(SENDER, "hear WANT", RECALL),
    Step(SENDER, "say OFFER", RECALL), Step(RECEIVER, "hear OFFER", RECALL),
    Step(RECEIVER, "say GRANT", RECALL), Step(SENDER, "hear GRANT", RECALL),
    Step(SENDER, "write", RECALL), Step(RECEIVER, "land", RECALL),
    Step(RECEIVER, "scatter", RECALL),
    Step(SENDER, "say DONE", RECALL), Step(RECEIVER, "hear DONE", RECALL),
    Step(RECEIVER, "say COMMIT", RECALL), Step(SENDER, "hear COMMIT", RECALL),
    Step(RECEIVER, "say RELEASE", NEEDLESS), Step(SENDER, "hear RELEASE", NEEDLESS),
    Step(SENDER, "say GONE", EVICT), Step(RECEIVER, "hear GONE", EVICT),
    Step(SENDER, "hear WANT", TWICE), Step(SENDER, "write", TWICE),
    Step(RECEIVER, "land", TWICE), Step(SENDER, "hear COMMIT", TWICE),
]  # fmt: skip
