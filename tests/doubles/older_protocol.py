"""What an engine of the protocol's version before says, for a process that speaks as it does."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

from p2p_engine.peers import directory, sessions
from p2p_engine.peers.link import Link
from p2p_engine.peers.links import Links
from p2p_engine.peers.sessions import Sessions
from p2p_engine.wire.messages import OLDEST_VERSION, Abandon, AbandonOk, Gone, Message

# Of the fields of version 7, behind which later ones have others.
NUM_FIELDS: dict[type[Message], int] = {Gone: 3, Abandon: 3, AbandonOk: 1}


def speak_as_before() -> None:
    """Let every engine and directory of this process say the version before and refuse all others;
    its GONE and its ABANDON do not say which content they mean. It changes modules, so it is for a
    process of its own."""
    setattr(directory, "PROTOCOL_VERSION", OLDEST_VERSION)  # noqa: B010
    for name in ("PROTOCOL_VERSION", "OLDEST_VERSION"):
        setattr(sessions, name, OLDEST_VERSION)
    Link.__init__ = partialmethod(Link.__init__, version=OLDEST_VERSION)  # type: ignore[assignment, method-assign]
    reply, send = Sessions.reply, Links.send

    def say(known: Sessions, epoch: int, kind: type[Message], fields: tuple[Any, ...]) -> None:
        reply(known, epoch, kind, fields[: NUM_FIELDS.get(kind)])

    def send_fewer(links: Links, link: Link, kind: type[Message], *fields: Any) -> None:
        send(links, link, kind, *fields[: NUM_FIELDS.get(kind)])

    Sessions.reply = say  # type: ignore[assignment, method-assign]
    Links.send = send_fewer  # type: ignore[assignment, method-assign]
